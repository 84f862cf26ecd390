// SPDX-License-Identifier: Apache-2.0
/* Migration: experts, with all data that belong to them (weights, gradients, masters, moments, step counts), are moved
 * to other ranks while training runs.
 *
 * The library moves memory of the host, described as spans. It sends the spans over connections of its own during
 * training, at a rate that the host sets, stages them at the receiver, and copies them into place at a boundary of the
 * host's steps: on all ranks or on none. Until then it does not write memory of the host. Two experts that swap places
 * may use the same memory for what leaves and what arrives.
 *
 * Most of an expert's state does not change between two updates of the optimizer: weights, masters, moments and step
 * counts keep the values of the last update, and only gradients change. A host that begins a move after an update and
 * commits it before the next one therefore hides the transfer of everything but the gradients: STILL spans are sent in
 * the meantime, and AT_COMMIT spans when the host is at the boundary. A host that commits after the update, when
 * everything has changed, marks all its spans AT_COMMIT; this is also correct, but hides nothing.
 *
 *   begin (after update t)  ...  forward, backward  ...  commit  replace_experts  update t + 1
 *
 * The protocol is a three-phase commit without a coordinator. docs/migration.md has its state table and lists its
 * checks. */
#ifndef SLUICE_MIGRATION_H_
#define SLUICE_MIGRATION_H_

#include "sluice/base.h"
#include "sluice/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sluice_migration_s sluice_migration_t;

/* The phase of a move on one rank. */
enum {
  SLUICE_MIGRATION_NONE = 0,      /* no move has begun yet */
  SLUICE_MIGRATION_STREAMS = 1,   /* the move has begun: STILL spans are sent while the host trains */
  SLUICE_MIGRATION_FLUSHES = 2,   /* in commit: the remaining spans are sent */
  SLUICE_MIGRATION_READY = 3,     /* this rank has all spans, and has announced it */
  SLUICE_MIGRATION_AGREED = 4,    /* this rank knows that all ranks are ready, and has announced it */
  SLUICE_MIGRATION_UNDECIDED = 5, /* this rank lost another rank after that, and cannot know the outcome: call
                                     sluice_migration_settle */
  SLUICE_MIGRATION_COMMITTED = 6, /* the newest move has taken effect */
  SLUICE_MIGRATION_ABORTED = 7    /* the newest move has not taken effect, and never will */
};

typedef struct sluice_migration_config_s {
  size_t struct_size;              /* set by sluice_migration_config_init */
  const sluice_ext_header_t* next; /* NULL */
  uint64_t epoch;                  /* epoch of the placement in force, equal on all ranks; at most 2^62; default 0 */
  uint64_t bytes_per_second;       /* rate at which this rank sends between begin and commit; 0: as fast as the link
                                      allows */
  uint64_t staging_bytes;          /* limit of the staging memory of one move on this rank; 0: no limit */
  uint64_t chunk_bytes;            /* size of one message, [4096, 2^30], equal on all ranks; default 256 KiB */
  /* 1, the default: until commit, over tcp, all other messages and exchanges of this process have priority, including
   * the activations of a pipeline. Only few bytes of the move are in transit at a time. While another connection has
   * more than 32 KiB that have not arrived, the move sends nothing new except 16 KiB every 20 ms. 0: the move shares
   * links with other traffic. */
  int32_t gives_way;
  int32_t reserved; /* 0 */
} sluice_migration_config_t;

SLUICE_EXPORT SLUICE_EXPERIMENTAL void sluice_migration_config_init(sluice_migration_config_t* out_config,
                                                                    size_t struct_size);

/* Creates a migration. comm: the ranks between which experts move; retained. Its exchanges may run at the same time as
 * a move. Not collective. out_migration: new, sluice_migration_destroy. Thread-safe. Errors: INVALID_ARGUMENT (names
 * the field), ABI, NO_MEMORY. */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_migration_create(sluice_comm_t* comm,
                                                                       const sluice_migration_config_t* config,
                                                                       sluice_migration_t** out_migration);
/* Destroys the migration. Not collective; returns in bounded time. A move in progress is abandoned: for the other ranks
 * this rank is lost. Accepts NULL. */
SLUICE_EXPORT SLUICE_EXPERIMENTAL void sluice_migration_destroy(sluice_migration_t* migration);

enum { SLUICE_MIGRATION_LEAVES = 0, SLUICE_MIGRATION_ARRIVES = 1 };

enum {
  SLUICE_MIGRATION_STILL = 0,    /* the sender does not change the span between begin and the end of commit */
  SLUICE_MIGRATION_AT_COMMIT = 1 /* the sender may change the span until commit is called */
};

/* A range of host memory. */
typedef struct sluice_migration_span_s {
  void* data;     /* may be NULL where bytes is 0 */
  uint64_t bytes; /* equal at both ends */
  int32_t when;   /* SLUICE_MIGRATION_STILL or _AT_COMMIT, equal at both ends */
  int32_t reserved;
} sluice_migration_span_t;

/* All spans that move with one expert, at one of the two ends. Spans that leave and spans that arrive may be the same
 * memory. */
typedef struct sluice_migration_item_s {
  uint64_t id;                          /* equal at both ends; unique for each pair of ranks and direction */
  int32_t peer;                         /* the rank at the other end; not this rank */
  int32_t direction;                    /* SLUICE_MIGRATION_LEAVES or _ARRIVES */
  const sluice_migration_span_t* spans; /* [num_spans], as many as at the other end, in the same order */
  int32_t num_spans;
  int32_t reserved; /* 0 */
} sluice_migration_item_t;

/* Begins a move to `epoch`, which is larger than the epoch in force. Returns when the connections have been made; the
 * spans are sent afterwards. items [num_items] and their lists are copied; the memory of the spans is borrowed until
 * commit, abort or settle has decided. A rank that neither sends nor receives calls it with 0 items.
 *
 * Collective over comm, which must be idle, with the same epoch; comm-exclusive. Errors after which the old epoch is in
 * force on all ranks: INVALID_ARGUMENT (names the item), OVER_BUDGET (staging_bytes), NO_MEMORY; the other ranks learn
 * of these in commit at the latest. STATE: a move is in progress or undecided. MISMATCH: epochs differ. PEER_REFUSED,
 * PEER_LOST: another rank has already abandoned the move. Errors of opening a connection, with the phase "announce" and
 * the rank. */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_migration_begin(sluice_migration_t* migration, uint64_t epoch,
                                                                      const sluice_migration_item_t* items,
                                                                      int32_t num_items);

/* Checks, without waiting, whether the spans of an item that arrives have been received, and copies them. It is for a
 * host that uses them before the commit, such as the stage of a pipeline to which a layer moves while a batch runs.
 * AT_COMMIT spans arrive early if the sender has marked them (sluice_migration_mark_still).
 *
 *   id, peer      those of the item
 *   to            [num_spans], as many as the item has: the destination of each copy. 0 bytes: not wanted; otherwise
 *                 as many bytes as the span has. The destinations may be those of the item itself, which commit writes
 *                 again
 *   out_is_there  1: all wanted spans have been received and copied. 0: not yet, or another rank has abandoned the
 *                 move, which commit will report
 *
 * Threads: the thread that commits; not collective. Errors: STATE (no move is in progress), INVALID_ARGUMENT. */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_migration_read_early(sluice_migration_t* migration, uint64_t id,
                                                                           int32_t peer,
                                                                           const sluice_migration_span_t* to,
                                                                           int32_t num_spans, int32_t* out_is_there);

/* Declares that the AT_COMMIT spans of an item that leaves do not change any more either. They are sent after the STILL
 * spans, so that commit waits for less. Items are sent between two ranks in the order of their ids, so an item waits
 * for those with smaller ids. Threads: the thread that commits; not collective. May be repeated. Errors: STATE (no move
 * is in progress), INVALID_ARGUMENT. */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_migration_mark_still(sluice_migration_t* migration, uint64_t id,
                                                                           int32_t peer);

/* Completes the move: waits for the spans that are still being sent, without the limit of the rate, and for all ranks,
 * then copies the spans that have arrived into place. SLUICE_OK on one rank means that no rank has aborted: all
 * surviving ranks have committed, or will by sluice_migration_settle. Staging memory is freed. The host then calls
 * sluice_moe_replace_experts. refusal: the reason why this rank cannot commit, copied; NULL: it can. A refusal of any
 * rank aborts the move on all ranks.
 *
 * Collective; comm-exclusive, on the thread that the spans belong to. It waits at most comm's timeout for each message.
 *
 * Errors:
 *   STATE             no move is in progress
 *   PEER_REFUSED      a rank refused; the message names it and its reason. The move has aborted on all ranks
 *   INVALID_ARGUMENT  this rank refused. The move has aborted on all ranks
 *   MISMATCH          two ends disagree about what moves between them; the message names them. The move has aborted on
 *                     all ranks
 *   PEER_LOST, TIMED_OUT, ABORTED, OVER_BUDGET, EXTERNAL
 *                     the message names the rank and the phase. The move has aborted, or is UNDECIDED: see
 *                     sluice_migration_get_progress */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_migration_commit(sluice_migration_t* migration,
                                                                       const char* refusal);

/* Makes all surviving ranks agree on one epoch after a rank was lost. An undecided rank commits or aborts accordingly;
 * if no rank is undecided, nothing changes. comm: all surviving ranks, each in any phase but STREAMS, in a communicator
 * that the host has made since the loss; NULL: this rank alone. A rank without which the others have continued must not
 * continue by itself.
 *
 * Collective over comm; comm-exclusive. out_epoch: the epoch in force on all of them; may be NULL. Errors: STATE (a
 * move is in progress), INTERNAL (epochs still differ, because a rank was left out before), errors of the exchanges:
 * the rank is then in the same state as before. */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_migration_settle(sluice_migration_t* migration,
                                                                       sluice_comm_t* comm, uint64_t* out_epoch);

/* Abandons a move that has begun, before commit: the old epoch stays in force on all ranks. The other ranks learn of
 * it, with the reason, in commit. reason: copied; may be NULL. Not collective; comm-exclusive. Has no effect if no move
 * is in progress. */
SLUICE_EXPORT SLUICE_EXPERIMENTAL void sluice_migration_abort(sluice_migration_t* migration, const char* reason);

typedef struct sluice_migration_progress_s {
  size_t struct_size; /* set by the caller: sizeof */
  uint64_t epoch;     /* epoch in force */
  uint64_t target;    /* epoch of the newest move */
  /* The following fields describe the newest move on this rank. */
  uint64_t leaving_bytes;
  uint64_t arriving_bytes;
  uint64_t hidden_bytes; /* part of leaving_bytes: those that were handed to the link before commit was called */
  uint64_t staged_bytes; /* staged now, including the memory of the transport for it */
  uint64_t peak_staged_bytes;
  double commit_seconds; /* time inside commit */
  int32_t phase;         /* SLUICE_MIGRATION_* */
  int32_t reserved;
} sluice_migration_progress_t;

/* Returns the progress of the move. Any thread, except one that is in another call of this migration. Errors:
 * INVALID_ARGUMENT, ABI. */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_migration_get_progress(sluice_migration_t* migration,
                                                                             sluice_migration_progress_t* out_progress);

/* Returns "stream", "flush", "ready", "agree" and so on: immutable. */
SLUICE_EXPORT SLUICE_EXPERIMENTAL const char* sluice_migration_phase_name(int32_t phase);

#ifdef __cplusplus
}
#endif

#endif /* SLUICE_MIGRATION_H_ */
