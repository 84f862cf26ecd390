// SPDX-License-Identifier: Apache-2.0
/* The parts of a list's GEMMs that the selector measures. Internal to backend/gemm/auto. */
#pragma once

#include "backend/gemm/gemm.h"
#include "backend/gemm/gemm_form.h"

/* The GEMMs of a list are divided into equal parts. A run measures some parts, and successive runs go over all experts.
 * A pass reads each weight once, from memory. If the same part were measured repeatedly, its weight would be in a
 * cache, and a library that waits for memory would look as fast as one that does not. A run has several parts for each
 * thread, as a pass does, because some libraries give whole GEMMs to threads and others divide each GEMM among them.
 * Results go to scratch memory, except weight gradients that the call overwrites, which go to their own place. A weight
 * gradient mostly reads and writes its result. In a pass that is in memory, so it is evicted from the caches first. */
enum { SLUICE_GEMM_PARTS_PER_THREAD = 4, SLUICE_GEMM_PARTS_MOST = 64 };

typedef struct sluice_gemm_parts_s {
  const sluice_grouped_gemm_t* list;
  sluice_gemm_form_t form;    /* of the list's largest GEMM, with the rows to measure */
  sluice_gemm_problem_t part; /* only its sizes are used */
  int64_t along;              /* parts of one GEMM */
  int64_t in_run;             /* parts of one run, all distinct */
  int64_t problem, at;
  void (*evict)(const void* data, uint64_t bytes); /* sluice_cache_evict, or a test's replacement */
  sluice_gemm_problem_t run[SLUICE_GEMM_PARTS_MOST];
} sluice_gemm_parts_t;

/* Chooses the size of a part and the number of parts of a run. A run has at most `most_flop` of arithmetic for each
 * thread, and `most_bytes` of results in scratch memory. */
void sluice_gemm_parts_begin(sluice_gemm_parts_t* parts, const sluice_grouped_gemm_t* list,
                             const sluice_gemm_form_t* form, int num_threads, double most_flop, uint64_t most_bytes);
/* Returns the size of the scratch memory; may be 0. */
uint64_t sluice_gemm_parts_result_bytes(const sluice_gemm_parts_t* parts);
/* Returns the `in_run` parts of the next run. Results that are weight gradients have been evicted from the caches. */
const sluice_gemm_problem_t* sluice_gemm_parts_next(sluice_gemm_parts_t* parts, void* scratch);
