// SPDX-License-Identifier: Apache-2.0
/* The state of a rank's migration: its moves, over an endpoint of messages that exists only during a move. Private to
 * backend/migration/run.
 *
 * items.c             the items of a move, divided into chunks that are sent as messages, and the items that are sent,
 *                     or have arrived, before the boundary
 * stream.c            outgoing chunks, during training and at the boundary
 * control_messages.c  control messages between ranks, and arriving chunks
 * phases.c            events and rules: create, begin, commit, settle, abort */
#pragma once

#include <pthread.h>

#include "backend/base/alloc.h"
#include "backend/comm/messages.h"
#include "backend/migration/protocol.h"
#include "sluice/migration.h"

enum { SLUICE_MOVE_MAX_PIECES = 64 };

/* A message: a part of an item. Offsets count over the item's spans of one kind as if they were contiguous. */
typedef struct sluice_move_chunk_s {
  int32_t item;
  int32_t when; /* SLUICE_MIGRATION_STILL, _AT_COMMIT */
  int32_t first_span;
  int32_t may_go;     /* outgoing: it does not change any more */
  int32_t is_posted;  /* outgoing */
  int32_t is_through; /* it was sent, or has arrived */
  uint64_t offset;    /* in the first span */
  uint64_t bytes;
  sluice_message_request_t request; /* of a send in flight; else 0 */
  sluice_message_arrival_t* arrival;
  const void* payload;
} sluice_move_chunk_t;

/* The items and chunks of a move, in memory of its own. */
typedef struct sluice_move_list_s {
  sluice_migration_item_t* items; /* by id; at the beginning of the block */
  sluice_migration_span_t* spans;
  sluice_move_chunk_t* chunks;      /* [num_chunks], STILL before AT_COMMIT; otherwise in the order of items */
  uint64_t item_bytes, chunk_bytes; /* of both blocks */
  int32_t num_items, num_chunks, num_still;
  uint64_t leaving_bytes, arriving_bytes;
} sluice_move_list_t;

/* The state of another rank, from its control messages. */
typedef struct sluice_move_peer_s {
  int8_t is_alike; /* its announcement arrived, and matches this rank's */
  int8_t is_ready;
  int8_t has_agreed;
  int8_t has_refused;
  int8_t num_words; /* number of control messages received */
  int8_t is_held;   /* during a scan of the chunks: one chunk for it has to wait, so later ones do too */
} sluice_move_peer_t;

struct sluice_migration_s {
  sluice_comm_t* comm;
  sluice_migration_config_t config;
  sluice_allocator_t memory; /* for arriving messages */
  uint64_t epoch, target;
  int32_t phase; /* SLUICE_MIGRATION_* */

  sluice_messages_t* messages; /* NULL: no move is in progress */
  sluice_move_list_t list;
  sluice_move_peer_t* peers;    /* [W] */
  int32_t next_chunk;           /* among the STILL chunks: those before it have been posted, or are incoming */
  int32_t num_out, num_missing; /* chunks: posted but not complete; not arrived */
  int32_t num_said;             /* control messages posted but not complete */
  sluice_error_info_t refusal;  /* status OK: no rank has refused */
  uint64_t hidden_bytes, commit_ns;

  /* The thread that sends at a rate. */
  pthread_t thread;
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  int32_t has_thread, is_stopped;
};

/* ---- items.c ---- */

/* Copies and checks the items. out_list: release with sluice_move_list_free, also after an error. */
sluice_status_t sluice_move_list_make(const sluice_migration_t* m, const sluice_migration_item_t* items,
                                      int32_t num_items, sluice_move_list_t* out_list);
void sluice_move_list_free(sluice_move_list_t* list);
/* Returns in `pieces` the memory of a chunk, and the number of pieces. */
int32_t sluice_move_pieces(const sluice_move_list_t* list, const sluice_move_chunk_t* chunk,
                           sluice_message_span_t pieces[SLUICE_MOVE_MAX_PIECES]);
/* Returns a hash of everything that is sent in one direction between this rank and the peer: the same on both. */
uint64_t sluice_move_list_hash(const sluice_migration_t* m, int32_t peer, int32_t direction);
/* Copies staged state to its final place. */
void sluice_move_list_install(sluice_move_list_t* list);

/* ---- stream.c ---- */

/* Sends STILL chunks, at the rate if there is one. Errors: as sluice_messages_send, NO_MEMORY. */
sluice_status_t sluice_move_stream(sluice_migration_t* m);
/* Afterwards only sluice_move_flush posts chunks. */
void sluice_move_stop_stream(sluice_migration_t* m);
/* The outgoing chunks of this item do not change any more: they follow the STILL ones, at the rate if there is one.
 * Chunks for one peer are sent in order, so they wait for items before theirs. Call with the mutex held. */
void sluice_move_stop_access_out(sluice_migration_t* m, int32_t item);
/* Sends all other chunks. */
sluice_status_t sluice_move_flush(sluice_migration_t* m);
/* Cancels sends that have not begun. */
void sluice_move_cancel_unsent(sluice_migration_t* m);

/* ---- control_messages.c ---- */

/* Posts receives of control messages. */
sluice_status_t sluice_move_listen(sluice_migration_t* m);
/* Posts receives of chunks, and announces what this rank sends and expects. */
sluice_status_t sluice_move_announce(sluice_migration_t* m);
/* Sends to all other ranks. say: SLUICE_MOVE_SAY_READY, _AGREE, or _REFUSE with m->refusal. */
sluice_status_t sluice_move_broadcast_vote(sluice_migration_t* m, int32_t say);
/* Takes one completion. phase: waits for one, as sluice_messages_wait; NULL: does not wait, *out_is_taken is 0 if there
 * is none. */
sluice_status_t sluice_move_hear(sluice_migration_t* m, const char* phase, int32_t* out_is_taken);
/* Takes all completions that there are. */
void sluice_move_hear_the_rest(sluice_migration_t* m);
/* From now on no memory of the host is read or staged to; control messages in flight still reach the other ranks. */
void sluice_move_stop_access(sluice_migration_t* m);
/* Closes the connection when no rank needs it any more: if a rank has refused, when all ranks have refused or
 * deadline_ns has passed. If a rank closed it earlier, ranks that do not yet know the reason would report it as
 * lost. */
void sluice_move_close_endpoint(sluice_migration_t* m, uint64_t deadline_ns);
