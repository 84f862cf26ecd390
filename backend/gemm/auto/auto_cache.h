// SPDX-License-Identifier: Apache-2.0
/* The choices of "auto" in the machine cache, for later processes. Internal to backend/gemm/auto. */
#pragma once

#include <stdint.h>

typedef struct sluice_gemm_choice_s {
  int32_t class_id; /* at least 0 */
  uint32_t order;
} sluice_gemm_choice_t;

/* Reads at most `most` choices among these candidates that this version of Sluice made on this processor with the same
 * number of threads. Returns their number. A file that cannot be used is kept, and reported in the log (WARN). */
int sluice_gemm_choices_read(const char* candidates, sluice_gemm_choice_t* out_choices, int most);

/* Replaces the stored choices. If they cannot be written, the next process measures again; the log says so (INFO, since
 * a read-only cache folder is no fault). */
void sluice_gemm_choices_write(const char* candidates, const sluice_gemm_choice_t* choices, int count);
