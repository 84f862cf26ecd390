#include "backend/base/clock.h"
#include "backend/base/threads.h"
#include "backend/migration/run/state.h"
#include "backend/migration/run/wire.h"

/* ---- one chunk ---- */

static int leaves(const sluice_migration_t* m, const sluice_move_chunk_t* chunk) {
  return m->list.items[chunk->item].direction == SLUICE_MIGRATION_LEAVES;
}

static sluice_status_t post(sluice_migration_t* m, int32_t index) {
  sluice_move_chunk_t* chunk = &m->list.chunks[index];
  if (!leaves(m, chunk)) return SLUICE_OK;
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
  ++m->num_out;
  return SLUICE_OK;
}

static sluice_status_t post_until(sluice_migration_t* m, int32_t end) {
  for (; m->next_chunk < end; ++m->next_chunk) SLUICE_TRY(post(m, m->next_chunk));
  return SLUICE_OK;
}

/* ---- beside training ---- */

/* Ends early where the endpoint has failed: commit sees why. The lists are this thread's until it has ended. */
static void* stream(void* data) {
  sluice_migration_t* m = data;
  const uint64_t start_ns = sluice_now_ns();
  const double ns_per_byte = 1e9 / (double)m->config.bytes_per_second;
  double sent = 0;
  sluice_threads_forgo();
  pthread_mutex_lock(&m->mutex);
  while (!m->is_stopped && m->next_chunk < m->list.num_still) {
    const sluice_move_chunk_t* chunk = &m->list.chunks[m->next_chunk];
    const double bytes = leaves(m, chunk) ? (double)chunk->bytes : 0;
    const uint64_t due_ns = start_ns + (uint64_t)((sent + bytes) * ns_per_byte);
    if (bytes > 0 && sluice_now_ns() < due_ns) {
      (void)sluice_cond_wait_until(&m->changed, &m->mutex, due_ns);
      continue;
    }
    if (post(m, m->next_chunk) != SLUICE_OK) break;
    ++m->next_chunk;
    sent += bytes;
  }
  pthread_mutex_unlock(&m->mutex);
  return NULL;
}

sluice_status_t sluice_move_stream(sluice_migration_t* m) {
  m->next_chunk = 0;
  if (m->config.bytes_per_second == 0 || m->list.num_still == 0) return post_until(m, m->list.num_still);
  m->is_stopped = 0;
  if (pthread_create(&m->thread, NULL, stream, m) != 0)
    return SLUICE_FAIL(SLUICE_E_NO_MEMORY, "migration: no thread to send at a rate");
  m->has_thread = 1;
  return SLUICE_OK;
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

sluice_status_t sluice_move_flush(sluice_migration_t* m) { return post_until(m, m->list.num_chunks); }

void sluice_move_take_back(sluice_migration_t* m) {
  for (int32_t i = 0; i < m->list.num_chunks; ++i) {
    sluice_move_chunk_t* chunk = &m->list.chunks[i];
    if (chunk->request == 0 || !sluice_messages_cancel(m->messages, chunk->request)) continue;
    chunk->request = 0;
    --m->num_out;
  }
}
