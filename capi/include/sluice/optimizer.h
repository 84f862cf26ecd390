/* The optimizer that leaves the device: Adam and AdamW over masters and moments in host memory. Parameters and
 * gradients lie there too, or on a CUDA device, which then updates them (`context` in the config).
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
 * in rank order: the same bits for every bucket and every k, on all ranks. A finite gradient above about 5.8e20 makes v
 * infinite, as it does in torch: from then on the parameter decays and does not move by m. An infinite parameter stays
 * infinite.
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
#include "sluice/context.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sluice_optimizer_s sluice_optimizer_t;
typedef struct sluice_optimizer_file_s sluice_optimizer_file_t;

typedef struct sluice_optimizer_config_s {
  size_t struct_size;              /* set by sluice_optimizer_config_init */
  const sluice_ext_header_t* next; /* NULL */
  /* On a CUDA device: param and grad of all tensors lie in its memory, and updates run there. master, exp_avg and
   * exp_avg_sq stay in host memory and go to the device bucket by bucket, copies beside updates: so it holds 4 bytes
   * for each 16-bit parameter, and 16 for each element of a slot [AxoNN, section on memory]. Retained. NULL: all lies
   * in host memory. */
  sluice_context_t* context;
  int64_t device_bucket;    /* elements of a slot on the device, 1 to 2^40; 4194304 */
  int32_t device_num_slots; /* 2: copies run beside updates; 1: in turns; 2 */
  int32_t reserved;         /* 0 */
} sluice_optimizer_config_t;

SLUICE_EXPORT void sluice_optimizer_config_init(sluice_optimizer_config_t* out_config, size_t struct_size);

/* One parameter: `count` elements one behind the other in each array. Arrays of a step may not overlap. dtypes:
 * SLUICE_DTYPE_F32, BF16 or F16. Borrowed until the call returns; of a step on a device, until its stream is there. */
typedef struct sluice_optimizer_tensor_s {
  int64_t count;    /* >= 0 */
  int64_t step;     /* t, the number of this step; the first is 1. After a step that was skipped it is the same again */
  void* param;      /* in/out of param_dtype */
  float* master;    /* in/out the parameter in f32, which the step starts from; param becomes it, rounded to nearest
                       even. NULL: param has no master, which a step on a device does not take */
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
  /* Where masters and moments lie, borrowed until the call returns: then master, exp_avg and exp_avg_sq of all tensors
   * are NULL, and buckets of them are read, updated and written beside each other. NULL: in the tensors. */
  sluice_optimizer_file_t* file;
  sluice_stream_t stream; /* of a step on a device: the host's, behind whose work it runs; else NULL */
} sluice_optimizer_step_args_t;

SLUICE_EXPORT void sluice_optimizer_step_args_init(sluice_optimizer_step_args_t* out_args, size_t struct_size);

typedef struct sluice_optimizer_step_result_s {
  size_t struct_size; /* set by sluice_optimizer_step_result_init */
  double norm;     /* L2 over all groups, of gradients of the loss (their sums), before clipping; 0 where nobody looked,
                      as over ranks without clipping */
  int32_t skipped; /* 1: a gradient, or a sum, is infinite or no number: nothing was changed, on any rank */
  int32_t decided; /* of a step over ranks, 1: all sums were formed before the first update */
  /* Of a step over ranks; else 0. Times are 0 on a device. */
  int64_t sum_buckets;        /* k that was taken */
  uint64_t staging_bytes;     /* that sums lie in, and on a device what they receive */
  uint64_t sum_ns;            /* in sums, on a thread of their own */
  uint64_t update_ns;         /* in updates, on the calling thread */
  uint64_t step_ns;           /* of the call */
  uint64_t read_ns, write_ns; /* of a file, each on a thread of its own */
} sluice_optimizer_step_result_t;

SLUICE_EXPORT void sluice_optimizer_step_result_init(sluice_optimizer_step_result_t* out_result, size_t struct_size);

/* out_optimizer: new, sluice_optimizer_destroy. With a context it takes the slots from the context's memory, where they
 * count in its stats and below its budget. Threads: thread-safe; with a context, context-exclusive. Errors:
 * INVALID_ARGUMENT, ABI, NO_MEMORY, OVER_BUDGET; UNSUPPORTED (a context on a CPU: leave it out). */
SLUICE_API sluice_status_t sluice_optimizer_create(const sluice_optimizer_config_t* config,
                                                   sluice_optimizer_t** out_optimizer);

/* One step over all groups, by the caller's OpenMP threads. result may be NULL. Host-complete; on a device
 * stream-complete with the verdict known: it waits for what the stream has before it and for one look at the gradients.
 * Threads: one call at a time for an optimizer, others get BUSY; on a device context-exclusive. Errors:
 * INVALID_ARGUMENT (naming group, tensor and what is wrong: more than 2^48 elements, arrays that overlap), ABI, BUSY,
 * STATE (a forked child), NO_MEMORY: nothing was changed. A skipped step is OK, and told by result.
 *
 * With args->comm collective over it, comm-exclusive for all communicators of the step, and alike on all ranks: groups
 * in the same order, with the same numbers, and tensors of the same counts and dtypes where they are summed. Further
 * errors, on all ranks, that change nothing: MISMATCH (names a rank and what differs), PEER_REFUSED (another rank had
 * one of these: names it). ABI and BUSY of one rank are not told: the others wait. NO_MEMORY may end comm, and what
 * exchanges return does (PEER_LOST names the rank): then buckets whose sums had come are updated and others are not,
 * unless all sums are formed first (INT64_MAX of one communicator, clipping), where nothing was changed on this rank if
 * a sum failed.
 *
 * On a device: bits are those of the step in host memory, for every bucket and every k. Arrays in host memory are
 * page-locked, else copies wait for each other. Over ranks gradients are summed there, by communicators over nccl, or
 * local ones where ranks are threads; k is 2 unless it is given. Where sums have to be looked at first they are formed
 * twice: that takes no memory. Further errors: UNSUPPORTED, by name (file, max_norm: clip before the step, another
 * communicator), and STATE (a captured stream), with nothing changed; EXTERNAL (what the driver says), after which
 * buckets may differ in their step, and which ends the step's communicators.
 *
 * With args->file each tensor's step is the file's + 1, and each rank has a file of its own. Further errors, that
 * change nothing: MISMATCH (the file is of other tensors), EXTERNAL (what the disk says, or that it was damaged since
 * it was opened) on this rank, and PEER_REFUSED on the others: ranks agree before their files say that the step is
 * there, and once more after that, so that a disk which fails in between takes the step back on all. Whatever else a
 * step over ranks returns changes nothing either. Where the disk does not even give back what parameters were, a line
 * of the log says so, and steps return STATE until _load has filled them. A process that is killed between the two
 * handshakes may leave its file one step ahead: opened with config.comm, files go on from the step that all have. */
SLUICE_API sluice_status_t sluice_optimizer_step(sluice_optimizer_t* optimizer,
                                                 const sluice_optimizer_step_args_t* args,
                                                 sluice_optimizer_step_result_t* out_result);

/* Accepts NULL. With a context it waits for steps on the device, and is context-exclusive: where a rank was lost the
 * step's communicators are aborted or destroyed first, or sums that never come are waited for. */
SLUICE_EXPORT void sluice_optimizer_destroy(sluice_optimizer_t* optimizer);

/* ---- masters and moments in a file ---- */

/* For models whose states do not fit into memory: 12 bytes for each element lie in a file twice, since it holds two
 * steps. One is the last whole step and is only read, into the other the next one is written. So a process that ends in
 * mid-step leaves the last whole step there, and the file says that one more was begun. In memory a step takes 24 bytes
 * for each element of a bucket. Elements lie in the order of groups and tensors, so these stay the same.
 *
 * A parameter that other code has written since the last step is taken as it is: for f32 the step reads the parameter;
 * for a 16-bit one it takes the file's master where that, rounded, is the parameter, else the parameter. A step keeps
 * copies of such parameters until it ends, so that it can give them back.
 *
 * The file says what it is of: groups, shapes and dtypes of its tensors, rank and world size. Each step in it has a
 * checksum. One that a crash of the machine has left in part, or that was damaged, is not used when the file is opened:
 * the step before is. A new file has its name once a step is whole in it, and is called PATH.unfinished until then;
 * what an earlier process has left under that name is taken.
 *
 * One process has a file open at a time. A forked child has nothing of it: calls return STATE there, and it holds no
 * lock. Threads: one call at a time for a file, others get BUSY. */
typedef struct sluice_optimizer_file_config_s {
  size_t struct_size;              /* set by sluice_optimizer_file_config_init */
  const sluice_ext_header_t* next; /* NULL */
  const char* path;                /* read during the call; one that is a link means what the link leads to */
  int64_t step;     /* create: the steps that tensors have taken; open: which of the file's two; -1: none, the later
                       one; -1 */
  int32_t durable;  /* 1: a step is on the disk before it ends, and outlives the machine; 0: it outlives
                       the process; 0 */
  int32_t reserved; /* 0 */
  /* Of the ranks that step together, each with a file of its own: making and opening are then collective over it, all
   * make one or all open one, and go on from the last step that is whole in all of them. Borrowed until the call
   * returns. NULL: nobody compares. */
  sluice_comm_t* comm;
  int32_t rank, world_size; /* whose file it is, which it keeps; with comm its own are taken; 0 of 1 */
  /* open: tensors that the file has to be of, grad is not read; NULL: not compared until load and step do, by counts
   * and dtypes. */
  const sluice_optimizer_group_t* const* groups;
  int64_t num_groups;
  /* Shapes of all tensors of all groups, in order: 0 to 64 dimensions each. NULL: each has one. */
  const int32_t* num_dims;
  const int64_t* dims;
  int32_t replaces;  /* create: 1: it takes the place of the file at path, if there is one, when it is whole; 0 */
  int32_t reserved2; /* 0 */
} sluice_optimizer_file_config_t;

SLUICE_EXPORT void sluice_optimizer_file_config_init(sluice_optimizer_file_config_t* out_config, size_t struct_size);

/* A new file, filled from tensors: their master or, where that is NULL, param; their moments or, where these are NULL,
 * 0. grad is not read. The disk has room for all of it from now on. out_file: new, sluice_optimizer_file_close.
 * Thread-safe; with comm comm-exclusive. Errors: INVALID_ARGUMENT, ABI, EXTERNAL (it is there already, a full disk,
 * what the system says), BUSY (another process makes it), NO_MEMORY, and with comm PEER_REFUSED, MISMATCH (another rank
 * opens one) and what exchanges return: then there is no new file, and none was replaced. */
SLUICE_API sluice_status_t sluice_optimizer_file_create(const sluice_optimizer_file_config_t* config,
                                                        const sluice_optimizer_group_t* const* groups,
                                                        int64_t num_groups, sluice_optimizer_file_t** out_file);

/* One that is there, of which both steps are read once; parameters come from it by _load. A step that was begun and
 * never ended is told by _info and by a line of the log, one that is damaged by a line of the log. Thread-safe; with
 * comm comm-exclusive. Errors: INVALID_ARGUMENT, ABI, NOT_FOUND (no such file, or no such step in it), EXTERNAL
 * (another kind of file, cut, no step in it is whole), MISMATCH (it is of another model: names the first tensor that
 * differs; of another rank; with comm: no step is in the files of all ranks), BUSY (it is open elsewhere), NO_MEMORY,
 * and with comm PEER_REFUSED and what exchanges return. */
SLUICE_API sluice_status_t sluice_optimizer_file_open(const sluice_optimizer_file_config_t* config,
                                                      sluice_optimizer_file_t** out_file);

/* Parameters become the file's masters, rounded to nearest even; param, master, exp_avg and exp_avg_sq are filled where
 * a tensor has them, as for a checkpoint. Any thread, one call at a time. Errors: INVALID_ARGUMENT, MISMATCH (the file
 * is of other tensors: names the first), ABI, BUSY, STATE (a forked child), NO_MEMORY: nothing was changed; EXTERNAL
 * (what the disk says, or that it was damaged since it was opened): tensors are filled in part, or with what is
 * damaged.
 */
SLUICE_API sluice_status_t sluice_optimizer_file_load(sluice_optimizer_file_t* file,
                                                      const sluice_optimizer_group_t* const* groups,
                                                      int64_t num_groups);

typedef struct sluice_optimizer_file_info_s {
  size_t struct_size;      /* set by sluice_optimizer_file_info_init */
  int64_t count;           /* elements */
  int64_t step;            /* that is there, and that steps go on from */
  int64_t other_step;      /* that may be opened as well, until the next step; -1: none */
  int64_t unfinished_step; /* begun and not ended when the file was opened, until a step ends; -1: none, or its record
                              is damaged */
  uint64_t bytes;          /* of the file */
} sluice_optimizer_file_info_t;

SLUICE_EXPORT void sluice_optimizer_file_info_init(sluice_optimizer_file_info_t* out_info, size_t struct_size);

/* Any thread, one call at a time. Errors: INVALID_ARGUMENT, ABI, BUSY, STATE (a forked child). */
SLUICE_API sluice_status_t sluice_optimizer_file_info(sluice_optimizer_file_t* file,
                                                      sluice_optimizer_file_info_t* out_info);

/* The file stays on the disk. Any thread, not while a call uses it; accepts NULL. */
SLUICE_EXPORT void sluice_optimizer_file_close(sluice_optimizer_file_t* file);

/* ---- steps that nobody runs ---- */

/* A step of one rank. Updates run *near*: on a device, or in host memory. States (masters and moments) lie there, or
 * *far*, in host memory or in a file, from which they come bucket by bucket. Rates are bytes a second; 0: takes no
 * time. Prepared by _init. */
typedef struct sluice_optimizer_workload_s {
  size_t struct_size;                 /* set by sluice_optimizer_workload_init */
  const sluice_ext_header_t* next;    /* NULL */
  int64_t count;                      /* phi, elements of all parameters; 1 to 2^48 */
  int64_t bucket;                     /* elements; 4194304 */
  int64_t sum_buckets;                /* k; 0: the one that takes least; INT64_MAX: all */
  int32_t param_dtype, grad_dtype;    /* F32, BF16 or F16; BF16 */
  int32_t num_slots;                  /* of states: 0: they lie near; 1, or 2 for copies beside updates: far; 2 */
  int32_t world_size;                 /* ranks whose gradients are summed; 1 */
  int32_t decides;                    /* 1: all sums are formed before the first update, as with clipping; 0 */
  int32_t sums_on_device;             /* 1: they receive what the ranks send beside gradients in f32; 0 */
  double update_rate;                 /* of the memory that updates read and write */
  double copy_in_rate, copy_out_rate; /* far to near and back; they run beside each other */
  double sum_rate;                    /* of a rank's link */
  double sum_seconds;                 /* of a sum, however small */
} sluice_optimizer_workload_t;

SLUICE_EXPORT void sluice_optimizer_workload_init(sluice_optimizer_workload_t* out_workload, size_t struct_size);

/* Bytes are those that a step takes; seconds are simulated. */
typedef struct sluice_optimizer_prediction_s {
  size_t struct_size; /* set by sluice_optimizer_prediction_init */
  /* Near. */
  uint64_t param_bytes, grad_bytes;
  uint64_t slot_bytes;    /* of states in slots; 12 for each element of a slot, each array aligned up to 64 */
  uint64_t staging_bytes; /* gradients in f32: those of k buckets, twice beside updates, or of all of them; on a device
                             what ranks send of k buckets too */
  uint64_t near_bytes;    /* all of these, and states that lie near */
  /* States: masters, of parameters that have one, and both moments. */
  uint64_t state_bytes;
  uint64_t file_bytes;    /* of a file for them that holds two steps */
  uint64_t whole_bytes;   /* near, if states and gradients in f32 lay there whole: 20 for each 16-bit parameter */
  int64_t sum_buckets;    /* k that was asked for, or taken; INT64_MAX: all */
  double seconds;         /* with it */
  double seconds_by_k[4]; /* k = 1, 2, 4 and all [AxoNN, Fig. 8] */
  /* What each takes by itself. */
  double update_seconds, copy_in_seconds, copy_out_seconds, sum_seconds; /* with that k */
} sluice_optimizer_prediction_t;

SLUICE_EXPORT void sluice_optimizer_prediction_init(sluice_optimizer_prediction_t* out_prediction, size_t struct_size);

/* Any thread. Errors: INVALID_ARGUMENT naming the field, ABI, NO_MEMORY. Source: AxoNN, sections on memory and on the
 * all-reduce. */
SLUICE_API sluice_status_t sluice_optimizer_predict(const sluice_optimizer_workload_t* workload,
                                                    sluice_optimizer_prediction_t* out_prediction);

#ifdef __cplusplus
}
#endif

#endif /* SLUICE_OPTIMIZER_H_ */
