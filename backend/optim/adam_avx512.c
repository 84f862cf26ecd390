// SPDX-License-Identifier: Apache-2.0
/* The loops of adam_loops.inc.h for AVX-512 (F, BW, DQ, VL) with FMA. */
#include <stddef.h>

#include "backend/optim/adam.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("fma,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("fma,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif

#include "backend/optim/adam_loops.inc.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

static const sluice_adam_kernels_t kernels[SLUICE_ADAM_ARITHMETICS] = KERNELS_OF("avx512");

const sluice_adam_kernels_t* sluice_adam_avx512(void) {
  const int has = __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx512f") &&
                  __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  return has ? kernels : NULL;
}

#else

const sluice_adam_kernels_t* sluice_adam_avx512(void) { return NULL; }

#endif
