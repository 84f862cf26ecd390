// SPDX-License-Identifier: Apache-2.0
/* Computes the fewest bytes of a stage. All but three terms are sums over layers; the largest working bytes, copied
 * bytes and arena are maxima. With all three capped, each layer takes its minimum independently, so the best caps give
 * the answer: for each cap of copied bytes and of the arena, one sweep over all caps of working bytes. A cap of copied
 * bytes is left out if the layers, each at its minimum under it, take no less than the best total found. */
#include <stdlib.h>

#include "backend/base/math.h"
#include "backend/planner/stages/local.h"

#define NO_CAP ((uint64_t)1 << 62)

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

/* local->order has the items by working bytes; layers: the sum of their minima under no tighter caps. */
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

/* Returns the next larger arena. NO_CAP if there is none: no sum with it overflows. */
static uint64_t next_cap(const sluice_stages_local_t* local, uint64_t cap) {
  uint64_t next = NO_CAP;
  for (int32_t a = 0; a < local->first[local->count]; ++a) {
    const uint64_t arena = local->items[a].arena;
    if (arena > cap) next = sluice_min_u64(next, arena);
  }
  return next;
}

/* Computes the sum of each layer's fewest bytes, and the working bytes that cannot be avoided. */
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

/* ---- caps of copied bytes ---- */

/* Items by copied bytes, and the layers' fewest bytes with those that a cap allows. */
typedef struct allowed_s {
  int32_t* order;  /* [num_items] */
  uint64_t* least; /* [count] */
  uint64_t sum;
  int32_t next; /* of order, not allowed yet */
} allowed_t;

static int by_staging(const void* a, const void* b, void* user) {
  const sluice_stages_local_item_t* items = user;
  const int32_t left = *(const int32_t*)a, right = *(const int32_t*)b;
  if (items[left].staging != items[right].staging) return items[left].staging < items[right].staging ? -1 : 1;
  return left < right ? -1 : left > right;
}

/* Uses the memory of branch and bound, which runs later. */
static allowed_t allow_none(sluice_stages_local_t* local) {
  const int32_t num_items = local->first[local->count];
  allowed_t allowed = {.least = local->increments};
  allowed.order = (int32_t*)(allowed.least + local->count);
  for (int32_t i = 0; i < local->count; ++i) allowed.least[i] = UINT64_MAX;
  for (int32_t a = 0; a < num_items; ++a) allowed.order[a] = a;
  qsort_r(allowed.order, (size_t)num_items, sizeof *allowed.order, by_staging, local->items);
  return allowed;
}

/* Allows the items of the next cap. Returns the fewest working bytes of one of them: a choice that needs this cap has
 * one. After the first cap, 0, each layer has an item. */
static uint64_t allow_more(const sluice_stages_local_t* local, allowed_t* allowed, uint64_t* out_staging) {
  const int32_t num_items = local->first[local->count];
  uint64_t working = UINT64_MAX;
  *out_staging = local->items[allowed->order[allowed->next]].staging;
  for (; allowed->next < num_items; ++allowed->next) {
    const sluice_stages_local_item_t* item = &local->items[allowed->order[allowed->next]];
    if (item->staging > *out_staging) break;
    working = sluice_min_u64(working, item->working);
    uint64_t* least = &allowed->least[item->layer];
    if (item->bytes >= *least) continue;
    allowed->sum += item->bytes - (*least == UINT64_MAX ? 0 : *least); /* the sum may fall */
    *least = item->bytes;
  }
  return working;
}

/* ---- all caps ---- */

static void sweep_arenas(sluice_stages_local_t* local, uint64_t layers, uint64_t working, uint64_t staging,
                         caps_t* best) {
  for (uint64_t arena = 0; layers + working + staging + arena < best->bytes; arena = next_cap(local, arena))
    sweep(local, layers, staging, arena, best);
}

/* Returns the best caps with a total below `below`; if there are none, bytes is `below`. */
static caps_t best_caps(sluice_stages_local_t* local, uint64_t below) {
  const int32_t num_items = local->first[local->count];
  caps_t best = {0, 0, 0, below};
  uint64_t layers, working, most = 0;
  least_of(local, &layers, &working);
  if (layers + working >= below) return best;
  for (int32_t a = 0; a < num_items; ++a) {
    local->order[a] = a;
    most = sluice_max_u64(most, local->items[a].staging);
  }
  qsort_r(local->order, (size_t)num_items, sizeof *local->order, by_working, local->items);
  sweep_arenas(local, layers, working, most, &best); /* near the best if layers copy: few other caps are then left */
  if (most == 0) return best;
  allowed_t allowed = allow_none(local);
  while (allowed.next < num_items) {
    uint64_t staging;
    const uint64_t least_working = sluice_max_u64(working, allow_more(local, &allowed, &staging));
    ++local->steps;
    sweep_arenas(local, allowed.sum, least_working, staging, &best);
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
