/* The context: what the layers of one model on one rank share: device, lanes, slots, the choice of GEMMs.
 *
 * One pass (forward or backward of one layer) runs at a time per context; a second thread gets BUSY. Layers of one
 * model should share a context, so that L layers cost one set of temporaries.
 */
#ifndef SLUICE_CONTEXT_H_
#define SLUICE_CONTEXT_H_

#include "sluice/base.h"
#include "sluice/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sluice_context_s sluice_context_t;

/* GEMMs supplied by the host (for example torch's own), used by gemm "host".
 * C[m,n] = A[m,k] * B[k,n] + beta * C; all three are described by element strides, one of which is 1 for each matrix.
 * Called on the calling thread only. dtypes are SLUICE_DTYPE_*; A and B share one. Returns 0, or another value when
 * it cannot do this case (the library then uses another gemm for it). */
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
  float beta; /* 0 or 1; with 0 C may hold anything, NaN included */
  int32_t reserved;
} sluice_host_gemm_args_t;
typedef int32_t (*sluice_host_gemm_fn_t)(void* user, const sluice_host_gemm_args_t* args);

/* How rows of f32 layers are written between ranks, and their gradients; layers of other dtypes send them as they are,
 * and so does everyone else: route weights, counts, rows that stay on their rank. Not on CUDA (UNSUPPORTED). Results
 * have the same bits for every n, and depend on which rank owns which expert. Each hop of a row rounds once; a sum that
 * comes back is rounded as it leaves. */
enum {
  SLUICE_WIRE_LAYER_DTYPE = 0,
  /* Half the bytes. To the nearest bf16: a value is off by at most 2^-8 of itself. */
  SLUICE_WIRE_BF16 = 1,
  /* About a quarter: 128 neighbouring values of a row share a scale, the largest magnitude over 127. A value is off by
   * at most 1/253 of that magnitude. Where one of them is NaN or infinite, all become NaN; where all are below 1e-36,
   * 0. Rows of one value travel as they are. */
  SLUICE_WIRE_INT8 = 2
};

typedef struct sluice_context_config_s {
  size_t struct_size;              /* set by sluice_context_config_init */
  const sluice_ext_header_t* next; /* NULL */
  int32_t device_type;             /* SLUICE_DEVICE_CPU, or SLUICE_DEVICE_CUDA: an NVIDIA driver and cuBLAS, 12.0 */
  int32_t device_id;               /* of CUDA devices; on the CPU 0 */
  const char* gemm;                /* "auto", "native", "ref", "onednn", "blas", "host"; NULL = "auto": measured
                                      beside the first calls, so name one where bits must repeat between processes.
                                      CUDA: NULL, "auto" or "cublas"; "cublas-tf32": GEMMs of f32 round their operands
                                      to TF32 */
  const char* gemm_library;        /* path for "onednn" or "blas", or NULL: the loader's search */
  sluice_host_gemm_fn_t host_gemm; /* needed by gemm "host", considered by "auto"; may be NULL */
  void* host_gemm_user;
  sluice_allocate_fn_t allocate; /* for slots and temporaries, on CUDA device memory; NULL = the library's own */
  sluice_free_fn_t release;
  void* allocate_user;
  uint64_t memory_budget;  /* bytes of everything that this context allocates, saved buffers included; on CUDA of the
                              device's memory; 0: no limit */
  int32_t max_outstanding; /* under a budget: forwards without their backward at one time, over all layers of the
                              context; 0: one for each layer */
  int32_t separate_wgrad; /* under a budget: 1 where backwards call SLUICE_BACKWARD_DGRAD alone, so that plans count the
                           gradient rows it leaves for wgrad; 0: such a call is UNSUPPORTED there */
  uint64_t host_memory_budget; /* bytes of offloaded rows over max_outstanding forwards; 0: no limit of their own. On a
                                  CPU they count towards memory_budget as well */
  /* Where several contexts of a process are to stay below one budget, the host gives each a share as its memory_budget
   * (host_memory_budget), and here the whole, which errors then name: at least the share. 0: the share is the whole. */
  uint64_t shared_memory_budget;
  uint64_t shared_host_memory_budget;
  int32_t num_layers; /* under a budget: layers that the context will have, where the host makes some behind the first
                         forward, so that plans count what all of them take; 0: those that are there */
  int32_t reserved;   /* 0 */
  /* Ranks of each node: consecutive ranks [i n, (i + 1) n) share one, as launchers number them; divides the number of
   * ranks. Equal on all ranks. For layers with SLUICE_DEDUPLICATE_NODES. 0: not known, all are alike. */
  int32_t ranks_per_node;
  int32_t wire_dtype; /* SLUICE_WIRE_*; default LAYER_DTYPE. Equal on all ranks */
} sluice_context_config_t;

SLUICE_EXPORT void sluice_context_config_init(sluice_context_config_t* out_config, size_t struct_size);

/* comm: NULL for one rank, otherwise retained. out_context: new, sluice_context_destroy. Not collective, makes no
 * thread until the first pass that needs one. Thread-safe. Errors: INVALID_ARGUMENT, ABI, NO_MEMORY, NOT_FOUND (a named
 * gemm is missing; on CUDA the driver, a device, cuBLAS or the kernels), UNSUPPORTED (on CUDA: a CPU's gemm, a
 * communicator that is neither nccl nor local), EXTERNAL. */
SLUICE_API sluice_status_t sluice_context_create(const sluice_context_config_t* config, sluice_comm_t* comm,
                                                 sluice_context_t** out_context);
/* Layers and steps keep the context alive. Steps outstanding at process exit are harmless. */
SLUICE_EXPORT void sluice_context_destroy(sluice_context_t* context);

/* Another share of a budget than the context was made with, before its first plan: what each of several contexts needs
 * at least (sluice_moe_smallest_budget) is known when their first tokens are. whole: as shared_memory_budget in the
 * config. Every rank calls it with equal shares; the next header checks. Context-exclusive. Errors: INVALID_ARGUMENT
 * (a context without memory_budget, a share of 0 or above the whole), STATE (a plan stands). */
SLUICE_API sluice_status_t sluice_context_set_share(sluice_context_t* context, uint64_t memory_budget, uint64_t whole);

/* Memory from the process that counts as this context's, for saved buffers that a host hands out in sluice_save_fn_t
 * (say so with save_is_counted). 64-byte aligned. It may outlive the context: free it with NULL for the context then.
 * allocate_saved: for saved buffer `which` (SLUICE_SAVED_*); on a CPU offloaded rows get blocks that earlier steps
 * freed, which count until the context goes, or until a budget has no other room.
 * Any thread, also while a pass runs. Errors: INVALID_ARGUMENT, NO_MEMORY, OVER_BUDGET, STATE (in a forked child).
 * free accepts NULL data; bytes as given. Of both. */
SLUICE_API sluice_status_t sluice_context_allocate_saved(sluice_context_t* context, int32_t which, uint64_t bytes,
                                                         void** out_data);
SLUICE_API sluice_status_t sluice_context_allocate(sluice_context_t* context, uint64_t bytes, void** out_data);
SLUICE_EXPORT void sluice_context_free(sluice_context_t* context, void* data, uint64_t bytes);

typedef struct sluice_context_stats_s {
  size_t struct_size;     /* set by the caller: sizeof */
  uint64_t current_bytes; /* slots, temporaries and kept step data, allocated now; on CUDA in the device's memory */
  uint64_t peak_bytes;    /* highest current_bytes since the last reset, host-allocated saved buffers included */
  uint64_t slot_bytes;    /* of those, slots of the last pass; other passes, candidates on trial too, may need more */
  uint64_t saved_bytes;   /* of those, saved buffers of the last forward */
  uint64_t bytes_sent;    /* payload bytes to other ranks, all passes */
  uint64_t num_passes;
  uint64_t compute_ns;     /* time the compute lane spent inside ops, all passes */
  uint64_t comm_ns;        /* time the comm lane spent inside ops, all passes */
  uint64_t comm_cpu_ns;    /* CPU time of the comm lane's thread from its first op of a pass to its last, all passes */
  uint64_t pass_ns;        /* wall time inside passes */
  int32_t last_num_chunks; /* n of the last pass */
  int32_t last_is_settled; /* 1: that n is configured or chosen; 0: a candidate on trial */
  char gemm[64];           /* what does the GEMMs, for example "blas (libtorch_cpu)" */
  /* On a CPU, of passes while a trace is kept: what they take beside their ops. */
  uint64_t num_walks;   /* those passes */
  uint64_t bind_cpu_ns; /* CPU time of the calling thread for routes, offsets and slots; without the ranks' handshake
                           and the host's save callback, under a budget with the exchange of counts */
  uint64_t walk_cpu_ns; /* CPU time of the calling thread for submitting, ordering and recording the ops; without the
                           ops, the waits, waking other threads, and the events of the trace */
  uint64_t wait_ns;     /* time that the calling thread waited for other lanes */
  uint64_t num_wakes;   /* how often a thread of any lane, the calling one included, slept and was woken */
  uint64_t wake_cpu_ns; /* CPU time that this took of these threads, and waking of the calling one */
  /* The instrument: readings of the thread's clock that fall into bind_cpu_ns and walk_cpu_ns, and their CPU time: of
   * those about runs of ops as they took, of the others from what one took when the trace began. Without a trace there
   * are none. */
  uint64_t num_readings;
  uint64_t readings_cpu_ns;
  uint64_t num_pool_allocations; /* on a CPU: blocks for offloaded rows that were allocated, not taken from a step */
  uint64_t idle_pool_bytes;      /* of current_bytes, such blocks that no step holds now */
  uint64_t num_fallback_chunks;  /* under plans: chunks of forwards that did not fit kept_rows (sluice/plan.h) and are
                                    sent and computed again; the first of a layer is told at SLUICE_LOG_WARN */
  uint64_t num_outstanding;      /* forwards without their backward now, of all layers: their saved buffers are kept */
  uint64_t most_outstanding;     /* the most at one time since the last reset of the peak */
  uint64_t planned_outstanding;  /* max_outstanding of the newest plan; 0: none has been made. More than that may be
                                    refused, and fit while routing is even */
} sluice_context_stats_t;

/* Context-exclusive. reset_peak != 0 starts a new peak at the current bytes. Errors: INVALID_ARGUMENT, ABI. */
SLUICE_API sluice_status_t sluice_context_get_stats(sluice_context_t* context, int32_t reset_peak,
                                                    sluice_context_stats_t* out_stats);

/* ---- trace ---------------------------------------------------------------------------------------------------- */

enum { SLUICE_LANE_COMPUTE = 0, SLUICE_LANE_COMM = 1, SLUICE_LANE_COPY_OUT = 2, SLUICE_LANE_COPY_IN = 3 };
enum { SLUICE_FORWARD = 0, SLUICE_BACKWARD = 1 };

typedef struct sluice_trace_event_s {
  uint64_t begin_ns; /* CLOCK_MONOTONIC */
  uint64_t end_ns;
  const char* op;    /* immutable name: "dispatch", "gemm1", ... */
  int32_t layer;     /* config's layer_id */
  int32_t chunk;     /* -1: the whole pass */
  int32_t lane;      /* SLUICE_LANE_* */
  int32_t direction; /* SLUICE_FORWARD or SLUICE_BACKWARD */
  uint64_t bytes;    /* payload of communication ops, sent; of a whole pass: the tables of a deduplicated one */
} sluice_trace_event_t;

/* Keeps the newest `capacity` events from now on; 0 stops and forgets. They are no part of `memory_budget` and of the
 * bytes in the stats. On CUDA times are then the device's own, and each pass waits for its end (not one that is
 * captured: its events say when it was enqueued). Context-exclusive. Errors: INVALID_ARGUMENT, BUSY, NO_MEMORY. */
SLUICE_API sluice_status_t sluice_context_trace(sluice_context_t* context, int64_t capacity);
/* Copies up to `capacity` events, oldest first, and forgets all; *out_count is how many were copied. Context-exclusive.
 * Errors: INVALID_ARGUMENT, BUSY. */
SLUICE_API sluice_status_t sluice_context_take_trace(sluice_context_t* context, sluice_trace_event_t* out_events,
                                                     int64_t capacity, int64_t* out_count);

#ifdef __cplusplus
}
#endif

#endif /* SLUICE_CONTEXT_H_ */
