// SPDX-License-Identifier: Apache-2.0
#include "backend/planner/stages/partition/runs.h"

#include <math.h>

#include "backend/base/math.h"

static const double SMALLEST_CAP = 1e-12; /* all costs below it count as equal */

typedef struct division_s {
  const sluice_runs_t* runs;
  int32_t* low;  /* [num_stages] the earliest end of a stage that lets the others finish below the cap */
  int32_t* high; /* [num_stages] the latest end that the stage can reach below the cap */
  double* value; /* [2, length + 1] the worst cost up to an end, of a stage and the previous one */
  int32_t* from; /* [num_stages, length + 1] where the stage's run begins */
} division_t;

/* Computes the ends that floors allow below cap. Returns 0 if there are none. Floors grow with runs, so the longest run
 * of each stage in turn reaches furthest. */
static int windows(division_t* d, double cap) {
  const sluice_runs_t* r = d->runs;
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
  const sluice_runs_t* r = d->runs;
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
  const sluice_runs_t* r = d->runs;
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
  const sluice_runs_t* r = d->runs;
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

static double divide(division_t* d, int32_t* out_ends) {
  const sluice_runs_t* r = d->runs;
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

static sluice_status_t make(const sluice_runs_t* runs, sluice_allocator_t* allocator, division_t* out_division,
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

sluice_status_t sluice_runs_reach(const sluice_runs_t* runs, sluice_allocator_t* allocator, double cap,
                                  int32_t* out_is_found) {
  division_t division;
  uint64_t bytes;
  SLUICE_TRY(make(runs, allocator, &division, &bytes));
  *out_is_found = reach(&division, cap) < INFINITY;
  sluice_free(allocator, division.value, bytes);
  return SLUICE_OK;
}

sluice_status_t sluice_runs_divide(const sluice_runs_t* runs, sluice_allocator_t* allocator, int32_t* out_ends,
                                   double* out_worst) {
  *out_worst = INFINITY;
  division_t division;
  uint64_t bytes;
  SLUICE_TRY(make(runs, allocator, &division, &bytes));
  *out_worst = divide(&division, out_ends);
  sluice_free(allocator, division.value, bytes);
  return SLUICE_OK;
}
