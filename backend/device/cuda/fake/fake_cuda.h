// SPDX-License-Identifier: Apache-2.0
/* A CUDA driver for tests that runs on the CPU. One per process.
 *
 * Streams are recorded queues. Enqueued work runs, in stream order and after the events it waits for, as soon as it
 * can: on any call, and during a host wait. Kernels are the CPU build of the same source. Eight devices exist; device
 * memory is malloc's, so sanitizers see kernels that read or write outside it.
 *
 * In addition, every access of a copy, memset, kernel, GEMM and message is recorded with a vector clock that follows
 * only streams, events and host waits, never the time at which something ran: hazards() counts pairs of conflicting
 * accesses without an order.
 *
 * Kernels are loaded lazily, by the first launch of a kernel of a library on a device, which a capture does not allow.
 *
 * Thread-safe, so that ranks may be threads. */
#pragma once

#include "backend/device/cuda/cuda_device.h"

enum { SLUICE_FAKE_CUDA_DEVICES = 8, SLUICE_FAKE_SMS = 132 }; /* the SMs of one device */

/* Resets all state. No device may be alive. */
void sluice_fake_cuda_reset(void);
const sluice_cuda_driver_t* sluice_fake_cuda_driver(void);
/* Returns an image that the fake accepts: its kernels are linked in. */
sluice_cuda_image_t sluice_fake_cuda_image(void);
/* Creates device 0 of the driver. */
static inline sluice_status_t sluice_fake_cuda_device(sluice_allocator_t* allocator, sluice_device_t** out_device) {
  return sluice_cuda_device_create_from(sluice_fake_cuda_driver(), sluice_fake_cuda_image(), 0, allocator, out_device);
}

/* The call with this number, counted from now, fails with `code` and has no effect, except that destroy and free calls
 * still release. < 0: none. Calls for error texts are not counted. */
void sluice_fake_cuda_fail_call(int64_t nth, int code);
/* Calls since the last fail_call. */
int64_t sluice_fake_cuda_calls(void);
/* Returns whether the planned failure has occurred. */
int sluice_fake_cuda_failed(void);

/* Kernel nth_launch, counted from 0 at this call, faults when it runs, as after an illegal address: its launch
 * succeeds, and then every call fails with 700, but destroy and free calls still release. < 0: no fault, and calls
 * succeed. */
void sluice_fake_cuda_fault(int64_t nth_launch);
int sluice_fake_cuda_faulted(void);

/* The allocation of device or page-locked memory with this number, counted from now, fails. < 0: none. */
void sluice_fake_cuda_refuse(int64_t nth);
int sluice_fake_cuda_refused(void); /* whether that has occurred */

/* Live streams (except those of open_stream), events, libraries, contexts and memory; a line about them in `out`. */
int64_t sluice_fake_cuda_live(char* out, size_t out_bytes);
int64_t sluice_fake_cuda_host_waits(void);
int64_t sluice_fake_cuda_queries(void); /* number of cuEventQuery calls: how a header polls */
int64_t sluice_fake_cuda_launches(void);
int sluice_fake_cuda_has_kernel(const char* name); /* looked up since the reset, as the first launch does */

void sluice_fake_cuda_set_version(int version);
void sluice_fake_cuda_set_numa_node(int32_t node);       /* of every device; < 0: the driver lacks that attribute */
int64_t sluice_fake_cuda_registered_bytes(void);         /* page-locked in place by cuMemHostRegister */
void sluice_fake_cuda_set_memory(uint64_t device_bytes); /* of each device, free and total */

/* Returns a stream of the host, like a framework's; released by close_stream. */
void* sluice_fake_cuda_open_stream(int32_t ordinal);
void sluice_fake_cuda_close_stream(void* stream);
int sluice_fake_cuda_priority(void* stream);
/* Return the device of a stream and its number in the record of calls. Locked. */
int32_t sluice_fake_stream_rank(void* stream);
int32_t sluice_fake_stream_number(void* stream);

/* Capture as the host's framework does it, thread-local: work that this thread then enqueues on the stream, and on
 * streams that wait for it, becomes a graph and does not run. Calls that a capture does not allow, from this thread or
 * on such a stream, fail with 900 and invalidate it: waits and queries, creation of memory, streams, events and
 * kernels, copies of pageable memory. Waiting for an event recorded before the capture, or after the capture for one
 * recorded in it, fails as well. */
typedef struct sluice_fake_graph_s sluice_fake_graph_t;
void sluice_fake_cuda_begin_capture(void* stream);
/* In global mode: those calls of any thread, on any stream, fail and invalidate it. Only one capture at a time. */
void sluice_fake_cuda_begin_global_capture(void* stream);
/* 0 and the graph; 901: invalidated; 904: a stream was not joined. */
int sluice_fake_cuda_end_capture(void* stream, sluice_fake_graph_t** out_graph);
/* Enqueues it, in the order of its events, after the work on the stream. */
void sluice_fake_cuda_launch_graph(sluice_fake_graph_t* graph, void* stream);
void sluice_fake_cuda_destroy_graph(sluice_fake_graph_t* graph); /* accepts NULL; not while it runs */
/* Device memory for the host's own tensors: no driver calls, and not counted as alive. */
void* sluice_fake_cuda_take(int32_t ordinal, uint64_t bytes);
void sluice_fake_cuda_give(void* data);
int32_t sluice_fake_current_device(void); /* of the calling thread's context; -1: it has none */
/* Streams of a device share this many hardware queues, in turn, as with CUDA_DEVICE_MAX_CONNECTIONS; by default 8. A
 * queue executes work in the order of submission, each item to its end. For streams that are opened from now on, also
 * after a reset. */
void sluice_fake_cuda_set_queues(int32_t queues);
/* From now on loading a kernel waits until its device is idle, as a real driver may; also after a reset. */
void sluice_fake_cuda_set_load_waits(int waits);
/* Whether work waits for itself, by events, messages and queues: then waits of the host end, and each call fails with
 * 702. `out` describes it. */
int sluice_fake_cuda_deadlocked(char* out, size_t out_bytes);
/* Runs everything that can run; true if the stream is empty then. */
int sluice_fake_cuda_idle(void* stream);

/* Drops the wait with this number, counted from now: an injected hazard. < 0: none. */
void sluice_fake_cuda_drop_wait(int64_t nth);
/* Returns 0 under ThreadSanitizer: if ranks are threads, a dropped wait may also cause a race between threads of this
 * process. */
int sluice_fake_cuda_may_drop_waits(void);
int64_t sluice_fake_cuda_waits(void); /* since the last drop_wait */
/* The same by rank, whose threads identify themselves: numbers then do not depend on how ranks interleave. */
void sluice_fake_cuda_this_is(int32_t rank); /* the calling thread; 0 otherwise */
void sluice_fake_cuda_drop_wait_of(int32_t rank, int64_t nth);
int64_t sluice_fake_cuda_waits_of(int32_t rank);
/* Pairs of accesses to the same bytes, one of them a write, that no chain of stream order, events and host waits
 * orders; describes the first of them. */
int64_t sluice_fake_cuda_hazards(char* out, size_t out_bytes);
void sluice_fake_cuda_forget_accesses(void);

/* For fakes of libraries that work on streams: enqueues an operation. It runs once ready() returns nonzero (NULL: at
 * once); drop() frees `user` after it ran or when its stream is destroyed. All are called with the fake's lock held.
 */
typedef struct sluice_fake_moment_s sluice_fake_moment_t;
typedef struct sluice_fake_op_s {
  const char* name; /* of static storage */
  int (*ready)(void* user);
  /* Whether it cannot run before another queued operation with the same function. NULL: it waits for none. */
  int (*waits_for)(const void* user, const void* other);
  void (*run)(void* user);
  void (*drop)(void* user);
  void* user;
  /* Called when the operation has its position in a stream: records its accesses, or keeps the moment for later. */
  void (*note)(void* user, const sluice_fake_moment_t* moment);
  /* A copy of `user` for the same operation, which a graph enqueues at each launch. NULL: it cannot be captured. */
  void* (*again)(const void* user);
} sluice_fake_op_t;
/* Runs everything that can run, or adds to the graph if the stream is being captured. Locked. */
void sluice_fake_cuda_enqueue(void* stream, const sluice_fake_op_t* op);
/* Take and release the lock, and wake threads that wait with it. */
void sluice_fake_cuda_lock(void);
void sluice_fake_cuda_unlock(void);
void sluice_fake_cuda_pump(void); /* locked: runs everything that can run */
/* From now on threads that sleep with the lock poll, since other processes make progress too. */
void sluice_fake_cuda_look_again(void);
/* Locked: memory of the calling thread's device for a library's own allocator; returns the driver's code. free does not
 * wait.
 */
int sluice_fake_cuda_allocate(uint64_t bytes, void** out_data);
int sluice_fake_cuda_free(void* data);
/* The moment at which an operation was enqueued, for accesses that are known only when it runs (rows selected by an
 * index). */
enum { SLUICE_FAKE_CUDA_STREAMS = 64 };
struct sluice_fake_moment_s {
  int32_t stream;
  int64_t count;
  int64_t clock[SLUICE_FAKE_CUDA_STREAMS];
};
void sluice_fake_cuda_note_at(const sluice_fake_moment_t* moment, const void* data, uint64_t bytes, int is_write);
/* Records all accesses of a kernel of the image. Locked. (kernel_accesses.c) */
void sluice_fake_note_kernel(const char* name, const void* args, const sluice_fake_moment_t* moment);
/* The same, but calls `collect` for each access, and records nothing. */
typedef void (*sluice_fake_collect_fn_t)(const void* data, uint64_t bytes, int is_write);
void sluice_fake_list_accesses(const char* name, const void* args, sluice_fake_collect_fn_t collect);

/* The CPU build of a kernel, or NULL; *out_bytes: the size of its argument struct. (emulated_kernels.cc) */
typedef void (*sluice_emulated_kernel_fn_t)(int64_t warps, const void* args);
sluice_emulated_kernel_fn_t sluice_emulated_kernel(const char* name, size_t* out_bytes);
/* From now on kernels run by this function, called with the lock held; NULL: as usual. (lane_orders.c) */
void sluice_fake_cuda_run_kernels_by(void (*run)(const char* name, int64_t warps, const void* args));
