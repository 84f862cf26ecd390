// SPDX-License-Identifier: Apache-2.0
/* Choices of "auto", kept with the machine: a process begins with what earlier ones measured. Internal to
 * backend/gemm/auto. */
#ifndef SLUICE_BACKEND_GEMM_AUTO_AUTO_CACHE_H_
#define SLUICE_BACKEND_GEMM_AUTO_AUTO_CACHE_H_

#include <stdint.h>

typedef struct sluice_gemm_choice_s {
  int32_t class_id; /* at least 0 */
  uint32_t order;
} sluice_gemm_choice_t;

/* Reads at most `most` choices among these candidates, made on this processor with so many threads by this version;
 * returns how many. A file that cannot be used is left alone, with a word in the log (WARN). */
int sluice_gemm_choices_read(const char* candidates, sluice_gemm_choice_t* out_choices, int most);

/* Writes them in place of what was there. What cannot be written is measured again by the next process, with a word in
 * the log (INFO): a folder that is not ours to write is no reason to worry. */
void sluice_gemm_choices_write(const char* candidates, const sluice_gemm_choice_t* choices, int count);

#endif /* SLUICE_BACKEND_GEMM_AUTO_AUTO_CACHE_H_ */
