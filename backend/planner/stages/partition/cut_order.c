// SPDX-License-Identifier: Apache-2.0
#include "backend/planner/stages/partition/cut_order.h"

#include <math.h>

#include "backend/planner/stages/partition/runs.h"
#include "backend/planner/stages/problem/messages.h"

static const double MOST_BYTES = 1e18; /* larger values are no caps */

typedef struct cut_s {
  const sluice_stages_tables_t* tables;
  sluice_stages_local_t* local;
  const double* weights;
  double most_budget; /* of all stages with a budget */
  int32_t is_proven;  /* all costs so far are exact */
} cut_t;

static sluice_status_t divide(sluice_partition_t* part, const sluice_runs_t* runs, double* out_worst) {
  const sluice_stages_tables_t* t = part->tables;
  const uint64_t bytes = (uint64_t)t->num_stages * sizeof(int32_t);
  int32_t* ends = sluice_alloc(t->allocator, bytes, "ends of stages");
  if (ends == NULL) return sluice_alloc_status();
  const sluice_status_t status = sluice_runs_divide(runs, t->allocator, ends, out_worst);
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
  const sluice_runs_t runs = {&cut, part->tables->num_layers, part->tables->num_stages, seconds_floor, seconds_cost};
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

static sluice_runs_t runs_by_bytes(cut_t* cut) {
  const sluice_stages_tables_t* t = cut->tables;
  for (int32_t s = 0; s < t->num_stages; ++s) {
    if (t->budget[s] != UINT64_MAX) cut->most_budget = fmax(cut->most_budget, (double)t->budget[s]);
  }
  return (sluice_runs_t){cut, t->num_layers, t->num_stages, bytes_floor, bytes_cost, .are_costs_free_of_caps = 1};
}

sluice_status_t sluice_cut_order_leanest(sluice_partition_t* part) {
  cut_t cut = {.tables = part->tables, .local = &part->local};
  const sluice_runs_t runs = runs_by_bytes(&cut);
  double worst = INFINITY;
  return divide(part, &runs, &worst);
}

sluice_status_t sluice_cut_order_fits(sluice_partition_t* part, int32_t* out_fits) {
  cut_t cut = {.tables = part->tables, .local = &part->local};
  const sluice_runs_t runs = runs_by_bytes(&cut);
  SLUICE_TRY(sluice_runs_reach(&runs, part->tables->allocator, nextafter(cut.most_budget, INFINITY), out_fits));
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
  const sluice_runs_t runs = {&cut, part->tables->num_layers, part->tables->num_stages, weight_of, weight_cost};
  double worst = INFINITY;
  return divide(part, &runs, &worst);
}
