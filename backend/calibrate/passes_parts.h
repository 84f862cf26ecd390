/* What passes.c measures and passes_fit.c makes of it. Private to backend/calibrate. */
#ifndef SLUICE_BACKEND_CALIBRATE_PASSES_PARTS_H_
#define SLUICE_BACKEND_CALIBRATE_PASSES_PARTS_H_

#include "backend/calibrate/passes.h"

#define SLUICE_PASSES_ROUNDS 9

/* Few tokens in 1, 2, 4 and 8 chunks; many, and more than a cache holds, in 1 and 4. */
enum { FEW, FEW_IN_2, FEW_IN_4, FEW_IN_8, MANY, MANY_IN_4, FULL, FULL_IN_4, KINDS };
typedef struct sluice_pass_kind_s {
  int64_t tokens;
  int32_t chunks, whole; /* whole: of the same tokens in one chunk */
} sluice_pass_kind_t;
extern const sluice_pass_kind_t sluice_pass_kinds[KINDS];

enum { WHOLE, COMPUTE, PARTS };
typedef struct sluice_passes_s {
  const sluice_passes_source_t* source;
  int32_t has[KINDS], num_rounds;
  double took[KINDS]; /* seconds of a step, when it was tried */
  double samples[KINDS][PARTS][2][SLUICE_PASSES_ROUNDS];
  double measured[KINDS][PARTS][2]; /* medians, as steps are judged by, the longest of all ranks */
} sluice_passes_t;

/* Each corrects what the ones before it left. Errors: those of predictions. */
sluice_status_t sluice_passes_fit_products(const sluice_passes_t* passes, sluice_machine_t* machine);
sluice_status_t sluice_passes_fit_spill(const sluice_passes_t* passes, sluice_machine_t* machine);
sluice_status_t sluice_passes_fit_chunks(const sluice_passes_t* passes, sluice_machine_t* machine);
sluice_status_t sluice_passes_fit_rest(const sluice_passes_t* passes, sluice_machine_t* machine);

#endif /* SLUICE_BACKEND_CALIBRATE_PASSES_PARTS_H_ */
