// SPDX-License-Identifier: Apache-2.0
/* Makes the inputs and outputs of a rank of a call: plain blocks of memory, in which every value is a function of its
 * tensor and index, with the full width of its dtype. Independent of the ABI. */
#pragma once

#include "call.h"

enum { AS_I32 = 100, AS_I64 }; /* dtypes of blocks in addition to the list's */

typedef struct block_s {
  void* data; /* NULL: the call has none */
  uint64_t bytes;
  int64_t rows, cols, row_stride, col_stride; /* in elements */
  int32_t ndim, dtype;
} block_t;

enum { W1, W3, W2, B1, B3, B2, NUM_PARAMS };

typedef struct rank_data_s {
  const call_t* call;
  int32_t rank, num_local;
  int32_t owner[CALL_MAX_EXPERTS]; /* rank of each expert */
  int32_t local[CALL_MAX_EXPERTS]; /* the experts of this rank */
  block_t x, ids, weights, y, dy, dx, dw;
  block_t params[NUM_PARAMS][CALL_MAX_EXPERTS], grads[NUM_PARAMS][CALL_MAX_EXPERTS];
} rank_data_t;

void data_make(rank_data_t* out, const call_t* call, int32_t rank);
void data_drop(rank_data_t* data);
/* Makes the inputs of step `step`, with this many tokens, and unwritten outputs. ids_by is added to every expert id of
 * a route. */
void data_begin(rank_data_t* data, int32_t step, int64_t tokens, int32_t ids_by);
/* Makes only the outputs. */
void data_forget_outputs(rank_data_t* data);

double data_load(int32_t dtype, const void* data, int64_t i);
void data_store(int32_t dtype, void* data, int64_t i, double x);
uint64_t data_element_bytes(int32_t dtype);

/* Computes FNV-1a, continuing from `hash`; begin with DATA_HASH. Padding is included, as it must be unchanged. */
#define DATA_HASH UINT64_C(0xcbf29ce484222325)
uint64_t data_hash(uint64_t hash, const void* data, uint64_t bytes);
