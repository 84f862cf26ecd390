// SPDX-License-Identifier: Apache-2.0
/* Cases of a layer on a CUDA context, on fakes and on a GPU, without a test framework. Results are compared with the
 * plain f64 reference and with the same case on this CPU. */
#pragma once

#include "capi/test/world/world.h"

/* The machine that runs the cases. */
typedef struct layer_machine_s {
  const char* name;
  int32_t is_slow; /* fakes compare the accesses of every row with all others */
  /* Prepares the ranks of one case. variant: the kind of cuBLAS, if the machine has several; 1 is the default. */
  void (*open)(int32_t world_size, int32_t variant);
  const world_machine_t* (*world)(void);
  const char* (*close)(void); /* returns NULL, or a leak or hazard */
  /* Reads that the passes of one direction on a rank have waited for since open. */
  uint64_t (*reads)(int32_t rank, int32_t direction);
} layer_machine_t;

typedef struct layer_case_s {
  const char* name;
  const char* (*run)(const layer_machine_t* machine, int32_t world_size); /* returns NULL, or the problem */
  int32_t is_small;                                                       /* runs under slow tools too */
} layer_case_t;

/* The last entry has the name NULL. */
extern const layer_case_t layer_cases[];

/* Runs cases with random shapes, dtypes, policies and numbers of ranks for `seconds`; checks values, and that memory
 * does not grow. Returns NULL, or the problem; *out_cases is the number of the case, which `seed` reproduces. */
const char* layer_soak(const layer_machine_t* machine, int32_t most_ranks, uint64_t seed, double seconds,
                       int64_t* out_cases);
