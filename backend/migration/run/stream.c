// SPDX-License-Identifier: Apache-2.0
/* Sends outgoing chunks: on a thread while the host trains, and all others at the boundary. */
#include "backend/base/clock.h"
#include "backend/base/math.h"
#include "backend/base/threads.h"
#include "backend/migration/run/state.h"
#include "backend/migration/run/wire.h"

/* ---- one chunk ---- */

static int leaves(const sluice_migration_t* m, const sluice_move_chunk_t* chunk) {
  return m->list.items[chunk->item].direction == SLUICE_MIGRATION_LEAVES;
}

static sluice_status_t post(sluice_migration_t* m, int32_t index) {
  sluice_move_chunk_t* chunk = &m->list.chunks[index];
  const sluice_migration_item_t* item = &m->list.items[chunk->item];
  const sluice_move_chunk_head_t head = {
      .magic = SLUICE_MOVE_MAGIC, .bytes = chunk->bytes, .epoch = m->target, .item = item->id};
  sluice_message_span_t pieces[SLUICE_MOVE_MAX_PIECES];
  const sluice_message_t message = {.peer = item->peer,
                                    .num_spans = sluice_move_pieces(&m->list, chunk, pieces),
                                    .tag = sluice_move_chunk_tag(chunk->when),
                                    .head = &head,
                                    .head_bytes = sizeof head,
                                    .spans = pieces};
  SLUICE_TRY(sluice_messages_send(m->messages, &message, sluice_move_word_of_chunk(index), &chunk->request));
  chunk->is_posted = 1;
  ++m->num_out;
  return SLUICE_OK;
}

/* Returns the next chunk that may be sent; -1: none now. Messages of one peer and tag are sent in the order of the
 * list, in which they are received. */
static int32_t find_next(sluice_migration_t* m) {
  for (; m->next_chunk < m->list.num_still; ++m->next_chunk) {
    const sluice_move_chunk_t* chunk = &m->list.chunks[m->next_chunk];
    if (leaves(m, chunk) && !chunk->is_posted) return m->next_chunk;
  }
  for (int32_t r = 0; r < m->comm->world_size; ++r) m->peers[r].is_held = 0;
  for (int32_t i = m->list.num_still; i < m->list.num_chunks; ++i) {
    const sluice_move_chunk_t* chunk = &m->list.chunks[i];
    if (!leaves(m, chunk) || chunk->is_posted) continue;
    sluice_move_peer_t* peer = &m->peers[m->list.items[chunk->item].peer];
    if (chunk->may_go && !peer->is_held) return i;
    peer->is_held = 1;
  }
  return -1;
}

static sluice_status_t post_all(sluice_migration_t* m) {
  sluice_status_t status = SLUICE_OK;
  for (int32_t next; status == SLUICE_OK && (next = find_next(m)) >= 0;) status = post(m, next);
  return status;
}

/* ---- during training ---- */

/* Ends early if the endpoint has failed, which commit reports. The lists are used only by this thread and let_go_out
 * until it has ended. */
static void* stream(void* data) {
  sluice_migration_t* m = data;
  const double ns_per_byte = 1e9 / (double)m->config.bytes_per_second;
  uint64_t free_ns = sluice_now_ns(); /* the time by which earlier sends have used up the rate */
  sluice_threads_forgo();
  pthread_mutex_lock(&m->mutex);
  while (!m->is_stopped) {
    const int32_t next = find_next(m);
    if (next < 0) {
      pthread_cond_wait(&m->changed, &m->mutex);
      continue;
    }
    const uint64_t now_ns = sluice_now_ns(), took_ns = (uint64_t)((double)m->list.chunks[next].bytes * ns_per_byte);
    const uint64_t due_ns = sluice_add_saturating(free_ns, took_ns);
    if (now_ns < due_ns) {
      (void)sluice_cond_wait_until(&m->changed, &m->mutex, due_ns);
      continue;
    }
    if (post(m, next) != SLUICE_OK) break;
    free_ns = due_ns + took_ns < now_ns ? now_ns : due_ns; /* time lost in a pause is not caught up */
  }
  pthread_mutex_unlock(&m->mutex);
  return NULL;
}

sluice_status_t sluice_move_stream(sluice_migration_t* m) {
  m->next_chunk = 0;
  if (m->config.bytes_per_second == 0 || m->list.num_chunks == 0) return post_all(m);
  m->is_stopped = 0;
  if (pthread_create(&m->thread, NULL, stream, m) != 0)
    return SLUICE_FAIL(SLUICE_E_NO_MEMORY, "migration: cannot start the thread that limits the rate");
  m->has_thread = 1;
  return SLUICE_OK;
}

void sluice_move_stop_access_out(sluice_migration_t* m, int32_t item) {
  for (int32_t i = m->list.num_still; i < m->list.num_chunks; ++i) {
    if (m->list.chunks[i].item == item) m->list.chunks[i].may_go = 1;
  }
  if (m->has_thread) {
    pthread_cond_signal(&m->changed);
  } else {
    (void)post_all(m); /* after a failure of the endpoint, which commit reports */
  }
}

void sluice_move_stop_stream(sluice_migration_t* m) {
  if (!m->has_thread) return;
  pthread_mutex_lock(&m->mutex);
  m->is_stopped = 1;
  pthread_cond_signal(&m->changed);
  pthread_mutex_unlock(&m->mutex);
  pthread_join(m->thread, NULL);
  m->has_thread = 0;
}

sluice_status_t sluice_move_flush(sluice_migration_t* m) {
  for (int32_t i = 0; i < m->list.num_chunks; ++i) m->list.chunks[i].may_go = 1;
  return post_all(m);
}

void sluice_move_cancel_unsent(sluice_migration_t* m) {
  for (int32_t i = 0; i < m->list.num_chunks; ++i) {
    sluice_move_chunk_t* chunk = &m->list.chunks[i];
    if (chunk->request == 0 || !sluice_messages_cancel(m->messages, chunk->request)) continue;
    chunk->request = 0;
    --m->num_out;
  }
}
