// SPDX-License-Identifier: Apache-2.0
#include "backend/planner/stages/partition/heuristic.h"

#include "backend/planner/stages/partition/coarsen.h"
#include "backend/planner/stages/partition/cut_order.h"
#include "backend/planner/stages/partition/kernighan_lin.h"
#include "backend/planner/stages/partition/refine.h"

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
