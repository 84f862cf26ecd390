// SPDX-License-Identifier: Apache-2.0
/* Checks the tensors of a layer's calls, for the whole-layer calls and for the parts. Private to capi. */
#pragma once

#include "backend/base/tensor.h"
#include "backend/gemm/packed.h"
#include "backend/moe/layer/layer.h"

/* Checks for [T, width] of the layer's dtype with unit column stride; num_tokens -1: any. */
sluice_status_t sluice_check_rows(const sluice_moe_t* moe, const sluice_tensor_t* tensor, const char* name,
                                  int64_t num_tokens);
/* The same for output rows, which may not overlap. */
sluice_status_t sluice_check_out_rows(const sluice_moe_t* moe, const sluice_tensor_t* tensor, const char* name,
                                      int64_t num_tokens);
/* Checks for [T, K] i32 or i64. */
sluice_status_t sluice_check_ids(const sluice_moe_t* moe, const sluice_tensor_t* tensor, int64_t num_tokens);
/* Checks for [T, K] f32. */
sluice_status_t sluice_check_route_weights(const sluice_moe_t* moe, const sluice_tensor_t* tensor, const char* name,
                                           int64_t num_tokens);
/* The same for outputs, in which no two elements may share an address. */
sluice_status_t sluice_check_out_route_weights(const sluice_moe_t* moe, const sluice_tensor_t* tensor, const char* name,
                                               int64_t num_tokens);
/* Checks all arrays that the config requires, and the adapters. Copies the caller's struct, which may have an older
 * layout: members that it lacks are absent. */
sluice_status_t sluice_check_experts(const sluice_moe_t* moe, const sluice_expert_tensors_t* experts,
                                     sluice_expert_tensors_t* out_params);
/* Checks the gradients that are wanted, for params that were checked: the layer's dtype or f32, the same for all
 * tensors of a kind. */
sluice_status_t sluice_check_gradients(const sluice_moe_t* moe, const sluice_expert_tensors_t* params,
                                       const sluice_expert_tensors_t* gradients, sluice_expert_tensors_t* out_grads);
/* The largest rank of adapters in a config or a workload. */
#define SLUICE_MOST_LORA_RANK 65535
/* Checks whether a layer with these widths can use the format. where: the config or workload, for messages. On return a
 * block of 0 is replaced by that of the format. */
sluice_status_t sluice_check_weight_format(const char* where, int32_t format, int16_t* inout_block, int64_t model_width,
                                           int64_t hidden_width);
/* For a layer with packed weights: checks codes and scales of one of them, [shape[0], shape[1]] each. */
sluice_status_t sluice_check_packed(const sluice_moe_t* moe, const sluice_tensor_t* codes,
                                    const sluice_tensor_t* scales, const char* name, const char* scales_name,
                                    const int64_t* shape);
/* The same for one weight [rows, cols] in a known format. context: of its device; NULL: host memory. */
sluice_status_t sluice_check_packed_weight(const sluice_tensor_t* codes, const sluice_tensor_t* scales,
                                           const char* name, const char* scales_name, const sluice_context_t* context,
                                           int32_t format, int32_t block, int64_t rows, int64_t cols);
sluice_status_t sluice_check_callbacks(const sluice_moe_t* moe, const sluice_expert_callbacks_t* callbacks);
/* Returns UNSUPPORTED on a device whose memory the host cannot access. */
sluice_status_t sluice_check_is_near(const sluice_context_t* context, const char* what);
/* Returns UNSUPPORTED for a layer with a capacity. */
sluice_status_t sluice_check_is_exact(const sluice_moe_t* moe, const char* what);
/* Returns UNSUPPORTED for layers that send token copies. */
sluice_status_t sluice_check_sends_rows(const sluice_moe_t* moe, const char* what);
sluice_status_t sluice_check_stream(const sluice_moe_t* moe, sluice_stream_t stream);
