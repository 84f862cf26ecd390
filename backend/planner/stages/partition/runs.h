/* The best division of a row into runs: dynamic programming over (first, end, stage), where a stage's cost depends on
 * its run alone and the worst stage counts. Exact.
 *
 * Costs are expensive, so few are asked for: runs that no division below a cap can have are left out by a floor that is
 * cheap, and the cap grows from the least that floors allow until a division below it is found.
 *
 * Source: PipeDream's partitioning, with the floor's windows added. */
#ifndef SLUICE_BACKEND_PLANNER_STAGES_PARTITION_RUNS_H_
#define SLUICE_BACKEND_PLANNER_STAGES_PARTITION_RUNS_H_

#include "backend/base/alloc.h"

typedef struct sluice_runs_s {
  void* user;
  int32_t length;     /* of the row */
  int32_t num_stages; /* <= length: no run is empty */
  /* Never above the cost; never smaller for a run that contains another. INFINITY: impossible. */
  double (*floor)(void* user, int32_t stage, int32_t first, int32_t end);
  /* Exact where it is below cap; else anything that is not. */
  double (*cost)(void* user, int32_t stage, int32_t first, int32_t end, double cap);
  /* A cost below two caps is the same under both: the first cap may then be that of a division found greedily, and the
   * answer is the one that any other cap finds. */
  int32_t are_costs_free_of_caps;
} sluice_runs_t;

/* out_ends: [num_stages] where each stage's run ends. out_worst: its cost; INFINITY, and no ends: there is no division.
 * Of equal ones the first found, which is always the same. Errors: NO_MEMORY. */
sluice_status_t sluice_runs_divide(const sluice_runs_t* runs, sluice_allocator_t* allocator, int32_t* out_ends,
                                   double* out_worst);

/* Whether a division below cap is found greedily: each stage's run as long as it may be. 0: there may be one all the
 * same. Errors: NO_MEMORY. */
sluice_status_t sluice_runs_reach(const sluice_runs_t* runs, sluice_allocator_t* allocator, double cap,
                                  int32_t* out_is_found);

#endif /* SLUICE_BACKEND_PLANNER_STAGES_PARTITION_RUNS_H_ */
