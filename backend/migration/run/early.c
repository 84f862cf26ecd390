// SPDX-License-Identifier: Apache-2.0
/* Sends and receives items before the boundary, for hosts that know earlier which items are final. */
#include <string.h>

#include "backend/base/math.h"
#include "backend/migration/run/state.h"

static int32_t find(const sluice_migration_t* m, uint64_t id, int32_t peer, int32_t direction) {
  for (int32_t i = 0; i < m->list.num_items; ++i) {
    const sluice_migration_item_t* item = &m->list.items[i];
    if (item->id == id && item->peer == peer && item->direction == direction) return i;
  }
  return -1;
}

static sluice_status_t check(const sluice_migration_item_t* item, const sluice_migration_span_t* to,
                             int32_t num_spans) {
  SLUICE_TRY(SLUICE_REQUIRE(num_spans == item->num_spans && (to != NULL || num_spans == 0),
                            "sluice_migration_read_early: %d spans at %p; item %llu has %d", num_spans, (const void*)to,
                            (unsigned long long)item->id, item->num_spans));
  for (int32_t s = 0; s < num_spans; ++s) {
    if (to[s].bytes == 0) continue;
    SLUICE_TRY(
        SLUICE_REQUIRE(to[s].bytes == item->spans[s].bytes && to[s].data != NULL,
                       "sluice_migration_read_early: span %d of item %llu: give 0 bytes, or the %llu that it has", s,
                       (unsigned long long)item->id, (unsigned long long)item->spans[s].bytes));
  }
  return SLUICE_OK;
}

/* Visits a chunk piece by piece, as it was divided: chunks of an item arrive in the order of its spans. Copies the
 * wanted pieces of a chunk that has arrived. Returns whether any is wanted. */
static int visit(const sluice_migration_span_t* spans, const sluice_move_chunk_t* chunk,
                 const sluice_migration_span_t* to) {
  uint64_t done = 0, offset = chunk->offset;
  int is_wanted = 0;
  for (int32_t s = chunk->first_span; done < chunk->bytes; ++s, offset = 0) {
    if (spans[s].when != chunk->when || spans[s].bytes == 0) continue;
    const uint64_t bytes = sluice_min_u64(spans[s].bytes - offset, chunk->bytes - done);
    if (to[s].bytes > 0) is_wanted = 1;
    if (to[s].bytes > 0 && chunk->arrival != NULL)
      memcpy((char*)to[s].data + offset, (const char*)chunk->payload + done, bytes);
    done += bytes;
  }
  return is_wanted;
}

static int are_there(const sluice_migration_t* m, int32_t item, const sluice_migration_span_t* to) {
  for (int32_t i = 0; i < m->list.num_chunks; ++i) {
    const sluice_move_chunk_t* chunk = &m->list.chunks[i];
    if (chunk->item == item && chunk->arrival == NULL && visit(m->list.items[item].spans, chunk, to)) return 0;
  }
  return m->refusal.status == SLUICE_OK;
}

static void copy(const sluice_migration_t* m, int32_t item, const sluice_migration_span_t* to) {
  for (int32_t i = 0; i < m->list.num_chunks; ++i) {
    const sluice_move_chunk_t* chunk = &m->list.chunks[i];
    if (chunk->item == item) (void)visit(m->list.items[item].spans, chunk, to);
  }
}

sluice_status_t sluice_move_read_early(sluice_migration_t* m, uint64_t id, int32_t peer,
                                       const sluice_migration_span_t* to, int32_t num_spans, int32_t* out_is_there) {
  if (m->phase != SLUICE_MIGRATION_STREAMS) {
    return SLUICE_FAIL(SLUICE_E_STATE,
                       "sluice_migration_read_early: no migration is in progress (%s); call it before the commit",
                       sluice_migration_phase_name(m->phase));
  }
  const int32_t item = find(m, id, peer, SLUICE_MIGRATION_ARRIVES);
  SLUICE_TRY(SLUICE_REQUIRE(item >= 0, "sluice_migration_read_early: no item %llu arrives from rank %d",
                            (unsigned long long)id, peer));
  SLUICE_TRY(check(&m->list.items[item], to, num_spans));
  pthread_mutex_lock(&m->mutex); /* the thread that sends at a rate reads the same list */
  sluice_move_hear_the_rest(m);  /* commit reports failures */
  *out_is_there = are_there(m, item, to);
  if (*out_is_there) copy(m, item, to);
  pthread_mutex_unlock(&m->mutex);
  return SLUICE_OK;
}

sluice_status_t sluice_move_mark_still(sluice_migration_t* m, uint64_t id, int32_t peer) {
  if (m->phase != SLUICE_MIGRATION_STREAMS) {
    return SLUICE_FAIL(SLUICE_E_STATE,
                       "sluice_migration_mark_still: no migration is in progress (%s); call it before the commit",
                       sluice_migration_phase_name(m->phase));
  }
  const int32_t item = find(m, id, peer, SLUICE_MIGRATION_LEAVES);
  SLUICE_TRY(SLUICE_REQUIRE(item >= 0, "sluice_migration_mark_still: no item %llu leaves for rank %d",
                            (unsigned long long)id, peer));
  pthread_mutex_lock(&m->mutex);
  sluice_move_stop_access_out(m, item);
  pthread_mutex_unlock(&m->mutex);
  return SLUICE_OK;
}
