// SPDX-License-Identifier: Apache-2.0
/* The parts of a layer as separate calls, for hosts with their own experts or their own order of work.
 *
 * dispatch -> (the host's experts) -> combine, with one chunk; each has its backward. The whole-layer calls of moe.h
 * overlap these parts; use the separate calls if the host must do other work between them. Supported on CPU contexts.
 * For layers with `deduplicate` or under a capacity, the parts that exchange rows are UNSUPPORTED. */
#ifndef SLUICE_SPLIT_H_
#define SLUICE_SPLIT_H_

#include "sluice/moe.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Sends each token's row to the ranks that own its experts.
 *
 * Collective. tokens [T, M] and expert_ids [T, K] as in sluice_moe_forward. out_dispatch: new, sluice_dispatch_destroy.
 * The received rows are ordered by local expert, then source rank, then token and k: see sluice_dispatch_rows.
 * Threads, errors: as sluice_moe_forward. Numerics: bit-exact copy. */
typedef struct sluice_dispatch_s sluice_dispatch_t;
SLUICE_API sluice_status_t sluice_dispatch_forward(sluice_moe_t* moe, const sluice_tensor_t* tokens,
                                                   const sluice_tensor_t* expert_ids, sluice_stream_t stream,
                                                   sluice_dispatch_t** out_dispatch);
/* Returns the received rows [R, M] in the layer's dtype, borrowed until destroy; their number R; and the number of rows
 * of each local expert, written to out_rows_per_expert [E_local]. Each may be NULL. Local. Any thread, while no other
 * call uses the dispatch. Errors: INVALID_ARGUMENT, STATE (a fork). */
SLUICE_API sluice_status_t sluice_dispatch_rows(const sluice_dispatch_t* dispatch, void** out_rows,
                                                int64_t* out_num_rows, int64_t* out_rows_per_expert);
/* Sends the experts' outputs back and combines them: out_tokens [T, M] = sum over k of route_weights[t, k] * the row
 * that came back. rows [R, M]: the experts' outputs, in the order of sluice_dispatch_rows; NULL only if there are none.
 * Collective; may be repeated with other rows. Threads, errors: as sluice_moe_forward. */
SLUICE_API sluice_status_t sluice_dispatch_combine(sluice_dispatch_t* dispatch, const void* rows,
                                                   const sluice_tensor_t* route_weights,
                                                   const sluice_tensor_t* out_tokens, sluice_stream_t stream);
/* Backward of combine. grad_rows [R, M] out = route weight * output gradient of each row's token. grad_weight_rows [R]
 * f32 out = the unweighted gradient times rows, which sluice_dispatch_backward returns to the tokens; NULL if no rank
 * needs gradients of route weights (rows may then be NULL too). Collective. Threads, errors: as sluice_moe_forward. */
SLUICE_API sluice_status_t sluice_dispatch_combine_backward(sluice_dispatch_t* dispatch, const void* rows,
                                                            const sluice_tensor_t* route_weights,
                                                            const sluice_tensor_t* grad_out, void* grad_rows,
                                                            float* grad_weight_rows, sluice_stream_t stream);
/* Backward of dispatch. grad_tokens [T, M] out = sum over k of the input gradients of the rows. grad_route_weights [T,
 * K] f32 out is computed from grad_weight_rows [R], which is NULL only if there are no rows; both are NULL, on all
 * ranks, if these gradients are not needed. Collective. Threads, errors: as sluice_moe_forward. */
SLUICE_API sluice_status_t sluice_dispatch_backward(sluice_dispatch_t* dispatch, const void* grad_input_rows,
                                                    const float* grad_weight_rows, const sluice_tensor_t* grad_tokens,
                                                    const sluice_tensor_t* grad_route_weights, sluice_stream_t stream);
SLUICE_EXPORT void sluice_dispatch_destroy(sluice_dispatch_t* dispatch);

/* Counts routes and sorts them: the local part of a dispatch. expert_ids [T, K], each in [0, E), or -1: dropped;
 * out_rows_per_expert [E] i64; out_order [T*K] i64 (or NULL): flat route indices t*K+k sorted by expert, then token,
 * then k. Dropped routes are left out, and the end of the array is filled with -1. Thread-safe, host-complete. Errors:
 * INVALID_ARGUMENT (names the entry), NO_MEMORY. */
SLUICE_API sluice_status_t sluice_route(const sluice_tensor_t* expert_ids, int32_t num_experts,
                                        int64_t* out_rows_per_expert, int64_t* out_order);

/* Runs the local experts on rows that are sorted by local expert: out_rows [R, M]; rows_per_expert [E_local]. pre [R,
 * g*H] receives the pre-activations for the backward, or is NULL. Local; context-exclusive. Errors: INVALID_ARGUMENT,
 * ABI, BUSY, STATE (a fork), NO_MEMORY, UNSUPPORTED (callback experts: call them directly). */
SLUICE_API sluice_status_t sluice_experts_forward(sluice_moe_t* moe, const void* rows, const int64_t* rows_per_expert,
                                                  const sluice_expert_tensors_t* params, void* pre, void* out_rows,
                                                  sluice_stream_t stream);
/* Backward of sluice_experts_forward. grad_rows [R, M] is the gradient of out_rows. grad_input_rows [R, M] out or NULL;
 * grad_params as in sluice_moe_backward. Local; context-exclusive. Errors: as sluice_experts_forward. */
SLUICE_API sluice_status_t sluice_experts_backward(sluice_moe_t* moe, const void* rows, const void* pre,
                                                   const int64_t* rows_per_expert,
                                                   const sluice_expert_tensors_t* params, const void* grad_rows,
                                                   void* grad_input_rows, const sluice_expert_tensors_t* grad_params,
                                                   int32_t grad_mode, sluice_stream_t stream);

#ifdef __cplusplus
}
#endif

#endif /* SLUICE_SPLIT_H_ */
