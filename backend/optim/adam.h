// SPDX-License-Identifier: Apache-2.0
/* Adam and AdamW: the numbers of a step, and the kernels that take it over rows of memory [own, after Kingma and Ba,
 * Alg. 1; Loshchilov and Hutter, Alg. 2, with the bias correction and the place of epsilon that torch has].
 *
 *     g = grad * grad_scale                              (Adam: + weight_decay * p)
 *     m = beta1 * m + (1 - beta1) * g
 *     v = beta2 * v + (1 - beta2) * g * g
 *     p = (AdamW: (1 - lr * weight_decay) *) p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + epsilon)
 *
 * in f32, with m and v in the third rule as they are kept. Each of m, v and p is off from f64 arithmetic by at most two
 * units in the last place of the largest operand of its rule, where no number on the way leaves the range of f32.
 * Constants are formed in f64 and rounded once. What root, sum and quotient of the third rule lose is computed and
 * added back: else p would be five units off where it is smaller than what it moves by.
 *
 * That is SLUICE_ADAM_EXACT. With SLUICE_ADAM_ROUNDED each operation of the rules is rounded once, as in torch, and
 * errors are of torch's size: less arithmetic, which is what a step takes where its data are in a cache.
 *
 * At the ends of the range a step is torch's: where v overflows it is infinite from then on and p no longer moves by m;
 * an infinite p stays so; NaN in p, m, v or g makes p NaN. One thing differs: an epsilon so small that
 * epsilon * sqrt(1 - beta2^t) is no normal number of f32 counts as the smallest one.
 *
 * Multiplications are fused with additions where the loops say so and nowhere else, and roots and quotients are
 * rounded to nearest. So every instruction set gives the same bits. */
#ifndef SLUICE_BACKEND_OPTIM_ADAM_H_
#define SLUICE_BACKEND_OPTIM_ADAM_H_

#include <stdint.h>

#include "backend/base/status.h"

/* What a user sets of a group of parameters. */
typedef struct sluice_adam_rule_s {
  double lr, beta1, beta2, epsilon, weight_decay;
  int32_t is_decoupled;      /* 1: AdamW; 0: Adam, whose weight decay is part of the gradient */
  int32_t corrects_the_bias; /* 0: both 1 - beta^t are taken as 1 */
  int32_t maximizes;         /* 1: gradients are taken with the other sign */
} sluice_adam_rule_t;

/* What all elements of a step share. Both sides of the quotient are multiplied by sqrt(1 - beta2^t), which spares the
 * root a factor. */
typedef struct sluice_adam_numbers_s {
  float grad_scale; /* 1 / (scale of the loss), and what clipping makes of it */
  float l2;         /* Adam: weight_decay; else 0 */
  float one_minus_beta1, one_minus_beta2;
  float decay;                     /* AdamW: lr * weight_decay; else 0 */
  float beta2, kept;               /* of rounded steps alone; kept: 1 - lr * weight_decay, or 1 */
  float epsilon_high, epsilon_low; /* epsilon * sqrt(1 - beta2^t), and what its rounding lost */
  float step_high, step_low;       /* lr * sqrt(1 - beta2^t) / (1 - beta1^t), and what its rounding lost */
} sluice_adam_numbers_t;

/* Refuses a rule that no training means: INVALID_ARGUMENT naming the number. */
sluice_status_t sluice_adam_check(const sluice_adam_rule_t* rule);
/* Of the step with number `t`, the first is 1. grad_scale as it is in the result. */
sluice_adam_numbers_t sluice_adam_numbers_of(const sluice_adam_rule_t* rule, int64_t t, double grad_scale);

/* A parameter, all of `count` elements, one after the other. Pointers are borrowed and may not overlap. */
typedef struct sluice_adam_tensor_s {
  int64_t count;
  int64_t step;      /* the number of the step, the first is 1 */
  void* param;       /* of param_dtype, updated */
  float* master;     /* the parameter in f32, which is updated in its place; param becomes it, rounded to nearest even;
                        NULL: param has no master */
  const void* grad;  /* of grad_dtype */
  float* exp_avg;    /* m */
  float* exp_avg_sq; /* v */
  int32_t param_dtype, grad_dtype; /* F32, BF16 or F16 */
} sluice_adam_tensor_t;

/* What a scan finds in gradients. */
typedef struct sluice_adam_scan_s {
  double sum_of_squares; /* of grad as it lies, in f64, in an order that depends on neither threads nor processor */
  float largest;         /* of |grad|, infinity where one is infinite or no number */
} sluice_adam_scan_t;

typedef enum sluice_adam_arithmetic_e {
  SLUICE_ADAM_EXACT = 0,
  SLUICE_ADAM_ROUNDED,
  SLUICE_ADAM_ARITHMETICS
} sluice_adam_arithmetic_t;

/* Kernels of one instruction set, over elements [first, first + count) of a tensor. */
typedef struct sluice_adam_kernels_s {
  const char* name;
  void (*update)(const sluice_adam_tensor_t* tensor, int64_t first, int64_t count, const sluice_adam_numbers_t* n);
  sluice_adam_scan_t (*scan)(const void* grad, int32_t dtype, int64_t first, int64_t count);
  /* Where nobody needs the sum of squares, which may be 0. */
  sluice_adam_scan_t (*look)(const void* grad, int32_t dtype, int64_t first, int64_t count);
} sluice_adam_kernels_t;

/* Each an array, by sluice_adam_arithmetic_t. */
extern const sluice_adam_kernels_t sluice_adam_plain[SLUICE_ADAM_ARITHMETICS];
/* NULL where this processor lacks the instructions. */
const sluice_adam_kernels_t* sluice_adam_avx2(void);
const sluice_adam_kernels_t* sluice_adam_avx512(void);
/* The widest set that this processor has. */
const sluice_adam_kernels_t* sluice_adam_dispatch(void);

#endif /* SLUICE_BACKEND_OPTIM_ADAM_H_ */
