/* The optimizer that leaves the device: Adam and AdamW over parameters, masters and moments in host memory.
 *
 * A step is all or nothing: gradients are looked at first, and where one is infinite or no number, in any tensor of any
 * group, every byte stays as it was. The host owns all memory and counts the steps; the library keeps no state between
 * calls but scratch.
 *
 * Over ranks that have copies of the parameters (data parallel) a step sums gradients first. The sum goes bucket by
 * bucket, k buckets at a time, and buckets that are summed are updated beside the sum of the next. So that it stays all
 * or nothing the ranks first agree on their largest gradient. Only where a sum could leave f32, or where gradients are
 * clipped, all sums are formed before the first update, in 4 bytes an element.
 *
 * Numbers: g, m, v and p as below in f32, with m and v in the last rule as they are kept. Each of m, v and p is off
 * from f64 arithmetic by at most 2 ulp of the largest operand of its rule, where v is 0 or at least 1e-30, nothing
 * overflows, and, for v with the weight decay of Adam, beta2 is at least 0.9. Constants are formed in f64 and rounded
 * once. Results are the same bits on every processor, for every number of threads, and however a model is cut into
 * tensors; with clipping the norm is summed in f64 in the order of the tensors. Sums over ranks are formed in f32 and
 * in rank order: the same bits for every bucket and every k, on all ranks.
 *
 *     g = grad / loss_scale * clip                       (Adam: + weight_decay * p)
 *     m = beta1 * m + (1 - beta1) * g
 *     v = beta2 * v + (1 - beta2) * g * g
 *     p = (AdamW: (1 - lr * weight_decay) *) p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + epsilon)
 *
 * Source: Kingma and Ba, Algorithm 1; Loshchilov and Hutter, Algorithm 2; bias correction, epsilon and clipping as
 * torch has them. amsgrad is not there. AxoNN (Singh and Bhatele, 2022), sections on memory and on the all-reduce.
 */
#ifndef SLUICE_OPTIMIZER_H_
#define SLUICE_OPTIMIZER_H_

#include "sluice/base.h"
#include "sluice/comm.h"

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
  sluice_comm_t* comm; /* of a step over ranks: the ranks whose gradients of this group are summed, all of them ranks of
                          the step (the group's expert-data-parallel ones); NULL: all ranks of the step */
} sluice_optimizer_group_t;

SLUICE_EXPORT void sluice_optimizer_group_init(sluice_optimizer_group_t* out_group, size_t struct_size);

typedef struct sluice_optimizer_step_args_s {
  size_t struct_size; /* set by sluice_optimizer_step_args_init */
  const sluice_optimizer_group_t* const* groups;
  int64_t num_groups;
  double loss_scale;    /* > 0; gradients are those of the loss times this; 1 */
  double max_norm;      /* clips by the global norm over all groups, as torch's clip_grad_norm_; 0: clips nothing */
  int32_t check_finite; /* 1; 0: the host knows that gradients, and sums, are finite, which spares one reading */
  int32_t reserved;     /* 0 */
  /* Of a step over ranks. Gradients are summed: for their mean give W times the loss_scale. */
  sluice_comm_t* comm; /* of all ranks that step together, borrowed until the call returns; NULL: one rank */
  int64_t bucket;      /* elements, >= 1; 4194304 */
  int64_t sum_buckets; /* k, the buckets that are summed at once; INT64_MAX: all of them, before the first update; 0:
                            chosen by what the steps before took */
} sluice_optimizer_step_args_t;

SLUICE_EXPORT void sluice_optimizer_step_args_init(sluice_optimizer_step_args_t* out_args, size_t struct_size);

typedef struct sluice_optimizer_step_result_s {
  size_t struct_size; /* set by sluice_optimizer_step_result_init */
  double norm;     /* L2 over all groups, of gradients of the loss (their sums), before clipping; 0 where nobody looked,
                      as over ranks without clipping */
  int32_t skipped; /* 1: a gradient, or a sum, is infinite or no number: nothing was changed, on any rank */
  int32_t decided; /* of a step over ranks, 1: all sums were formed before the first update */
  /* Of a step over ranks; else 0. */
  int64_t sum_buckets;    /* k that was taken */
  uint64_t staging_bytes; /* that sums lie in */
  uint64_t sum_ns;        /* in sums, on a thread of their own */
  uint64_t update_ns;     /* in updates, on the calling thread */
  uint64_t step_ns;       /* of the call */
} sluice_optimizer_step_result_t;

SLUICE_EXPORT void sluice_optimizer_step_result_init(sluice_optimizer_step_result_t* out_result, size_t struct_size);

/* out_optimizer: new, sluice_optimizer_destroy. Threads: thread-safe. Errors: INVALID_ARGUMENT, ABI, NO_MEMORY. */
SLUICE_API sluice_status_t sluice_optimizer_create(const sluice_optimizer_config_t* config,
                                                   sluice_optimizer_t** out_optimizer);

/* One step over all groups, by the caller's OpenMP threads. result may be NULL. Host-complete. Threads: one call at a
 * time for an optimizer, others get BUSY. Errors: INVALID_ARGUMENT (naming group, tensor and what is wrong), ABI, BUSY,
 * NO_MEMORY: nothing was changed. A skipped step is OK, and told by result.
 *
 * With args->comm collective over it, comm-exclusive for all communicators of the step, and alike on all ranks: groups
 * in the same order, with the same numbers, and tensors of the same counts and dtypes where they are summed. Further
 * errors, on all ranks, that change nothing: MISMATCH (names a rank and what differs), PEER_REFUSED (another rank had
 * one of these: names it). ABI and BUSY of one rank are not told: the others wait. NO_MEMORY may end comm, and what
 * exchanges return does (PEER_LOST names the rank): then buckets whose sums had come are updated and others are not,
 * unless all sums are formed first (INT64_MAX of one communicator, clipping), where nothing was changed on this rank if
 * a sum failed. */
SLUICE_API sluice_status_t sluice_optimizer_step(sluice_optimizer_t* optimizer,
                                                 const sluice_optimizer_step_args_t* args,
                                                 sluice_optimizer_step_result_t* out_result);

SLUICE_EXPORT void sluice_optimizer_destroy(sluice_optimizer_t* optimizer);

#ifdef __cplusplus
}
#endif

#endif /* SLUICE_OPTIMIZER_H_ */
