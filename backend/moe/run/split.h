// SPDX-License-Identifier: Apache-2.0
/* The parts of a layer as separate calls: the same ops as in whole-layer passes, from templates that hold only those
 * parts. Arguments have been checked; the context has been entered. */
#pragma once

#include "backend/moe/run/run.h"
#include "sluice/split.h"

struct sluice_dispatch_s {
  sluice_step_t* step; /* META and INPUT: the routing and the received rows */
  int64_t num_rows;
};

sluice_status_t sluice_part_dispatch(sluice_moe_t* moe, const sluice_tensor_t* tokens,
                                     const sluice_tensor_t* expert_ids, sluice_status_t refusal,
                                     sluice_dispatch_t** out_dispatch);
sluice_status_t sluice_part_combine(sluice_dispatch_t* dispatch, const void* rows, const sluice_tensor_t* route_weights,
                                    const sluice_tensor_t* out_tokens, sluice_status_t refusal);
sluice_status_t sluice_part_combine_backward(sluice_dispatch_t* dispatch, const void* rows,
                                             const sluice_tensor_t* route_weights, const sluice_tensor_t* grad_out,
                                             void* grad_rows, float* grad_weight_rows, sluice_status_t refusal);
sluice_status_t sluice_part_dispatch_backward(sluice_dispatch_t* dispatch, const void* grad_input_rows,
                                              const float* grad_weight_rows, const sluice_tensor_t* grad_tokens,
                                              const sluice_tensor_t* grad_route_weights, sluice_status_t refusal);
sluice_status_t sluice_part_experts(sluice_moe_t* moe, const void* rows, const int64_t* rows_per_expert,
                                    const sluice_expert_tensors_t* params, void* pre, void* out_rows);
sluice_status_t sluice_part_experts_backward(sluice_moe_t* moe, const void* rows, const void* pre,
                                             const int64_t* rows_per_expert, const sluice_expert_tensors_t* params,
                                             const void* grad_rows, void* grad_input_rows,
                                             const sluice_expert_tensors_t* grad_params, int32_t grad_mode);
void sluice_part_destroy(sluice_dispatch_t* dispatch);
