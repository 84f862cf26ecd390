// SPDX-License-Identifier: Apache-2.0
/* Sluice's own gate, for hosts that have none: it computes expert ids and route weights from logits, and their
 * backward.
 *
 * Local to a rank; deterministic; f32 throughout. For equal scores the lower expert id is chosen. */
#ifndef SLUICE_GATE_H_
#define SLUICE_GATE_H_

#include "sluice/base.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { SLUICE_SCORE_SOFTMAX = 0, SLUICE_SCORE_SIGMOID = 1 };

/* The routes that an expert keeps if more than its capacity choose it. */
enum {
  SLUICE_DROP_NONE = 0,     /* dropless; capacity is ignored */
  SLUICE_DROP_POSITION = 1, /* first come: all first choices in token order, then all second choices, ... */
  SLUICE_DROP_SCORE = 2     /* highest score first, then token order */
};

typedef struct sluice_gate_config_s {
  size_t struct_size;              /* set by sluice_gate_config_init */
  const sluice_ext_header_t* next; /* NULL */
  int32_t num_experts;             /* E >= 1 */
  int32_t top_k;                   /* K in [1, E] */
  int32_t score;                   /* SLUICE_SCORE_* */
  int32_t renormalize;             /* 1: the K chosen scores are divided by their sum (after dropping) */
  int32_t num_groups;              /* 0 or 1: no groups; else E divisible by it */
  int32_t top_groups;              /* groups that are kept per token; [1, num_groups] with groups */
  int32_t group_score_top;         /* a group's score = sum of its best this many (biased) scores; 0 = 2 */
  int32_t drop_policy;             /* SLUICE_DROP_* */
  int64_t capacity;                /* routes that one expert keeps from this rank; 0: computed from capacity_factor */
  float capacity_factor;           /* capacity = ceil(T * K / E * factor), at least min_capacity */
  float scaling;                   /* factor of the weights (DeepSeek); default 1 */
  int64_t min_capacity;
} sluice_gate_config_t;

SLUICE_EXPORT void sluice_gate_config_init(sluice_gate_config_t* out_config, size_t struct_size);

/* Chooses the experts of each token, and computes route weights and losses.
 *
 *   logits        in   [T, E] f32, unit column stride
 *   bias          in   [E] f32 or NULL: added to the scores only for the choice of experts (bias correction)
 *   expert_ids    out  [T, K] i32, any strides without overlap; -1 where dropped
 *   route_weights out  [T, K] f32, any strides without overlap; 0 where dropped
 *   counts        out  [E] i64 routes per expert before dropping, or NULL
 *   out_aux_loss  out  E * sum over e of (share of the T*K routes that chose e) * (mean score of e), or NULL.
 *                      Sigmoid scores are normalised to sum 1 per token for the mean. 1 when perfectly balanced.
 *   out_z_loss    out  mean over t of logsumexp(logits[t])^2, or NULL
 *
 * T = 0: losses are 0. A NaN score ranks below every number when experts are chosen, so ids are always valid; weights
 * and losses become NaN. Scores that are kept and sum to 0 give weights of 0. A group_score_top above the size of a
 * group is refused (its default of 2 is reduced to the size). capacity_factor 0 with min_capacity 0 drops everything.
 * Threads: thread-safe. Errors: INVALID_ARGUMENT, ABI, NO_MEMORY: no effect. Source: Switch Transformer eq. 4 (aux),
 * ST-MoE eq. 5 (z), DeepSeek-V3 section 2.1.2 (groups, bias). */
SLUICE_API sluice_status_t sluice_gate_forward(const sluice_gate_config_t* config, const sluice_tensor_t* logits,
                                               const sluice_tensor_t* bias, const sluice_tensor_t* expert_ids,
                                               const sluice_tensor_t* route_weights, const sluice_tensor_t* counts,
                                               float* out_aux_loss, float* out_z_loss);

/* Backward of the gate. grad_logits [T, E] f32 out, unit column stride, rows without overlap, overwritten: the sum of
 * the gradients from grad_route_weights [T, K] (NULL: none), grad_aux_loss and grad_z_loss. expert_ids are those that
 * forward wrote; choices, counts and bias have no gradient. Threads, errors: as forward. */
SLUICE_API sluice_status_t sluice_gate_backward(const sluice_gate_config_t* config, const sluice_tensor_t* logits,
                                                const sluice_tensor_t* bias, const sluice_tensor_t* expert_ids,
                                                const sluice_tensor_t* grad_route_weights, float grad_aux_loss,
                                                float grad_z_loss, const sluice_tensor_t* grad_logits);

#ifdef __cplusplus
}
#endif

#endif /* SLUICE_GATE_H_ */
