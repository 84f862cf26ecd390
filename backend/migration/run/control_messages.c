// SPDX-License-Identifier: Apache-2.0
/* Sends and receives control messages, receives chunks, and closes the endpoint of a move. */
#include <stdio.h>
#include <string.h>

#include "backend/base/clock.h"
#include "backend/comm/comm.h"
#include "backend/migration/run/state.h"
#include "backend/migration/run/wire.h"

#define FAREWELL_NS UINT64_C(2000000000) /* for control messages that were sent before a move ended */

/* An announcement; ready or a refusal; agree or a refusal. */
enum { WORDS_OF_A_PEER = 3 };

/* A control message has no payload. One from another build may have one, and its sender gets an error. */
#define MOST_AFTER_A_WORD UINT64_C(65536)

/* ---- sending ---- */

static sluice_status_t say_to(sluice_migration_t* m, int32_t rank, const sluice_move_word_t* word) {
  const sluice_message_t message = {
      .peer = rank, .tag = SLUICE_MOVE_WORD_TAG, .head = word, .head_bytes = sizeof *word};
  SLUICE_TRY(sluice_messages_send(m->messages, &message, (uint64_t)rank, NULL));
  ++m->num_said;
  return SLUICE_OK;
}

sluice_status_t sluice_move_broadcast_vote(sluice_migration_t* m, int32_t say) {
  sluice_move_word_t word = {.magic = SLUICE_MOVE_MAGIC, .kind = say, .epoch = m->target};
  if (say == SLUICE_MOVE_SAY_REFUSE) {
    word.status = m->refusal.status;
    word.rank = m->refusal.peer >= 0 ? m->refusal.peer : m->comm->rank;
    (void)snprintf(word.reason, sizeof word.reason, "%.*s", (int)sizeof word.reason - 1, m->refusal.message);
  }
  sluice_status_t status = SLUICE_OK;
  for (int32_t r = 0; r < m->comm->world_size && status == SLUICE_OK; ++r) {
    if (r != m->comm->rank) status = say_to(m, r, &word);
  }
  return status;
}

/* Posts one receive at a time, so that a silent rank has the oldest request, which is the one that a wait names. */
static sluice_status_t listen_to(sluice_migration_t* m, int32_t rank) {
  return sluice_messages_receive_up_to(m->messages, rank, SLUICE_MOVE_WORD_TAG, MOST_AFTER_A_WORD, (uint64_t)rank,
                                       NULL);
}

sluice_status_t sluice_move_listen(sluice_migration_t* m) {
  for (int32_t r = 0; r < m->comm->world_size; ++r) {
    if (r != m->comm->rank) SLUICE_TRY(listen_to(m, r));
  }
  return SLUICE_OK;
}

sluice_status_t sluice_move_announce(sluice_migration_t* m) {
  for (int32_t i = 0; i < m->list.num_chunks; ++i) {
    const sluice_move_chunk_t* chunk = &m->list.chunks[i];
    const sluice_migration_item_t* item = &m->list.items[chunk->item];
    if (item->direction != SLUICE_MIGRATION_ARRIVES) continue;
    SLUICE_TRY(sluice_messages_receive(m->messages, item->peer, sluice_move_chunk_tag(chunk->when),
                                       sluice_move_word_of_chunk(i), NULL));
    ++m->num_missing;
  }
  for (int32_t r = 0; r < m->comm->world_size; ++r) {
    if (r == m->comm->rank) continue;
    const sluice_move_word_t word = {.magic = SLUICE_MOVE_MAGIC,
                                     .kind = SLUICE_MOVE_WORD_ANNOUNCE,
                                     .epoch = m->target,
                                     .leaves = sluice_move_list_hash(m, r, SLUICE_MIGRATION_LEAVES),
                                     .arrives = sluice_move_list_hash(m, r, SLUICE_MIGRATION_ARRIVES)};
    SLUICE_TRY(say_to(m, r, &word));
  }
  return SLUICE_OK;
}

/* ---- receiving ---- */

/* Records a refusal; only the first one is kept. */
static void refuse(sluice_migration_t* m, int32_t status, int32_t peer, const char* why) {
  if (m->refusal.status != SLUICE_OK) return;
  m->refusal.status = status;
  m->refusal.rank = m->comm->rank;
  m->refusal.peer = peer;
  (void)snprintf(m->refusal.message, sizeof m->refusal.message, "%s", why);
}

static void refuse_differing(sluice_migration_t* m, int32_t rank, const char* what) {
  char why[256];
  (void)snprintf(why, sizeof why,
                 "migration: ranks %d and %d differ in %s: give the same ids, spans, bytes and times at both ends",
                 rank, m->comm->rank, what);
  refuse(m, SLUICE_E_MISMATCH, rank, why);
}

static void hear_refusal(sluice_migration_t* m, int32_t rank, const sluice_move_word_t* word) {
  char why[640];
  m->peers[rank].has_refused = 1;
  const int32_t refuser = word->rank >= 0 && word->rank < m->comm->world_size ? word->rank : rank;
  const int is_theirs = word->status == SLUICE_E_MISMATCH || word->status == SLUICE_E_PEER_REFUSED;
  /* If two ranks differ, neither is at fault, and all ranks report the same text. */
  if (is_theirs) {
    (void)snprintf(why, sizeof why, "%s", word->reason);
  } else {
    (void)snprintf(why, sizeof why, "migration to epoch %llu: rank %d refused: %s: %s", (unsigned long long)word->epoch,
                   refuser, sluice_status_name(word->status), word->reason);
  }
  refuse(m, word->status == SLUICE_E_MISMATCH ? SLUICE_E_MISMATCH : SLUICE_E_PEER_REFUSED, refuser, why);
}

static void hear_word(sluice_migration_t* m, const sluice_message_completion_t* completion) {
  const int32_t rank = completion->peer;
  sluice_move_peer_t* peer = &m->peers[rank];
  sluice_move_word_t word;
  if (completion->head_bytes != sizeof word || completion->payload_bytes != 0) {
    refuse_differing(m, rank, "the build of Sluice");
    return;
  }
  memcpy(&word, completion->head, sizeof word);
  word.reason[sizeof word.reason - 1] = 0;
  if (word.magic != SLUICE_MOVE_MAGIC || word.epoch != m->target) {
    refuse_differing(m, rank, "the build of Sluice");
    return;
  }
  switch (word.kind) {
    case SLUICE_MOVE_WORD_ANNOUNCE:
      peer->is_alike = word.arrives == sluice_move_list_hash(m, rank, SLUICE_MIGRATION_LEAVES) &&
                       word.leaves == sluice_move_list_hash(m, rank, SLUICE_MIGRATION_ARRIVES);
      if (!peer->is_alike) refuse_differing(m, rank, "what moves between them");
      break;
    case SLUICE_MOVE_SAY_READY: peer->is_ready = 1; break;
    case SLUICE_MOVE_SAY_AGREE: peer->has_agreed = 1; break;
    case SLUICE_MOVE_SAY_REFUSE: hear_refusal(m, rank, &word); break;
    default: refuse_differing(m, rank, "the build of Sluice"); break;
  }
}

static void stage(sluice_migration_t* m, int32_t index, const sluice_message_completion_t* completion) {
  sluice_move_chunk_t* chunk = &m->list.chunks[index];
  sluice_move_chunk_head_t head = {.magic = 0};
  if (completion->head_bytes == sizeof head) memcpy(&head, completion->head, sizeof head);
  chunk->arrival = completion->arrival;
  chunk->payload = completion->payload;
  chunk->is_through = 1;
  --m->num_missing;
  if (head.magic != SLUICE_MOVE_MAGIC || head.epoch != m->target || head.item != m->list.items[chunk->item].id ||
      head.bytes != chunk->bytes || completion->payload_bytes != chunk->bytes) {
    refuse_differing(m, completion->peer, "what moves between them");
  }
}

static sluice_status_t take(sluice_migration_t* m, const sluice_message_completion_t* completion) {
  const int is_chunk = (completion->user & SLUICE_MOVE_IS_CHUNK) != 0;
  const int32_t index = (int32_t)(completion->user & (SLUICE_MOVE_IS_CHUNK - 1));
  if (is_chunk && index >= m->list.num_chunks) { /* of a move that this rank has abandoned */
    sluice_messages_release(m->messages, completion->arrival);
    return SLUICE_OK;
  }
  if (completion->kind == SLUICE_MESSAGE_SENT) {
    if (!is_chunk) {
      --m->num_said;
      return SLUICE_OK;
    }
    m->list.chunks[index].is_through = 1;
    m->list.chunks[index].request = 0;
    --m->num_out;
  } else if (is_chunk) {
    stage(m, index, completion);
  } else {
    sluice_move_peer_t* peer = &m->peers[completion->peer];
    hear_word(m, completion);
    sluice_messages_release(m->messages, completion->arrival);
    if (++peer->num_words < WORDS_OF_A_PEER && !peer->has_refused) return listen_to(m, completion->peer);
  }
  return SLUICE_OK;
}

sluice_status_t sluice_move_hear(sluice_migration_t* m, const char* phase, int32_t* out_is_taken) {
  sluice_message_completion_t completion;
  *out_is_taken = 0;
  const sluice_status_t status = phase != NULL ? sluice_messages_wait(m->messages, phase, &completion)
                                               : sluice_messages_next(m->messages, 0, &completion);
  if (phase == NULL && status == SLUICE_E_TIMED_OUT && completion.kind == 0) {
    /* There was no message, or the endpoint has failed, which the next wait reports. */
    return SLUICE_OK;
  }
  if (status != SLUICE_OK) return status;
  *out_is_taken = 1;
  return take(m, &completion);
}

void sluice_move_hear_the_rest(sluice_migration_t* m) {
  int32_t is_taken = 1;
  sluice_status_t status = SLUICE_OK; /* a failure to post more receives does not affect what has arrived */
  while (is_taken) status = sluice_move_hear(m, NULL, &is_taken);
  (void)status;
}

/* ---- the end of a move ---- */

void sluice_move_stop_access(sluice_migration_t* m) {
  const uint64_t deadline_ns = sluice_now_ns() + FAREWELL_NS;
  sluice_message_completion_t completion;
  sluice_status_t status = SLUICE_OK;
  sluice_move_cancel_unsent(m);
  while (m->num_said + m->num_out > 0 && status == SLUICE_OK) {
    status = sluice_messages_next(m->messages, deadline_ns, &completion);
    if (status == SLUICE_OK) status = take(m, &completion);
  }
  /* The host gets its memory back in any case. */
  if (m->num_out > 0) sluice_messages_abort(m->messages);
  for (int32_t i = 0; i < m->list.num_chunks; ++i) {
    sluice_messages_release(m->messages, m->list.chunks[i].arrival);
    m->list.chunks[i].arrival = NULL;
  }
  sluice_move_list_free(&m->list);
}

static int is_needed(const sluice_migration_t* m) {
  if (m->refusal.status == SLUICE_OK) return 0;
  for (int32_t r = 0; r < m->comm->world_size; ++r) {
    if (r != m->comm->rank && !m->peers[r].has_refused) return 1;
  }
  return 0;
}

void sluice_move_close_endpoint(sluice_migration_t* m, uint64_t deadline_ns) {
  sluice_message_completion_t completion;
  while (is_needed(m) && sluice_messages_next(m->messages, deadline_ns, &completion) == SLUICE_OK) {
    if (take(m, &completion) != SLUICE_OK) break;
  }
  sluice_messages_close(m->messages);
  m->messages = NULL;
}
