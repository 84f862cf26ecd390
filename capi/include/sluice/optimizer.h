// SPDX-License-Identifier: Apache-2.0
/* Adam and AdamW with master parameters and moments in host memory. Parameters and gradients are also in host memory,
 * or in the memory of a CUDA device, which then computes the updates (`context` in the config).
 *
 * A step changes either everything or nothing. It checks the gradients first; if a gradient of any tensor of any group
 * is infinite or NaN, no byte changes. The host owns all memory and counts the steps. The library keeps no state
 * between calls except scratch memory.
 *
 * Over ranks that hold copies of the parameters (data parallel), a step first sums gradients. It sums k buckets at a
 * time, and updates summed buckets while the next ones are summed. The ranks first agree on their largest gradient, so
 * that the step still changes everything or nothing. All sums are completed before the first update only if a sum could
 * overflow f32 or if gradients are clipped; this takes 4 bytes per element.
 *
 * Numbers: g, m, v and p are computed in f32 by the rules below; the last rule uses m and v as they are stored. The
 * error of each of m, v and p, unless the config says SLUICE_OPTIMIZER_ROUNDED, against f64 arithmetic is at most 2 ulp
 * of the largest operand of its rule, provided that v is 0 or at least 1e-30, nothing overflows, and, for v with the
 * weight decay of Adam, beta2 is at least 0.9. Constants are computed in f64 and rounded once. Results have the same
 * bits on every processor, for every number of threads, and for every division of a model into tensors; with clipping
 * the norm is summed in f64 in the order of the tensors. Sums over ranks are computed in f32 and in rank order: they
 * have the same bits for every bucket size and every k, on all ranks. A finite gradient above about 5.8e20 makes v
 * infinite, as in torch: from then on the parameter decays and m does not change it. An infinite parameter stays
 * infinite.
 *
 *     g = grad / loss_scale * clip                       (Adam: + weight_decay * p)
 *     m = beta1 * m + (1 - beta1) * g
 *     v = beta2 * v + (1 - beta2) * g * g
 *     p = (AdamW: (1 - lr * weight_decay) *) p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + epsilon)
 *
 * Source: Kingma and Ba, Algorithm 1; Loshchilov and Hutter, Algorithm 2; bias correction, epsilon and clipping follow
 * torch. amsgrad is not supported. AxoNN (Singh and Bhatele, 2022), sections on memory and on the all-reduce. */
#ifndef SLUICE_OPTIMIZER_H_
#define SLUICE_OPTIMIZER_H_

#include "sluice/base.h"
#include "sluice/comm.h"
#include "sluice/context.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How updates are rounded. Both have the same bits on every processor and for every number of threads. */
enum {
  SLUICE_OPTIMIZER_EXACT = 0, /* within 2 ulp of f64 arithmetic, see above */
  SLUICE_OPTIMIZER_ROUNDED =
      1 /* each operation is rounded once, as in torch: less arithmetic, errors of torch's size */
};

typedef struct sluice_optimizer_s sluice_optimizer_t;
typedef struct sluice_optimizer_file_s sluice_optimizer_file_t;

typedef struct sluice_optimizer_config_s {
  size_t struct_size;              /* set by sluice_optimizer_config_init */
  const sluice_ext_header_t* next; /* NULL */
  /* A context on a CUDA device: param and grad of all tensors are in its memory, and updates run there. master, exp_avg
   * and exp_avg_sq stay in host memory and are copied to the device bucket by bucket while other buckets are updated.
   * The device then holds 4 bytes for each 16-bit parameter, and 16 for each element of a slot [AxoNN, section on
   * memory]. Retained. NULL: everything is in host memory. */
  sluice_context_t* context;
  int64_t device_bucket;    /* elements of a slot on the device, 1 to 2^40; default 4194304 */
  int32_t device_num_slots; /* 2: copies and updates run in parallel; 1: they alternate; default 2 */
  int32_t arithmetic;       /* SLUICE_OPTIMIZER_*; default SLUICE_OPTIMIZER_EXACT, the only one on a device */
} sluice_optimizer_config_t;

SLUICE_EXPORT void sluice_optimizer_config_init(sluice_optimizer_config_t* out_config, size_t struct_size);

/* One parameter: `count` contiguous elements in each array. Arrays of a step must not overlap. dtypes:
 * SLUICE_DTYPE_F32, BF16 or F16. Borrowed until the call returns; for a step on a device, until its stream has
 * completed the step. */
typedef struct sluice_optimizer_tensor_s {
  int64_t count;     /* >= 0 */
  int64_t step;      /* t, the number of this step; the first is 1. The number is the same again after a step that was
                        skipped */
  void* param;       /* in/out, of param_dtype */
  float* master;     /* in/out, the parameter in f32, from which the step starts; param is set to it, rounded to nearest
                        even. NULL: param has no master, which a step on a device does not support */
  const void* grad;  /* in, of grad_dtype */
  float* exp_avg;    /* in/out, m, 0 before the first step */
  float* exp_avg_sq; /* in/out, v, 0 before the first step */
  int32_t param_dtype;
  int32_t grad_dtype;
} sluice_optimizer_tensor_t;

/* Parameters with the same hyperparameters. _init sets the defaults of torch's AdamW. */
typedef struct sluice_optimizer_group_s {
  size_t struct_size; /* set by sluice_optimizer_group_init */
  const sluice_optimizer_tensor_t* tensors;
  int64_t num_tensors;
  double lr;               /* >= 0; default 1e-3 */
  double beta1, beta2;     /* [0, 1); default 0.9, 0.999 */
  double epsilon;          /* >= 0, added to the root; default 1e-8 */
  double weight_decay;     /* >= 0; default 0.01 */
  int32_t decoupled;       /* 1: AdamW; 0: Adam, which adds the weight decay to the gradient; default 1 */
  int32_t bias_correction; /* default 1; 0: both 1 - beta^t are taken as 1 */
  int32_t maximize;        /* 1: the sign of gradients is reversed; default 0 */
  int32_t reserved;        /* 0 */
  sluice_comm_t* comm;     /* in a step over ranks: the ranks whose gradients of this group are summed, all of which are
                              ranks of the step (for instance the expert-data-parallel group); NULL: all ranks of the
                              step */
} sluice_optimizer_group_t;

SLUICE_EXPORT void sluice_optimizer_group_init(sluice_optimizer_group_t* out_group, size_t struct_size);

typedef struct sluice_optimizer_step_args_s {
  size_t struct_size; /* set by sluice_optimizer_step_args_init */
  const sluice_optimizer_group_t* const* groups;
  int64_t num_groups;
  double loss_scale;    /* > 0; gradients are those of the loss times this factor; default 1 */
  double max_norm;      /* clips by the global norm over all groups, as torch's clip_grad_norm_; 0: does not clip */
  int32_t check_finite; /* default 1; 0: the host knows that gradients and sums are finite, which saves one pass over
                           them */
  int32_t reserved;     /* 0 */
  /* The following fields are for a step over ranks. Gradients are summed: to get their mean, multiply loss_scale by
   * W. */
  sluice_comm_t* comm; /* communicator of all ranks that take the step, borrowed until the call returns; NULL: one
                          rank */
  int64_t bucket;      /* elements, >= 1; default 4194304 */
  int64_t sum_buckets; /* k, the number of buckets that are summed at once; INT64_MAX: all, before the first update; 0:
                          chosen from the times of earlier steps */
  /* The file that holds masters and moments, borrowed until the call returns. master, exp_avg and exp_avg_sq of all
   * tensors are then NULL, and buckets of them are read, updated and written in parallel. NULL: the tensors hold
   * them. */
  sluice_optimizer_file_t* file;
  sluice_stream_t stream; /* in a step on a device: the stream of the host, after whose work the step runs; else NULL */
} sluice_optimizer_step_args_t;

SLUICE_EXPORT void sluice_optimizer_step_args_init(sluice_optimizer_step_args_t* out_args, size_t struct_size);

typedef struct sluice_optimizer_step_result_s {
  size_t struct_size; /* set by sluice_optimizer_step_result_init */
  double norm;     /* L2 norm over all groups of the gradients of the loss (their sums), before clipping; 0 if the norm
                      was not computed, as without clipping over ranks or with SLUICE_OPTIMIZER_ROUNDED */
  int32_t skipped; /* 1: a gradient or a sum is infinite or NaN: nothing was changed on any rank */
  int32_t decided; /* in a step over ranks, 1: all sums were completed before the first update */
  /* The following fields are for a step over ranks; else 0. Times are 0 on a device. */
  int64_t sum_buckets;        /* the k that was used */
  uint64_t staging_bytes;     /* memory of the sums, and on a device of the data received for them */
  uint64_t sum_ns;            /* time in sums, on a thread of their own */
  uint64_t update_ns;         /* time in updates, on the calling thread */
  uint64_t step_ns;           /* time of the call */
  uint64_t read_ns, write_ns; /* time of reads and writes of a file, each on a thread of its own */
} sluice_optimizer_step_result_t;

SLUICE_EXPORT void sluice_optimizer_step_result_init(sluice_optimizer_step_result_t* out_result, size_t struct_size);

/* Creates an optimizer. out_optimizer: new, sluice_optimizer_destroy. With a context the slots are allocated from the
 * context's memory: they count in its statistics and towards its budget. Threads: thread-safe; with a context,
 * context-exclusive. Errors: INVALID_ARGUMENT, ABI, NO_MEMORY, OVER_BUDGET; UNSUPPORTED (a context on a CPU: pass NULL
 * instead). */
SLUICE_API sluice_status_t sluice_optimizer_create(const sluice_optimizer_config_t* config,
                                                   sluice_optimizer_t** out_optimizer);

/* Runs one step over all groups, on the caller's OpenMP threads. out_result may be NULL. Host-complete. On a device
 * stream-complete, and the result of the check is known: the call waits for the earlier work of the stream and for one
 * check of the gradients. Threads: one call at a time for an optimizer, others get BUSY; on a device context-exclusive.
 * Errors: INVALID_ARGUMENT (names the group, the tensor and the problem: more than 2^48 elements, arrays that overlap),
 * ABI, BUSY, STATE (a forked child), NO_MEMORY: nothing was changed. A skipped step returns OK and sets `skipped`.
 *
 * With args->comm the call is collective over it and comm-exclusive for all communicators of the step. Arguments are
 * the same on all ranks: groups in the same order, with the same hyperparameters, and tensors with the same counts and
 * dtypes where they are summed. Further errors, on all ranks, that change nothing: MISMATCH (names a rank and what
 * differs), PEER_REFUSED (another rank had one of these, with its name). ABI and BUSY of one rank are not reported to
 * the others, which wait. NO_MEMORY may end comm, and an error of its exchanges does (PEER_LOST names the rank):
 * buckets whose sums had arrived are then updated and others are not. If all sums are completed first (INT64_MAX of one
 * communicator, clipping) and a sum failed, nothing was changed on this rank.
 *
 * On a device results have the bits of a step in host memory, for every bucket size and every k. Page-lock the arrays
 * in host memory, otherwise copies wait for each other. Over ranks gradients are summed on the device, by communicators
 * over nccl, or by local ones if ranks are threads; k is 2 unless it is given. If sums must be checked first they are
 * computed twice, which takes no memory. Further errors: UNSUPPORTED with the name of the argument (file; max_norm:
 * clip before the step; another communicator) and STATE (the stream is being captured), after which nothing was
 * changed; EXTERNAL (the driver's text), after which buckets may be at different steps, and which ends the
 * communicators of the step.
 *
 * With args->file the step of each tensor is that of the file + 1, and each rank has its own file. Further errors that
 * change nothing: MISMATCH (the file belongs to other tensors) and EXTERNAL (the error of the disk, or the file was
 * damaged after it was opened) on this rank, and PEER_REFUSED on the others. Ranks agree before their files record that
 * the step is complete, and once more after that, so that a disk which fails in between undoes the step on all ranks.
 * Other errors of a step over ranks also change nothing. If the disk cannot even return the former parameters, a line
 * of the log says so, and steps return STATE until _load has filled the parameters. A process that is killed between
 * the two handshakes may leave its file one step ahead: if they are opened with config.comm, the files continue from
 * the step that all of them have. */
SLUICE_API sluice_status_t sluice_optimizer_step(sluice_optimizer_t* optimizer,
                                                 const sluice_optimizer_step_args_t* args,
                                                 sluice_optimizer_step_result_t* out_result);

/* Destroys the optimizer. Accepts NULL. With a context the call waits for steps on the device, and is
 * context-exclusive. If a rank was lost, first abort or destroy the communicators of the step; otherwise the call waits
 * for sums that never arrive. */
SLUICE_EXPORT void sluice_optimizer_destroy(sluice_optimizer_t* optimizer);

/* ---- masters and moments in a file ------------------------------------------------------------------------------- */

/* Masters and moments in a file, for models whose states do not fit into memory. The file holds two steps, so 12 bytes
 * per element are stored twice. The last complete step is only read, and the next step is written into the other place.
 * A process that ends in the middle of a step therefore leaves the last complete step, and the file records that one
 * more was begun. In memory a step takes 24 bytes for each element of a bucket. Elements are stored in the order of
 * groups and tensors, so this order must stay the same.
 *
 * If other code has changed a parameter since the last step, the step uses the new value. For f32 the step reads the
 * parameter. For a 16-bit parameter it uses the file's master if that rounds to the parameter, else the parameter. A
 * step keeps copies of such parameters until it ends, so that it can restore them.
 *
 * The file records the groups, the shapes and dtypes of its tensors, the rank and the world size. Each step in it has a
 * checksum. A step that a crash of the machine has left incomplete, or that was damaged, is not used when the file is
 * opened: the step before it is. A new file is called PATH.unfinished until it holds a complete step, and then gets its
 * name. A PATH.unfinished that an earlier process has left is reused.
 *
 * One process has a file open at a time. A forked child has no access to it: calls return STATE there, and the child
 * holds no lock. Threads: one call at a time for a file, others get BUSY. */
typedef struct sluice_optimizer_file_config_s {
  size_t struct_size;              /* set by sluice_optimizer_file_config_init */
  const sluice_ext_header_t* next; /* NULL */
  const char* path;                /* read during the call; of a symbolic link, the target is used */
  int64_t step;     /* create: the number of steps that the tensors have taken; open: which of the file's two steps; -1:
                       none, or the later one; default -1 */
  int32_t durable;  /* 1: a step is on the disk before it ends, and survives a crash of the machine; 0: it survives a
                       crash of the process; default 0 */
  int32_t reserved; /* 0 */
  /* Communicator of the ranks that take steps together, each with a file of its own. create and open are then
   * collective over it: all ranks create or all open a file, and they continue from the last step that is complete in
   * all files. Borrowed until the call returns. NULL: the files are not compared. */
  sluice_comm_t* comm;
  int32_t rank, world_size; /* the rank and world size of the file, which it stores; with comm those of comm are used;
                               default 0 of 1 */
  /* open: the tensors that the file must belong to; grad is not read; NULL: only load and step compare, by counts and
   * dtypes */
  const sluice_optimizer_group_t* const* groups;
  int64_t num_groups;
  /* Shapes of all tensors of all groups, in order: 0 to 64 dimensions each. NULL: each tensor has one dimension. */
  const int32_t* num_dims;
  const int64_t* dims;
  int32_t replaces;  /* create: 1: the new file replaces an existing file at path when it is complete; default 0 */
  int32_t reserved2; /* 0 */
} sluice_optimizer_file_config_t;

SLUICE_EXPORT void sluice_optimizer_file_config_init(sluice_optimizer_file_config_t* out_config, size_t struct_size);

/* Creates a file and fills it from tensors: with their master or, if that is NULL, param; with their moments or, if
 * these are NULL, 0. grad is not read. Space on the disk is reserved for the whole file. out_file: new,
 * sluice_optimizer_file_close. Thread-safe; with comm comm-exclusive. Errors: INVALID_ARGUMENT, ABI, EXTERNAL (the file
 * exists, the disk is full, or another error of the system), BUSY (another process is creating it), NO_MEMORY, and with
 * comm PEER_REFUSED, MISMATCH (another rank opens a file) and errors of the exchanges: then no file was created or
 * replaced. */
SLUICE_API sluice_status_t sluice_optimizer_file_create(const sluice_optimizer_file_config_t* config,
                                                        const sluice_optimizer_group_t* const* groups,
                                                        int64_t num_groups, sluice_optimizer_file_t** out_file);

/* Opens an existing file and reads both of its steps once; _load copies the parameters from it. _info and a line of the
 * log report a step that was begun and never ended; a line of the log reports a damaged step. Thread-safe; with comm
 * comm-exclusive. Errors: INVALID_ARGUMENT, ABI, NOT_FOUND (no such file, or no such step in it), EXTERNAL (the file is
 * of another kind or truncated, or no step in it is complete), MISMATCH (the file belongs to another model, with the
 * first tensor that differs, or to another rank; with comm: no step is in the files of all ranks), BUSY (it is open
 * elsewhere), NO_MEMORY, and with comm PEER_REFUSED and errors of the exchanges. */
SLUICE_API sluice_status_t sluice_optimizer_file_open(const sluice_optimizer_file_config_t* config,
                                                      sluice_optimizer_file_t** out_file);

/* Sets parameters to the file's masters, rounded to nearest even. Fills param, master, exp_avg and exp_avg_sq where a
 * tensor has them, as for a checkpoint. Any thread, one call at a time. Errors: INVALID_ARGUMENT, MISMATCH (the file
 * belongs to other tensors, with the first that differs), ABI, BUSY, STATE (a forked child), NO_MEMORY: nothing was
 * changed; EXTERNAL (the error of the disk, or the file was damaged after it was opened): tensors are filled in part,
 * or with damaged data. */
SLUICE_API sluice_status_t sluice_optimizer_file_load(sluice_optimizer_file_t* file,
                                                      const sluice_optimizer_group_t* const* groups,
                                                      int64_t num_groups);

typedef struct sluice_optimizer_file_info_s {
  size_t struct_size;      /* set by sluice_optimizer_file_info_init */
  int64_t count;           /* elements */
  int64_t step;            /* the current step, from which later steps continue */
  int64_t other_step;      /* the other step that may be opened, until the next step; -1: none */
  int64_t unfinished_step; /* a step that was begun and had not ended when the file was opened; reset when a step ends;
                              -1: none, or its record is damaged */
  uint64_t bytes;          /* size of the file */
} sluice_optimizer_file_info_t;

SLUICE_EXPORT void sluice_optimizer_file_info_init(sluice_optimizer_file_info_t* out_info, size_t struct_size);

/* Returns the steps and the size of the file. Any thread, one call at a time. Errors: INVALID_ARGUMENT, ABI, BUSY,
 * STATE (a forked child). */
SLUICE_API sluice_status_t sluice_optimizer_file_info(sluice_optimizer_file_t* file,
                                                      sluice_optimizer_file_info_t* out_info);

/* Closes the file, which stays on the disk. Any thread, unless another call uses the file; accepts NULL. */
SLUICE_EXPORT void sluice_optimizer_file_close(sluice_optimizer_file_t* file);

/* ---- prediction -------------------------------------------------------------------------------------------------- */

/* A step of one rank, for a simulation. Updates run *near*: on a device, or in host memory. States (masters and
 * moments) are also near, or *far*: in host memory or in a file, from which they are copied bucket by bucket. Rates are
 * in bytes per second; 0: the transfer takes no time. Prepared by _init. */
typedef struct sluice_optimizer_workload_s {
  size_t struct_size;                 /* set by sluice_optimizer_workload_init */
  const sluice_ext_header_t* next;    /* NULL */
  int64_t count;                      /* phi, the number of elements of all parameters; 1 to 2^48 */
  int64_t bucket;                     /* elements; default 4194304 */
  int64_t sum_buckets;                /* k; 0: the fastest k; INT64_MAX: all */
  int32_t param_dtype, grad_dtype;    /* F32, BF16 or F16; default BF16 */
  int32_t num_slots;                  /* slots for states. 0: states are near; 1, or 2 for copies in parallel with
                                         updates: states are far; default 2 */
  int32_t world_size;                 /* ranks whose gradients are summed; default 1 */
  int32_t decides;                    /* 1: all sums are completed before the first update, as with clipping; default
                                         0 */
  int32_t sums_on_device;             /* 1: sums on a device, which receive the data of the ranks in addition to
                                         gradients in f32; default 0 */
  double update_rate;                 /* bandwidth of the memory that updates read and write */
  double copy_in_rate, copy_out_rate; /* from far to near and back; both run in parallel */
  double sum_rate;                    /* bandwidth of a rank's link */
  double sum_seconds;                 /* fixed time of a sum of any size */
} sluice_optimizer_workload_t;

SLUICE_EXPORT void sluice_optimizer_workload_init(sluice_optimizer_workload_t* out_workload, size_t struct_size);

/* Bytes are those that a step takes; seconds are simulated. */
typedef struct sluice_optimizer_prediction_s {
  size_t struct_size; /* set by sluice_optimizer_prediction_init */
  /* Near. */
  uint64_t param_bytes, grad_bytes;
  uint64_t slot_bytes;    /* states in slots: 12 bytes for each element of a slot, each array aligned up to 64 */
  uint64_t staging_bytes; /* gradients in f32: those of k buckets, twice if updates run in parallel, or those of all; on
                             a device also the data that ranks send for k buckets */
  uint64_t near_bytes;    /* all of these, and states that are near */
  /* States: the masters of parameters that have one, and both moments. */
  uint64_t state_bytes;
  uint64_t file_bytes;    /* size of a file for the states that holds two steps */
  uint64_t whole_bytes;   /* bytes near if all states and gradients in f32 were there: 20 for each 16-bit parameter */
  int64_t sum_buckets;    /* the k that was given or chosen; INT64_MAX: all */
  double seconds;         /* time of the step with that k */
  double seconds_by_k[4]; /* k = 1, 2, 4 and all [AxoNN, Fig. 8] */
  /* Time of each part alone. */
  double update_seconds, copy_in_seconds, copy_out_seconds, sum_seconds; /* sum_seconds with that k */
} sluice_optimizer_prediction_t;

SLUICE_EXPORT void sluice_optimizer_prediction_init(sluice_optimizer_prediction_t* out_prediction, size_t struct_size);

/* Predicts the memory and the time of a step. Any thread. Errors: INVALID_ARGUMENT (names the field), ABI, NO_MEMORY.
 * Source: AxoNN, sections on memory and on the all-reduce. */
SLUICE_API sluice_status_t sluice_optimizer_predict(const sluice_optimizer_workload_t* workload,
                                                    sluice_optimizer_prediction_t* out_prediction);

#ifdef __cplusplus
}
#endif

#endif /* SLUICE_OPTIMIZER_H_ */
