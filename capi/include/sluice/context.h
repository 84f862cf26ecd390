// SPDX-License-Identifier: Apache-2.0
/* The context: the state that the layers of one model on one rank share (device, lanes, slots, choice of GEMMs).
 *
 * A context runs one pass (forward or backward of one layer) at a time; a second thread gets BUSY. The layers of one
 * model should share a context, so that all of them together need one set of temporaries. */
#ifndef SLUICE_CONTEXT_H_
#define SLUICE_CONTEXT_H_

#include "sluice/base.h"
#include "sluice/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sluice_context_s sluice_context_t;

/* GEMMs supplied by the host (for example torch's own), used by gemm "host". C[m,n] = A[m,k] * B[k,n] + beta * C. All
 * three matrices are described by strides in elements, one of which is 1 for each matrix. Called on the calling thread
 * only. dtypes are SLUICE_DTYPE_*; A and B have the same one. Returns 0, or another value if it does not support this
 * case (the library then uses another gemm for it). */
typedef struct sluice_host_gemm_args_s {
  int64_t m, n, k;
  const void* a;
  const void* b;
  void* c;
  int64_t a_row_stride, a_col_stride;
  int64_t b_row_stride, b_col_stride;
  int64_t c_row_stride, c_col_stride;
  int32_t dtype_ab;
  int32_t dtype_c;
  float beta; /* 0 or 1; with 0 the input values of C are ignored, NaN included */
  int32_t reserved;
} sluice_host_gemm_args_t;
typedef int32_t (*sluice_host_gemm_fn_t)(void* user, const sluice_host_gemm_args_t* args);

/* Format in which rows of f32 layers and their gradients are sent between ranks. Layers of other dtypes send rows in
 * their own dtype. Route weights, counts and rows that stay on their rank are never converted. UNSUPPORTED on CUDA.
 * Results have the same bits for every n, and depend on which rank owns which expert. Each hop of a row rounds once; a
 * sum that is returned is rounded when it is sent. */
enum {
  SLUICE_WIRE_LAYER_DTYPE = 0,
  /* Half the bytes. Values are rounded to the nearest bf16: the error of a value is at most 2^-8 of the value. */
  SLUICE_WIRE_BF16 = 1,
  /* About a quarter of the bytes. 128 neighbouring values of a row share a scale, the largest magnitude over 127. The
   * error of a value is at most 1/253 of that magnitude. If one of the 128 values is NaN or infinite, all become NaN;
   * if all are below 1e-36, all become 0. Rows of one value are sent in f32. */
  SLUICE_WIRE_INT8 = 2
};

typedef struct sluice_context_config_s {
  size_t struct_size;              /* set by sluice_context_config_init */
  const sluice_ext_header_t* next; /* NULL */
  int32_t device_type;             /* SLUICE_DEVICE_CPU, or SLUICE_DEVICE_CUDA, which needs an NVIDIA driver and cuBLAS
                                      12.0 */
  int32_t device_id;               /* index of the CUDA device; 0 on the CPU */
  const char* gemm;                /* "auto", "native", "ref", "onednn", "blas", "host"; NULL = "auto", which times the
                                      libraries during the first calls. Name one if bits must repeat between processes.
                                      CUDA: NULL, "auto" or "cublas"; with "cublas-tf32" GEMMs of f32 round their
                                      operands to TF32 */
  const char* gemm_library;        /* path of the library for "onednn" or "blas"; NULL: the loader searches */
  sluice_host_gemm_fn_t host_gemm; /* required by gemm "host", a candidate of "auto"; may be NULL */
  void* host_gemm_user;
  sluice_allocate_fn_t allocate; /* allocates slots and temporaries, on CUDA in device memory; NULL = the library's own
                                    allocator */
  sluice_free_fn_t release;
  void* allocate_user;
  uint64_t memory_budget;  /* limit in bytes of all memory that this context allocates, saved buffers included; on CUDA
                              of device memory; 0: no limit */
  int32_t max_outstanding; /* under a budget: the maximum number of forwards without their backward at one time, over
                              all layers of the context; 0: one for each layer */
  int32_t separate_wgrad;  /* under a budget: 1 if backwards are called with SLUICE_BACKWARD_DGRAD alone: plans then
                              count the gradient rows that are kept for wgrad; 0: such a call is UNSUPPORTED under a
                              budget */
  uint64_t host_memory_budget; /* limit in bytes of the offloaded rows of max_outstanding forwards; 0: no separate
                                  limit. On a CPU they also count towards memory_budget */
  /* If several contexts of a process share one budget, the host gives each context a share as its memory_budget
   * (host_memory_budget), and the whole budget here, which errors then name. The whole is at least the share. 0: the
   * share is the whole. */
  uint64_t shared_memory_budget;
  uint64_t shared_host_memory_budget;
  int32_t num_layers; /* under a budget: the number of layers that the context will have, if the host creates some after
                         the first forward; plans then count the memory of all of them; 0: the layers that exist */
  int32_t reserved;   /* 0 */
  /* Ranks of each node: consecutive ranks [i n, (i + 1) n) are on one node, as launchers number them. It divides the
   * number of ranks. Equal on all ranks. For layers with SLUICE_DEDUPLICATE_NODES. 0: not known; the ranks are treated
   * as equally distant. */
  int32_t ranks_per_node;
  int32_t wire_dtype; /* SLUICE_WIRE_*; default LAYER_DTYPE. Equal on all ranks */
} sluice_context_config_t;

SLUICE_EXPORT void sluice_context_config_init(sluice_context_config_t* out_config, size_t struct_size);

/* Creates a context. comm: NULL for one rank, otherwise retained. out_context: new, sluice_context_destroy. Not
 * collective. Creates no thread before the first pass that needs one. Thread-safe. Errors: INVALID_ARGUMENT, ABI,
 * NO_MEMORY, NOT_FOUND (a named gemm is missing; on CUDA the driver, a device, cuBLAS or the kernels), UNSUPPORTED (on
 * CUDA: a gemm of the CPU, or a communicator that is neither nccl nor local), EXTERNAL. */
SLUICE_API sluice_status_t sluice_context_create(const sluice_context_config_t* config, sluice_comm_t* comm,
                                                 sluice_context_t** out_context);
/* Releases the handle. Layers and steps keep the context alive. Steps that are outstanding when the process exits do no
 * harm. */
SLUICE_EXPORT void sluice_context_destroy(sluice_context_t* context);

/* Changes the context's share of a budget before its first plan. It exists because the smallest share that a context
 * needs (sluice_moe_smallest_budget) depends on its number of tokens, which is known only at its first forward. whole:
 * as shared_memory_budget in the config. Every rank calls it with equal shares, which the next header checks.
 * Context-exclusive. Errors: INVALID_ARGUMENT (a context without memory_budget, or a share of 0 or above the whole),
 * STATE (the context has a plan). */
SLUICE_API sluice_status_t sluice_context_set_share(sluice_context_t* context, uint64_t memory_budget, uint64_t whole);

/* Allocate and free memory of the process that counts as this context's, for saved buffers that a host returns from
 * sluice_save_fn_t (then set save_is_counted). 64-byte aligned. The memory may outlive the context: then pass NULL as
 * the context to free it. allocate_saved allocates saved buffer `which` (SLUICE_SAVED_*); on a CPU offloaded rows reuse
 * blocks that earlier steps freed. Such blocks count until the context is destroyed, or until a budget needs their
 * bytes. free frees memory of both functions and accepts NULL data; bytes is the allocated size. Any thread, also while
 * a pass runs. Errors: INVALID_ARGUMENT, NO_MEMORY, OVER_BUDGET, STATE (in a forked child). */
SLUICE_API sluice_status_t sluice_context_allocate_saved(sluice_context_t* context, int32_t which, uint64_t bytes,
                                                         void** out_data);
SLUICE_API sluice_status_t sluice_context_allocate(sluice_context_t* context, uint64_t bytes, void** out_data);
SLUICE_EXPORT void sluice_context_free(sluice_context_t* context, void* data, uint64_t bytes);

typedef struct sluice_context_stats_s {
  size_t struct_size;     /* set by the caller: sizeof */
  uint64_t current_bytes; /* bytes of slots, temporaries and kept step data that are allocated now; on CUDA in device
                             memory */
  uint64_t peak_bytes;    /* maximum of current_bytes since the last reset, host-allocated saved buffers included */
  uint64_t slot_bytes;    /* part of current_bytes: slots of the last pass; other passes or candidates may need more */
  uint64_t saved_bytes;   /* part of current_bytes: saved buffers of the last forward */
  uint64_t bytes_sent;    /* payload bytes to other ranks, all passes */
  uint64_t num_passes;
  uint64_t compute_ns;     /* time that the compute lane spent in ops, all passes */
  uint64_t comm_ns;        /* time that the communication lane spent in ops, all passes */
  uint64_t comm_cpu_ns;    /* CPU time of the communication lane's thread from its first op of a pass to its last, all
                              passes */
  uint64_t pass_ns;        /* wall time inside passes */
  int32_t last_num_chunks; /* n of the last pass */
  int32_t last_is_settled; /* 1: that n is configured or chosen; 0: it is a candidate on trial */
  char gemm[64];           /* the library that runs the GEMMs, for example "blas (libtorch_cpu)" */
  /* On a CPU: costs of traced passes other than their ops. */
  uint64_t num_walks;   /* number of these passes */
  uint64_t bind_cpu_ns; /* CPU time of the calling thread for routes, offsets and slots. Excludes the ranks' handshake
                           and the host's save callback, and under a budget the exchange of counts */
  uint64_t walk_cpu_ns; /* CPU time of the calling thread for submitting, ordering and recording ops. Excludes the ops,
                           waits, waking other threads, and the events of the trace */
  uint64_t wait_ns;     /* time that the calling thread waited for other lanes */
  uint64_t num_wakes;   /* number of times that a thread of any lane, the calling one included, slept and was woken */
  uint64_t wake_cpu_ns; /* CPU time that these threads and the waking by the calling thread took for it */
  /* Cost of the measurement: the readings of the thread's clock that fall into bind_cpu_ns and walk_cpu_ns, and their
   * CPU time. Readings around runs of ops are counted as measured; the others are estimated from the cost of one
   * reading when the trace began. Without a trace there are no readings. */
  uint64_t num_readings;
  uint64_t readings_cpu_ns;
  uint64_t num_pool_allocations; /* on a CPU: blocks for offloaded rows that were allocated and not reused from a
                                    step */
  uint64_t idle_pool_bytes;      /* part of current_bytes: blocks of the pool that no step uses now */
  uint64_t num_fallback_chunks;  /* under plans: chunks of forwards that did not fit kept_rows (sluice/plan.h), and are
                                    sent and computed again; the first of a layer is logged at SLUICE_LOG_WARN */
  uint64_t num_outstanding;      /* forwards without their backward now, over all layers: their saved buffers are
                                    kept */
  uint64_t most_outstanding;     /* maximum of num_outstanding since the last reset of the peak */
  uint64_t planned_outstanding;  /* max_outstanding of the newest plan; 0: there is no plan yet. More forwards than that
                                    may be refused; they fit while routing is even */
  int32_t last_deduplicate;      /* SLUICE_DEDUPLICATE_* of the last pass: NONE, RANKS or NODES */
  int32_t reserved;              /* 0 */
} sluice_context_stats_t;

/* Returns the statistics of the context. reset_peak != 0 resets the peak to the current bytes. Context-exclusive.
 * Errors: INVALID_ARGUMENT, ABI. */
SLUICE_API sluice_status_t sluice_context_get_stats(sluice_context_t* context, int32_t reset_peak,
                                                    sluice_context_stats_t* out_stats);

/* ---- trace ------------------------------------------------------------------------------------------------------- */

enum { SLUICE_LANE_COMPUTE = 0, SLUICE_LANE_COMM = 1, SLUICE_LANE_COPY_OUT = 2, SLUICE_LANE_COPY_IN = 3 };
enum { SLUICE_FORWARD = 0, SLUICE_BACKWARD = 1 };

typedef struct sluice_trace_event_s {
  uint64_t begin_ns; /* CLOCK_MONOTONIC */
  uint64_t end_ns;
  const char* op;    /* immutable name: "dispatch", "gemm1", ... */
  int32_t layer;     /* layer_id of the config */
  int32_t chunk;     /* -1: the whole pass */
  int32_t lane;      /* SLUICE_LANE_* */
  int32_t direction; /* SLUICE_FORWARD or SLUICE_BACKWARD */
  uint64_t bytes;    /* bytes of payload that a communication op sent; of a whole pass: bytes of the tables of a
                        deduplicated one */
} sluice_trace_event_t;

/* Records events from now on and keeps the newest `capacity`; 0 stops the trace and discards its events. The events do
 * not count towards `memory_budget` or the bytes in the statistics. On CUDA times are the device's own, and each pass
 * waits for its end (except a pass that is captured: its events have the times of the enqueue). Context-exclusive.
 * Errors: INVALID_ARGUMENT, BUSY, NO_MEMORY. */
SLUICE_API sluice_status_t sluice_context_trace(sluice_context_t* context, int64_t capacity);
/* Copies up to `capacity` events, oldest first, and discards all of them; *out_count is the number that was copied.
 * Context-exclusive. Errors: INVALID_ARGUMENT, BUSY. */
SLUICE_API sluice_status_t sluice_context_take_trace(sluice_context_t* context, sluice_trace_event_t* out_events,
                                                     int64_t capacity, int64_t* out_count);

#ifdef __cplusplus
}
#endif

#endif /* SLUICE_CONTEXT_H_ */
