// SPDX-License-Identifier: Apache-2.0
/* What the selector measures on. Internal to backend/gemm/auto. */
#ifndef SLUICE_BACKEND_GEMM_AUTO_AUTO_PARTS_H_
#define SLUICE_BACKEND_GEMM_AUTO_AUTO_PARTS_H_

#include "backend/gemm/gemm.h"
#include "backend/gemm/gemm_form.h"

/* Equal parts of the GEMMs of a list, some to a run, run after run over all experts. A pass uses each weight once,
 * so it comes from memory; the same part again and again would lie in a cache, where a library that waits for memory
 * looks as fast as one that does not. A run has several for each thread, as a pass has: threads that take whole
 * GEMMs and those that divide each of them do not look alike on a single one. Results go to scratch memory, those of
 * weight gradients that are about to be overwritten to their own place. A weight gradient is mostly reading and writing
 * of its result, which in a pass comes from memory too: where it will go is evicted first. */
enum { SLUICE_GEMM_PARTS_PER_THREAD = 4, SLUICE_GEMM_PARTS_MOST = 64 };

typedef struct sluice_gemm_parts_s {
  const sluice_grouped_gemm_t* list;
  sluice_gemm_form_t form;    /* of the list's largest GEMM, with the rows to measure */
  sluice_gemm_problem_t part; /* its sizes */
  int64_t along;              /* parts of one GEMM */
  int64_t in_run;             /* parts of one run, no two the same */
  int64_t problem, at;
  void (*evict)(const void* data, uint64_t bytes); /* sluice_cache_evict; tests note what is evicted */
  sluice_gemm_problem_t run[SLUICE_GEMM_PARTS_MOST];
} sluice_gemm_parts_t;

/* Sizes of a part and parts of a run: for each thread at most `most_flop` of arithmetic, and `most_bytes` of results in
 * all. */
void sluice_gemm_parts_begin(sluice_gemm_parts_t* parts, const sluice_grouped_gemm_t* list,
                             const sluice_gemm_form_t* form, int num_threads, double most_flop, uint64_t most_bytes);
/* Of the scratch memory; may be 0. */
uint64_t sluice_gemm_parts_result_bytes(const sluice_gemm_parts_t* parts);
/* The next run: `in_run` parts, whose results, if they are weight gradients, lie in no cache. */
const sluice_gemm_problem_t* sluice_gemm_parts_next(sluice_gemm_parts_t* parts, void* scratch);

#endif /* SLUICE_BACKEND_GEMM_AUTO_AUTO_PARTS_H_ */
