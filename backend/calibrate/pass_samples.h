// SPDX-License-Identifier: Apache-2.0
/* The passes that a calibration measures: few and many rows, in one chunk and in several, in rounds. Private to
 * backend/calibrate; passes_fit.c corrects a machine with them. */
#pragma once

#include "backend/calibrate/pass_source.h"

#define SLUICE_PASSES_ROUNDS 9

/* Few tokens in 1, 2, 4 and 8 chunks; many tokens, and more than a cache holds, in 1 and 4. */
enum { FEW, FEW_IN_2, FEW_IN_4, FEW_IN_8, MANY, MANY_IN_4, FULL, FULL_IN_4, KINDS };
typedef struct sluice_pass_kind_s {
  int64_t tokens;
  int32_t chunks, whole; /* whole: the kind with the same tokens in one chunk */
} sluice_pass_kind_t;
extern const sluice_pass_kind_t sluice_pass_kinds[KINDS];

enum { WHOLE, COMPUTE, PARTS };
typedef struct sluice_pass_samples_s {
  const sluice_passes_source_t* source;
  int32_t has[KINDS], num_rounds;
  double took[KINDS]; /* seconds of a step, when it was tried */
  double samples[KINDS][PARTS][2][SLUICE_PASSES_ROUNDS];
  double measured[KINDS][PARTS][2]; /* medians, as for steps, the maximum over ranks */
} sluice_pass_samples_t;

/* Takes samples from `source` for about `seconds` and skips kinds that would take too long. Errors: those of the
 * source.
 */
sluice_status_t sluice_pass_samples_take(const sluice_passes_source_t* source, double seconds,
                                         sluice_pass_samples_t* out_samples);
