/* The optimizer that leaves the device: Adam and AdamW over parameters, masters and moments in host memory.
 *
 * A step is all or nothing: gradients are looked at first, and where one is infinite or no number, in any tensor of any
 * group, every byte stays as it was. The host owns all memory and counts the steps; the library keeps no state between
 * calls but scratch.
 *
 * Numbers: g, m, v and p as below in f32, with m and v in the last rule as they are kept. Each of m, v and p is off
 * from f64 arithmetic by at most 2 ulp of the largest operand of its rule, where v is 0 or at least 1e-30, nothing
 * overflows, and, for v with the weight decay of Adam, beta2 is at least 0.9. Constants are formed in f64 and rounded
 * once. Results are the same bits on every processor, for every number of threads, and however a model is cut into
 * tensors; with clipping the norm is summed in f64 in the order of the tensors.
 *
 *     g = grad / loss_scale * clip                       (Adam: + weight_decay * p)
 *     m = beta1 * m + (1 - beta1) * g
 *     v = beta2 * v + (1 - beta2) * g * g
 *     p = (AdamW: (1 - lr * weight_decay) *) p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + epsilon)
 *
 * Source: Kingma and Ba, Algorithm 1; Loshchilov and Hutter, Algorithm 2; bias correction, epsilon and clipping as
 * torch has them. amsgrad is not there.
 */
#ifndef SLUICE_OPTIMIZER_H_
#define SLUICE_OPTIMIZER_H_

#include "sluice/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sluice_optimizer_s sluice_optimizer_t;

typedef struct sluice_optimizer_config_s {
  size_t struct_size;              /* set by sluice_optimizer_config_init */
  const sluice_ext_header_t* next; /* NULL */
} sluice_optimizer_config_t;

SLUICE_EXPORT void sluice_optimizer_config_init(sluice_optimizer_config_t* out_config, size_t struct_size);

/* One parameter in host memory: `count` elements one behind the other in each array. Arrays of a step may not overlap.
 * dtypes: SLUICE_DTYPE_F32, BF16 or F16. Borrowed until the call returns. */
typedef struct sluice_optimizer_tensor_s {
  int64_t count;    /* >= 0 */
  int64_t step;     /* t, the number of this step; the first is 1. After a step that was skipped it is the same again */
  void* param;      /* in/out of param_dtype */
  float* master;    /* in/out the parameter in f32, which the step starts from; param becomes it, rounded to nearest
                       even. NULL: param has no master */
  const void* grad; /* in of grad_dtype */
  float* exp_avg;   /* in/out m, 0 before the first step */
  float* exp_avg_sq; /* in/out v, 0 before the first step */
  int32_t param_dtype;
  int32_t grad_dtype;
} sluice_optimizer_tensor_t;

/* Parameters that share their numbers. Prepared by _init: AdamW as torch has it by default. */
typedef struct sluice_optimizer_group_s {
  size_t struct_size; /* set by sluice_optimizer_group_init */
  const sluice_optimizer_tensor_t* tensors;
  int64_t num_tensors;
  double lr;               /* >= 0; 1e-3 */
  double beta1, beta2;     /* [0, 1); 0.9, 0.999 */
  double epsilon;          /* >= 0, added to the root; 1e-8 */
  double weight_decay;     /* >= 0; 0.01 */
  int32_t decoupled;       /* 1: AdamW; 0: Adam, whose weight decay is part of the gradient */
  int32_t bias_correction; /* 1; 0: both 1 - beta^t are taken as 1 */
  int32_t maximize;        /* 1: gradients are taken with the other sign; 0 */
  int32_t reserved;        /* 0 */
} sluice_optimizer_group_t;

SLUICE_EXPORT void sluice_optimizer_group_init(sluice_optimizer_group_t* out_group, size_t struct_size);

typedef struct sluice_optimizer_step_args_s {
  size_t struct_size; /* set by sluice_optimizer_step_args_init */
  const sluice_optimizer_group_t* const* groups;
  int64_t num_groups;
  double loss_scale;    /* > 0; gradients are those of the loss times this; 1 */
  double max_norm;      /* clips by the global norm over all groups, as torch's clip_grad_norm_; 0: clips nothing */
  int32_t check_finite; /* 1; 0: the host knows that gradients are finite, which spares one reading of them */
  int32_t reserved;     /* 0 */
} sluice_optimizer_step_args_t;

SLUICE_EXPORT void sluice_optimizer_step_args_init(sluice_optimizer_step_args_t* out_args, size_t struct_size);

typedef struct sluice_optimizer_step_result_s {
  size_t struct_size; /* set by sluice_optimizer_step_result_init */
  double norm;        /* L2 over all groups, of gradients of the loss, before clipping; 0 where nobody looked */
  int32_t skipped;    /* 1: a gradient is infinite or no number, nothing was changed */
  int32_t reserved;   /* 0 */
} sluice_optimizer_step_result_t;

SLUICE_EXPORT void sluice_optimizer_step_result_init(sluice_optimizer_step_result_t* out_result, size_t struct_size);

/* out_optimizer: new, sluice_optimizer_destroy. Threads: thread-safe. Errors: INVALID_ARGUMENT, ABI, NO_MEMORY. */
SLUICE_API sluice_status_t sluice_optimizer_create(const sluice_optimizer_config_t* config,
                                                   sluice_optimizer_t** out_optimizer);

/* One step over all groups, by the caller's OpenMP threads. result may be NULL. Host-complete. Threads: one call at a
 * time for an optimizer, others get BUSY. Errors: INVALID_ARGUMENT (naming group, tensor and what is wrong), ABI, BUSY,
 * NO_MEMORY: nothing was changed. A skipped step is OK, and told by result. */
SLUICE_API sluice_status_t sluice_optimizer_step(sluice_optimizer_t* optimizer,
                                                 const sluice_optimizer_step_args_t* args,
                                                 sluice_optimizer_step_result_t* out_result);

SLUICE_EXPORT void sluice_optimizer_destroy(sluice_optimizer_t* optimizer);

#ifdef __cplusplus
}
#endif

#endif /* SLUICE_OPTIMIZER_H_ */
