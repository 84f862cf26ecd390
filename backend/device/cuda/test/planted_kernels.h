// SPDX-License-Identifier: Apache-2.0
/* Kernels with a fault that lane_orders.h must find, and the same ones without. Each is a kernel of `units` warps. */
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct planted_args_s {
  int32_t* data; /* [32 * units] */
  int64_t units;
  int32_t is_planted;
} planted_args_t;

enum { NUM_PLANTED = 7 };
typedef struct planted_kernel_s {
  const char* name;
  void (*fn)(int64_t warps, const void* args);
  const char* problem; /* part of the text */
} planted_kernel_t;
const planted_kernel_t* planted_kernels(void);

#ifdef __cplusplus
}
#endif
