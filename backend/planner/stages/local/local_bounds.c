// SPDX-License-Identifier: Apache-2.0
#include "backend/planner/stages/local/local_bounds.h"

#include <math.h>
#include <stdlib.h>

#include "backend/planner/stages/local/local.h"

static double weighted(const sluice_stages_local_item_t* item, double weight) {
  return weight * item->seconds + (1 - weight) * item->copy_seconds;
}

static int by_seconds_a_byte(const void* a, const void* b) {
  const sluice_stages_local_increment_t *x = a, *y = b;
  const double left = x->seconds * y->bytes, right = y->seconds * x->bytes;
  if (left != right) return left < right ? -1 : 1;
  return x->index < y->index ? -1 : x->index > y->index;
}

/* Returns the next corner of the hull among the items with fewer bytes; -1 if there is none. */
static int32_t next_corner(const sluice_stages_local_t* local, int32_t layer, double weight, int32_t from) {
  const sluice_stages_local_item_t* at = &local->items[from];
  int32_t best = -1;
  double best_slope = INFINITY;
  for (int32_t a = local->first[layer]; a < local->first[layer + 1]; ++a) {
    const sluice_stages_local_item_t* item = &local->items[a];
    if (item->bytes >= at->bytes) continue;
    const double slope = (weighted(item, weight) - weighted(at, weight)) / (double)(at->bytes - item->bytes);
    const int goes_further = best >= 0 && slope == best_slope && item->bytes < local->items[best].bytes;
    if (best < 0 || slope < best_slope || goes_further) best = a, best_slope = slope;
  }
  return best;
}

static int32_t least_weighted(const sluice_stages_local_t* local, int32_t layer, double weight) {
  int32_t best = local->first[layer];
  for (int32_t a = best + 1; a < local->first[layer + 1]; ++a) {
    const double here = weighted(&local->items[a], weight), there = weighted(&local->items[best], weight);
    if (here < there || (here == there && local->items[a].bytes < local->items[best].bytes)) best = a;
  }
  return best;
}

void sluice_stages_local_bound_make(const sluice_stages_local_t* local, const int32_t* layers, double weight,
                                    sluice_stages_local_bound_t* bound) {
  bound->weight = weight, bound->num_increments = 0;
  bound->seconds[local->count] = bound->bytes[local->count] = 0;
  for (int32_t depth = local->count; depth-- > 0;) {
    int32_t at = least_weighted(local, layers[depth], weight);
    bound->seconds[depth] = bound->seconds[depth + 1] + weighted(&local->items[at], weight);
    bound->bytes[depth] = bound->bytes[depth + 1] + (double)local->items[at].bytes;
    for (int32_t next; (next = next_corner(local, layers[depth], weight, at)) >= 0; at = next) {
      bound->increments[bound->num_increments] = (sluice_stages_local_increment_t){
          (double)(local->items[at].bytes - local->items[next].bytes),
          weighted(&local->items[next], weight) - weighted(&local->items[at], weight), depth, bound->num_increments};
      ++bound->num_increments;
    }
  }
  qsort(bound->increments, (size_t)bound->num_increments, sizeof *bound->increments, by_seconds_a_byte);
}

double sluice_stages_local_bound_of(const sluice_stages_local_bound_t* bound, int32_t depth, double bytes) {
  double seconds = bound->seconds[depth], missing = bound->bytes[depth] - bytes;
  for (int32_t i = 0; i < bound->num_increments && missing > 0; ++i) {
    const sluice_stages_local_increment_t* increment = &bound->increments[i];
    if (increment->depth < depth) continue;
    if (increment->bytes >= missing) return seconds + increment->seconds * (missing / increment->bytes);
    seconds += increment->seconds, missing -= increment->bytes;
  }
  return missing > 0 ? INFINITY : seconds;
}
