// SPDX-License-Identifier: Apache-2.0
/* Swap: the activations that layers save for their backward are copied from device memory to host memory or to a file,
 * and copied back before the backward (vPipe, TPDS 2022; the option OFFLOAD of stages.h). Copies run on a thread of
 * their own while the layers compute.
 *
 * A swap is a schedule of ops. The host reports the progress of the computation (sluice_swap_reach), and gets the ops
 * that follow. It runs them in order, with one call for each piece of memory that the layer saved:
 *
 *   op         call for each piece     effect
 *   PUT        sluice_swap_put         begins the copy out; the host does not change or free the memory until SETTLE
 *   SETTLE     sluice_swap_settle      waits until the copy out has ended: the host may now free the memory
 *   PREFETCH   sluice_swap_prefetch    begins the copy back, into memory that the host has allocated for it
 *   TAKE       sluice_swap_take        waits until the copy back has ended: the backward may read the memory
 *   RELEASE    sluice_swap_release     drops a piece that no backward needs
 *
 * The rules that make the schedule (backend/swap/order.h) are pure functions. This executor, the simulator
 * (sluice_swap_predict) and the checker share them. The device holds the memory of at most one swapped layer in
 * addition to that of the layer that runs: a second copy out waits for the first, and a copy back begins when no copy
 * out is in progress. The planner of stages.h counts the same (its working and staging bytes). Copies use one link, in
 * the order in which they begin. */
#ifndef SLUICE_SWAP_H_
#define SLUICE_SWAP_H_

#include "sluice/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sluice_swap_s sluice_swap_t;

typedef struct sluice_swap_config_s {
  size_t struct_size;              /* set by sluice_swap_config_init */
  const sluice_ext_header_t* next; /* NULL */
  const int32_t* swapped;          /* [num_layers] 1: the layer's activations are copied out; the array is copied */
  const char* path;        /* NULL: host memory. Otherwise the path of a new file in an existing folder. The file is
                              unlinked at once, and its space is freed by destroy, or when the process ends. The
                              string is copied */
  uint64_t budget_bytes;   /* > 0: maximum of the bytes that are copied out at one time */
  double bytes_per_second; /* limit of the rate of copies; 0, the default: no limit */
  int32_t num_layers;      /* >= 1 */
  int32_t reserved;        /* 0 */
} sluice_swap_config_t;

SLUICE_EXPORT SLUICE_EXPERIMENTAL void sluice_swap_config_init(sluice_swap_config_t* out_config, size_t struct_size);

/* Creates a swap. Host memory is allocated when it is first needed, and reused by later batches. out_swap: new,
 * sluice_swap_destroy. Thread-safe. Errors: INVALID_ARGUMENT (names the field), ABI, NO_MEMORY, EXTERNAL (the path and
 * the error of the system). */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_swap_create(const sluice_swap_config_t* config,
                                                                  sluice_swap_t** out_swap);
/* Destroys a swap: waits for the copy in progress and drops the others. Accepts NULL. In a forked child the call has no
 * effect. */
SLUICE_EXPORT SLUICE_EXPERIMENTAL void sluice_swap_destroy(sluice_swap_t* swap);

/* Events of the computation that a host reports. */
enum {
  SLUICE_SWAP_FORWARD_ENDS = 0,    /* of a layer; reported for every layer */
  SLUICE_SWAP_BACKWARD_BEGINS = 1, /* of a layer: the gradient of its output is ready. May be repeated */
  SLUICE_SWAP_BACKWARD_NEXT = 2,   /* optional: the backward of a micro-batch runs next. layer: ignored */
  SLUICE_SWAP_BACKWARD_ENDS = 3    /* of a micro-batch, in all layers. layer: ignored */
};

enum {
  SLUICE_SWAP_OP_PUT = 0,
  SLUICE_SWAP_OP_SETTLE = 1,
  SLUICE_SWAP_OP_PREFETCH = 2,
  SLUICE_SWAP_OP_TAKE = 3,
  SLUICE_SWAP_OP_RELEASE = 4
};

/* An op on all memory that a layer has saved in the forward of a micro-batch. */
typedef struct sluice_swap_op_s {
  int64_t micro_batch;
  int32_t kind; /* SLUICE_SWAP_OP_PUT, ... */
  int32_t layer;
} sluice_swap_op_t;

/* Returns the ops that follow from an event. Layers are numbered in the order of their forwards. The numbers of
 * micro-batches increase in the order of their backwards.
 *
 * ops        [room] out; room >= 4, and > num_layers for BACKWARD_ENDS
 * out_count  number of ops
 *
 * The backward of a layer without a forward has no ops. Threads: one at a time. Errors: INVALID_ARGUMENT (layer, event,
 * room), STATE (the forward of a layer has ended twice for a micro-batch), NO_MEMORY; sluice_swap_reset follows. */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_swap_reach(sluice_swap_t* swap, int32_t event,
                                                                 int64_t micro_batch, int32_t layer,
                                                                 sluice_swap_op_t* ops, int32_t room,
                                                                 int32_t* out_count);

/* The calls for one piece of memory. Threads: those of one swap one at a time, reach and reset included.
 *
 *   put       begins to copy `bytes` (above 0) out. data: borrowed until settle or release.
 *             out_ticket: the number of the piece, above 0
 *   settle    waits until the copy out has ended. May be repeated
 *   prefetch  begins to copy back. to: memory of the piece's size, borrowed until take or release
 *   take      waits until the copy back has ended. After success the ticket is void
 *   release   drops a piece, and waits for the part of its copy that is in progress. The ticket is then void; a void
 *             ticket has no effect
 *   reset     drops all pieces and micro-batches, and the error of a copy. Call it after a batch that failed
 *
 * Errors: INVALID_ARGUMENT (no such ticket), STATE (take without prefetch, a second prefetch, a forked child),
 * OVER_BUDGET (put; names the bytes and the budget), NO_MEMORY. EXTERNAL: a copy has failed; the message has the path
 * and the error of the system, or says that the file is shorter than what was written. After that, every call returns
 * this error until reset. */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_swap_put(sluice_swap_t* swap, const void* data, uint64_t bytes,
                                                               int64_t* out_ticket);
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_swap_settle(sluice_swap_t* swap, int64_t ticket);
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_swap_prefetch(sluice_swap_t* swap, int64_t ticket, void* to);
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_swap_take(sluice_swap_t* swap, int64_t ticket);
SLUICE_EXPORT SLUICE_EXPERIMENTAL void sluice_swap_release(sluice_swap_t* swap, int64_t ticket);
SLUICE_EXPORT SLUICE_EXPERIMENTAL void sluice_swap_reset(sluice_swap_t* swap);

typedef struct sluice_swap_stats_s {
  size_t struct_size;  /* set by the caller: sizeof */
  uint64_t out_bytes;  /* copied out since create */
  uint64_t in_bytes;   /* copied back */
  uint64_t held_bytes; /* bytes of pieces that are out now */
  uint64_t most_bytes; /* maximum of held_bytes */
  uint64_t num_waits;  /* calls of settle and take that had to wait */
  uint64_t wait_ns;    /* time in these waits */
  uint64_t copy_ns;    /* time in copies */
} sluice_swap_stats_t;

/* Returns the statistics of the swap. Threads: as put. Errors: INVALID_ARGUMENT, ABI. */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_swap_get_stats(sluice_swap_t* swap,
                                                                     sluice_swap_stats_t* out_stats);

/* ---- prediction ---- */

/* A layer of a stage. Seconds and bytes are for one micro-batch. */
typedef struct sluice_swap_layer_s {
  double forward_seconds;
  double backward_seconds;
  uint64_t bytes; /* bytes that are copied out; 0: the layer is not swapped */
} sluice_swap_layer_t;

typedef struct sluice_swap_workload_s {
  size_t struct_size;                /* set by sluice_swap_workload_init */
  const sluice_ext_header_t* next;   /* NULL */
  const sluice_swap_layer_t* layers; /* [num_layers] */
  double bytes_per_second;           /* > 0 */
  int32_t num_layers;
  int32_t num_micro_batches; /* default 1 */
  int32_t in_flight;         /* forwards that run before the first backward; after it both alternate. Default 1 */
  int32_t reserved;          /* 0 */
} sluice_swap_workload_t;

SLUICE_EXPORT SLUICE_EXPERIMENTAL void sluice_swap_workload_init(sluice_swap_workload_t* out_workload,
                                                                 size_t struct_size);

typedef struct sluice_swap_prediction_s {
  size_t struct_size;     /* set by the caller: sizeof */
  double seconds;         /* time of the batch */
  double compute_seconds; /* time in forwards and backwards */
  double wait_seconds;    /* time in waits for copies */
  uint64_t out_bytes;
  uint64_t in_bytes;
  uint64_t most_near_bytes; /* maximum of the bytes of swapped layers on the device at one time, the layer that runs
                               included */
  uint64_t most_out_bytes;  /* maximum of the bytes that are out at one time: the smallest sufficient budget */
  int64_t num_waits;
} sluice_swap_prediction_t;

/* Simulates a batch of a stage in virtual time. Pure; any thread. Errors: INVALID_ARGUMENT, ABI, NO_MEMORY. */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_swap_predict(const sluice_swap_workload_t* workload,
                                                                   sluice_swap_prediction_t* out_prediction);

#ifdef __cplusplus
}
#endif

#endif /* SLUICE_SWAP_H_ */
