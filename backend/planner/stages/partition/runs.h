// SPDX-License-Identifier: Apache-2.0
/* Divides a row into runs optimally: dynamic programming over (first, end, stage), where the cost of a stage depends
 * only on its run, and the worst stage counts. Exact.
 *
 * Costs are expensive, so few are evaluated: a cheap floor excludes runs that no division below a cap can have, and the
 * cap grows from the least that floors allow until a division below it is found.
 *
 * Source: PipeDream's partitioning; the windows of the floor are ours. */
#pragma once

#include "backend/base/alloc.h"

typedef struct sluice_runs_s {
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
} sluice_runs_t;

/* out_ends: [num_stages] the end of each stage's run. out_worst: its cost; INFINITY, and no ends: there is no division.
 * Of equal divisions the first found, which is deterministic. Errors: NO_MEMORY. */
sluice_status_t sluice_runs_divide(const sluice_runs_t* runs, sluice_allocator_t* allocator, int32_t* out_ends,
                                   double* out_worst);

/* Finds out whether a greedy division, with each stage's run as long as possible, stays below cap. 0: one may still
 * exist. Errors: NO_MEMORY. */
sluice_status_t sluice_runs_reach(const sluice_runs_t* runs, sluice_allocator_t* allocator, double cap,
                                  int32_t* out_is_found);
