// SPDX-License-Identifier: Apache-2.0
/* Chooses the options of a stage by branch and bound. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/math.h"
#include "backend/planner/stages/local.h"

/* ---- bounds ---- */

/* Lower bounds of a stage's turn with some layers decided: the relaxation in which layers may take fractions of
 * options.
 *
 * A turn is at least w * compute + (1 - w) * copies for any weight w in [0, 1]. For one w the undecided layers form a
 * multiple-choice knapsack. Its relaxation is solved by taking the steps of each layer's lower hull of (bytes, weighted
 * seconds) in order of seconds per byte until enough bytes are saved (Sinha and Zoltners, 1979). */

/* The bound of one weight. Arrays are [count + 1], for the layers from a depth on. */
typedef struct bound_s {
  double weight;
  double* seconds; /* weighted, each layer at its minimum */
  double* bytes;   /* with those options */
  sluice_stages_local_increment_t* increments;
  int32_t num_increments;
} bound_t;

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

/* layers: [count] positions in the decision order. Fills arrays that the caller has set. */
static void make_bound(const sluice_stages_local_t* local, const int32_t* layers, double weight, bound_t* bound) {
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

/* Returns a lower bound of the weighted seconds of the layers from depth on within the given bytes; INFINITY: they do
 * not fit. */
static double bound_of(const bound_t* bound, int32_t depth, double bytes) {
  double seconds = bound->seconds[depth], missing = bound->bytes[depth] - bytes;
  for (int32_t i = 0; i < bound->num_increments && missing > 0; ++i) {
    const sluice_stages_local_increment_t* increment = &bound->increments[i];
    if (increment->depth < depth) continue;
    if (increment->bytes >= missing) return seconds + increment->seconds * (missing / increment->bytes);
    seconds += increment->seconds, missing -= increment->bytes;
  }
  return missing > 0 ? INFINITY : seconds;
}

/* ---- branch and bound ---- */

/* Recurses once per layer; larger stages keep the answer of greedy. */
enum { MOST_LAYERS = 64 };

typedef struct search_s {
  sluice_stages_local_t* local;
  int32_t layers[MOST_LAYERS]; /* in the decision order */
  int32_t pick[MOST_LAYERS];   /* by position in the stage */
  bound_t bound[2];
  int32_t num_bounds;
  double* seconds; /* [count + 1], for the layers from a depth on: each at its fastest */
  double* bytes;   /* each at its fewest bytes */
  uint64_t working[MOST_LAYERS + 1];
  double link;  /* messages that copies are added to */
  double limit; /* only turns below this are searched */
  uint64_t nodes;
  int is_cut; /* some nodes were not visited */
} search_t;

typedef struct node_s {
  double compute;
  double copies;
  uint64_t bytes; /* without the maxima */
  uint64_t working;
  uint64_t staging;
  uint64_t arena;
} node_t;

/* ---- bounds ---- */

static uint64_t spread(const sluice_stages_local_t* local, int32_t layer) {
  uint64_t least = UINT64_MAX, most = 0;
  for (int32_t a = local->first[layer]; a < local->first[layer + 1]; ++a) {
    least = sluice_min_u64(least, local->items[a].bytes), most = sluice_max_u64(most, local->items[a].bytes);
  }
  return most - least;
}

/* Layers whose options differ most in bytes are decided first. */
static void order_layers(search_t* s) {
  for (int32_t i = 0; i < s->local->count; ++i) {
    int32_t at = i;
    for (; at > 0 && spread(s->local, i) > spread(s->local, s->layers[at - 1]); --at) s->layers[at] = s->layers[at - 1];
    s->layers[at] = i;
  }
}

static void sum_leasts(search_t* s) {
  const sluice_stages_local_t* local = s->local;
  s->seconds[local->count] = s->bytes[local->count] = 0, s->working[local->count] = 0;
  for (int32_t depth = local->count; depth-- > 0;) {
    const int32_t layer = s->layers[depth];
    uint64_t bytes = UINT64_MAX, working = UINT64_MAX;
    for (int32_t a = local->first[layer]; a < local->first[layer + 1]; ++a) {
      bytes = sluice_min_u64(bytes, local->items[a].bytes);
      working = sluice_min_u64(working, local->items[a].working);
    }
    s->seconds[depth] = s->seconds[depth + 1] + local->items[local->first[layer]].seconds;
    s->bytes[depth] = s->bytes[depth + 1] + (double)bytes;
    s->working[depth] = sluice_max_u64(s->working[depth + 1], working);
  }
}

static double room(const search_t* s, const node_t* node, int32_t depth) {
  return (double)s->local->budget - (double)node->bytes - (double)sluice_max_u64(node->working, s->working[depth]) -
         (double)node->staging - (double)node->arena;
}

static double bound_at(const search_t* s, const bound_t* bound, const node_t* node, int32_t depth) {
  return bound->weight * node->compute + (1 - bound->weight) * (s->link + node->copies) +
         bound_of(bound, depth, room(s, node, depth));
}

static void make_bounds(search_t* s, const node_t* root) {
  sluice_stages_local_t* local = s->local;
  const int32_t n = local->tables->num_layers + 1, num_items = local->tables->num_items;
  s->seconds = local->suffix, s->bytes = s->seconds + n;
  sum_leasts(s);
  for (int i = 0; i < 2; ++i) {
    s->bound[i].seconds = local->suffix + (2 + 2 * i) * (int64_t)n, s->bound[i].bytes = s->bound[i].seconds + n;
    s->bound[i].increments = (sluice_stages_local_increment_t*)local->increments + (int64_t)i * num_items;
  }
  make_bound(local, s->layers, 1, &s->bound[0]);
  s->num_bounds = 1;
  int copies = 0;
  for (int32_t a = 0; a < local->first[local->count]; ++a) copies |= local->items[a].staging > 0;
  if (!copies) return;
  double best = -1, best_weight = 0.5;
  for (int eighths = 7; eighths > 0; eighths -= 2) {
    make_bound(local, s->layers, 0.125 * eighths, &s->bound[1]);
    const double found = bound_at(s, &s->bound[1], root, 0);
    if (found > best) best = found, best_weight = 0.125 * eighths;
  }
  make_bound(local, s->layers, best_weight, &s->bound[1]);
  s->num_bounds = 2;
}

static int is_hopeless(const search_t* s, const node_t* node, int32_t depth) {
  const double limit = s->limit * (1 - 1e-12);
  if (s->bytes[depth] > room(s, node, depth)) return 1;
  if (sluice_stages_turn_seconds(s->local->tables->problem, node->compute + s->seconds[depth], s->local->messages,
                                 node->copies) >= limit)
    return 1;
  for (int32_t i = 0; i < s->num_bounds; ++i) {
    if (bound_at(s, &s->bound[i], node, depth) >= limit) return 1;
  }
  return 0;
}

/* ---- search ---- */

static void visit(search_t* s, const node_t* node, int32_t depth) { /* NOLINT(misc-no-recursion): MOST_LAYERS deep */
  sluice_stages_local_t* local = s->local;
  if (s->nodes >= local->most_nodes) s->is_cut = 1;
  if (s->is_cut || is_hopeless(s, node, depth)) return;
  ++s->nodes, ++local->steps;
  if (depth == local->count) {
    memcpy(local->pick, s->pick, (size_t)local->count * sizeof *s->pick);
    local->sum = sluice_stages_local_sum(local, local->pick);
    s->limit = fmin(s->limit, local->sum.turn);
    return;
  }
  const int32_t layer = s->layers[depth];
  for (int32_t a = local->first[layer]; a < local->first[layer + 1]; ++a) {
    const sluice_stages_local_item_t* item = &local->items[a];
    const node_t next = {node->compute + item->seconds,
                         node->copies + item->copy_seconds,
                         node->bytes + item->bytes,
                         sluice_max_u64(node->working, item->working),
                         sluice_max_u64(node->staging, item->staging),
                         sluice_max_u64(node->arena, item->arena)};
    s->pick[layer] = a;
    visit(s, &next, depth + 1);
  }
}

int sluice_stages_local_exact(sluice_stages_local_t* local, double cap) {
  if (!sluice_stages_local_greedy(local)) return 0;
  if (local->is_proven || local->most_nodes == 0 || local->count > MOST_LAYERS) return 1;
  search_t search = {.local = local, .limit = fmin(cap, local->sum.turn)};
  const node_t root = {.bytes = local->fixed_bytes};
  search.link = local->tables->problem->copies_share_links ? local->messages : 0;
  order_layers(&search);
  make_bounds(&search, &root);
  visit(&search, &root, 0);
  sluice_stages_local_polish(local);
  local->is_proven = !search.is_cut;
  return 1;
}
