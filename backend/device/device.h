/* A device: lanes (ordered queues) and the events between them, and the row kernels.
 *
 * A pass submits its ops in program order, each to a lane, with the ops it waits for; then it joins, and nothing need
 * run before. The device decides how lanes run: on a CPU the compute lane is the calling thread and every other lane
 * one thread; on CUDA lanes are streams and events. Event i belongs to op i and fires when the op has ended.
 *
 * Failure: the first failing job decides the pass's status. Afterwards only jobs marked `run_on_failure` run
 * (exchanges: the group must stay in step), until one of those fails too; skipped jobs still fire their events.
 *
 * Threads: begin, submit and join are called by one thread at a time (context-exclusive).
 */
#ifndef SLUICE_BACKEND_DEVICE_DEVICE_H_
#define SLUICE_BACKEND_DEVICE_DEVICE_H_

#include "backend/base/alloc.h"
#include "backend/base/status.h"
#include "backend/device/kernels.h"
#include "backend/device/tally.h"
#include "sluice/context.h"

typedef struct sluice_device_s sluice_device_t;
typedef struct sluice_timer_s sluice_timer_t; /* of a device of its own memory */

/* Does op `index` of the pass `user`; `stream` is the lane's (NULL on a CPU). */
typedef sluice_status_t (*sluice_job_fn_t)(void* user, int32_t index, sluice_stream_t stream);

typedef struct sluice_job_s {
  int32_t index;        /* the op, and its event */
  int32_t lane;         /* SLUICE_LANE_* */
  const int32_t* waits; /* events of other lanes, of jobs submitted before; borrowed until join */
  int32_t num_waits;
  int32_t run_on_failure;
} sluice_job_t;

typedef struct sluice_device_vtable_s {
  void (*destroy)(sluice_device_t* device); /* first; joins and ends all threads */
  /* Starts a pass of `num_events` jobs. stream: the host's (NULL on a CPU). */
  sluice_status_t (*begin)(sluice_device_t* device, int32_t num_events, sluice_job_fn_t fn, void* user,
                           sluice_stream_t stream);
  sluice_status_t (*submit)(sluice_device_t* device, const sluice_job_t* job);
  /* Runs or awaits everything; returns the first failure with its error record on this thread. On a CPU all results are
   * host-complete. Must be called once after each successful begin. */
  sluice_status_t (*join)(sluice_device_t* device);
  /* Optional, both or none. Bytes that passes of num_events jobs make begin() allocate once (-1: bytes allocated now),
   * and doing so ahead of the first pass. */
  uint64_t (*events_bytes)(const sluice_device_t* device, int32_t num_events);
  sluice_status_t (*reserve)(sluice_device_t* device, int32_t num_events);
} sluice_device_vtable_t;

/* The routes of a forward, ordered on the device. Rows of chunk i start at first_token[i] * K in the three orders, with
 * a ceiling at i * E * ceiling in order and order_token. */
typedef struct sluice_far_routes_s {
  const void* ids;      /* device: expert of route (t, k) at t * ids_t + k * ids_k; -1: dropped */
  int64_t ids_t, ids_k; /* elements */
  int32_t ids_64;       /* 1: i64 ids, 0: i32 */
  int32_t num_chunks;
  const int64_t* first_token;     /* host [n + 1] */
  const int32_t* place_of_expert; /* host [E] */
  int32_t top_k, num_experts;
  int32_t* counts; /* device, out [n][E + 1] by place; the last of a chunk: its first route whose id is no expert's,
                      t * K + k, or INT32_MAX */
  int32_t* order;  /* device, out: flat routes t * K + k in sent order */
  int32_t* order_token; /* device, out: their tokens */
  int32_t* position;    /* device, out [T * K]: row of each route in its chunk's sent order, -1 where dropped */
  void* scratch;        /* device, scratch_bytes() */
  /* Not 0: every place has this many rows in each chunk. Its first routes take them, the others are dropped; rows that
   * no route takes are -1 in order and order_token. */
  int64_t ceiling;
  int64_t* tally; /* device, with a ceiling: [SLUICE_TALLY_WORDS], added to */
} sluice_far_routes_t;

/* Routes per block of tokens and place: block g of G has the tokens [T g / G, T (g + 1) / G). */
typedef struct sluice_far_blocks_s {
  const void* ids; /* as sluice_far_routes_t */
  int64_t ids_t, ids_k;
  int32_t ids_64;
  int32_t num_blocks; /* G */
  int64_t num_tokens;
  const int32_t* place_of_expert; /* host [E] */
  int32_t top_k, num_experts;
  int32_t* counts; /* device, out [G][E + 1]; the last of a block: its first route whose id is no expert's, t * K + k,
                      or INT32_MAX */
  void* scratch;   /* device, route_scratch_bytes(0, E) */
  /* Parcels too; num_ranks 0: not. */
  int32_t num_ranks;
  const int32_t* rank_of_expert; /* host [E] */
  int32_t* parcels;              /* device, out [G][W + 1] by rank, and a word without meaning */
  void* parcel_scratch;          /* device, parcel_scratch_bytes(T K, E, W) */
} sluice_far_blocks_t;

/* The parcels of a forward (moe/routing/parcels.h), of routes that were ordered before. Those of chunk i start at
 * first_token[i] * most in token; rows of its routes at first_token[i] * K in slots. */
typedef struct sluice_far_parcels_s {
  const void* ids; /* as sluice_far_routes_t */
  int64_t ids_t, ids_k;
  int32_t ids_64;
  int32_t num_chunks;
  const int64_t* first_token;    /* host [n + 1] */
  const int32_t* rank_of_expert; /* host [E] */
  int32_t top_k, num_experts, num_ranks;
  int32_t most;               /* parcels of a token: min(K, W) */
  const int32_t* position;    /* device [T * K] of the routes */
  int32_t* counts;            /* device, out [n][W + 1] parcels by rank, and a word without meaning */
  int32_t* token;             /* device, out: of each parcel, by (rank, token) in each chunk */
  int32_t* position_of_token; /* device, out [T][W] its row in that order, -1: none */
  int32_t* slots;             /* device, out: of each route, in sent order */
  void* scratch;              /* device, parcel_scratch_bytes() */
} sluice_far_parcels_t;

/* Received routes of one source and one expert in a chunk, in the sender's order: where their slots lie, the parcels of
 * the source in this chunk and the first of them among all, the routes' first row in expert order and in origin.
 * from: the source's first parcel among those that travelled, weight: the routes' place among weights that arrive; of
 * own routes the first parcel in token, and -1. */
typedef struct sluice_far_parcel_run_s {
  int32_t rows, slot, parcels, parcel, row, origin, from, weight;
} sluice_far_parcel_run_t;

typedef struct sluice_far_arrivals_s {
  const sluice_far_parcel_run_t* runs; /* host */
  int64_t num_runs;
  int32_t top_k;
  int64_t parcels;      /* that arrive */
  const int32_t* slots; /* device, and the rest */
  const int32_t* token;
  int32_t* position; /* out [parcels][K] row in expert order, -1: no such route */
  int32_t* weight;   /* out [parcels][K] index of the route weight as it arrives, own ones t * K + k; -1 alike */
  int32_t* origin;   /* out by row: the parcel that travelled, own ones the token; -1: the slot was none */
} sluice_far_arrivals_t;

enum { SLUICE_OP_TIMES_NONE = 0, SLUICE_OP_TIMES_TAKEN = 1, SLUICE_OP_TIMES_LATER = 2 };

/* A device whose memory the host cannot touch. Work goes to `stream`, the host's or a lane's, and is stream-complete.
 * Errors: INVALID_ARGUMENT and STATE where named, NO_MEMORY, FOREIGN. */
typedef struct sluice_far_vtable_s {
  /* Before anything else of a call: INVALID_ARGUMENT unless the stream belongs to this device; it waits for the end of
   * the pass before, on whatever stream that ran, since passes share the context's slots. *out_captured: the stream is
   * being captured into a graph. Then nothing waits for what was enqueued before the capture, until the next open
   * nothing is allocated and no block is given back, and the caller has made the same call outside a capture before. */
  sluice_status_t (*open)(sluice_device_t* device, sluice_stream_t stream, int32_t* out_captured);
  /* INVALID_ARGUMENT, naming the tensor, unless `data` is memory of this device. bytes 0: anything passes. */
  sluice_status_t (*check_memory)(sluice_device_t* device, const void* data, uint64_t bytes, uint64_t alignment,
                                  const char* name);
  /* allocate, release NULL: the device's own memory. */
  void (*init_memory)(sluice_device_t* device, sluice_allocate_fn_t allocate, sluice_free_fn_t release, void* user,
                      sluice_allocator_t* out_memory);
  sluice_status_t (*fill)(sluice_device_t* device, sluice_stream_t stream, void* to, int32_t value, uint64_t bytes);
  sluice_status_t (*copy)(sluice_device_t* device, sluice_stream_t stream, void* to, const void* from, uint64_t bytes);
  /* To host memory; waits for that copy: the only host wait. STATE where the stream is being captured. */
  sluice_status_t (*read)(sluice_device_t* device, sluice_stream_t stream, const void* data, void* out, uint64_t bytes);
  uint64_t (*route_scratch_bytes)(int64_t num_routes, int32_t num_experts);
  sluice_status_t (*route)(sluice_device_t* device, sluice_stream_t stream, const sluice_far_routes_t* routes);
  sluice_status_t (*count_blocks)(sluice_device_t* device, sluice_stream_t stream, const sluice_far_blocks_t* blocks);
  /* Numbers the parcels of a forward; words move by runs; received slots become tables. */
  uint64_t (*parcel_scratch_bytes)(int64_t num_routes, int32_t num_experts, int32_t num_ranks);
  sluice_status_t (*number_parcels)(sluice_device_t* device, sluice_stream_t stream,
                                    const sluice_far_parcels_t* parcels);
  sluice_status_t (*move_words)(sluice_device_t* device, sluice_stream_t stream, const sluice_row_run_t* runs,
                                int64_t num_runs, const int32_t* src, int32_t* dst);
  sluice_status_t (*place_parcels)(sluice_device_t* device, sluice_stream_t stream,
                                   const sluice_far_arrivals_t* arrivals);
  /* Blocks from pools, to be used from `stream` and from lanes of passes on it: page-locked host memory, or the
   * device's (memory: from init_memory; the same one always). most_bytes: no larger block (0: any that is not
   * wasteful), so that what steps of a plan hold is bounded, and where it is `bytes` known to the byte. In a capture
   * one that lies idle, else STATE. give: free for others once the last pass of this device has ended, without waiting
   * for it, and never if it is given in a capture; accepts NULL. release: gives all of it back, and waits. */
  sluice_status_t (*take)(sluice_device_t* device, sluice_stream_t stream, sluice_allocator_t* memory, int32_t pinned,
                          uint64_t bytes, uint64_t most_bytes, void** out_data);
  void (*give)(sluice_device_t* device, int32_t pinned, void* data);
  /* Two marks on a stream, and the time between them on the device. ns answers 0 while the second has not been passed:
   * nothing waits. Not in a capture. destroy accepts NULL. */
  sluice_status_t (*timer_create)(sluice_device_t* device, sluice_timer_t** out_timer);
  sluice_status_t (*timer_mark)(sluice_device_t* device, sluice_timer_t* timer, int32_t is_end, sluice_stream_t stream);
  sluice_status_t (*timer_ns)(sluice_device_t* device, const sluice_timer_t* timer, uint64_t* out_ns);
  void (*timer_destroy)(sluice_device_t* device, sluice_timer_t* timer);
  /* Whether passes from now on note when each op ran on the device; not in a capture. op_times, after a join: when the
   * ops of the last pass ran, in ns from its begin, once the pass has ended (TAKEN); nothing waits (LATER). NONE: this
   * pass has no times, which is no failure. begin_ns, end_ns: [num_ops]. */
  void (*time_ops)(sluice_device_t* device, int32_t wanted);
  int32_t (*op_times)(sluice_device_t* device, int32_t num_ops, uint64_t* begin_ns, uint64_t* end_ns);
  /* Bytes of the device's memory in blocks that nobody has taken: they make room where memory is short. */
  uint64_t (*idle_bytes)(const sluice_device_t* device);
  /* Page-locked blocks are at most so many bytes from now on; 0: no limit. */
  void (*limit_pinned)(sluice_device_t* device, uint64_t bytes);
  /* What the device is, for a person and for caches of what was measured on it. */
  void (*describe)(const sluice_device_t* device, char* out_name, int32_t bytes);
  void (*release)(sluice_device_t* device);
} sluice_far_vtable_t;

/* Of one pass on a device whose lanes are threads. */
typedef struct sluice_lane_waits_s {
  uint64_t caller_ns;     /* that the calling thread waited */
  uint64_t caller_cpu_ns; /* CPU time of its sleeping, of being woken, and of waking others */
  uint64_t cpu_ns;        /* the same of all threads, where only the calling one counts for waking others */
  uint64_t num_wakes;
  uint64_t num_caller_wakes; /* of them, of the calling thread */
  uint64_t num_caller_posts; /* how often it woke others */
} sluice_lane_waits_t;

struct sluice_device_s {
  const sluice_device_vtable_t* vtable;
  const sluice_kernels_t* kernels;
  sluice_allocator_t* allocator; /* of host memory */
  const char* name;
  const sluice_far_vtable_t* far; /* NULL: the device works in host memory */
  int32_t counts_waits;           /* asked before begin: the pass's waits are in `waits` after join */
  sluice_lane_waits_t waits;
};

/* out_device: new, device->vtable->destroy. No thread is made before the first job of another lane. */
sluice_status_t sluice_cpu_device_create(sluice_allocator_t* allocator, sluice_device_t** out_device);

#endif /* SLUICE_BACKEND_DEVICE_DEVICE_H_ */
