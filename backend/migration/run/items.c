// SPDX-License-Identifier: Apache-2.0
/* Copies and checks the items of a move, and divides them into chunks. */
#include <stdlib.h>
#include <string.h>

#include "backend/base/hash.h"
#include "backend/base/math.h"
#include "backend/migration/run/state.h"

enum { MAX_ITEMS = 1 << 16, MAX_SPANS = 1 << 20 };

/* ---- checks ---- */

static sluice_status_t check_span(const sluice_migration_item_t* item, int32_t index) {
  const sluice_migration_span_t* span = &item->spans[index];
  const unsigned long long id = item->id;
  SLUICE_TRY(SLUICE_REQUIRE(span->data != NULL || span->bytes == 0,
                            "migration: span %d of item %llu is NULL and has %llu bytes", index, id,
                            (unsigned long long)span->bytes));
  SLUICE_TRY(SLUICE_REQUIRE(span->bytes <= UINT64_C(1) << 48, "migration: span %d of item %llu has %llu bytes", index,
                            id, (unsigned long long)span->bytes));
  SLUICE_TRY(SLUICE_REQUIRE(span->reserved == 0, "migration: span %d of item %llu: reserved is %d; set it to 0", index,
                            id, span->reserved));
  return SLUICE_REQUIRE(span->when == SLUICE_MIGRATION_STILL || span->when == SLUICE_MIGRATION_AT_COMMIT,
                        "migration: span %d of item %llu: when is %d; give SLUICE_MIGRATION_STILL or _AT_COMMIT", index,
                        id, span->when);
}

static sluice_status_t check_item(const sluice_comm_t* comm, const sluice_migration_item_t* item) {
  const unsigned long long id = item->id;
  SLUICE_TRY(SLUICE_REQUIRE(item->peer >= 0 && item->peer < comm->world_size && item->peer != comm->rank,
                            "migration: item %llu: peer is %d; give another rank than %d, of [0, %d)", id, item->peer,
                            comm->rank, comm->world_size));
  SLUICE_TRY(SLUICE_REQUIRE(item->direction == SLUICE_MIGRATION_LEAVES || item->direction == SLUICE_MIGRATION_ARRIVES,
                            "migration: item %llu: direction is %d; give SLUICE_MIGRATION_LEAVES or _ARRIVES", id,
                            item->direction));
  SLUICE_TRY(
      SLUICE_REQUIRE(item->reserved == 0, "migration: item %llu: reserved is %d; set it to 0", id, item->reserved));
  SLUICE_TRY(SLUICE_REQUIRE(item->num_spans >= 0 && item->num_spans <= MAX_SPANS,
                            "migration: item %llu: num_spans is %d; give 0 to %d", id, item->num_spans, MAX_SPANS));
  SLUICE_TRY(SLUICE_REQUIRE(item->spans != NULL || item->num_spans == 0,
                            "migration: item %llu: spans is NULL; give the list of its %d spans", id, item->num_spans));
  for (int32_t i = 0; i < item->num_spans; ++i) SLUICE_TRY(check_span(item, i));
  return SLUICE_OK;
}

static int compare(const void* a, const void* b) {
  const sluice_migration_item_t *x = a, *y = b;
  if (x->id != y->id) return x->id < y->id ? -1 : 1;
  if (x->peer != y->peer) return x->peer < y->peer ? -1 : 1;
  return x->direction - y->direction;
}

static sluice_status_t check_ids(const sluice_move_list_t* list) {
  for (int32_t i = 1; i < list->num_items; ++i) {
    SLUICE_TRY(SLUICE_REQUIRE(compare(&list->items[i - 1], &list->items[i]) != 0,
                              "migration: item %llu is given twice for rank %d: give each item its own id",
                              (unsigned long long)list->items[i].id, list->items[i].peer));
  }
  return SLUICE_OK;
}

/* ---- chunks ---- */

/* Divides an item's spans of one kind into chunks. chunks: NULL only counts. Returns the number of chunks. */
static int32_t cut(const sluice_move_list_t* list, int32_t index, int32_t when, uint64_t chunk_bytes,
                   sluice_move_chunk_t* chunks) {
  const sluice_migration_item_t* item = &list->items[index];
  sluice_move_chunk_t at = {.item = index, .when = when};
  int32_t count = 0, pieces = 0;
  for (int32_t s = 0; s < item->num_spans; ++s) {
    if (item->spans[s].when != when) continue;
    for (uint64_t offset = 0; offset < item->spans[s].bytes;) {
      if (at.bytes == chunk_bytes || pieces == SLUICE_MOVE_MAX_PIECES) {
        if (chunks != NULL) chunks[count] = at;
        ++count;
        at.bytes = 0;
        pieces = 0;
      }
      if (at.bytes == 0) at.first_span = s, at.offset = offset;
      const uint64_t bytes = sluice_min_u64(chunk_bytes - at.bytes, item->spans[s].bytes - offset);
      at.bytes += bytes;
      offset += bytes;
      ++pieces;
    }
  }
  if (at.bytes == 0) return count;
  if (chunks != NULL) chunks[count] = at;
  return count + 1;
}

static sluice_status_t cut_all(sluice_move_list_t* list, uint64_t chunk_bytes) {
  int64_t count[2] = {0, 0};
  for (int32_t when = 0; when < 2; ++when) {
    for (int32_t i = 0; i < list->num_items; ++i) count[when] += cut(list, i, when, chunk_bytes, NULL);
  }
  SLUICE_TRY(SLUICE_REQUIRE(count[0] + count[1] <= INT32_MAX / 2,
                            "migration: %lld messages are too many; raise chunk_bytes",
                            (long long)(count[0] + count[1])));
  list->num_still = (int32_t)count[0];
  list->num_chunks = (int32_t)(count[0] + count[1]);
  list->chunk_bytes = (uint64_t)list->num_chunks * sizeof *list->chunks;
  list->chunks = sluice_alloc_zeroed(sluice_process_allocator(), list->chunk_bytes, "migration: chunks");
  if (list->chunks == NULL) return sluice_alloc_status();
  int32_t at = 0;
  for (int32_t when = 0; when < 2; ++when) {
    for (int32_t i = 0; i < list->num_items; ++i) at += cut(list, i, when, chunk_bytes, list->chunks + at);
  }
  for (int32_t i = 0; i < list->num_chunks; ++i) {
    const int leaves = list->items[list->chunks[i].item].direction == SLUICE_MIGRATION_LEAVES;
    uint64_t* bytes = leaves ? &list->leaving_bytes : &list->arriving_bytes;
    *bytes += list->chunks[i].bytes;
    list->chunks[i].may_go = leaves && list->chunks[i].when == SLUICE_MIGRATION_STILL;
  }
  return SLUICE_OK;
}

/* ---- the list ---- */

static sluice_status_t copy(const sluice_migration_item_t* items, int32_t num_items, int64_t num_spans,
                            sluice_move_list_t* list) {
  const uint64_t head = (uint64_t)num_items * sizeof *list->items;
  list->item_bytes = head + (uint64_t)num_spans * sizeof *list->spans;
  list->items = sluice_alloc_zeroed(sluice_process_allocator(), list->item_bytes, "migration: items");
  if (list->items == NULL) return sluice_alloc_status();
  list->spans = (sluice_migration_span_t*)(void*)((char*)list->items + head);
  list->num_items = num_items;
  sluice_migration_span_t* spans = list->spans;
  for (int32_t i = 0; i < num_items; ++i) {
    list->items[i] = items[i];
    list->items[i].spans = spans;
    for (int32_t s = 0; s < items[i].num_spans; ++s) *spans++ = items[i].spans[s];
  }
  if (num_items > 1) qsort(list->items, (size_t)num_items, sizeof *list->items, compare);
  return check_ids(list);
}

sluice_status_t sluice_move_list_make(const sluice_migration_t* m, const sluice_migration_item_t* items,
                                      int32_t num_items, sluice_move_list_t* out_list) {
  *out_list = (sluice_move_list_t){.num_items = 0};
  SLUICE_TRY(SLUICE_REQUIRE(num_items >= 0 && num_items <= MAX_ITEMS,
                            "sluice_migration_begin: num_items is %d; give 0 to %d", num_items, MAX_ITEMS));
  SLUICE_TRY(SLUICE_REQUIRE(items != NULL || num_items == 0,
                            "sluice_migration_begin: items is NULL; give the list of the %d items", num_items));
  int64_t num_spans = 0;
  for (int32_t i = 0; i < num_items; ++i) {
    SLUICE_TRY(check_item(m->comm, &items[i]));
    num_spans += items[i].num_spans;
  }
  SLUICE_TRY(copy(items, num_items, num_spans, out_list));
  SLUICE_TRY(cut_all(out_list, m->config.chunk_bytes));
  if (m->config.staging_bytes == 0 || out_list->arriving_bytes <= m->config.staging_bytes) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_OVER_BUDGET,
                     "migration: %llu bytes arrive, and staging_bytes is %llu: move in rounds of fewer experts",
                     (unsigned long long)out_list->arriving_bytes, (unsigned long long)m->config.staging_bytes);
}

void sluice_move_list_free(sluice_move_list_t* list) {
  sluice_free(sluice_process_allocator(), list->chunks, list->chunk_bytes);
  sluice_free(sluice_process_allocator(), list->items, list->item_bytes);
  list->chunks = NULL;
  list->items = NULL;
  list->spans = NULL;
  list->num_items = list->num_chunks = list->num_still = 0;
}

int32_t sluice_move_pieces(const sluice_move_list_t* list, const sluice_move_chunk_t* chunk,
                           sluice_message_span_t pieces[SLUICE_MOVE_MAX_PIECES]) {
  const sluice_migration_item_t* item = &list->items[chunk->item];
  uint64_t offset = chunk->offset;
  int32_t count = 0;
  uint64_t left = chunk->bytes;
  for (int32_t s = chunk->first_span; left > 0; ++s, offset = 0) {
    const sluice_migration_span_t* span = &item->spans[s];
    if (span->when != chunk->when || span->bytes == 0) continue;
    const uint64_t bytes = sluice_min_u64(left, span->bytes - offset);
    pieces[count++] = (sluice_message_span_t){(char*)span->data + offset, bytes};
    left -= bytes;
  }
  return count;
}

uint64_t sluice_move_list_hash(const sluice_migration_t* m, int32_t peer, int32_t direction) {
  uint64_t hash = sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, &m->config.chunk_bytes, sizeof m->config.chunk_bytes);
  for (int32_t i = 0; i < m->list.num_items; ++i) {
    const sluice_migration_item_t* item = &m->list.items[i];
    if (item->peer != peer || item->direction != direction) continue;
    hash = sluice_hash_bytes(hash, &item->id, sizeof item->id);
    hash = sluice_hash_bytes(hash, &item->num_spans, sizeof item->num_spans);
    for (int32_t s = 0; s < item->num_spans; ++s) {
      hash = sluice_hash_bytes(hash, &item->spans[s].bytes, sizeof item->spans[s].bytes);
      hash = sluice_hash_bytes(hash, &item->spans[s].when, sizeof item->spans[s].when);
    }
  }
  return hash;
}

void sluice_move_list_install(sluice_move_list_t* list) {
  sluice_message_span_t pieces[SLUICE_MOVE_MAX_PIECES];
  for (int32_t i = 0; i < list->num_chunks; ++i) {
    const sluice_move_chunk_t* chunk = &list->chunks[i];
    if (chunk->arrival == NULL) continue;
    const char* from = chunk->payload;
    const int32_t count = sluice_move_pieces(list, chunk, pieces);
    for (int32_t p = 0; p < count; ++p) {
      memcpy((void*)pieces[p].data, from, pieces[p].bytes);
      from += pieces[p].bytes;
    }
  }
}

/* ---- items before the boundary, for hosts that know earlier which ones are final ---- */

static int32_t find(const sluice_migration_t* m, uint64_t id, int32_t peer, int32_t direction) {
  for (int32_t i = 0; i < m->list.num_items; ++i) {
    const sluice_migration_item_t* item = &m->list.items[i];
    if (item->id == id && item->peer == peer && item->direction == direction) return i;
  }
  return -1;
}

static sluice_status_t check(const sluice_migration_item_t* item, const sluice_migration_span_t* to,
                             int32_t num_spans) {
  SLUICE_TRY(SLUICE_REQUIRE(num_spans == item->num_spans,
                            "sluice_migration_read_early: num_spans is %d; item %llu has %d", num_spans,
                            (unsigned long long)item->id, item->num_spans));
  SLUICE_TRY(SLUICE_REQUIRE(to != NULL || num_spans == 0,
                            "sluice_migration_read_early: to is NULL; give the list of the %d spans", num_spans));
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

static void copy_to_host(const sluice_migration_t* m, int32_t item, const sluice_migration_span_t* to) {
  for (int32_t i = 0; i < m->list.num_chunks; ++i) {
    const sluice_move_chunk_t* chunk = &m->list.chunks[i];
    if (chunk->item == item) (void)visit(m->list.items[item].spans, chunk, to);
  }
}

/* Finds an item of the migration in progress, for a function that is called before the commit. */
static sluice_status_t find_in_progress(const sluice_migration_t* m, const char* function, uint64_t id, int32_t peer,
                                        int32_t direction, int32_t* out_item) {
  if (m->phase != SLUICE_MIGRATION_STREAMS) {
    return SLUICE_FAIL(SLUICE_E_STATE, "%s: no migration is in progress (%s); call it before the commit", function,
                       sluice_migration_phase_name(m->phase));
  }
  *out_item = find(m, id, peer, direction);
  return SLUICE_REQUIRE(*out_item >= 0, "%s: no item %llu %s rank %d", function, (unsigned long long)id,
                        direction == SLUICE_MIGRATION_ARRIVES ? "arrives from" : "leaves for", peer);
}

sluice_status_t sluice_migration_read_early(sluice_migration_t* m, uint64_t id, int32_t peer,
                                            const sluice_migration_span_t* to, int32_t num_spans,
                                            int32_t* out_is_there) {
  int32_t item;
  SLUICE_TRY(SLUICE_REQUIRE(m != NULL && out_is_there != NULL,
                            "sluice_migration_read_early: migration and out_is_there may not be NULL"));
  *out_is_there = 0;
  SLUICE_TRY(find_in_progress(m, "sluice_migration_read_early", id, peer, SLUICE_MIGRATION_ARRIVES, &item));
  SLUICE_TRY(check(&m->list.items[item], to, num_spans));
  pthread_mutex_lock(&m->mutex); /* the thread that sends at a rate reads the same list */
  sluice_move_hear_the_rest(m);  /* commit reports failures */
  *out_is_there = are_there(m, item, to);
  if (*out_is_there) copy_to_host(m, item, to);
  pthread_mutex_unlock(&m->mutex);
  return SLUICE_OK;
}

sluice_status_t sluice_migration_mark_still(sluice_migration_t* m, uint64_t id, int32_t peer) {
  int32_t item;
  SLUICE_TRY(SLUICE_REQUIRE(m != NULL, "sluice_migration_mark_still: migration is NULL"));
  SLUICE_TRY(find_in_progress(m, "sluice_migration_mark_still", id, peer, SLUICE_MIGRATION_LEAVES, &item));
  pthread_mutex_lock(&m->mutex);
  sluice_move_stop_access_out(m, item);
  pthread_mutex_unlock(&m->mutex);
  return SLUICE_OK;
}
