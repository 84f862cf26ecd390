// SPDX-License-Identifier: Apache-2.0
/* Swap: what layers save for their backward is copied out of the memory of the device, to host memory or to a file, and
 * copied back before the backward (vPipe, TPDS 2022; the option OFFLOAD of stages.h). Copies run on a thread of their
 * own while the layers compute.
 *
 * What runs is a schedule of ops. The host tells the swap where the computation is (sluice_swap_reach), and gets the
 * ops that follow. It runs them in their order, by one call for each piece of memory that the layer saved:
 *
 *   op         call for each piece     what it does
 *   PUT        sluice_swap_put         begins the copy out. The memory stays the host's, unchanged until SETTLE
 *   SETTLE     sluice_swap_settle      waits until the copy out has ended: the host may now free the memory
 *   PREFETCH   sluice_swap_prefetch    begins the copy back, into memory that the host has allocated for it
 *   TAKE       sluice_swap_take        waits until the copy back has ended: the backward may read it
 *   RELEASE    sluice_swap_release     forgets a piece that no backward has asked for
 *
 * The rules that make the schedule (backend/swap/order.h) are pure, and shared by this executor, the simulator
 * (sluice_swap_predict) and the checker. At no time is there more than one layer's memory on the device besides that of
 * the layer that runs: a second copy out waits for the first, and a copy back begins when none leaves. This is what the
 * planner of stages.h counts (its working and staging bytes). Copies use one link, in the order in which they begin. */
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
  const int32_t* swapped;          /* [num_layers] 1: what the layer saves is copied out; copied */
  const char* path;        /* NULL: host memory. Otherwise a file that does not exist, in a folder that does; it is
                              removed from the folder at once, and its space is free after destroy, or when the
                              process ends. Copied */
  uint64_t budget_bytes;   /* > 0: most bytes that are copied out at one time */
  double bytes_per_second; /* limit of the rate of copies; 0, the default: no limit */
  int32_t num_layers;      /* >= 1 */
  int32_t reserved;        /* 0 */
} sluice_swap_config_t;

SLUICE_EXPORT SLUICE_EXPERIMENTAL void sluice_swap_config_init(sluice_swap_config_t* out_config, size_t struct_size);

/* Creates a swap. Host memory is allocated as it is needed, and kept for the next batch. out_swap: new,
 * sluice_swap_destroy. Thread-safe. Errors: INVALID_ARGUMENT (names the field), ABI, NO_MEMORY, EXTERNAL (names the
 * path and what the system says). */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_swap_create(const sluice_swap_config_t* config,
                                                                  sluice_swap_t** out_swap);
/* Waits for the copy that runs, and drops the others. Accepts NULL. In a forked child only the parent's copy is freed.
 */
SLUICE_EXPORT SLUICE_EXPERIMENTAL void sluice_swap_destroy(sluice_swap_t* swap);

/* Where the computation is. */
enum {
  SLUICE_SWAP_FORWARD_ENDS = 0,    /* of a layer; tell it of every layer */
  SLUICE_SWAP_BACKWARD_BEGINS = 1, /* of a layer: the gradient of its output is there. May be repeated */
  SLUICE_SWAP_BACKWARD_NEXT = 2,   /* the backward of a micro-batch is what runs next; optional. layer: ignored */
  SLUICE_SWAP_BACKWARD_ENDS = 3    /* of a micro-batch, in all layers. layer: ignored */
};

enum {
  SLUICE_SWAP_OP_PUT = 0,
  SLUICE_SWAP_OP_SETTLE = 1,
  SLUICE_SWAP_OP_PREFETCH = 2,
  SLUICE_SWAP_OP_TAKE = 3,
  SLUICE_SWAP_OP_RELEASE = 4
};

/* An op on all that a layer has saved in the forward of a micro-batch. */
typedef struct sluice_swap_op_s {
  int64_t micro_batch;
  int32_t kind; /* SLUICE_SWAP_OP_PUT, ... */
  int32_t layer;
} sluice_swap_op_t;

/* Returns the ops that follow from an event. Layers are numbered in the order of their forwards; micro-batches by
 * numbers that ascend, in the order of their backwards.
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
 *   prefetch  begins to copy back. to: memory of that many bytes, borrowed until take or release
 *   take      waits until the copy back has ended. After success the ticket is void
 *   release   drops a piece, and waits for the part of its copy that runs. The ticket is void.
 *             A void ticket has no effect
 *   reset     drops every piece, all micro-batches and the error of a copy. Call it after a batch that failed
 *
 * Errors: INVALID_ARGUMENT (no such ticket), STATE (take without prefetch, a second prefetch, a forked child),
 * OVER_BUDGET (put; names the bytes and the budget), NO_MEMORY, and EXTERNAL where a copy has failed: it names the path
 * and what the system says, also that the file is shorter than what was written. Once a copy has failed every call
 * returns this error until reset. */
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
  uint64_t held_bytes; /* of pieces that are out now */
  uint64_t most_bytes; /* largest held_bytes */
  uint64_t num_waits;  /* of settle and take, calls that had to wait */
  uint64_t wait_ns;    /* in them */
  uint64_t copy_ns;    /* in copies */
} sluice_swap_stats_t;

/* Threads: as put. Errors: INVALID_ARGUMENT, ABI. */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_swap_get_stats(sluice_swap_t* swap,
                                                                     sluice_swap_stats_t* out_stats);

/* ---- in virtual time ---- */

/* A layer of a stage, by one micro-batch. */
typedef struct sluice_swap_layer_s {
  double forward_seconds;
  double backward_seconds;
  uint64_t bytes; /* copied out; 0: the layer keeps what it saves */
} sluice_swap_layer_t;

typedef struct sluice_swap_workload_s {
  size_t struct_size;                /* set by sluice_swap_workload_init */
  const sluice_ext_header_t* next;   /* NULL */
  const sluice_swap_layer_t* layers; /* [num_layers] */
  double bytes_per_second;           /* > 0 */
  int32_t num_layers;
  int32_t num_micro_batches; /* default 1 */
  int32_t in_flight;         /* default 1. Forwards that run before the first backward; then both in turns */
  int32_t reserved;          /* 0 */
} sluice_swap_workload_t;

SLUICE_EXPORT SLUICE_EXPERIMENTAL void sluice_swap_workload_init(sluice_swap_workload_t* out_workload,
                                                                 size_t struct_size);

typedef struct sluice_swap_prediction_s {
  size_t struct_size;     /* set by the caller: sizeof */
  double seconds;         /* of the whole batch */
  double compute_seconds; /* of its forwards and backwards */
  double wait_seconds;    /* for copies */
  uint64_t out_bytes;
  uint64_t in_bytes;
  uint64_t most_near_bytes; /* most bytes of swapped layers on the device at one time, that of the layer that runs
                               included */
  uint64_t most_out_bytes;  /* most bytes that are out at one time: the budget that is needed */
  int64_t num_waits;
} sluice_swap_prediction_t;

/* Runs the schedule of a stage in virtual time. Pure; any thread. Errors: INVALID_ARGUMENT, ABI, NO_MEMORY. */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_swap_predict(const sluice_swap_workload_t* workload,
                                                                   sluice_swap_prediction_t* out_prediction);

#ifdef __cplusplus
}
#endif

#endif /* SLUICE_SWAP_H_ */
