// SPDX-License-Identifier: Apache-2.0
/* Which rows and gradients a backward sums into weight gradients, and the size of their f32 sums. */
#pragma once

#include "backend/moe/pass/pass.h"

/* The host's tensors by sluice_parameter_t: out [SLUICE_NUM_PARAMETERS], each an array by local expert or NULL. */
void sluice_gradients_of(const sluice_expert_tensors_t* tensors, const sluice_tensor_t** out);
/* Whether the host wants the gradient; it leaves out those of parameters that it does not train. */
int sluice_gradient_is_wanted(const sluice_shape_t* shape, const sluice_tensor_t* const* all, int parameter);
int sluice_is_short_dtype(int32_t dtype);

/* Rows of an expert in a chunk, or in all chunks (-1). */
int64_t sluice_rows_of_expert(const sluice_pass_t* pass, int32_t chunk, int32_t local);
/* The chunks that have rows of an expert. */
typedef struct sluice_chunk_span_s {
  int32_t count, first, last;
} sluice_chunk_span_t;
sluice_chunk_span_t sluice_chunks_of_expert(const sluice_pass_t* pass, int32_t local);
/* Whether one GEMM can run over all chunks, because the expert's rows are contiguous; else chunk by chunk. */
int sluice_weight_rows_are_joined(const sluice_pass_t* pass);

/* Bytes of the sums that this pass needs, after its other tensors are measured and pass->grad_params is set. */
uint64_t sluice_weight_sum_bytes(const sluice_pass_t* pass);
