/* A machine corrected by the steps that ran on it: what lanes and passes took over what the machine had said of them.
 *
 * The newest passes of layers whose costs the machine knows are kept as they come in headers, so alike on all ranks.
 * Two of three say by how much GEMMs, and exchanges, take longer than predicted (medians over passes), and what is
 * left of a pass is pass_seconds; every third is held out and says how far such a machine is off.
 *
 * Ours: the model is corrected by what was seen.
 */
#ifndef SLUICE_BACKEND_COST_REFINED_MACHINE_H_
#define SLUICE_BACKEND_COST_REFINED_MACHINE_H_

#include "backend/cost/cost.h"

#define SLUICE_TIMED_PASSES       48
#define SLUICE_TIMED_PASSES_LEAST 6 /* passes */

typedef struct sluice_timed_pass_s {
  sluice_workload_t work; /* with the tokens and skew of that pass */
  int32_t num_chunks, wgrad_mode;
  int32_t direction, reserved;
  double seconds;       /* of the slowest rank */
  double compute, comm; /* of its lanes */
} sluice_timed_pass_t;

typedef struct sluice_timed_passes_s {
  int64_t count; /* ever */
  sluice_timed_pass_t passes[SLUICE_TIMED_PASSES];
} sluice_timed_passes_t;

void sluice_timed_passes_add(sluice_timed_passes_t* passes, const sluice_timed_pass_t* pass);
/* The machine as these passes (NULL: none) correct it; its provenance says so. Errors: STATE (too few passes), those of
 * predictions.
 */
sluice_status_t sluice_machine_refine(const sluice_timed_passes_t* passes, const sluice_machine_t* machine,
                                      sluice_machine_t* out_machine);

#endif /* SLUICE_BACKEND_COST_REFINED_MACHINE_H_ */
