// SPDX-License-Identifier: Apache-2.0
/* Helpers of the examples: tensors of 32-bit numbers, errors, and data that is the same in every language. */
#pragma once

#include <stdio.h>
#include <string.h>

#include "sluice/sluice.h"

/* Returns a number in [-1, 1) that depends only on the arguments, not on the rank. */
static inline float noise(uint32_t kind, uint32_t i) {
  uint32_t h = kind * 0x9e3779b9u + i * 0x85ebca6bu;
  h ^= h >> 16, h *= 0x7feb352du, h ^= h >> 15, h *= 0x846ca68bu, h ^= h >> 16;
  return (float)(h >> 8) / 8388608.0f - 1;
}

/* Prints the error and returns 1, or returns 0 if there is none. */
static inline int failed(int rank, sluice_status_t status) {
  sluice_error_info_t why;
  if (status == SLUICE_OK) return 0;
  sluice_error_info_init(&why, sizeof why);
  sluice_error_last(&why);
  fprintf(stderr, "rank %d: %s: %s\n", rank, sluice_status_name(status), why.message);
  return 1;
}

/* Describes a row-major matrix of this program's memory. The shape is borrowed. */
static inline sluice_tensor_t describe(const void* data, uint8_t type_code, int64_t* shape) {
  sluice_tensor_t t;
  memset(&t, 0, sizeof t);
  t.data = (void*)data, t.device_type = SLUICE_DEVICE_CPU, t.ndim = 2, t.shape = shape;
  t.type_code = type_code, t.type_bits = 32, t.type_lanes = 1;
  return t;
}
