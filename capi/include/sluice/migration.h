/* Migration: experts change their owner with all that belongs to them (weights, gradients, masters, moments, step
 * counts), while training runs.
 *
 * What moves is memory of the host, as spans. It travels over connections of its own beside training, at a rate that
 * the host sets, is staged where it arrives, and is put into its place at a boundary of the host's steps: on all ranks
 * or on none. Until then nothing that the host owns is written. Two experts that swap their places give each other what
 * lies in the same memory.
 *
 * Most of an expert's state does not change between two updates of the optimizer: weights, masters, moments and step
 * counts are what the last update left. Only gradients do. So a host that begins a move behind an update and commits
 * it before the next one hides all but the gradients: spans that are STILL travel meanwhile, spans AT_COMMIT when the
 * host is at the boundary. A host that commits behind the update, where all has changed, has all its spans AT_COMMIT:
 * right too, and nothing is hidden.
 *
 *   begin (behind update t)  ...  forward, backward  ...  commit  replace_experts  update t + 1
 *
 * The protocol is a three-phase commit without a coordinator. docs/migration.md has its table, and what checks it.
 */
#ifndef SLUICE_MIGRATION_H_
#define SLUICE_MIGRATION_H_

#include "sluice/base.h"
#include "sluice/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sluice_migration_s sluice_migration_t;

/* Where a rank stands. */
enum {
  SLUICE_MIGRATION_NONE = 0,      /* nothing has been moved yet */
  SLUICE_MIGRATION_STREAMS = 1,   /* begun: spans that are STILL travel while the host trains */
  SLUICE_MIGRATION_FLUSHES = 2,   /* in commit: the rest travels */
  SLUICE_MIGRATION_READY = 3,     /* this rank has all, and has said so */
  SLUICE_MIGRATION_AGREED = 4,    /* it has heard that all are, and has said that */
  SLUICE_MIGRATION_UNDECIDED = 5, /* it has lost a rank then, and cannot know: sluice_migration_settle */
  SLUICE_MIGRATION_COMMITTED = 6, /* the newest move has taken effect */
  SLUICE_MIGRATION_ABORTED = 7    /* the newest move has not, and never will */
};

typedef struct sluice_migration_config_s {
  size_t struct_size;              /* set by sluice_migration_config_init */
  const sluice_ext_header_t* next; /* NULL */
  uint64_t epoch;                  /* of the placement in force, alike on all ranks; at most 2^62; default 0 */
  uint64_t bytes_per_second;       /* from this rank between begin and commit; 0: as fast as the link takes them */
  uint64_t staging_bytes;          /* on this rank at most, of one move; 0: no limit */
  uint64_t chunk_bytes;            /* of one message, [4096, 2^30], alike on all ranks; default 256 KiB */
  /* Until commit: 1, the default: over tcp all other messages and exchanges of this process go first, activations of a
   * pipeline among them. Little of what moves is under way at a time, and nothing new while another connection has more
   * than 32 KiB that have not arrived, but for 16 KiB every 20 ms. 0: it shares links with them. */
  int32_t gives_way;
  int32_t reserved; /* 0 */
} sluice_migration_config_t;

SLUICE_EXPORT SLUICE_EXPERIMENTAL void sluice_migration_config_init(sluice_migration_config_t* out_config,
                                                                    size_t struct_size);

/* comm: the ranks among which experts move; retained. Its exchanges may go on beside a move. Not collective.
 * out_migration: new, sluice_migration_destroy. Thread-safe. Errors: INVALID_ARGUMENT naming the field, ABI,
 * NO_MEMORY. */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_migration_create(sluice_comm_t* comm,
                                                                       const sluice_migration_config_t* config,
                                                                       sluice_migration_t** out_migration);
/* Not collective, in bounded time. A move that is under way is given up: the others lose this rank. Accepts NULL. */
SLUICE_EXPORT SLUICE_EXPERIMENTAL void sluice_migration_destroy(sluice_migration_t* migration);

enum { SLUICE_MIGRATION_LEAVES = 0, SLUICE_MIGRATION_ARRIVES = 1 };

enum {
  SLUICE_MIGRATION_STILL = 0,    /* what leaves does not change from begin to the end of commit */
  SLUICE_MIGRATION_AT_COMMIT = 1 /* it may change until commit is called */
};

/* A piece of host memory. */
typedef struct sluice_migration_span_s {
  void* data;     /* may be NULL where bytes is 0 */
  uint64_t bytes; /* alike at both ends */
  int32_t when;   /* SLUICE_MIGRATION_STILL or _AT_COMMIT, alike at both ends */
  int32_t reserved;
} sluice_migration_span_t;

/* All that moves with one expert, at one of its ends. What leaves and what arrives may be the same memory. */
typedef struct sluice_migration_item_s {
  uint64_t id;                          /* alike at both ends, once for each pair of ranks and direction */
  int32_t peer;                         /* the other end, another rank than this one */
  int32_t direction;                    /* SLUICE_MIGRATION_LEAVES or _ARRIVES */
  const sluice_migration_span_t* spans; /* [num_spans] as many as at the other end, in the same order */
  int32_t num_spans;
  int32_t reserved; /* 0 */
} sluice_migration_item_t;

/* Begins a move to `epoch`, above that in force. It returns when connections stand; spans travel afterwards.
 * items [num_items] and their lists are copied; what spans point to is borrowed until commit, abort or settle has
 * decided. A rank that gives and gets nothing calls it with 0 items.
 *
 * Collective over comm, which must be idle, with the same epoch; comm-exclusive. Errors, after which the old epoch is
 * in force on all ranks: INVALID_ARGUMENT (an item: named), OVER_BUDGET (staging_bytes), NO_MEMORY; the others hear of
 * these at the latest in commit. STATE: a move is under way, or undecided. MISMATCH: epochs differ. PEER_REFUSED,
 * PEER_LOST: another rank has given the move up already. What opening an endpoint returns, naming the phase "announce"
 * and the rank. */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_migration_begin(sluice_migration_t* migration, uint64_t epoch,
                                                                      const sluice_migration_item_t* items,
                                                                      int32_t num_items);

/* Looks, without waiting, whether spans of an item that arrives are here, and copies them: for a host that uses them
 * before the commit, as the stage of a pipeline does to which a layer moves while a batch runs. Spans AT_COMMIT come
 * early where the other end has marked them.
 *
 * id, peer  of the item
 * to        [num_spans], as many as the item has: where a copy goes. 0 bytes: not wanted; else as many as the span has.
 *           The places of the item itself will do; commit writes them again
 * out_is_there: 1: all that are wanted are here, and copied. 0: not yet, or another rank has given the move up, as
 *           commit will say
 *
 * Threads: that which commits; not collective. Errors: STATE (no move is under way), INVALID_ARGUMENT. */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_migration_read_early(sluice_migration_t* migration, uint64_t id,
                                                                           int32_t peer,
                                                                           const sluice_migration_span_t* to,
                                                                           int32_t num_spans, int32_t* out_is_there);

/* From now on the spans AT_COMMIT of an item that leaves do not change any more either: they follow those that are
 * STILL, and commit waits for fewer. Between two ranks items go in the order of their ids, so one waits for those ahead
 * of it. Threads: that which commits; not collective. May be said again. Errors: STATE (no move is under way),
 * INVALID_ARGUMENT. */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_migration_mark_still(sluice_migration_t* migration, uint64_t id,
                                                                           int32_t peer);

/* Ends the move: waits for what is still under way, without the rate, and for all ranks, then puts what has arrived
 * into its place. SLUICE_OK on one rank means that no rank has aborted: those that live have committed, or come to it
 * by sluice_migration_settle. Staged memory is freed. The host then calls sluice_moe_replace_experts. refusal: why this
 * rank cannot, copied; NULL: it can. Any refusal aborts the move on all ranks.
 *
 * Collective; comm-exclusive, by the thread that the spans belong to. It waits at most comm's timeout for each message.
 * Errors: STATE          no move is under way PEER_REFUSED   a rank refused: names it, and why. The move has aborted
 * everywhere INVALID_ARGUMENT  this rank refused. The same MISMATCH       two ends disagree about what moves between
 * them: names them. The same PEER_LOST, TIMED_OUT, ABORTED, OVER_BUDGET, EXTERNAL  naming the rank and the phase. The
 * move has aborted, or is UNDECIDED: sluice_migration_get_progress says which */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_migration_commit(sluice_migration_t* migration,
                                                                       const char* refusal);

/* After a loss: one epoch for all who are left. An undecided rank commits or aborts by it; where none is, nothing
 * changes.
 * comm: those who are left, all of them, each in any state but STREAMS, in a communicator that the host has made since;
 * NULL: this rank alone. A rank that others have gone on without must not go on by itself.
 *
 * Collective over comm; comm-exclusive. out_epoch: in force on all of them; may be NULL. Errors: STATE (a move is under
 * way), INTERNAL (epochs differ all the same: a rank was left out before), what exchanges return: then the rank is as
 * it was. */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_migration_settle(sluice_migration_t* migration,
                                                                       sluice_comm_t* comm, uint64_t* out_epoch);

/* Gives a move up that has begun, before commit: the old epoch stays in force on all ranks, which hear of it, and why,
 * in commit. reason: copied; may be NULL. Not collective; comm-exclusive. Without effect where none is under
 * way. */
SLUICE_EXPORT SLUICE_EXPERIMENTAL void sluice_migration_abort(sluice_migration_t* migration, const char* reason);

typedef struct sluice_migration_progress_s {
  size_t struct_size; /* set by the caller: sizeof */
  uint64_t epoch;     /* in force */
  uint64_t target;    /* epoch of the newest move */
  /* Of the newest move on this rank. */
  uint64_t leaving_bytes;
  uint64_t arriving_bytes;
  uint64_t hidden_bytes; /* of those that leave, handed to the link before commit was called */
  uint64_t staged_bytes; /* now, with what the transport takes for it */
  uint64_t peak_staged_bytes;
  double commit_seconds; /* inside commit */
  int32_t phase;         /* SLUICE_MIGRATION_* */
  int32_t reserved;
} sluice_migration_progress_t;

/* Any thread but one that is in another call of this migration. Errors: INVALID_ARGUMENT, ABI. */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_migration_get_progress(sluice_migration_t* migration,
                                                                             sluice_migration_progress_t* out_progress);

/* "stream", "flush", "ready", "agree", ...: immutable. */
SLUICE_EXPORT SLUICE_EXPERIMENTAL const char* sluice_migration_phase_name(int32_t phase);

#ifdef __cplusplus
}
#endif

#endif /* SLUICE_MIGRATION_H_ */
