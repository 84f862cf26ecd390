/* Computes the fewest bytes of a stage. All but three terms are sums over layers; the largest working bytes, copied
 * bytes and arena are maxima. With all three capped, each layer takes its minimum independently, so the best caps give
 * the answer: for each cap of copied bytes and of the arena, one sweep over all caps of working bytes. */
#include <stdlib.h>

#include "backend/base/math.h"
#include "backend/planner/stages/local/local.h"

typedef struct caps_s {
  uint64_t working;
  uint64_t staging;
  uint64_t arena;
  uint64_t bytes; /* total with these caps */
} caps_t;

static int by_working(const void* a, const void* b, void* user) {
  const sluice_stages_local_item_t* items = user;
  const int32_t left = *(const int32_t*)a, right = *(const int32_t*)b;
  if (items[left].working != items[right].working) return items[left].working < items[right].working ? -1 : 1;
  return left < right ? -1 : left > right;
}

/* local->order has the items by working bytes; layers: the sum of their minima without caps. */
static void sweep(sluice_stages_local_t* local, uint64_t layers, uint64_t staging, uint64_t arena, caps_t* best) {
  const int32_t num_items = local->first[local->count];
  int32_t missing = local->count;
  uint64_t sum = 0;
  for (int32_t i = 0; i < local->count; ++i) local->least[i] = UINT64_MAX;
  for (int32_t a = 0; a < num_items; ++a) {
    const sluice_stages_local_item_t* item = &local->items[local->order[a]];
    ++local->steps;
    if (layers + item->working + staging + arena >= best->bytes) return;
    uint64_t* least = &local->least[item->layer];
    if (item->staging > staging || item->arena > arena || item->bytes >= *least) continue;
    if (*least == UINT64_MAX) {
      --missing, sum += item->bytes;
    } else {
      sum -= *least - item->bytes;
    }
    *least = item->bytes;
    const uint64_t bytes = sum + item->working + staging + arena;
    if (missing == 0 && bytes < best->bytes) *best = (caps_t){item->working, staging, arena, bytes};
  }
}

/* One of the capped terms. */
typedef uint64_t (*term_fn)(const sluice_stages_local_item_t* item);

static uint64_t staging_of(const sluice_stages_local_item_t* item) { return item->staging; }
static uint64_t arena_of(const sluice_stages_local_item_t* item) { return item->arena; }

static uint64_t next_cap(const sluice_stages_local_t* local, term_fn term, uint64_t cap) {
  uint64_t next = UINT64_MAX;
  for (int32_t a = 0; a < local->first[local->count]; ++a) {
    const uint64_t other = term(&local->items[a]);
    if (other > cap) next = sluice_min_u64(next, other);
  }
  return next;
}

/* The sum of each layer's fewest bytes, and the working bytes that cannot be avoided. */
static void least_of(const sluice_stages_local_t* local, uint64_t* out_layers, uint64_t* out_working) {
  *out_layers = *out_working = 0;
  for (int32_t i = 0; i < local->count; ++i) {
    uint64_t bytes = UINT64_MAX, working = UINT64_MAX;
    for (int32_t a = local->first[i]; a < local->first[i + 1]; ++a) {
      bytes = sluice_min_u64(bytes, local->items[a].bytes);
      working = sluice_min_u64(working, local->items[a].working);
    }
    *out_layers += bytes, *out_working = sluice_max_u64(*out_working, working);
  }
}

/* The best caps with a total below `below`; if there are none, bytes is `below`. */
static caps_t best_caps(sluice_stages_local_t* local, uint64_t below) {
  const int32_t num_items = local->first[local->count];
  caps_t best = {0, 0, 0, below};
  uint64_t layers, working;
  least_of(local, &layers, &working);
  const uint64_t least = layers + working;
  if (least >= below) return best;
  for (int32_t a = 0; a < num_items; ++a) local->order[a] = a;
  qsort_r(local->order, (size_t)num_items, sizeof *local->order, by_working, local->items);
  for (uint64_t staging = 0; staging < best.bytes - least; staging = next_cap(local, staging_of, staging)) {
    for (uint64_t arena = 0; arena < best.bytes - least - staging; arena = next_cap(local, arena_of, arena))
      sweep(local, layers, staging, arena, &best);
  }
  return best;
}

uint64_t sluice_stages_local_fewest_bytes(sluice_stages_local_t* local, uint64_t below) {
  return below <= local->fixed_bytes ? below : local->fixed_bytes + best_caps(local, below - local->fixed_bytes).bytes;
}

void sluice_stages_local_leanest(sluice_stages_local_t* local) {
  const caps_t best = best_caps(local, UINT64_MAX);
  for (int32_t i = 0; i < local->count; ++i) {
    local->pick[i] = -1;
    for (int32_t a = local->first[i]; a < local->first[i + 1]; ++a) {
      const sluice_stages_local_item_t* item = &local->items[a];
      if (item->working > best.working || item->staging > best.staging || item->arena > best.arena) continue;
      if (local->pick[i] < 0 || item->bytes < local->items[local->pick[i]].bytes) local->pick[i] = a;
    }
  }
  local->sum = sluice_stages_local_sum(local, local->pick);
}
