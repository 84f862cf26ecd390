// SPDX-License-Identifier: Apache-2.0
/* Arrays of gpu_suite, each on the host, for the plain version, and on the device. */
#pragma once

#include <stdint.h>

typedef struct gpu_array_s {
  void* host;  /* for the plain version */
  void* there; /* on the device */
  void* back;  /* copy of the device's result */
  int64_t bytes;
  int64_t skipped; /* bytes between the device's block and `there` */
} gpu_array_t;

/* Zeros on the host; uninitialised on the device. */
gpu_array_t gpu_array(int64_t bytes);
/* For arrays that a kernel writes in part and the suite reads whole: a checker of uninitialised memory would report
 * them.
 */
gpu_array_t gpu_zeros(int64_t bytes);
/* Random numbers in [-3, 3], on the host and the device. */
gpu_array_t gpu_randoms(int32_t dtype, int64_t count);
/* The same on the device only, by repeating a block: good enough to measure times, and much faster to make. */
gpu_array_t gpu_repeated(int32_t dtype, int64_t count);
void gpu_drop(gpu_array_t* a);

/* Offset in elements of the arrays of gpu_randoms from an aligned address, as for parts of a host's tensors. */
extern int64_t gpu_misaligned;

/* host to device; device to back. Both wait. */
void gpu_send(const gpu_array_t* a);
void gpu_fetch(const gpu_array_t* a);

uint32_t gpu_random_bits(void);

/* NULL, or the place where the device's result differs from the plain one by more than relative * |x| + absolute. */
const char* gpu_differs(const gpu_array_t* a, int32_t dtype, double relative, double absolute);
