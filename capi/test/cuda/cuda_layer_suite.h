// SPDX-License-Identifier: Apache-2.0
/* Requirements on the layer on a CUDA context, on fakes and on a GPU: cases without a test framework, against the plain
 * f64 reference and against the same case on this CPU. */
#ifndef SLUICE_CAPI_TEST_CUDA_CUDA_LAYER_SUITE_H_
#define SLUICE_CAPI_TEST_CUDA_CUDA_LAYER_SUITE_H_

#include "capi/test/world/world.h"

/* The machine that runs the cases. */
typedef struct layer_machine_s {
  const char* name;
  int32_t is_slow; /* fakes: the accesses of every row are compared with all others */
  /* Prepares for the ranks of one case. variant: the kind of cuBLAS, if there is a choice; 1 is the usual one. */
  void (*open)(int32_t world_size, int32_t variant);
  const world_machine_t* (*world)(void);
  const char* (*close)(void); /* NULL, or a leak or hazard */
  /* Reads that all passes of one direction waited for, on one rank, since open. */
  uint64_t (*reads)(int32_t rank, int32_t direction);
} layer_machine_t;

typedef struct layer_case_s {
  const char* name;
  const char* (*run)(const layer_machine_t* machine, int32_t world_size); /* NULL, or the problem */
  int32_t is_small;                                                       /* for slow tools */
} layer_case_t;

/* Ends with a name that is NULL. */
extern const layer_case_t layer_cases[];

/* Random shapes, dtypes, policies and numbers of ranks up to most_ranks, for the given seconds: checks values, and that
 * memory does not leak between rounds. NULL, or the problem with the case's number, which with `seed` repeats it. */
const char* layer_soak(const layer_machine_t* machine, int32_t most_ranks, uint64_t seed, double seconds,
                       int64_t* out_cases);

#endif /* SLUICE_CAPI_TEST_CUDA_CUDA_LAYER_SUITE_H_ */
