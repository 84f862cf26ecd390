// SPDX-License-Identifier: Apache-2.0
/* Partitions that cut the execution order. A chain has no others, so the best of them is the optimum; for other graphs
 * the best cut is a good start. */
#include <math.h>

#include "backend/base/alloc.h"
#include "backend/base/math.h"
#include "backend/planner/stages/partition.h"

/* ---- division of a row into runs ---- */

/* Divides a row into runs optimally: dynamic programming over (first, end, stage), where the cost of a stage depends
 * only on its run, and the worst stage counts. Exact.
 *
 * Costs are expensive, so few are evaluated: a cheap floor excludes runs that no division below a cap can have, and the
 * cap grows from the least that floors allow until a division below it is found.
 *
 * Source: PipeDream's partitioning; the windows of the floor are ours. */
typedef struct runs_s {
  void* user;
  int32_t length;     /* of the row */
  int32_t num_stages; /* <= length: no run is empty */
  /* Never above the cost; never smaller for a run that contains another. INFINITY: impossible. */
  double (*floor)(void* user, int32_t stage, int32_t first, int32_t end);
  /* Exact if it is below cap; else any value that is not below. */
  double (*cost)(void* user, int32_t stage, int32_t first, int32_t end, double cap);
  /* A cost below two caps is the same under both: the first cap may then be that of a greedy division, and the answer
   * is the one that any other cap gives. */
  int32_t are_costs_free_of_caps;
} runs_t;

static const double SMALLEST_CAP = 1e-12; /* all costs below it count as equal */

typedef struct division_s {
  const runs_t* runs;
  int32_t* low;  /* [num_stages] the earliest end of a stage that lets the others finish below the cap */
  int32_t* high; /* [num_stages] the latest end that the stage can reach below the cap */
  double* value; /* [2, length + 1] the worst cost up to an end, of a stage and the previous one */
  int32_t* from; /* [num_stages, length + 1] where the stage's run begins */
} division_t;

/* Computes the ends that floors allow below cap. Returns 0 if there are none. Floors grow with runs, so the longest run
 * of each stage in turn reaches furthest. */
static int windows(division_t* d, double cap) {
  const runs_t* r = d->runs;
  int32_t first = 0, end = 0;
  for (int32_t s = 0; s < r->num_stages; ++s) {
    const int32_t most = r->length - (r->num_stages - 1 - s);
    while (end < most && r->floor(r->user, s, first, end + 1) < cap) ++end;
    d->high[s] = first = end;
    if (end <= s) return 0;
  }
  if (end < r->length) return 0;
  end = r->length;
  for (int32_t s = r->num_stages - 1; s >= 0; --s) {
    d->low[s] = end;
    first = end;
    while (first > s && r->floor(r->user, s, first - 1, end) < cap) --first;
    end = first;
  }
  if (end > 0) return 0;
  for (int32_t s = 0; s < r->num_stages; ++s) {
    if (d->low[s] > d->high[s]) return 0;
  }
  return 1;
}

static void fill_end(division_t* d, int32_t stage, int32_t end, double cap) {
  const runs_t* r = d->runs;
  const double* before = d->value + (int64_t)((stage + 1) % 2) * (r->length + 1);
  double best = cap;
  int32_t best_first = -1;
  const int32_t low = stage == 0 ? 0 : d->low[stage - 1];
  const int32_t high = stage == 0 ? 0 : (int32_t)sluice_min(d->high[stage - 1], end - 1);
  for (int32_t first = high; first >= low; --first) {
    if (r->floor(r->user, stage, first, end) >= best) break;
    const double reached = stage == 0 ? -INFINITY : before[first];
    if (reached >= best) continue;
    const double cost = fmax(reached, r->cost(r->user, stage, first, end, best));
    if (cost < best) best = cost, best_first = first;
  }
  d->value[(int64_t)(stage % 2) * (r->length + 1) + end] = best_first < 0 ? INFINITY : best;
  d->from[(int64_t)stage * (r->length + 1) + end] = best_first;
}

/* Returns the worst cost of the best division; INFINITY: none is below cap. */
static double divide_below(division_t* d, double cap) {
  const runs_t* r = d->runs;
  if (!windows(d, cap)) return INFINITY;
  for (int32_t s = 0; s < r->num_stages; ++s) {
    for (int32_t end = d->low[s]; end <= d->high[s]; ++end) fill_end(d, s, end, cap);
  }
  return d->value[(int64_t)((r->num_stages - 1) % 2) * (r->length + 1) + r->length];
}

/* Returns the least cap that floors allow, to a thousandth; INFINITY: none. */
static double least_cap(division_t* d) {
  if (!windows(d, INFINITY)) return INFINITY;
  double low = SMALLEST_CAP, high = SMALLEST_CAP;
  if (windows(d, high)) return high;
  while (!windows(d, high)) low = high, high *= 4;
  while (high - low > 1e-3 * high) {
    const double middle = low + (high - low) / 2;
    if (windows(d, middle)) {
      high = middle;
    } else {
      low = middle;
    }
  }
  return high;
}

/* Returns the worst cost of a greedy division in which each stage takes the longest run below cap; INFINITY: greedy
 * finds none. */
static double reach(division_t* d, double cap) {
  const runs_t* r = d->runs;
  if (!windows(d, cap)) return INFINITY;
  double worst = -INFINITY;
  int32_t first = 0;
  for (int32_t s = 0; s < r->num_stages; ++s) {
    double cost = INFINITY;
    int32_t end = d->high[s];
    for (; end >= d->low[s] && end > first; --end) {
      if (r->floor(r->user, s, first, end) >= cap) continue;
      cost = r->cost(r->user, s, first, end, cap);
      if (cost < cap) break;
    }
    if (!(cost < cap)) return INFINITY;
    worst = fmax(worst, cost), first = end;
  }
  return worst;
}

/* Returns a cap just above what a greedy division reaches, found by bisection. */
static double greedy_cap(division_t* d, double least) {
  double low = least, high = INFINITY;
  for (double over = 0.02; high == INFINITY && over < 1e6; over *= 2) {
    const double worst = reach(d, least * (1 + over));
    if (worst < INFINITY) {
      high = worst;
    } else {
      low = least * (1 + over);
    }
  }
  while (isfinite(high) && high - low > 1e-3 * high) {
    const double middle = low + (high - low) / 2, worst = reach(d, middle);
    if (worst < INFINITY) {
      high = worst;
    } else {
      low = middle;
    }
  }
  return nextafter(high, INFINITY);
}

static double divide_runs(division_t* d, int32_t* out_ends) {
  const runs_t* r = d->runs;
  const double least = least_cap(d);
  double worst = INFINITY;
  if (isfinite(least) && r->are_costs_free_of_caps) {
    const double cap = greedy_cap(d, least);
    if (isfinite(cap)) worst = divide_below(d, cap);
  }
  /* relative to the least cap; a narrow cap leaves few runs to evaluate, and one of the first usually suffices */
  double over = 0.02;
  while (isfinite(least) && worst == INFINITY) {
    const double cap = over < 1e6 ? least * (1 + over) : INFINITY;
    worst = divide_below(d, cap);
    if (cap == INFINITY) break;
    over *= 4;
  }
  if (worst == INFINITY) return worst;
  int32_t end = r->length;
  for (int32_t s = r->num_stages - 1; s >= 0; --s) {
    out_ends[s] = end;
    end = d->from[(int64_t)s * (r->length + 1) + end];
  }
  return worst;
}

static sluice_status_t make_division(const runs_t* runs, sluice_allocator_t* allocator, division_t* out_division,
                                     uint64_t* out_bytes) {
  const uint64_t length = (uint64_t)runs->length + 1, stages = (uint64_t)runs->num_stages;
  *out_bytes = 2 * length * sizeof(double) + (2 * stages + stages * length) * sizeof(int32_t);
  char* block = sluice_alloc_zeroed(allocator, *out_bytes, "division into runs");
  if (block == NULL) return sluice_alloc_status();
  *out_division = (division_t){.runs = runs, .value = (double*)block};
  out_division->low = (int32_t*)(out_division->value + 2 * length), out_division->high = out_division->low + stages;
  out_division->from = out_division->high + stages;
  return SLUICE_OK;
}

/* Finds out whether a greedy division, with each stage's run as long as possible, stays below cap. 0: one may still
 * exist. */
static sluice_status_t can_reach(const runs_t* runs, sluice_allocator_t* allocator, double cap, int32_t* out_is_found) {
  division_t division;
  uint64_t bytes;
  SLUICE_TRY(make_division(runs, allocator, &division, &bytes));
  *out_is_found = reach(&division, cap) < INFINITY;
  sluice_free(allocator, division.value, bytes);
  return SLUICE_OK;
}

/* out_ends: [num_stages] the end of each stage's run. out_worst: its cost; INFINITY, and no ends: there is no division.
 * Of equal divisions the first found, which is deterministic. */
static sluice_status_t best_division(const runs_t* runs, sluice_allocator_t* allocator, int32_t* out_ends,
                                     double* out_worst) {
  *out_worst = INFINITY;
  division_t division;
  uint64_t bytes;
  SLUICE_TRY(make_division(runs, allocator, &division, &bytes));
  *out_worst = divide_runs(&division, out_ends);
  sluice_free(allocator, division.value, bytes);
  return SLUICE_OK;
}

/* ---- cuts ---- */

static const double MOST_BYTES = 1e18; /* larger values are no caps */

typedef struct cut_s {
  const sluice_stages_tables_t* tables;
  sluice_stages_local_t* local;
  const double* weights;
  double most_budget; /* of all stages with a budget */
  int32_t is_proven;  /* all costs so far are exact */
} cut_t;

static sluice_status_t divide(sluice_partition_t* part, const runs_t* runs, double* out_worst) {
  const sluice_stages_tables_t* t = part->tables;
  const uint64_t bytes = (uint64_t)t->num_stages * sizeof(int32_t);
  int32_t* ends = sluice_alloc(t->allocator, bytes, "ends of stages");
  if (ends == NULL) return sluice_alloc_status();
  const sluice_status_t status = best_division(runs, t->allocator, ends, out_worst);
  if (status == SLUICE_OK && *out_worst < INFINITY) {
    sluice_partition_set_ends(part, ends);
    sluice_partition_settle(part);
  }
  sluice_free(t->allocator, ends, bytes);
  return status;
}

/* ---- the fastest ---- */

static double seconds_floor(void* user, int32_t stage, int32_t first, int32_t end) {
  const sluice_stages_tables_t* t = ((cut_t*)user)->tables;
  if (sluice_stages_run_least_bytes(t, stage, first, end) > t->budget[stage]) return INFINITY;
  return sluice_stages_run_fastest(t, first, end);
}

static double seconds_cost(void* user, int32_t stage, int32_t first, int32_t end, double cap) {
  cut_t* cut = user;
  sluice_stages_local_set_run(cut->local, stage, first, end);
  if (cut->local->messages >= cap) return INFINITY;
  const uint64_t budget = cut->local->budget;
  if (budget < UINT64_MAX && sluice_stages_local_fewest_bytes(cut->local, budget + 1) > budget) return INFINITY;
  if (!sluice_stages_local_exact(cut->local, cap)) return INFINITY;
  cut->is_proven &= cut->local->is_proven;
  return cut->local->sum.turn;
}

sluice_status_t sluice_cut_order_fastest(sluice_partition_t* part, int32_t* out_exists, int32_t* out_is_optimal) {
  cut_t cut = {.tables = part->tables, .local = &part->local, .is_proven = 1};
  const runs_t runs = {&cut, part->tables->num_layers, part->tables->num_stages, seconds_floor, seconds_cost};
  double worst = INFINITY;
  SLUICE_TRY(divide(part, &runs, &worst));
  *out_exists = worst < INFINITY;
  *out_is_optimal = cut.is_proven;
  return SLUICE_OK;
}

/* ---- the leanest ---- */

/* Returns the bytes by which a stage exceeds its budget, shifted above zero: the search works with ratios. A stage
 * without a budget never exceeds it. */
static double lack(const cut_t* cut, int32_t stage, uint64_t bytes) {
  const uint64_t budget = cut->tables->budget[stage];
  return budget == UINT64_MAX ? 0 : (double)bytes - (double)budget + cut->most_budget;
}

static double bytes_floor(void* user, int32_t stage, int32_t first, int32_t end) {
  const cut_t* cut = user;
  return lack(cut, stage, sluice_stages_run_least_bytes(cut->tables, stage, first, end));
}

static double bytes_cost(void* user, int32_t stage, int32_t first, int32_t end, double cap) {
  const cut_t* cut = user;
  if (cut->tables->budget[stage] == UINT64_MAX) return 0;
  const sluice_stages_tables_t* t = cut->tables;
  const uint64_t messages = sluice_stages_message_bytes(t, stage, t->cut[first], t->cut[end]);
  if (lack(cut, stage, sluice_stages_run_least_bytes(t, stage, first, end) + messages) >= cap) return INFINITY;
  const double below = ceil(cap - cut->most_budget + (double)t->budget[stage]);
  sluice_stages_local_set_run(cut->local, stage, first, end);
  return lack(cut, stage,
              sluice_stages_local_fewest_bytes(cut->local, below < MOST_BYTES ? (uint64_t)below : UINT64_MAX));
}

static runs_t runs_by_bytes(cut_t* cut) {
  const sluice_stages_tables_t* t = cut->tables;
  for (int32_t s = 0; s < t->num_stages; ++s) {
    if (t->budget[s] != UINT64_MAX) cut->most_budget = fmax(cut->most_budget, (double)t->budget[s]);
  }
  return (runs_t){cut, t->num_layers, t->num_stages, bytes_floor, bytes_cost, .are_costs_free_of_caps = 1};
}

sluice_status_t sluice_cut_order_leanest(sluice_partition_t* part) {
  cut_t cut = {.tables = part->tables, .local = &part->local};
  const runs_t runs = runs_by_bytes(&cut);
  double worst = INFINITY;
  return divide(part, &runs, &worst);
}

sluice_status_t sluice_cut_order_fits(sluice_partition_t* part, int32_t* out_fits) {
  cut_t cut = {.tables = part->tables, .local = &part->local};
  const runs_t runs = runs_by_bytes(&cut);
  SLUICE_TRY(can_reach(&runs, part->tables->allocator, nextafter(cut.most_budget, INFINITY), out_fits));
  if (*out_fits) return SLUICE_OK;
  double worst = INFINITY;
  SLUICE_TRY(divide(part, &runs, &worst));
  *out_fits = worst <= cut.most_budget;
  return SLUICE_OK;
}

/* ---- evenly ---- */

static double weight_of(void* user, int32_t stage, int32_t first, int32_t end) {
  (void)stage;
  const double* weights = ((const cut_t*)user)->weights;
  return weights[end] - weights[first];
}

static double weight_cost(void* user, int32_t stage, int32_t first, int32_t end, double cap) {
  (void)cap;
  return weight_of(user, stage, first, end);
}

sluice_status_t sluice_cut_order_evenly(sluice_partition_t* part, const double* weights) {
  cut_t cut = {.tables = part->tables, .weights = weights};
  const runs_t runs = {&cut, part->tables->num_layers, part->tables->num_stages, weight_of, weight_cost};
  double worst = INFINITY;
  return divide(part, &runs, &worst);
}
