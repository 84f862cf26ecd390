// SPDX-License-Identifier: Apache-2.0
/* Checks of the tensors that a layer's calls take; used by the whole-layer calls and by the parts. Private to capi. */
#ifndef SLUICE_CAPI_CHECK_LAYER_H_
#define SLUICE_CAPI_CHECK_LAYER_H_

#include "backend/base/tensor.h"
#include "backend/gemm/packed.h"
#include "backend/moe/layer/layer.h"

/* [T, width] of the layer's dtype with unit column stride; num_tokens -1: any. */
sluice_status_t sluice_check_rows(const sluice_moe_t* moe, const sluice_tensor_t* tensor, const char* name,
                                  int64_t num_tokens);
/* The same for rows that are written: they may not overlap. */
sluice_status_t sluice_check_out_rows(const sluice_moe_t* moe, const sluice_tensor_t* tensor, const char* name,
                                      int64_t num_tokens);
/* [T, K] i32 or i64. */
sluice_status_t sluice_check_ids(const sluice_moe_t* moe, const sluice_tensor_t* tensor, int64_t num_tokens);
/* [T, K] f32. */
sluice_status_t sluice_check_route_weights(const sluice_moe_t* moe, const sluice_tensor_t* tensor, const char* name,
                                           int64_t num_tokens);
/* The same, written: no element lies on another. */
sluice_status_t sluice_check_out_route_weights(const sluice_moe_t* moe, const sluice_tensor_t* tensor, const char* name,
                                               int64_t num_tokens);
/* All arrays that the config asks for, and the adapters. Copies the caller's struct, which may be of an older layout:
 * what it lacks is absent. */
sluice_status_t sluice_check_experts(const sluice_moe_t* moe, const sluice_expert_tensors_t* experts,
                                     sluice_expert_tensors_t* out_params);
/* Gradients that are wanted, of params, which have been checked: the layer's dtype or f32, one for all of a kind. */
sluice_status_t sluice_check_gradients(const sluice_moe_t* moe, const sluice_expert_tensors_t* params,
                                       const sluice_expert_tensors_t* gradients, sluice_expert_tensors_t* out_grads);
/* The largest rank of adapters that a config or a workload may name. */
#define SLUICE_MOST_LORA_RANK 65535
/* Of a config or a workload that messages call `where`: whether a layer of these widths can have the format. On return
 * the block is that of the format where it was 0. */
sluice_status_t sluice_check_weight_format(const char* where, int32_t format, int16_t* inout_block, int64_t model_width,
                                           int64_t hidden_width);
/* Of a layer whose weights are packed: codes and scales of one of them, [shape[0], shape[1]] each. */
sluice_status_t sluice_check_packed(const sluice_moe_t* moe, const sluice_tensor_t* codes,
                                    const sluice_tensor_t* scales, const char* name, const char* scales_name,
                                    const int64_t* shape);
/* The same of one weight [rows, cols] in a format that is known. context: on whose device it lies; NULL: the host's. */
sluice_status_t sluice_check_packed_weight(const sluice_tensor_t* codes, const sluice_tensor_t* scales,
                                           const char* name, const char* scales_name, const sluice_context_t* context,
                                           int32_t format, int32_t block, int64_t rows, int64_t cols);
sluice_status_t sluice_check_callbacks(const sluice_moe_t* moe, const sluice_expert_callbacks_t* callbacks);
/* UNSUPPORTED on a device whose memory the host cannot touch. */
sluice_status_t sluice_check_is_near(const sluice_context_t* context, const char* what);
/* UNSUPPORTED for a layer under a capacity. */
sluice_status_t sluice_check_is_exact(const sluice_moe_t* moe, const char* what);
/* UNSUPPORTED for layers that send token copies. */
sluice_status_t sluice_check_sends_rows(const sluice_moe_t* moe, const char* what);
sluice_status_t sluice_check_stream(const sluice_moe_t* moe, sluice_stream_t stream);

#endif /* SLUICE_CAPI_CHECK_LAYER_H_ */
