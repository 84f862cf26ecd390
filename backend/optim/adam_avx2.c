// SPDX-License-Identifier: Apache-2.0
/* The loops of adam_loops.inc.h for AVX2 with FMA. */
#include <stddef.h>

#include "backend/optim/adam.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif

#include "backend/optim/adam_loops.inc.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

static const sluice_adam_kernels_t kernels[SLUICE_ADAM_ARITHMETICS] = KERNELS_OF("avx2");

const sluice_adam_kernels_t* sluice_adam_avx2(void) {
  const int has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return has ? kernels : NULL;
}

#else

const sluice_adam_kernels_t* sluice_adam_avx2(void) { return NULL; }

#endif
