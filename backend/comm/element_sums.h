// SPDX-License-Identifier: Apache-2.0
/* Reads elements of one dtype into sums and writes them back. Sums are floats, those of f64 are doubles. */
#pragma once

#include <stdint.h>

typedef struct sluice_element_sums_s {
  int32_t dtype;
  uint64_t bytes; /* of one element */
  /* sums[i] = data[i], sums[i] += data[i], data[i] = sums[i] for i < count. sums and data do not overlap. */
  void (*load)(const void* data, int64_t count, void* sums);
  void (*add)(const void* data, int64_t count, void* sums);
  void (*store)(const void* sums, int64_t count, void* data);
} sluice_element_sums_t;

/* Supports f32, bf16, f16 and f64; NULL: another dtype. */
const sluice_element_sums_t* sluice_element_sums_of(int32_t dtype);
/* Sums of i64, which wrap around, and maxima instead of sums. */
extern const sluice_element_sums_t sluice_i64_sums, sluice_i64_maxima;
