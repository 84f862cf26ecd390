// SPDX-License-Identifier: Apache-2.0
/* A case that calibrates CUDA contexts, on fakes and on a GPU, without a test framework. */
#pragma once

#include "capi/test/cuda/cuda_layer_suite.h"

typedef struct calibrate_case_s {
  int32_t world_size, dtype;
  int64_t model_width, hidden_width;
  double seconds;
  const char* folder; /* the cache; "": no cache */
} calibrate_case_t;

/* Every rank calibrates its context on a thread. All ranks must get the same machine, which must have curves for the
 * ops of a layer and predict. Writes it to out_text [out_bytes], which may be NULL. Returns NULL, or the problem. */
const char* calibrate_run(const layer_machine_t* machine, const calibrate_case_t* c, char* out_text,
                          uint64_t out_bytes);
