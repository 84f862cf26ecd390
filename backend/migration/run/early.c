/* What has arrived before the boundary, for a host that uses it early. */
#include <string.h>

#include "backend/base/check.h"
#include "backend/migration/run/state.h"

static int32_t find(const sluice_migration_t* m, uint64_t id, int32_t peer) {
  for (int32_t i = 0; i < m->list.num_items; ++i) {
    const sluice_migration_item_t* item = &m->list.items[i];
    if (item->id == id && item->peer == peer && item->direction == SLUICE_MIGRATION_ARRIVES) return i;
  }
  return -1;
}

static sluice_status_t check(const sluice_migration_item_t* item, const sluice_migration_span_t* to,
                             int32_t num_spans) {
  SLUICE_TRY(SLUICE_REQUIRE(num_spans == item->num_spans && (to != NULL || num_spans == 0),
                            "sluice_migration_read_still: %d spans at %p; item %llu has %d", num_spans, (const void*)to,
                            (unsigned long long)item->id, item->num_spans));
  for (int32_t s = 0; s < num_spans; ++s) {
    if (to[s].bytes == 0) continue;
    SLUICE_TRY(SLUICE_REQUIRE(
        item->spans[s].when == SLUICE_MIGRATION_STILL && to[s].bytes == item->spans[s].bytes && to[s].data != NULL,
        "sluice_migration_read_still: span %d of item %llu: give 0 bytes, or %llu where it is STILL", s,
        (unsigned long long)item->id, (unsigned long long)item->spans[s].bytes));
  }
  return SLUICE_OK;
}

/* What has come, without waiting. A failure is said by commit. */
static void hear(sluice_migration_t* m) {
  int32_t is_taken = 1;
  sluice_status_t status = SLUICE_OK;
  while (is_taken) status = sluice_move_hear(m, NULL, &is_taken);
  (void)status;
}

static int is_all_there(const sluice_migration_t* m, int32_t item) {
  for (int32_t i = 0; i < m->list.num_still; ++i) {
    if (m->list.chunks[i].item == item && m->list.chunks[i].arrival == NULL) return 0;
  }
  return m->refusal.status == SLUICE_OK;
}

/* Piece by piece, as it was cut: chunks of an item come in the order of its spans. */
static void copy(const sluice_migration_t* m, int32_t item, const sluice_migration_span_t* to) {
  const sluice_migration_span_t* spans = m->list.items[item].spans;
  for (int32_t i = 0; i < m->list.num_still; ++i) {
    const sluice_move_chunk_t* chunk = &m->list.chunks[i];
    if (chunk->item != item) continue;
    const char* from = chunk->payload;
    uint64_t left = chunk->bytes, offset = chunk->offset;
    for (int32_t s = chunk->first_span; left > 0; ++s, offset = 0) {
      if (spans[s].when != SLUICE_MIGRATION_STILL || spans[s].bytes == 0) continue;
      const uint64_t rest = spans[s].bytes - offset, bytes = left < rest ? left : rest;
      if (to[s].bytes > 0) memcpy((char*)to[s].data + offset, from, bytes);
      from += bytes;
      left -= bytes;
    }
  }
}

sluice_status_t sluice_move_read_still(sluice_migration_t* m, uint64_t id, int32_t peer,
                                       const sluice_migration_span_t* to, int32_t num_spans, int32_t* out_is_there) {
  if (m->phase != SLUICE_MIGRATION_STREAMS) {
    return SLUICE_FAIL(SLUICE_E_STATE, "sluice_migration_read_still: no move is under way (%s); ask before its commit",
                       sluice_migration_phase_name(m->phase));
  }
  const int32_t item = find(m, id, peer);
  SLUICE_TRY(SLUICE_REQUIRE(item >= 0, "sluice_migration_read_still: no item %llu arrives from rank %d",
                            (unsigned long long)id, peer));
  SLUICE_TRY(check(&m->list.items[item], to, num_spans));
  pthread_mutex_lock(&m->mutex); /* the thread that sends at a rate looks at the same list */
  hear(m);
  *out_is_there = is_all_there(m, item);
  if (*out_is_there) copy(m, item, to);
  pthread_mutex_unlock(&m->mutex);
  return SLUICE_OK;
}
