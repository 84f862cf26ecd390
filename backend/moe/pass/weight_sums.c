// SPDX-License-Identifier: Apache-2.0
#include "backend/moe/pass/weight_sums.h"

#include <string.h>

#include "backend/base/tensor.h"

void sluice_gradients_of(const sluice_expert_tensors_t* t, const sluice_tensor_t** out) {
  const sluice_tensor_t* const all[SLUICE_NUM_PARAMETERS] = {t->w1,  t->w3,  t->w2,  t->b1,  t->b3,  t->b2,
                                                             t->la1, t->lb1, t->la3, t->lb3, t->la2, t->lb2};
  memcpy(out, all, sizeof all);
}

int64_t sluice_rows_of_expert(const sluice_pass_t* pass, int32_t chunk, int32_t local) {
  const sluice_binding_t* b = &pass->binding;
  if (chunk >= 0) return b->rows_of_expert[(int64_t)chunk * b->num_local + local];
  int64_t rows = 0;
  for (int32_t i = 0; i < b->num_chunks; ++i) rows += b->rows_of_expert[(int64_t)i * b->num_local + local];
  return rows;
}

sluice_chunk_span_t sluice_chunks_of_expert(const sluice_pass_t* pass, int32_t local) {
  sluice_chunk_span_t span = {0, 0, 0};
  for (int32_t i = 0; i < pass->binding.num_chunks; ++i) {
    if (sluice_rows_of_expert(pass, i, local) == 0) continue;
    if (span.count++ == 0) span.first = i;
    span.last = i;
  }
  return span;
}

int sluice_weight_rows_are_joined(const sluice_pass_t* pass) {
  return sluice_pass_is_joined(pass, SLUICE_T_DI) && sluice_pass_is_joined(pass, SLUICE_T_DDO) &&
         sluice_pass_is_joined(pass, SLUICE_T_DM) && sluice_pass_is_joined(pass, SLUICE_T_DACT) &&
         (pass->moe->shape.config.lora_rank == 0 || sluice_pass_is_joined(pass, SLUICE_T_LOW));
}

int sluice_gradient_is_wanted(const sluice_shape_t* shape, const sluice_tensor_t* const* all, int member) {
  return all[member] != NULL && sluice_parameter_elements(shape, member) > 0;
}

int sluice_is_short_dtype(int32_t dtype) { return dtype == SLUICE_DTYPE_BF16 || dtype == SLUICE_DTYPE_F16; }

static int has_short_gradient(const sluice_pass_t* pass) {
  const sluice_tensor_t* all[SLUICE_NUM_PARAMETERS];
  sluice_gradients_of(pass->grad_params, all);
  for (int m = 0; m < SLUICE_NUM_PARAMETERS; ++m) {
    if (sluice_gradient_is_wanted(&pass->moe->shape, all, m) && sluice_is_short_dtype(sluice_tensor_dtype(&all[m][0])))
      return 1;
  }
  return 0;
}

uint64_t sluice_weight_sum_bytes(const sluice_pass_t* pass) {
  if (pass->schedule->ring[SLUICE_T_DW] == 0 || pass->moe->shape.config.callback_experts ||
      pass->binding.num_local == 0 || pass->grad_params == NULL || !has_short_gradient(pass)) {
    return 0;
  }
  int all_at_once = 0;
  for (int32_t i = 0; i < pass->schedule->num_ops; ++i) {
    const sluice_op_t* op = &pass->schedule->ops[i];
    all_at_once |= op->kind == SLUICE_OP_WEIGHT_GRAD && op->chunk < 0;
  }
  if (all_at_once && sluice_weight_rows_are_joined(pass)) return 0;
  uint64_t shared = 0;
  for (int32_t e = 0; e < pass->binding.num_local; ++e) shared += sluice_chunks_of_expert(pass, e).count > 1;
  if (all_at_once && shared > 1) shared = 1;
  return shared * sluice_weight_sum_offset(&pass->moe->shape, SLUICE_NUM_PARAMETERS);
}
