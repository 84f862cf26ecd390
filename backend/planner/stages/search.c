// SPDX-License-Identifier: Apache-2.0
/* vPipe's decomposition: a partition for given options, then options for that partition, repeated until nothing
 * improves. */
#include <math.h>
#include <string.h>

#include "backend/planner/stages/partition.h"

/* ---- coarsening ---- */

/* Coarsens a graph of layers: short nests become one node each.
 *
 * An edge that spans more than a quarter of a stage's share of the seconds is long: any partition cuts it somewhere. A
 * place in the order that more than one short tensor crosses lies in a nest, and partitions should not cut there. A
 * nest heavier than that quarter is divided where the fewest bytes cross.
 *
 * Source: vPipe, coarsening by the distance of layers in execution order. Its threshold is not in the text that we
 * have: the quarter of a share is ours. */

static double limit_of(const sluice_stages_tables_t* t) { return t->fastest[t->num_layers] / (4.0 * t->num_stages); }

/* Sets crossing[i] to the number of short tensors that cross the boundary before layer i. */
static void count_short_tensors(const sluice_stages_tables_t* t, int32_t* crossing) {
  const double limit = limit_of(t);
  memset(crossing, 0, ((size_t)t->num_layers + 1) * sizeof *crossing);
  for (int32_t i = 0; i < t->num_layers; ++i) {
    int32_t last = i;
    for (int32_t a = t->first_reader[i]; a < t->first_reader[i + 1]; ++a) {
      const int32_t to = t->readers[a];
      if (to > last && sluice_stages_run_fastest(t, i + 1, to) <= limit) last = to;
    }
    ++crossing[i + 1], --crossing[last + 1]; /* differences first */
  }
  for (int32_t i = 0; i < t->num_layers; ++i) crossing[i + 1] += crossing[i];
}

/* Returns where to divide a heavy nest that began at first: the place with the fewest bytes in the second half of the
 * allowed range. */
static int32_t divide_nest(const sluice_stages_tables_t* t, int32_t first, int32_t end) {
  const double limit = limit_of(t);
  int32_t best = -1;
  for (int32_t at = first + 1; at <= end; ++at) {
    const double seconds = sluice_stages_run_fastest(t, first, at);
    if (best > 0 && seconds > limit) break;
    if (seconds < limit / 2 && at < end) continue;
    if (best < 0 || t->cut[at] <= t->cut[best]) best = at;
  }
  return best < 0 ? end : best;
}

int32_t sluice_stages_leave_fine(const sluice_stages_tables_t* t, int32_t* out_first) {
  for (int32_t i = 0; i <= t->num_layers; ++i) out_first[i] = i;
  return t->num_layers;
}

int32_t sluice_stages_coarsen(const sluice_stages_tables_t* t, int32_t* out_first, int32_t* crossing) {
  const double limit = limit_of(t);
  int32_t count = 0;
  count_short_tensors(t, crossing);
  for (int32_t first = 0, end; first < t->num_layers; first = end) {
    out_first[count++] = first;
    for (end = first + 1; end < t->num_layers && crossing[end] > 1; ++end) {
    }
    if (sluice_stages_run_fastest(t, first, end) > limit) end = divide_nest(t, first, end);
  }
  out_first[count] = t->num_layers;
  return count >= t->num_stages ? count : sluice_stages_leave_fine(t, out_first);
}

/* ---- Kernighan and Lin ---- */

/* Partitions a graph of nodes by recursive bipartition: half of the stages left, half right, and so on.
 *
 * Each bipartition begins with a cut of the order and improves as in Kernighan and Lin: a pass moves each node once,
 * the best one first even if the cost rises, and keeps the best prefix of that sequence. Nodes move singly, as in
 * Fiduccia and Mattheyses, because their weights differ. A move may not make an edge lead backwards. The cost is the
 * slower side's seconds per stage, or the messages between the sides if these take longer; then bytes.
 *
 * Source: vPipe's global algorithm; Kernighan and Lin 1970; Fiduccia and Mattheyses 1982. */

/* Limits of a pass: most gains are near the cut, and long sequences are undone anyway. */
enum { MOST_MOVES = 64, MOST_PASSES = 16 };

enum { LEFT = 0, RIGHT = 1, ELSEWHERE = 2 };

typedef struct graph_s {
  const sluice_stages_tables_t* tables;
  const int32_t* first;
  int32_t num_nodes;
  double* seconds;       /* [num_nodes] */
  int32_t* node_of;      /* [num_layers] */
  int32_t* side;         /* [num_nodes] in the current bipartition */
  int32_t* is_locked;    /* [num_nodes] */
  int32_t* stages_first; /* [num_nodes] of the stages open to the node */
  int32_t* stages_end;
} graph_t;

/* A set of nodes and the stages to divide them over. */
typedef struct halves_s {
  int32_t stages[2]; /* of the sides */
  int32_t boundary;  /* the stage before the boundary */
  double seconds[2];
  int32_t nodes[2];
} halves_t;

typedef struct cost_s {
  double seconds;
  uint64_t bytes;
} cost_t;

static int is_cheaper(cost_t a, cost_t b) {
  const double rounding = 1e-12 * (a.seconds + b.seconds);
  if (fabs(a.seconds - b.seconds) > rounding) return a.seconds < b.seconds;
  return a.bytes < b.bytes;
}

static uint64_t cut_bytes(const graph_t* g) {
  const sluice_stages_tables_t* t = g->tables;
  uint64_t bytes = 0;
  for (int32_t i = 0; i < t->num_layers; ++i) {
    if (g->side[g->node_of[i]] != LEFT) continue;
    for (int32_t a = t->first_reader[i]; a < t->first_reader[i + 1]; ++a) {
      if (g->side[g->node_of[t->readers[a]]] != RIGHT) continue;
      bytes += t->problem->layers[i].output_bytes;
      break;
    }
  }
  return bytes;
}

static cost_t cost_of(const graph_t* g, const halves_t* h) {
  const uint64_t bytes = cut_bytes(g);
  const double sides = fmax(h->seconds[LEFT] / h->stages[LEFT], h->seconds[RIGHT] / h->stages[RIGHT]);
  return (cost_t){fmax(sides, sluice_stages_link_seconds(g->tables->problem, h->boundary, bytes)), bytes};
}

static void flip(graph_t* g, halves_t* h, int32_t node) {
  const int32_t from = g->side[node], to = 1 - from;
  h->seconds[from] -= g->seconds[node], h->seconds[to] += g->seconds[node];
  --h->nodes[from], ++h->nodes[to];
  g->side[node] = to;
}

/* The left side may not read the right side; each side has a node for each stage. */
static int may_flip(const graph_t* g, const halves_t* h, int32_t node) {
  const sluice_stages_tables_t* t = g->tables;
  const int32_t from = g->side[node];
  if (from == ELSEWHERE || g->is_locked[node] || h->nodes[from] <= h->stages[from]) return 0;
  const int32_t* first = from == LEFT ? t->first_reader : t->first_source;
  const int32_t* list = from == LEFT ? t->readers : t->sources;
  for (int32_t i = g->first[node]; i < g->first[node + 1]; ++i) {
    for (int32_t a = first[i]; a < first[i + 1]; ++a) {
      const int32_t other = g->node_of[list[a]];
      if (other != node && g->side[other] == from) return 0;
    }
  }
  return 1;
}

/* Returns the node whose move leaves the least cost; -1: no node may move. */
static int32_t best_flip(graph_t* g, halves_t* h, cost_t* out_cost) {
  int32_t best = -1;
  for (int32_t node = 0; node < g->num_nodes; ++node) {
    if (!may_flip(g, h, node)) continue;
    flip(g, h, node);
    const cost_t cost = cost_of(g, h);
    flip(g, h, node);
    if (best < 0 || is_cheaper(cost, *out_cost)) best = node, *out_cost = cost;
  }
  return best;
}

/* Makes a pass. Returns 1 if the cost fell. */
static int pass(graph_t* g, halves_t* h) {
  int32_t moved[MOST_MOVES], num_moved = 0, num_kept = 0;
  cost_t best = cost_of(g, h), cost = best;
  memset(g->is_locked, 0, (size_t)g->num_nodes * sizeof *g->is_locked);
  for (int32_t node; num_moved < MOST_MOVES && (node = best_flip(g, h, &cost)) >= 0;) {
    flip(g, h, node);
    g->is_locked[node] = 1;
    moved[num_moved++] = node;
    if (is_cheaper(cost, best)) best = cost, num_kept = num_moved;
  }
  while (num_moved > num_kept) flip(g, h, moved[--num_moved]);
  return num_kept > 0;
}

/* Cuts the order at the place closest to each side's share. */
static void cut_in_order(graph_t* g, halves_t* h, int32_t first_stage) {
  double all = 0;
  int32_t count = 0;
  for (int32_t node = 0; node < g->num_nodes; ++node) {
    g->side[node] = g->stages_first[node] == first_stage ? RIGHT : ELSEWHERE;
    if (g->side[node] == RIGHT) all += g->seconds[node], ++count;
  }
  h->seconds[LEFT] = 0, h->seconds[RIGHT] = all, h->nodes[LEFT] = 0, h->nodes[RIGHT] = count;
  const double share = all * h->stages[LEFT] / (h->stages[LEFT] + h->stages[RIGHT]);
  for (int32_t node = 0; node < g->num_nodes; ++node) {
    if (g->side[node] != RIGHT || h->nodes[RIGHT] <= h->stages[RIGHT]) continue;
    const int is_needed = h->nodes[LEFT] < h->stages[LEFT];
    if (!is_needed && h->seconds[LEFT] + g->seconds[node] / 2 > share) break;
    flip(g, h, node);
  }
}

/* Divides the nodes for the stages [first, end). */
static void bipartition(graph_t* g, int32_t first, int32_t end) {
  const int32_t middle = first + (end - first) / 2;
  halves_t halves = {.stages = {middle - first, end - middle}, .boundary = middle - 1};
  cut_in_order(g, &halves, first);
  for (int passes = 0; passes < MOST_PASSES && pass(g, &halves); ++passes) {
  }
  for (int32_t node = 0; node < g->num_nodes; ++node) {
    if (g->side[node] == LEFT) g->stages_end[node] = middle;
    if (g->side[node] == RIGHT) g->stages_first[node] = middle;
  }
}

/* Divides the largest sets of stages first: [first, end) is divided while it has more than one stage. */
static void divide_all(graph_t* g) {
  for (int32_t stage = 0; stage < g->tables->num_stages;) {
    int32_t end = stage + 1;
    for (int32_t node = 0; node < g->num_nodes; ++node) {
      if (g->stages_first[node] == stage) end = g->stages_end[node];
    }
    if (end - stage > 1) {
      bipartition(g, stage, end);
    } else {
      stage = end;
    }
  }
}

sluice_status_t sluice_stages_kernighan_lin(const sluice_stages_tables_t* t, const int32_t* first, int32_t num_nodes,
                                            const double* seconds_of, int32_t* out_stage_of) {
  const uint64_t nodes = (uint64_t)num_nodes;
  const uint64_t bytes = nodes * (sizeof(double) + 4 * sizeof(int32_t)) + (uint64_t)t->num_layers * sizeof(int32_t);
  graph_t g = {.tables = t, .first = first, .num_nodes = num_nodes};
  g.seconds = sluice_alloc_zeroed(t->allocator, bytes, "bipartition of layers");
  if (g.seconds == NULL) return sluice_alloc_status();
  g.side = (int32_t*)(g.seconds + nodes), g.is_locked = g.side + nodes;
  g.stages_first = g.is_locked + nodes, g.stages_end = g.stages_first + nodes, g.node_of = g.stages_end + nodes;
  for (int32_t node = 0; node < num_nodes; ++node) {
    g.stages_end[node] = t->num_stages;
    for (int32_t i = first[node]; i < first[node + 1]; ++i) g.node_of[i] = node, g.seconds[node] += seconds_of[i];
  }
  divide_all(&g);
  for (int32_t i = 0; i < t->num_layers; ++i) out_stage_of[i] = g.stages_first[g.node_of[i]];
  sluice_free(t->allocator, g.seconds, bytes);
  return SLUICE_OK;
}

/* ---- the search ---- */

enum { MOST_ROUNDS = 8 };

/* Takes the partition of scratch if it is better. Returns 1 if it is. */
static int keep_better(sluice_partition_t* part, const sluice_partition_t* scratch) {
  const int32_t num_stages = part->tables->num_stages;
  const sluice_partition_score_t mine = sluice_partition_score(part->judged, num_stages);
  const sluice_partition_score_t other = sluice_partition_score(scratch->judged, num_stages);
  if (!sluice_partition_is_better(&other, &mine)) return 0;
  sluice_partition_copy(part, scratch);
  return 1;
}

/* ---- even divisions ---- */

typedef enum even_e { BY_SECONDS, BY_LAYERS, BY_PARAMETERS, NUM_EVEN } even_t;

static double weight_before(const sluice_stages_tables_t* t, even_t by, int32_t layer) {
  if (by == BY_LAYERS) return layer;
  return by == BY_PARAMETERS ? (double)t->parameters[layer] : t->fastest[layer];
}

static sluice_status_t begin_evenly(sluice_partition_t* part, even_t by, double* weights) {
  for (int32_t i = 0; i <= part->tables->num_layers; ++i) weights[i] = weight_before(part->tables, by, i);
  SLUICE_TRY(sluice_cut_order_evenly(part, weights));
  return sluice_partition_refine(part);
}

static sluice_status_t search_evenly(sluice_partition_t* part, sluice_partition_t* scratch) {
  const sluice_stages_tables_t* t = part->tables;
  const uint64_t bytes = ((uint64_t)t->num_layers + 1) * sizeof(double);
  double* weights = sluice_alloc(t->allocator, bytes, "weights of layers");
  if (weights == NULL) return sluice_alloc_status();
  sluice_status_t status = begin_evenly(part, BY_SECONDS, weights);
  for (int by = BY_LAYERS; status == SLUICE_OK && by < NUM_EVEN; ++by) {
    status = begin_evenly(scratch, (even_t)by, weights);
    if (status == SLUICE_OK) keep_better(part, scratch);
  }
  sluice_free(t->allocator, weights, bytes);
  return status;
}

/* ---- turns ---- */

static sluice_status_t search_in_turns(sluice_partition_t* part, sluice_partition_t* scratch, const int32_t* first,
                                       int32_t num_nodes, int32_t* out_num_rounds) {
  for (*out_num_rounds = 0; *out_num_rounds < MOST_ROUNDS;) {
    ++*out_num_rounds;
    /* The seconds of layers with the options of the best partition so far guide this search. */
    SLUICE_TRY(sluice_stages_kernighan_lin(part->tables, first, num_nodes, part->seconds_of, scratch->stage_of));
    sluice_partition_settle(scratch);
    SLUICE_TRY(sluice_partition_refine(scratch));
    if (!keep_better(part, scratch)) return SLUICE_OK;
  }
  return SLUICE_OK;
}

sluice_status_t sluice_stages_search(sluice_partition_t* part, sluice_partition_t* scratch, int32_t coarsen,
                                     int32_t* out_num_rounds) {
  const sluice_stages_tables_t* t = part->tables;
  const uint64_t length = (uint64_t)t->num_layers + 1, bytes = 2 * length * sizeof(int32_t);
  SLUICE_TRY(search_evenly(part, scratch));
  int32_t* first = sluice_alloc_zeroed(t->allocator, bytes, "nodes of layers");
  if (first == NULL) return sluice_alloc_status();
  const int32_t num_nodes =
      coarsen ? sluice_stages_coarsen(t, first, first + length) : sluice_stages_leave_fine(t, first);
  const sluice_status_t status = search_in_turns(part, scratch, first, num_nodes, out_num_rounds);
  sluice_free(t->allocator, first, bytes);
  return status;
}
