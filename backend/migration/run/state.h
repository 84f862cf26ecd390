// SPDX-License-Identifier: Apache-2.0
/* What a rank's migration holds. Private to backend/migration/run.
 *
 *   life.c    migrations come and go
 *   items.c   what moves, cut into chunks that travel as messages
 *   stream.c  chunks on their way out, beside training and at the boundary
 *   control_messages.c    what ranks say to each other, and what arrives
 *   early.c   what leaves, or has arrived, before the boundary
 *   phases.c  events and rules: begin, commit, settle, abort */
#ifndef SLUICE_BACKEND_MIGRATION_RUN_STATE_H_
#define SLUICE_BACKEND_MIGRATION_RUN_STATE_H_

#include <pthread.h>

#include "backend/base/alloc.h"
#include "backend/comm/messages.h"
#include "backend/migration/protocol.h"
#include "backend/migration/run/run.h"

enum { SLUICE_MOVE_MAX_PIECES = 64 };

/* A message: a piece of an item, of its spans of one kind as if they lay one after the other. */
typedef struct sluice_move_chunk_s {
  int32_t item;
  int32_t when; /* SLUICE_MIGRATION_STILL, _AT_COMMIT */
  int32_t first_span;
  int32_t may_go;     /* of what leaves: it does not change any more */
  int32_t is_posted;  /* of what leaves */
  int32_t is_through; /* has been sent, or has arrived */
  uint64_t offset;    /* in the first span */
  uint64_t bytes;
  sluice_message_request_t request; /* of a send that is out; else 0 */
  sluice_message_arrival_t* arrival;
  const void* payload;
} sluice_move_chunk_t;

/* All that a move needs, in its own memory. */
typedef struct sluice_move_list_s {
  sluice_migration_item_t* items; /* by id; the first of the block */
  sluice_migration_span_t* spans;
  sluice_move_chunk_t* chunks;      /* [num_chunks] STILL before AT_COMMIT; else in the order of items */
  uint64_t item_bytes, chunk_bytes; /* of both blocks */
  int32_t num_items, num_chunks, num_still;
  uint64_t leaving_bytes, arriving_bytes;
} sluice_move_list_t;

/* What a rank has said. */
typedef struct sluice_move_peer_s {
  int8_t is_alike; /* its announcement came, and is this rank's */
  int8_t is_ready;
  int8_t has_agreed;
  int8_t has_refused;
  int8_t num_words; /* that were heard */
  int8_t is_held;   /* while chunks are looked through: one for it has to wait */
} sluice_move_peer_t;

struct sluice_migration_s {
  sluice_comm_t* comm;
  sluice_migration_config_t config;
  sluice_allocator_t memory; /* of what arrives */
  uint64_t epoch, target;
  int32_t phase; /* SLUICE_MIGRATION_* */

  sluice_messages_t* messages; /* NULL: no move is under way */
  sluice_move_list_t list;
  sluice_move_peer_t* peers;    /* [W] */
  int32_t next_chunk;           /* of the STILL ones: those before it have been posted, or arrive */
  int32_t num_out, num_missing; /* chunks: posted and not through; not arrived */
  int32_t num_said;             /* words posted and not through */
  sluice_error_info_t refusal;  /* status OK: nobody has refused */
  uint64_t hidden_bytes, commit_ns;

  /* The thread that sends at a rate. */
  pthread_t thread;
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  int32_t has_thread, is_stopped;
};

/* ---- items.c ---- */

/* Copies and checks. out_list: sluice_move_list_free, also after an error. */
sluice_status_t sluice_move_list_make(const sluice_migration_t* m, const sluice_migration_item_t* items,
                                      int32_t num_items, sluice_move_list_t* out_list);
void sluice_move_list_free(sluice_move_list_t* list);
/* The memory of a chunk. Returns how many pieces. */
int32_t sluice_move_pieces(const sluice_move_list_t* list, const sluice_move_chunk_t* chunk,
                           sluice_message_span_t pieces[SLUICE_MOVE_MAX_PIECES]);
/* Of all that goes one way between this rank and the peer: alike at both ends. */
uint64_t sluice_move_list_hash(const sluice_migration_t* m, int32_t peer, int32_t direction);
/* What is staged goes to its place. */
void sluice_move_list_install(sluice_move_list_t* list);

/* ---- stream.c ---- */

/* STILL chunks go out, at the rate if there is one. Errors: as sluice_messages_send, NO_MEMORY. */
sluice_status_t sluice_move_stream(sluice_migration_t* m);
/* No chunk is posted afterwards but by sluice_move_flush. */
void sluice_move_stop_stream(sluice_migration_t* m);
/* Chunks of this item, which leaves, do not change any more: they follow the STILL ones, at the rate if there is one.
 * Those of one peer go in their order, so they wait for items ahead of theirs. Under the mutex. */
void sluice_move_stop_access_out(sluice_migration_t* m, int32_t item);
/* All other chunks go out. */
sluice_status_t sluice_move_flush(sluice_migration_t* m);
/* Takes back what has not begun to go out. */
void sluice_move_cancel_unsent(sluice_migration_t* m);

/* ---- control_messages.c ---- */

/* Posts what this rank will hear. */
sluice_status_t sluice_move_listen(sluice_migration_t* m);
/* Posts what it will get, and announces what it sends and expects. */
sluice_status_t sluice_move_announce(sluice_migration_t* m);
/* To all others. say: SLUICE_MOVE_SAY_READY, _AGREE, or _REFUSE with m->refusal. */
sluice_status_t sluice_move_broadcast_vote(sluice_migration_t* m, int32_t say);
/* Takes one completion. phase: waits for one, as sluice_messages_wait; NULL: only looks, *out_is_taken 0 where there is
 * none. */
sluice_status_t sluice_move_hear(sluice_migration_t* m, const char* phase, int32_t* out_is_taken);
/* Nothing of the host is read or staged any more; words that are out still reach the others. */
void sluice_move_stop_access(sluice_migration_t* m);
/* Closes the connection, once nobody needs it: where a rank has refused, all have by then, or deadline_ns has passed. A
 * rank that left before would be lost to those who have not heard yet why. */
void sluice_move_close_endpoint(sluice_migration_t* m, uint64_t deadline_ns);

#endif /* SLUICE_BACKEND_MIGRATION_RUN_STATE_H_ */
