// SPDX-License-Identifier: Apache-2.0
/* Shared by the files of the fake driver: the state, and the calls between them. All calls except the driver's own
 * require the lock.
 *
 * fake_world.c    the state, devices and contexts, and the calls of tests
 * fake_queues.c   the queues of streams, and the order in which work runs
 * fake_streams.c  streams and events
 * fake_graphs.c   capture
 * fake_memory.c   memory of devices, pinned and registered memory
 * fake_work.c     copies, kernels and their launches
 * fake_hazards.c  accesses, and pairs of them without an order (kernel_accesses.c: accesses of kernels)
 * fake_record.c   calls as data, and what a dry run omits (kernel_work.c: the amount of work of kernels) */
#pragma once

#include "backend/device/cuda/fake/fake_cuda.h"
#include "backend/device/cuda/fake/fake_record.h"

enum { MAX_STREAMS = SLUICE_FAKE_CUDA_STREAMS, MAX_BLOCKS = 4096 };
enum { INVALID_VALUE = 1, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500 };
enum { CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_UNJOINED = 904, CAPTURE_ISOLATION = 905 };
enum { ILLEGAL_ADDRESS = 700, LAUNCH_TIMEOUT = 702, CAPTURED_EVENT = 907 };

typedef struct fake_clock_s {
  int64_t at[MAX_STREAMS];
} fake_clock_t;

/* One record of an event: shared by the event and its waiters. */
typedef struct ticket_s {
  int references;
  int done;
  int32_t rank;
  int64_t number;
  uint64_t done_ns;
  fake_clock_t clock;
} ticket_t;

typedef struct queued_s {
  struct queued_s* next;
  int64_t number; /* in the order of submission */
  sluice_fake_op_t op;
  ticket_t* waits_for;
  ticket_t* records;
} queued_t;

typedef struct fake_stream_s {
  int32_t live, index, ordinal, is_hosts, priority;
  int32_t queue; /* of its device, which it may share */
  fake_clock_t clock;
  queued_t* head;
  queued_t** tail;
  sluice_fake_graph_t* graph; /* that it is being captured into */
} fake_stream_t;

typedef struct fake_event_s {
  ticket_t* last;   /* NULL: never recorded */
  int64_t graph_id; /* not 0: recorded last in the capture of that graph ... */
  int32_t mark;     /* ... as this mark */
  int32_t is_timed;
} fake_event_t;

/* The work of a graph, in the order of the calls. */
typedef struct node_s {
  struct node_s* next;
  int32_t stream;             /* in which it was captured */
  int32_t records, waits_for; /* marks; -1: none */
  sluice_fake_op_t op;
} node_t;

struct sluice_fake_graph_s {
  int64_t id;
  int32_t origin, is_spoiled, num_marks;
  int32_t is_member[MAX_STREAMS];
  fake_clock_t clocks[MAX_STREAMS];   /* in the capture */
  fake_clock_t* marks;                /* [num_marks] */
  fake_stream_t* places[MAX_STREAMS]; /* its own streams, on which the nodes of each captured stream run */
  node_t* head;
  node_t** tail;
};

typedef struct access_s {
  int32_t stream, is_write;
  int64_t count;
  int64_t clock; /* index into clocks: one for all accesses of an operation */
  int64_t block; /* number of the allocation: an address may be reused */
  const char* data;
  uint64_t bytes;
} access_t;

typedef struct block_s {
  void* data;
  uint64_t bytes;
  int32_t ordinal; /* -1: pinned host memory */
  int32_t is_hosts;
  int32_t is_registered; /* pinned, and owned by the caller */
  int32_t is_reserved;   /* without pages */
  int64_t number;
} block_t;

typedef struct fake_kernel_s {
  char name[64];
  sluice_emulated_kernel_fn_t fn;
  size_t args_bytes;
  int32_t is_loaded[SLUICE_FAKE_CUDA_DEVICES];
} fake_kernel_t;
enum { MAX_KERNELS = 128 };

typedef struct fake_library_s { /* kept until the reset */
  struct fake_library_s* next;
  int32_t is_live, num_kernels;
  fake_kernel_t kernels[MAX_KERNELS];
} fake_library_t;

typedef struct sluice_fake_world_s {
  int version;
  int64_t calls, fail_at;
  int fail_code, failed;
  int64_t fault_at; /* counts launches */
  int faulted;
  int64_t allocations, refuse_at;
  int refused;
  int64_t waits, drop_at;
  int64_t waits_of[SLUICE_FAKE_CUDA_DEVICES];
  int32_t drop_rank; /* drop_at counts this rank's waits; -1: all ranks' */
  int64_t num_events, num_libraries, num_contexts, host_waits, queries, launches;
  int32_t numa_node;
  uint64_t memory, used[SLUICE_FAKE_CUDA_DEVICES];
  fake_stream_t streams[MAX_STREAMS]; /* [0, devices): the default ones */
  block_t blocks[MAX_BLOCKS];
  int32_t num_places; /* the blocks after them have never been used */
  fake_clock_t host;  /* events that the host has waited for */
  access_t* accesses;
  fake_clock_t* clocks;
  int64_t num_accesses, room_accesses, num_clocks, room_clocks, num_blocks, num_graphs, num_tickets;
  fake_library_t* libraries;
  sluice_fake_graph_t* global_capture;
  int64_t num_queued, num_streams[SLUICE_FAKE_CUDA_DEVICES]; /* so far */
  char deadlock[400];                                        /* the first one; all calls fail after it */
} sluice_fake_world_t;
extern sluice_fake_world_t sluice_fake_world;

/* The driver's calls: sluice_fake_cuInit and so on. */
#define SYMBOL(name, parameters) int sluice_fake_##name parameters;
#include "backend/device/cuda/cuda_symbols.inc"
#undef SYMBOL

/* Counts a call. Nonzero: the call must fail with this code. */
int sluice_fake_planned(void);
/* The same for a call that a steady-state pass does not make; it is recorded. */
int sluice_fake_planned_once(const char* name);
/* Takes the lock and plans such a call, which a capture does not allow; then releases the lock and returns the code. */
int sluice_fake_begin(const char* name);
int sluice_fake_end(int code);
/* For calls without an effect of their own; takes the lock. */
int sluice_fake_simple(void);
/* Takes the lock: ranks are threads, one may read while another counts. */
int64_t sluice_fake_locked_count(const int64_t* counter);
/* Releases the lock until something may have changed. */
void sluice_fake_sleep(void);
/* A wait of the host: calls is_over until it is true. Nonzero: a deadlock. */
int sluice_fake_wait_until(int (*is_over)(const void* user), const void* user);
void* sluice_fake_context_of(int32_t ordinal);

/* fake_queues.c */
void sluice_fake_merge(fake_clock_t* into, const fake_clock_t* from);
/* NULL: the default stream of the calling thread's device. */
fake_stream_t* sluice_fake_stream_of(void* handle);
queued_t* sluice_fake_push(fake_stream_t* stream);
void sluice_fake_put(fake_stream_t* stream, const sluice_fake_op_t* op);
ticket_t* sluice_fake_new_ticket(const fake_stream_t* stream); /* two references: the event's and the queue's */
void sluice_fake_drop_ticket(ticket_t* ticket);
void sluice_fake_wait_for_ticket(fake_stream_t* stream, ticket_t* ticket);
void sluice_fake_drop_queued(queued_t* item);
int32_t sluice_fake_next_queue(int32_t ordinal); /* for a new stream */
/* After work that can run has run: looks for queued work that waits for itself, and describes it. */
int sluice_fake_is_deadlocked(void);

/* fake_streams.c; NULL if there are no more */
fake_stream_t* sluice_fake_new_stream(int32_t ordinal, int32_t is_hosts);
void sluice_fake_end_stream(fake_stream_t* stream);

/* fake_graphs.c: a stream with a graph is being captured. */
/* Returns whether a call of this thread, on that stream if it has one, is not allowed during a capture; if so, it
 * invalidates the capture. */
int sluice_fake_spoils(const fake_stream_t* stream);
void sluice_fake_capture_op(fake_stream_t* stream, const sluice_fake_op_t* op);
void sluice_fake_record_in_capture(fake_stream_t* stream, fake_event_t* event);
/* A stream that waits for a captured event is captured from then on. */
int sluice_fake_wait_in_capture(fake_stream_t* stream, const fake_event_t* event);

/* fake_memory.c */
int64_t sluice_fake_block_number(const char* data); /* 0: not memory of the driver */
int sluice_fake_is_on_device(const char* data);
int sluice_fake_is_idle(const void* ordinal);   /* whether no stream of that device has work */
void sluice_fake_release_block(block_t* block); /* its memory, unless the caller owns it */
