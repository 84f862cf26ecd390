// SPDX-License-Identifier: Apache-2.0
/* Adam and AdamW: the constants of a step, and the kernels that run it over rows of memory [own, after Kingma and Ba,
 * Alg. 1; Loshchilov and Hutter, Alg. 2, with torch's bias correction and place of epsilon].
 *
 *     g = grad * grad_scale                              (Adam: + weight_decay * p)
 *     m = beta1 * m + (1 - beta1) * g
 *     v = beta2 * v + (1 - beta2) * g * g
 *     p = (AdamW: (1 - lr * weight_decay) *) p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + epsilon)
 *
 * All is in f32, and the third rule uses m and v as stored. Each of m, v and p differs from f64 arithmetic by at most
 * two units in the last place of the largest operand of its rule, unless an intermediate leaves the range of f32.
 * Constants are computed in f64 and rounded once. The rounding errors of root, sum and quotient in the third rule are
 * computed and added back; without this, p would be five units off where it is smaller than its update.
 *
 * That is SLUICE_ADAM_EXACT. With SLUICE_ADAM_ROUNDED each operation of the rules is rounded once, as in torch, and
 * errors are of torch's size. This is less arithmetic, which limits a step whose data are in a cache.
 *
 * At the ends of the range a step gives torch's results: a v that overflows stays infinite and p no longer moves by m;
 * an infinite p stays infinite; NaN in p, m, v or g makes p NaN. There is one difference: if epsilon is so small that
 * epsilon * sqrt(1 - beta2^t) is no normal number of f32, the smallest normal number is used.
 *
 * Multiplications are fused with additions only where the loops say so, and roots and quotients are rounded to nearest.
 * Therefore every instruction set gives the same bits. */
#pragma once

#include <stdint.h>

#include "backend/base/status.h"
#include "backend/base/threads.h"

/* The settings of a parameter group. */
typedef struct sluice_adam_rule_s {
  double lr, beta1, beta2, epsilon, weight_decay;
  int32_t is_decoupled;      /* 1: AdamW; 0: Adam, which adds weight decay to the gradient */
  int32_t corrects_the_bias; /* 0: both 1 - beta^t are taken as 1 */
  int32_t maximizes;         /* 1: negates the gradients */
} sluice_adam_rule_t;

/* Constants that all elements of a step share. Both sides of the quotient are multiplied by sqrt(1 - beta2^t), which
 * saves a multiplication of the root. */
typedef struct sluice_adam_numbers_s {
  float grad_scale; /* 1 / loss scale, times the clip factor */
  float l2;         /* Adam: weight_decay; else 0 */
  float one_minus_beta1, one_minus_beta2;
  float decay;                     /* AdamW: lr * weight_decay; else 0 */
  float beta2, kept;               /* only for rounded steps; kept: 1 - lr * weight_decay, or 1 */
  float epsilon_high, epsilon_low; /* epsilon * sqrt(1 - beta2^t), and its rounding error */
  float step_high, step_low;       /* lr * sqrt(1 - beta2^t) / (1 - beta1^t), and its rounding error */
} sluice_adam_numbers_t;

/* Checks a rule. Errors: INVALID_ARGUMENT naming the number that is out of range. */
sluice_status_t sluice_adam_check(const sluice_adam_rule_t* rule);
/* Returns the constants of step `t` (the first is 1). grad_scale: without the sign of `maximizes`. */
sluice_adam_numbers_t sluice_adam_numbers_of(const sluice_adam_rule_t* rule, int64_t t, double grad_scale);

/* A parameter of `count` contiguous elements. Pointers are borrowed and may not overlap. */
typedef struct sluice_adam_tensor_s {
  int64_t count;
  int64_t step;  /* the number of the step, the first is 1 */
  void* param;   /* of param_dtype, updated */
  float* master; /* the f32 parameter, updated in place; param becomes its value, rounded to nearest even; NULL: param
                    has no master */
  const void* grad;                /* of grad_dtype */
  float* exp_avg;                  /* m */
  float* exp_avg_sq;               /* v */
  int32_t param_dtype, grad_dtype; /* F32, BF16 or F16 */
} sluice_adam_tensor_t;

/* The result of a scan over gradients. */
typedef struct sluice_adam_scan_s {
  double sum_of_squares; /* of grad as stored, in f64, in an order that depends on neither threads nor processor */
  float largest;         /* of |grad|; infinity if an element is infinite or NaN */
} sluice_adam_scan_t;

typedef enum sluice_adam_arithmetic_e {
  SLUICE_ADAM_EXACT = 0,
  SLUICE_ADAM_ROUNDED,
  SLUICE_ADAM_ARITHMETICS
} sluice_adam_arithmetic_t;

/* The kernels of one instruction set. They work on elements [first, first + count) of a tensor. */
typedef struct sluice_adam_kernels_s {
  const char* name;
  void (*update)(const sluice_adam_tensor_t* tensor, int64_t first, int64_t count, const sluice_adam_numbers_t* n);
  sluice_adam_scan_t (*scan)(const void* grad, int32_t dtype, int64_t first, int64_t count);
  /* For callers that do not need the sum of squares: it may be 0. */
  sluice_adam_scan_t (*look)(const void* grad, int32_t dtype, int64_t first, int64_t count);
} sluice_adam_kernels_t;

/* Each is an array indexed by sluice_adam_arithmetic_t. */
extern const sluice_adam_kernels_t sluice_adam_plain[SLUICE_ADAM_ARITHMETICS];
/* Return NULL if this processor lacks the instructions. */
const sluice_adam_kernels_t* sluice_adam_avx2(void);
const sluice_adam_kernels_t* sluice_adam_avx512(void);
/* Returns the widest instruction set that this processor has. */
const sluice_adam_kernels_t* sluice_adam_dispatch(void);

/* ---- the arguments of a step: tensors in groups, and the settings that all groups share ---- */

/* The elements of many tensors are one line of pieces, which threads share. The boundaries of pieces depend only on the
 * tensors, so sums by piece do not depend on the number of threads. In elements; a tensor's last piece is shorter. */
enum { SLUICE_ADAM_PIECE = 1 << 15 };

/* Tensors with the same settings. */
typedef struct sluice_adam_group_s {
  sluice_adam_rule_t rule;
  const sluice_adam_tensor_t* tensors;
  int64_t num_tensors;
} sluice_adam_group_t;

typedef struct sluice_adam_step_s {
  const sluice_adam_group_t* groups;
  int64_t num_groups;
  double loss_scale;   /* the gradients were multiplied by this; 1: not scaled */
  double max_norm;     /* clips by the global norm over all groups; 0: no clipping */
  int32_t looks_first; /* 0: the gradients are known to be finite; without clipping they are then read only once */
  const sluice_adam_kernels_t* kernels;
  const sluice_threads_t* threads;
} sluice_adam_step_t;
