#include "backend/device/cuda/fake/fake_cuda.h"

#include <assert.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/clock.h"

enum { MAX_STREAMS = SLUICE_FAKE_CUDA_STREAMS, MAX_BLOCKS = 4096, MAX_CONTEXT_DEPTH = 16 };
enum { INVALID_VALUE = 1, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500 };
enum { CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_UNJOINED = 904, CAPTURE_ISOLATION = 905 };
enum { CAPTURED_EVENT = 907 };

/* ---- what exists ----------------------------------------------------------------------------------------------- */

typedef struct fake_clock_s {
  int64_t at[MAX_STREAMS];
} fake_clock_t;

/* One record of an event: shared by the event and by those who wait for it. */
typedef struct ticket_s {
  int references;
  int done;
  uint64_t done_ns;
  fake_clock_t clock;
} ticket_t;

typedef struct queued_s {
  struct queued_s* next;
  sluice_fake_op_t op;
  ticket_t* waits_for;
  ticket_t* records;
} queued_t;

typedef struct fake_stream_s {
  int32_t live, index, ordinal, is_hosts, capturing;
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

/* What a graph enqueues, in the order of the calls. */
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
  fake_stream_t* places[MAX_STREAMS]; /* of its own: where the nodes of a stream run */
  node_t* head;
  node_t** tail;
};

typedef struct access_s {
  int32_t stream, is_write;
  int64_t count;
  fake_clock_t clock;
  int64_t block; /* number of the allocation: an address may come again */
  const char* data;
  uint64_t bytes;
} access_t;

typedef struct block_s {
  void* data;
  uint64_t bytes;
  int32_t ordinal; /* -1: pinned host memory */
  int32_t is_hosts;
  int32_t is_registered; /* pinned, and the caller's own */
  int64_t number;
} block_t;

typedef struct fake_kernel_s {
  char name[64];
  sluice_emulated_kernel_fn_t fn;
  size_t args_bytes;
} fake_kernel_t;
enum { MAX_KERNELS = 128 };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t progress = PTHREAD_COND_INITIALIZER;
static struct {
  int version;
  int64_t calls, fail_at;
  int fail_code, failed;
  int64_t waits, drop_at;
  int64_t waits_of[SLUICE_FAKE_CUDA_DEVICES];
  int32_t drop_rank; /* drop_at counts this rank's waits; -1: everybody's */
  int64_t num_events, num_libraries, num_contexts, host_waits, queries, launches;
  int32_t numa_node;
  uint64_t memory, used[SLUICE_FAKE_CUDA_DEVICES];
  fake_stream_t streams[MAX_STREAMS]; /* [0, devices): the default ones */
  block_t blocks[MAX_BLOCKS];
  fake_clock_t host; /* what the host has waited for */
  access_t* accesses;
  int64_t num_accesses, room_accesses, num_blocks, num_graphs;
  fake_kernel_t kernels[MAX_KERNELS];
  int32_t num_kernels;
} world;
static char contexts[SLUICE_FAKE_CUDA_DEVICES];
static char library;
static _Thread_local void* current[MAX_CONTEXT_DEPTH];
static _Thread_local int depth;
static _Thread_local sluice_fake_graph_t* own_capture; /* by this thread */

void sluice_fake_cuda_lock(void) { pthread_mutex_lock(&mutex); }
void sluice_fake_cuda_unlock(void) {
  pthread_cond_broadcast(&progress);
  pthread_mutex_unlock(&mutex);
}

/* Counts a call; the lock is held. Not 0: the call shall fail with that. */
static int planned(void) {
  int64_t number = world.calls++;
  if (number != world.fail_at) return 0;
  world.failed = 1;
  return world.fail_code;
}
/* For calls with no effect of their own. */
static int simple(void) {
  sluice_fake_cuda_lock();
  int code = planned();
  sluice_fake_cuda_unlock();
  return code;
}

static void merge(fake_clock_t* into, const fake_clock_t* from) {
  for (int i = 0; i < MAX_STREAMS; ++i) {
    if (from->at[i] > into->at[i]) into->at[i] = from->at[i];
  }
}

/* ---- queues ---------------------------------------------------------------------------------------------------- */

static void drop_ticket(ticket_t* ticket) {
  if (ticket != NULL && --ticket->references == 0) free(ticket);
}

static void drop_queued(queued_t* item) {
  if (item->op.drop != NULL) item->op.drop(item->op.user);
  drop_ticket(item->waits_for);
  drop_ticket(item->records);
  free(item);
}

static int run_head(fake_stream_t* stream) {
  queued_t* item = stream->head;
  if (item->waits_for != NULL && !item->waits_for->done) return 0;
  if (item->op.ready != NULL && !item->op.ready(item->op.user)) return 0;
  stream->head = item->next;
  if (stream->head == NULL) stream->tail = &stream->head;
  if (item->op.run != NULL) item->op.run(item->op.user);
  if (item->records != NULL) {
    item->records->done = 1;
    item->records->done_ns = sluice_now_ns();
  }
  drop_queued(item);
  return 1;
}

/* The streams with high numbers first: no test may rely on an order between streams. */
void sluice_fake_cuda_pump(void) {
  for (int moved = 1; moved;) {
    moved = 0;
    for (int i = MAX_STREAMS - 1; i >= 0; --i) {
      fake_stream_t* stream = &world.streams[i];
      while (stream->live && stream->head != NULL && run_head(stream)) moved = 1;
    }
  }
}

static fake_stream_t* stream_of(void* handle) {
  if (handle != NULL) return handle;
  int32_t ordinal = depth > 0 ? (int32_t)((char*)current[depth - 1] - contexts) : 0;
  return &world.streams[ordinal];
}

static queued_t* push(fake_stream_t* stream) {
  queued_t* item = calloc(1, sizeof *item);
  assert(item != NULL && stream->live);
  *stream->tail = item;
  stream->tail = &item->next;
  merge(&stream->clock, &world.host); /* enqueued after the host knew that */
  ++stream->clock.at[stream->index];
  return item;
}

static void moment_of(const fake_stream_t* stream, sluice_fake_moment_t* out) {
  out->stream = stream->index;
  out->count = stream->clock.at[stream->index];
  memcpy(out->clock, stream->clock.at, sizeof out->clock);
}

static void put(fake_stream_t* stream, const sluice_fake_op_t* op) {
  sluice_fake_moment_t moment;
  push(stream)->op = *op;
  moment_of(stream, &moment);
  if (op->note != NULL) op->note(op->user, &moment);
}

static node_t* add_node(fake_stream_t* stream) {
  sluice_fake_graph_t* graph = stream->graph;
  node_t* node = calloc(1, sizeof *node);
  node->stream = stream->index;
  node->records = node->waits_for = -1;
  *graph->tail = node;
  graph->tail = &node->next;
  ++graph->clocks[stream->index].at[stream->index];
  return node;
}

/* Whether a call of this thread, on that stream if it has one, is one that a capture does not allow; it spoils it. */
static int spoils(const fake_stream_t* stream) {
  if (own_capture != NULL) own_capture->is_spoiled = 1;
  if (stream != NULL && stream->graph != NULL) stream->graph->is_spoiled = 1;
  return own_capture != NULL || (stream != NULL && stream->graph != NULL);
}

void sluice_fake_cuda_enqueue(void* handle, const sluice_fake_op_t* op) {
  fake_stream_t* stream = stream_of(handle);
  if (stream->graph != NULL) {
    stream->graph->is_spoiled |= op->again == NULL;
    add_node(stream)->op = *op;
  } else {
    put(stream, op);
  }
  sluice_fake_cuda_pump();
}

static int64_t block_number(const char* data) {
  for (int i = 0; i < MAX_BLOCKS; ++i) {
    const char* begin = world.blocks[i].data;
    if (begin != NULL && data >= begin && data < begin + world.blocks[i].bytes) return world.blocks[i].number;
  }
  return 0;
}

void sluice_fake_cuda_note_at(const sluice_fake_moment_t* moment, const void* data, uint64_t bytes, int is_write) {
  if (bytes == 0 || data == NULL) return;
  if (world.num_accesses == world.room_accesses) {
    world.room_accesses = world.room_accesses == 0 ? 256 : 2 * world.room_accesses;
    world.accesses = realloc(world.accesses, (size_t)world.room_accesses * sizeof *world.accesses);
    assert(world.accesses != NULL);
  }
  world.accesses[world.num_accesses++] = (access_t){.stream = moment->stream,
                                                    .is_write = is_write,
                                                    .count = moment->count,
                                                    .block = block_number(data),
                                                    .data = data,
                                                    .bytes = bytes};
  memcpy(world.accesses[world.num_accesses - 1].clock.at, moment->clock, sizeof moment->clock);
}

/* Whether one of the two is over before the other begins. */
static int ordered(const access_t* a, const access_t* b) {
  return b->clock.at[a->stream] >= a->count || a->clock.at[b->stream] >= b->count;
}

static int by_place(const void* x, const void* y) {
  const access_t *a = x, *b = y;
  if (a->block != b->block) return a->block < b->block ? -1 : 1;
  if (a->data != b->data) return a->data < b->data ? -1 : 1;
  return 0;
}

int64_t sluice_fake_cuda_hazards(char* out, size_t out_bytes) {
  int64_t found = 0;
  sluice_fake_cuda_lock();
  if (out_bytes > 0) out[0] = '\0';
  if (world.num_accesses > 0) qsort(world.accesses, (size_t)world.num_accesses, sizeof(access_t), by_place);
  for (int64_t i = 0; i < world.num_accesses; ++i) {
    const access_t* a = &world.accesses[i];
    for (int64_t j = i + 1; j < world.num_accesses; ++j) {
      const access_t* b = &world.accesses[j];
      if (b->block != a->block || b->data >= a->data + a->bytes) break;
      if (!(a->is_write || b->is_write) || ordered(a, b)) continue;
      if (found++ > 0) continue;
      snprintf(out, out_bytes, "%s %p by stream %d and %s %p by stream %d are not ordered",
               a->is_write ? "write" : "read", (const void*)a->data, a->stream, b->is_write ? "write" : "read",
               (const void*)b->data, b->stream);
    }
  }
  sluice_fake_cuda_unlock();
  return found;
}

void sluice_fake_cuda_forget_accesses(void) {
  sluice_fake_cuda_lock();
  world.num_accesses = 0;
  sluice_fake_cuda_unlock();
}

/* ---- driver calls: start, devices, contexts -------------------------------------------------------------------- */

static int fake_cuInit(unsigned int flags) {
  (void)flags;
  return simple();
}
static int fake_cuDriverGetVersion(int* out_version) {
  *out_version = world.version;
  return simple();
}
static int fake_cuGetErrorName(int error, const char** out_name) {
  static const char* const names[] = {"CUDA_SUCCESS", "CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_OUT_OF_MEMORY"};
  *out_name = error >= 0 && error < 3 ? names[error] : "CUDA_ERROR_FAKE";
  return 0;
}
static int fake_cuGetErrorString(int error, const char** out_text) {
  *out_text = error == 2 ? "out of memory" : "an error on command";
  return 0;
}
static int fake_cuDeviceGetCount(int* out_count) {
  *out_count = SLUICE_FAKE_CUDA_DEVICES;
  return simple();
}
static int fake_cuDeviceGet(int* out_device, int ordinal) {
  *out_device = 100 + ordinal;
  return simple();
}
static int fake_cuDeviceGetAttribute(int* out_value, int attribute, int device) {
  *out_value = attribute == SLUICE_CU_ATTRIBUTE_MAJOR ? 9 : 0;
  if (attribute == SLUICE_CU_ATTRIBUTE_PCI_BUS) *out_value = 0x1a + device - 100;
  if (attribute != SLUICE_CU_ATTRIBUTE_HOST_NUMA_ID) return simple();
  *out_value = world.numa_node;
  return world.numa_node < 0 ? INVALID_VALUE : simple();
}
static int fake_cuDevicePrimaryCtxRetain(void** out_context, int device) {
  sluice_fake_cuda_lock();
  int code = planned();
  if (code == 0) {
    *out_context = &contexts[device - 100];
    ++world.num_contexts;
  }
  sluice_fake_cuda_unlock();
  return code;
}
static int fake_cuDevicePrimaryCtxRelease_v2(int device) {
  (void)device;
  sluice_fake_cuda_lock();
  int code = planned();
  --world.num_contexts;
  sluice_fake_cuda_unlock();
  return code;
}
static int fake_cuCtxPushCurrent_v2(void* context) {
  int code = simple();
  if (code != 0) return code;
  if (depth == MAX_CONTEXT_DEPTH) return INVALID_CONTEXT;
  current[depth++] = context;
  return 0;
}
static int fake_cuCtxPopCurrent_v2(void** out_context) {
  int code = simple();
  if (depth == 0) return INVALID_CONTEXT;
  *out_context = current[--depth];
  return code;
}
static int fake_cuCtxGetStreamPriorityRange(int* out_least, int* out_greatest) {
  *out_least = 0;
  *out_greatest = -5;
  return depth == 0 ? INVALID_CONTEXT : simple();
}

/* ---- streams and events ---------------------------------------------------------------------------------------- */

static fake_stream_t* new_stream(int32_t ordinal, int32_t is_hosts) {
  for (int32_t i = SLUICE_FAKE_CUDA_DEVICES; i < MAX_STREAMS; ++i) {
    fake_stream_t* stream = &world.streams[i];
    if (stream->live) continue;
    int64_t count = stream->clock.at[i]; /* of its predecessor in this place */
    *stream = (fake_stream_t){.live = 1, .index = i, .ordinal = ordinal, .is_hosts = is_hosts};
    stream->clock.at[i] = count;
    stream->tail = &stream->head;
    return stream;
  }
  return NULL;
}

static void end_stream(fake_stream_t* stream) {
  while (stream->head != NULL) {
    queued_t* item = stream->head;
    stream->head = item->next;
    drop_queued(item);
  }
  stream->tail = &stream->head;
  stream->live = 0;
}

static int fake_cuStreamCreateWithPriority(void** out_stream, unsigned int flags, int priority) {
  if (flags != SLUICE_CU_STREAM_NON_BLOCKING || priority > 0 || priority < -5) return INVALID_VALUE;
  if (depth == 0) return INVALID_CONTEXT;
  sluice_fake_cuda_lock();
  int code = planned();
  if (code == 0 && spoils(NULL)) code = CAPTURE_UNSUPPORTED;
  if (code == 0) {
    *out_stream = new_stream((int32_t)((char*)current[depth - 1] - contexts), 0);
    if (*out_stream == NULL) code = SLUICE_CU_OUT_OF_MEMORY;
  }
  sluice_fake_cuda_unlock();
  return code;
}
static int fake_cuStreamDestroy_v2(void* stream) {
  sluice_fake_cuda_lock();
  int code = planned();
  sluice_fake_cuda_pump();
  end_stream(stream);
  sluice_fake_cuda_unlock();
  return code;
}
static int fake_cuStreamGetCtx(void* stream, void** out_context) {
  *out_context = &contexts[stream_of(stream)->ordinal];
  return simple();
}
static int fake_cuStreamIsCapturing(void* handle, int* out_status) {
  const fake_stream_t* stream = stream_of(handle);
  *out_status = stream->graph != NULL ? 1 + stream->graph->is_spoiled : stream->capturing;
  return simple();
}
static int fake_cuEventCreate(void** out_event, unsigned int flags) {
  if (flags != SLUICE_CU_EVENT_DISABLE_TIMING && flags != SLUICE_CU_EVENT_DEFAULT) return INVALID_VALUE;
  if (depth == 0) return INVALID_CONTEXT;
  sluice_fake_cuda_lock();
  int code = planned();
  if (code == 0 && spoils(NULL)) code = CAPTURE_UNSUPPORTED;
  if (code == 0) {
    fake_event_t* event = calloc(1, sizeof *event);
    event->is_timed = flags == SLUICE_CU_EVENT_DEFAULT;
    *out_event = event;
    ++world.num_events;
  }
  sluice_fake_cuda_unlock();
  return code;
}
static int fake_cuEventDestroy_v2(void* handle) {
  fake_event_t* event = handle;
  sluice_fake_cuda_lock();
  int code = planned();
  drop_ticket(event->last);
  free(event);
  --world.num_events;
  sluice_fake_cuda_unlock();
  return code;
}
static void record_in_capture(fake_stream_t* stream, fake_event_t* event) {
  sluice_fake_graph_t* graph = stream->graph;
  node_t* node = add_node(stream);
  graph->marks = realloc(graph->marks, (size_t)(graph->num_marks + 1) * sizeof *graph->marks);
  assert(graph->marks != NULL);
  graph->marks[graph->num_marks] = graph->clocks[stream->index];
  drop_ticket(event->last);
  event->last = NULL;
  event->graph_id = graph->id;
  event->mark = node->records = graph->num_marks++;
}

static ticket_t* new_ticket(const fake_stream_t* stream) {
  ticket_t* ticket = calloc(1, sizeof *ticket);
  ticket->references = 2;
  ticket->clock = stream->clock;
  return ticket;
}

static int fake_cuEventRecord(void* handle, void* stream_handle) {
  fake_event_t* event = handle;
  sluice_fake_cuda_lock();
  int code = planned();
  fake_stream_t* stream = stream_of(stream_handle);
  if (code == 0 && stream->graph != NULL) {
    record_in_capture(stream, event);
  } else if (code == 0) {
    queued_t* item = push(stream);
    item->records = new_ticket(stream);
    drop_ticket(event->last);
    event->last = item->records;
    event->graph_id = 0;
    sluice_fake_cuda_pump();
  }
  sluice_fake_cuda_unlock();
  return code;
}

static void wait_for_ticket(fake_stream_t* stream, ticket_t* ticket) {
  queued_t* item = push(stream);
  item->waits_for = ticket;
  ++ticket->references;
  merge(&stream->clock, &ticket->clock);
  sluice_fake_cuda_pump();
}

/* The capture that is going on and has this number. */
static sluice_fake_graph_t* graph_of(int64_t id) {
  for (int i = 0; i < MAX_STREAMS; ++i) {
    sluice_fake_graph_t* graph = world.streams[i].graph;
    if (world.streams[i].live && graph != NULL && graph->id == id) return graph;
  }
  return NULL;
}

/* A stream that waits for a captured event is captured from there on. */
static int wait_in_capture(fake_stream_t* stream, const fake_event_t* event) {
  sluice_fake_graph_t* graph = event->graph_id != 0 ? graph_of(event->graph_id) : NULL;
  if (event->graph_id == 0 && event->last == NULL) return 0; /* never recorded */
  if (graph == NULL || (stream->graph != NULL && stream->graph != graph)) {
    if (stream->graph != NULL) stream->graph->is_spoiled = 1;
    return event->graph_id == 0 ? CAPTURE_ISOLATION : CAPTURED_EVENT;
  }
  stream->graph = graph;
  graph->is_member[stream->index] = 1;
  add_node(stream)->waits_for = event->mark;
  merge(&graph->clocks[stream->index], &graph->marks[event->mark]);
  return 0;
}

static _Thread_local int32_t this_rank;

/* Counts a wait; whether it is the one to be left out. */
static int is_left_out(void) {
  const int64_t of_all = world.waits++, of_rank = world.waits_of[this_rank]++;
  if (world.drop_rank < 0) return of_all == world.drop_at;
  return world.drop_rank == this_rank && of_rank == world.drop_at;
}

static int fake_cuStreamWaitEvent(void* stream_handle, void* handle, unsigned int flags) {
  const fake_event_t* event = handle;
  (void)flags;
  sluice_fake_cuda_lock();
  int code = planned();
  fake_stream_t* stream = stream_of(stream_handle);
  int is_any = event->last != NULL || event->graph_id != 0;
  if (code == 0 && is_any && !is_left_out()) {
    if (stream->graph != NULL || event->graph_id != 0) {
      code = wait_in_capture(stream, event);
    } else {
      wait_for_ticket(stream, event->last);
    }
  }
  sluice_fake_cuda_unlock();
  return code;
}
static int fake_cuEventQuery(void* handle) {
  const fake_event_t* event = handle;
  sluice_fake_cuda_lock();
  int code = planned();
  ++world.queries;
  if (code == 0 && spoils(NULL)) code = CAPTURE_UNSUPPORTED;
  sluice_fake_cuda_pump();
  if (code == 0 && event->last != NULL) {
    if (event->last->done) {
      merge(&world.host, &event->last->clock);
    } else {
      code = SLUICE_CU_NOT_READY;
    }
  }
  sluice_fake_cuda_unlock();
  return code;
}
static int fake_cuEventElapsedTime(float* out_milliseconds, void* start, void* end) {
  const fake_event_t *from = start, *to = end;
  sluice_fake_cuda_lock();
  int code = planned();
  ++world.queries;
  if (code == 0 && spoils(NULL)) code = CAPTURE_UNSUPPORTED;
  sluice_fake_cuda_pump();
  int is_recorded = from->last != NULL && to->last != NULL && from->is_timed && to->is_timed;
  if (code == 0 && !is_recorded) code = INVALID_HANDLE;
  if (code == 0 && (!from->last->done || !to->last->done)) code = SLUICE_CU_NOT_READY;
  if (code == 0) *out_milliseconds = (float)(to->last->done_ns - from->last->done_ns) * 1e-6f;
  sluice_fake_cuda_unlock();
  return code;
}
static int fake_cuEventSynchronize(void* handle) {
  const fake_event_t* event = handle;
  sluice_fake_cuda_lock();
  int code = planned();
  ++world.host_waits;
  if (code == 0 && spoils(NULL)) code = CAPTURE_UNSUPPORTED;
  if (code == 0 && event->last != NULL) {
    for (sluice_fake_cuda_pump(); !event->last->done; sluice_fake_cuda_pump()) pthread_cond_wait(&progress, &mutex);
    merge(&world.host, &event->last->clock);
  }
  sluice_fake_cuda_unlock();
  return code;
}
static int fake_cuStreamSynchronize(void* handle) {
  sluice_fake_cuda_lock();
  int code = planned();
  ++world.host_waits;
  fake_stream_t* stream = stream_of(handle);
  if (code == 0 && spoils(stream)) code = CAPTURE_UNSUPPORTED;
  if (code == 0) {
    for (sluice_fake_cuda_pump(); stream->head != NULL; sluice_fake_cuda_pump()) pthread_cond_wait(&progress, &mutex);
    merge(&world.host, &stream->clock);
  }
  sluice_fake_cuda_unlock();
  return code;
}

/* ---- memory ---------------------------------------------------------------------------------------------------- */

static int take_block(uint64_t bytes, int32_t ordinal, void** out_data) {
  if (bytes == 0) return INVALID_VALUE;
  if (ordinal >= 0 && world.used[ordinal] + bytes > world.memory) return SLUICE_CU_OUT_OF_MEMORY;
  for (int i = 0; i < MAX_BLOCKS; ++i) {
    block_t* block = &world.blocks[i];
    if (block->data != NULL) continue;
    if (posix_memalign(&block->data, 256, bytes) != 0) return SLUICE_CU_OUT_OF_MEMORY;
    memset(block->data, 0xa5, bytes); /* what was there before */
    block->bytes = bytes;
    block->ordinal = ordinal;
    block->is_hosts = block->is_registered = 0;
    block->number = ++world.num_blocks;
    if (ordinal >= 0) world.used[ordinal] += bytes;
    *out_data = block->data;
    return 0;
  }
  return SLUICE_CU_OUT_OF_MEMORY;
}
static int give_block(void* data) {
  for (int i = 0; i < MAX_BLOCKS; ++i) {
    block_t* block = &world.blocks[i];
    if (data == NULL || block->data != data || block->is_registered) continue;
    sluice_fake_cuda_pump();
    if (block->ordinal >= 0) world.used[block->ordinal] -= block->bytes;
    free(block->data);
    block->data = NULL;
    return 0;
  }
  return INVALID_VALUE;
}
static int fake_cuMemAlloc_v2(unsigned long long* out_pointer, size_t bytes) {
  if (depth == 0) return INVALID_CONTEXT;
  void* data = NULL;
  sluice_fake_cuda_lock();
  int code = planned();
  if (code == 0 && spoils(NULL)) code = CAPTURE_UNSUPPORTED;
  if (code == 0) code = take_block(bytes, (int32_t)((char*)current[depth - 1] - contexts), &data);
  if (code == 0) *out_pointer = (unsigned long long)(uintptr_t)data;
  sluice_fake_cuda_unlock();
  return code;
}
static int is_busy(int32_t ordinal) {
  for (int i = 0; i < MAX_STREAMS; ++i) {
    const fake_stream_t* stream = &world.streams[i];
    if (stream->live && stream->ordinal == ordinal && stream->head != NULL) return 1;
  }
  return 0;
}
static int32_t ordinal_of(const void* data) {
  for (int i = 0; i < MAX_BLOCKS; ++i) {
    if (world.blocks[i].data == data) return world.blocks[i].ordinal;
  }
  return -1;
}
/* As the real one: waits for everything on the block's device. */
static int fake_cuMemFree_v2(unsigned long long pointer) {
  void* data = (void*)(uintptr_t)pointer;
  sluice_fake_cuda_lock();
  int code = planned();
  if (spoils(NULL)) code = CAPTURE_UNSUPPORTED;
  for (sluice_fake_cuda_pump(); is_busy(ordinal_of(data)); sluice_fake_cuda_pump()) {
    pthread_cond_wait(&progress, &mutex);
  }
  int freed = give_block(data);
  sluice_fake_cuda_unlock();
  return code != 0 ? code : freed;
}
/* Of the current device. What comes after is not ordered by it here: nobody may rely on a wait for everything. */
static int fake_cuCtxSynchronize(void) {
  if (depth == 0) return INVALID_CONTEXT;
  sluice_fake_cuda_lock();
  int code = planned();
  ++world.host_waits;
  if (code == 0 && spoils(NULL)) code = CAPTURE_UNSUPPORTED;
  int32_t ordinal = (int32_t)((char*)current[depth - 1] - contexts);
  for (sluice_fake_cuda_pump(); code == 0 && is_busy(ordinal); sluice_fake_cuda_pump()) {
    pthread_cond_wait(&progress, &mutex);
  }
  sluice_fake_cuda_unlock();
  return code;
}
int sluice_fake_cuda_allocate(uint64_t bytes, void** out_data) {
  if (depth == 0) return INVALID_CONTEXT;
  if (spoils(NULL)) return CAPTURE_UNSUPPORTED;
  return take_block(bytes, (int32_t)((char*)current[depth - 1] - contexts), out_data);
}
int sluice_fake_cuda_free(void* data) { return spoils(NULL) ? CAPTURE_UNSUPPORTED : give_block(data); }

static int fake_cuMemGetInfo_v2(size_t* out_free, size_t* out_total) {
  if (depth == 0) return INVALID_CONTEXT;
  *out_free = world.memory - world.used[(char*)current[depth - 1] - contexts];
  *out_total = world.memory;
  return simple();
}
static int fake_cuMemHostAlloc(void** out_pointer, size_t bytes, unsigned int flags) {
  (void)flags;
  if (depth == 0) return INVALID_CONTEXT;
  sluice_fake_cuda_lock();
  int code = planned();
  if (code == 0 && spoils(NULL)) code = CAPTURE_UNSUPPORTED;
  if (code == 0) code = take_block(bytes, -1, out_pointer);
  sluice_fake_cuda_unlock();
  return code;
}
static int fake_cuMemFreeHost(void* pointer) {
  sluice_fake_cuda_lock();
  int code = planned(), freed = give_block(pointer);
  if (spoils(NULL)) code = CAPTURE_UNSUPPORTED;
  sluice_fake_cuda_unlock();
  return code != 0 ? code : freed;
}
static int fake_cuMemHostRegister_v2(void* pointer, size_t bytes, unsigned int flags) {
  (void)flags;
  if (depth == 0) return INVALID_CONTEXT;
  sluice_fake_cuda_lock();
  int code = planned();
  if (code == 0 && spoils(NULL)) code = CAPTURE_UNSUPPORTED;
  block_t* block = NULL;
  for (int i = 0; i < MAX_BLOCKS && code == 0 && block == NULL; ++i) {
    if (world.blocks[i].data == NULL) block = &world.blocks[i];
  }
  if (code == 0 && block == NULL) code = SLUICE_CU_OUT_OF_MEMORY;
  if (code == 0) {
    memset(pointer, 0xa5, bytes); /* touches it */
    *block =
        (block_t){.data = pointer, .bytes = bytes, .ordinal = -1, .is_registered = 1, .number = ++world.num_blocks};
  }
  sluice_fake_cuda_unlock();
  return code;
}
static int fake_cuMemHostUnregister(void* pointer) {
  sluice_fake_cuda_lock();
  int code = planned(), found = INVALID_VALUE;
  if (spoils(NULL)) code = CAPTURE_UNSUPPORTED;
  for (int i = 0; i < MAX_BLOCKS; ++i) {
    if (world.blocks[i].data != pointer || !world.blocks[i].is_registered) continue;
    world.blocks[i] = (block_t){.data = NULL};
    found = 0;
  }
  sluice_fake_cuda_unlock();
  return code != 0 ? code : found;
}
int64_t sluice_fake_cuda_registered_bytes(void) {
  int64_t bytes = 0;
  sluice_fake_cuda_lock();
  for (int i = 0; i < MAX_BLOCKS; ++i) {
    if (world.blocks[i].data != NULL && world.blocks[i].is_registered) bytes += (int64_t)world.blocks[i].bytes;
  }
  sluice_fake_cuda_unlock();
  return bytes;
}
static int fake_cuPointerGetAttribute(void* out_value, int attribute, unsigned long long pointer) {
  const char* at = (const char*)(uintptr_t)pointer;
  sluice_fake_cuda_lock();
  int code = planned();
  if (code == 0) {
    code = INVALID_VALUE; /* as for pageable host memory */
    for (int i = 0; i < MAX_BLOCKS; ++i) {
      const block_t* block = &world.blocks[i];
      const char* data = block->data;
      if (data == NULL || at < data || at >= data + block->bytes) continue;
      int device = block->ordinal >= 0;
      unsigned int type = device ? SLUICE_CU_MEMORY_DEVICE : SLUICE_CU_MEMORY_HOST;
      if (attribute == SLUICE_CU_POINTER_MEMORY_TYPE) memcpy(out_value, &type, sizeof type);
      if (attribute == SLUICE_CU_POINTER_DEVICE_ORDINAL) memcpy(out_value, &block->ordinal, sizeof block->ordinal);
      code = 0;
    }
  }
  sluice_fake_cuda_unlock();
  return code;
}

/* ---- work ------------------------------------------------------------------------------------------------------ */

typedef struct copy_s {
  void* to;
  const void* from; /* NULL: fill */
  unsigned char value;
  size_t bytes;
} copy_t;

static void run_copy(void* user) {
  const copy_t* copy = user;
  if (copy->from != NULL) {
    memmove(copy->to, copy->from, copy->bytes);
  } else {
    memset(copy->to, copy->value, copy->bytes);
  }
}

static void note_copy(void* user, const sluice_fake_moment_t* moment) {
  const copy_t* copy = user;
  sluice_fake_cuda_note_at(moment, copy->to, copy->bytes, 1);
  if (copy->from != NULL) sluice_fake_cuda_note_at(moment, copy->from, copy->bytes, 0);
}

static void* copy_again(const void* user) {
  copy_t* kept = malloc(sizeof *kept);
  *kept = *(const copy_t*)user;
  return kept;
}

static int enqueue_copy(const copy_t* copy, void* stream) {
  sluice_fake_cuda_lock();
  int code = planned();
  int is_pageable = block_number(copy->to) == 0 || (copy->from != NULL && block_number(copy->from) == 0);
  if (code == 0 && is_pageable && spoils(stream_of(stream))) code = CAPTURE_UNSUPPORTED;
  if (code == 0 && copy->bytes > 0) {
    sluice_fake_cuda_enqueue(
        stream, &(sluice_fake_op_t){
                    .run = run_copy, .drop = free, .user = copy_again(copy), .note = note_copy, .again = copy_again});
  }
  sluice_fake_cuda_unlock();
  return code;
}
static int fake_cuMemcpyAsync(unsigned long long to, unsigned long long from, size_t bytes, void* stream) {
  const copy_t copy = {.to = (void*)(uintptr_t)to, .from = (const void*)(uintptr_t)from, .bytes = bytes};
  return enqueue_copy(&copy, stream);
}
static int fake_cuMemsetD8Async(unsigned long long to, unsigned char value, size_t bytes, void* stream) {
  const copy_t copy = {.to = (void*)(uintptr_t)to, .value = value, .bytes = bytes};
  return enqueue_copy(&copy, stream);
}

static int fake_cuMemsetD2D8Async(unsigned long long to, size_t pitch, unsigned char value, size_t width, size_t height,
                                  void* stream) {
  int code = height == 0 || width == 0 ? simple() : 0;
  for (size_t row = 0; row < height && width > 0 && code == 0; ++row) {
    const copy_t copy = {.to = (void*)(uintptr_t)(to + row * pitch), .value = value, .bytes = width};
    code = enqueue_copy(&copy, stream);
  }
  return code;
}

static int fake_cuLibraryLoadData(void** out_library, const void* image, int* jit_options, void** jit_values,
                                  unsigned int num_jit, int* library_options, void** library_values,
                                  unsigned int num_library) {
  (void)image, (void)jit_options, (void)jit_values, (void)library_options, (void)library_values;
  if (num_jit != 0 || num_library != 0) return INVALID_VALUE;
  sluice_fake_cuda_lock();
  int code = planned();
  if (code == 0 && spoils(NULL)) code = CAPTURE_UNSUPPORTED;
  if (code == 0) {
    *out_library = &library;
    ++world.num_libraries;
  }
  sluice_fake_cuda_unlock();
  return code;
}
static int fake_cuLibraryUnload(void* handle) {
  (void)handle;
  sluice_fake_cuda_lock();
  int code = planned();
  --world.num_libraries;
  sluice_fake_cuda_unlock();
  return code;
}
static int fake_cuLibraryGetKernel(void** out_kernel, void* handle, const char* name) {
  fake_kernel_t kernel = {.fn = NULL};
  snprintf(kernel.name, sizeof kernel.name, "%s", name);
  kernel.fn = sluice_emulated_kernel(name, &kernel.args_bytes);
  if (handle != &library || kernel.fn == NULL) return NOT_FOUND;
  sluice_fake_cuda_lock();
  int code = planned();
  int32_t i = 0;
  while (i < world.num_kernels && world.kernels[i].fn != kernel.fn) ++i;
  assert(i < MAX_KERNELS);
  if (i == world.num_kernels) world.kernels[world.num_kernels++] = kernel;
  if (code == 0 && spoils(NULL)) code = CAPTURE_UNSUPPORTED;
  if (code == 0) *out_kernel = &world.kernels[i];
  sluice_fake_cuda_unlock();
  return code;
}

typedef struct launch_s {
  const fake_kernel_t* kernel;
  sluice_fake_moment_t moment;
  sluice_emulated_kernel_fn_t fn;
  int64_t warps;
  char args[4096]; /* what a kernel's parameters may take */
} launch_t;

static void run_launch(void* user) {
  const launch_t* launch = user;
  sluice_fake_note_kernel(launch->kernel->name, launch->args, &launch->moment); /* before it writes */
  launch->fn(launch->warps, launch->args);
}

static void note_launch(void* user, const sluice_fake_moment_t* moment) { ((launch_t*)user)->moment = *moment; }

static void* launch_again(const void* user) {
  launch_t* launch = malloc(sizeof *launch);
  memcpy(launch, user, sizeof *launch);
  return launch;
}

static int fake_cuLaunchKernel(void* function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                               unsigned int block_x, unsigned int block_y, unsigned int block_z,
                               unsigned int shared_bytes, void* stream, void** parameters, void** extra) {
  const fake_kernel_t* kernel = function;
  if (depth == 0) return INVALID_CONTEXT;
  if (grid_x == 0 || grid_y != 1 || grid_z != 1 || block_x % 32 != 0 || block_x > 1024 || block_y != 1 ||
      block_z != 1 || shared_bytes != 0 || extra != NULL || kernel->args_bytes > 4096) {
    return INVALID_VALUE;
  }
  if (&contexts[stream_of(stream)->ordinal] != current[depth - 1]) return INVALID_HANDLE;
  sluice_fake_cuda_lock();
  int code = planned();
  if (code == 0) {
    launch_t* launch = calloc(1, sizeof *launch);
    launch->fn = kernel->fn;
    launch->warps = (int64_t)grid_x * block_x / 32;
    memcpy(launch->args, parameters[0], kernel->args_bytes);
    ++world.launches;
    launch->kernel = kernel;
    sluice_fake_cuda_enqueue(
        stream, &(sluice_fake_op_t){
                    .run = run_launch, .drop = free, .user = launch, .note = note_launch, .again = launch_again});
  }
  sluice_fake_cuda_unlock();
  return code;
}

/* ---- the fake itself ------------------------------------------------------------------------------------------- */

const sluice_cuda_driver_t* sluice_fake_cuda_driver(void) {
  static const sluice_cuda_driver_t driver = {
#define SYMBOL(name, parameters) .name = fake_##name,
#include "backend/device/cuda/cuda_symbols.inc"
#undef SYMBOL
      .version = 13000,
  };
  return &driver;
}

sluice_cuda_image_t sluice_fake_cuda_image(void) {
  static const char image[] = "kernels that are linked in";
  return (sluice_cuda_image_t){image, sizeof image};
}

void sluice_fake_cuda_reset(void) {
  sluice_fake_cuda_lock();
  for (int i = 0; i < MAX_STREAMS; ++i) end_stream(&world.streams[i]);
  for (int i = 0; i < MAX_BLOCKS; ++i) {
    if (!world.blocks[i].is_registered) free(world.blocks[i].data);
  }
  free(world.accesses);
  memset(&world, 0, sizeof world);
  world.version = 13000;
  world.numa_node = -1;
  world.fail_at = world.drop_at = world.drop_rank = -1;
  world.memory = (uint64_t)1 << 30;
  for (int32_t i = 0; i < SLUICE_FAKE_CUDA_DEVICES; ++i) {
    world.streams[i] = (fake_stream_t){.live = 1, .index = i, .ordinal = i, .is_hosts = 1};
  }
  for (int i = 0; i < MAX_STREAMS; ++i) world.streams[i].tail = &world.streams[i].head;
  sluice_fake_cuda_unlock();
}

void sluice_fake_cuda_fail_call(int64_t nth, int code) {
  sluice_fake_cuda_lock();
  world.calls = 0;
  world.fail_at = nth;
  world.fail_code = code;
  world.failed = 0;
  sluice_fake_cuda_unlock();
}
/* Ranks are threads: one reads while another counts. */
static int64_t locked_count(const int64_t* counter) {
  sluice_fake_cuda_lock();
  int64_t value = *counter;
  sluice_fake_cuda_unlock();
  return value;
}

int64_t sluice_fake_cuda_calls(void) { return locked_count(&world.calls); }
int sluice_fake_cuda_failed(void) { return world.failed; }
int64_t sluice_fake_cuda_host_waits(void) { return locked_count(&world.host_waits); }
int64_t sluice_fake_cuda_queries(void) { return locked_count(&world.queries); }
int64_t sluice_fake_cuda_launches(void) { return locked_count(&world.launches); }
void sluice_fake_cuda_set_version(int version) { world.version = version; }
void sluice_fake_cuda_set_numa_node(int32_t node) { world.numa_node = node; }
void sluice_fake_cuda_set_memory(uint64_t device_bytes) { world.memory = device_bytes; }

int64_t sluice_fake_cuda_live(char* out, size_t out_bytes) {
  int64_t streams = 0, blocks = 0;
  sluice_fake_cuda_lock();
  for (int i = 0; i < MAX_STREAMS; ++i) streams += world.streams[i].live && !world.streams[i].is_hosts;
  for (int i = 0; i < MAX_BLOCKS; ++i) blocks += world.blocks[i].data != NULL && !world.blocks[i].is_hosts;
  snprintf(out, out_bytes, "%lld streams, %lld events, %lld libraries, %lld contexts, %lld blocks, depth %d",
           (long long)streams, (long long)world.num_events, (long long)world.num_libraries,
           (long long)world.num_contexts, (long long)blocks, depth);
  int64_t live = streams + blocks + world.num_events + world.num_libraries + world.num_contexts + depth;
  sluice_fake_cuda_unlock();
  return live;
}

void* sluice_fake_cuda_take(int32_t ordinal, uint64_t bytes) {
  void* data = NULL;
  sluice_fake_cuda_lock();
  int code = take_block(bytes, ordinal, &data);
  for (int i = 0; i < MAX_BLOCKS && code == 0; ++i) world.blocks[i].is_hosts |= world.blocks[i].data == data;
  sluice_fake_cuda_unlock();
  return code == 0 ? data : NULL;
}
void sluice_fake_cuda_give(void* data) {
  sluice_fake_cuda_lock();
  (void)give_block(data);
  sluice_fake_cuda_unlock();
}

void* sluice_fake_cuda_open_stream(int32_t ordinal) {
  sluice_fake_cuda_lock();
  void* stream = new_stream(ordinal, 1);
  sluice_fake_cuda_unlock();
  return stream;
}
void sluice_fake_cuda_close_stream(void* stream) {
  sluice_fake_cuda_lock();
  sluice_fake_cuda_pump();
  end_stream(stream);
  sluice_fake_cuda_unlock();
}
void sluice_fake_cuda_set_capturing(void* stream, int capturing) { ((fake_stream_t*)stream)->capturing = capturing; }
int sluice_fake_cuda_idle(void* handle) {
  sluice_fake_cuda_lock();
  sluice_fake_cuda_pump();
  int idle = stream_of(handle)->head == NULL;
  sluice_fake_cuda_unlock();
  return idle;
}

void sluice_fake_cuda_drop_wait(int64_t nth) { sluice_fake_cuda_drop_wait_of(-1, nth); }
int64_t sluice_fake_cuda_waits(void) { return locked_count(&world.waits); }

void sluice_fake_cuda_this_is(int32_t rank) { this_rank = rank; }
void sluice_fake_cuda_drop_wait_of(int32_t rank, int64_t nth) {
  sluice_fake_cuda_lock();
  world.waits = 0;
  memset(world.waits_of, 0, sizeof world.waits_of);
  world.drop_rank = rank;
  world.drop_at = nth;
  sluice_fake_cuda_unlock();
}
int64_t sluice_fake_cuda_waits_of(int32_t rank) { return world.waits_of[rank]; }

/* ---- graphs ---------------------------------------------------------------------------------------------------- */

void sluice_fake_cuda_begin_capture(void* handle) {
  sluice_fake_cuda_lock();
  fake_stream_t* stream = stream_of(handle);
  sluice_fake_graph_t* graph = calloc(1, sizeof *graph);
  assert(graph != NULL && stream->graph == NULL && own_capture == NULL);
  graph->id = ++world.num_graphs;
  graph->origin = stream->index;
  graph->tail = &graph->head;
  graph->is_member[stream->index] = 1;
  stream->graph = own_capture = graph;
  sluice_fake_cuda_unlock();
}

static int judge(const sluice_fake_graph_t* graph) {
  for (int i = 0; i < MAX_STREAMS; ++i) {
    if (graph->is_member[i] && graph->clocks[graph->origin].at[i] < graph->clocks[i].at[i]) return CAPTURE_UNJOINED;
  }
  return graph->is_spoiled ? CAPTURE_INVALIDATED : 0;
}

int sluice_fake_cuda_end_capture(void* handle, sluice_fake_graph_t** out_graph) {
  sluice_fake_cuda_lock();
  sluice_fake_graph_t* graph = stream_of(handle)->graph;
  assert(graph != NULL && graph == own_capture && graph->origin == stream_of(handle)->index);
  own_capture = NULL;
  for (int i = 0; i < MAX_STREAMS; ++i) {
    if (!graph->is_member[i]) continue;
    world.streams[i].graph = NULL;
    graph->places[i] = new_stream(world.streams[i].ordinal, 1);
    assert(graph->places[i] != NULL);
  }
  int code = judge(graph);
  sluice_fake_cuda_unlock();
  *out_graph = code == 0 ? graph : NULL;
  if (code != 0) sluice_fake_cuda_destroy_graph(graph);
  return code;
}

void sluice_fake_cuda_launch_graph(sluice_fake_graph_t* graph, void* handle) {
  sluice_fake_cuda_lock();
  fake_stream_t* stream = stream_of(handle);
  ticket_t** tickets = calloc((size_t)graph->num_marks + 1, sizeof *tickets);
  queued_t* entry = push(stream);
  ticket_t* before = entry->records = new_ticket(stream);
  for (int i = 0; i < MAX_STREAMS; ++i) {
    if (graph->is_member[i]) wait_for_ticket(graph->places[i], before);
  }
  drop_ticket(before);
  for (const node_t* node = graph->head; node != NULL; node = node->next) {
    fake_stream_t* place = graph->places[node->stream];
    if (node->waits_for >= 0) {
      wait_for_ticket(place, tickets[node->waits_for]);
    } else if (node->records >= 0) {
      queued_t* item = push(place);
      tickets[node->records] = item->records = new_ticket(place);
    } else {
      sluice_fake_op_t op = node->op;
      op.user = op.again(op.user);
      put(place, &op);
    }
  }
  queued_t* exit = push(graph->places[graph->origin]);
  ticket_t* after = exit->records = new_ticket(graph->places[graph->origin]);
  wait_for_ticket(stream, after);
  drop_ticket(after);
  for (int32_t i = 0; i < graph->num_marks; ++i) drop_ticket(tickets[i]);
  free(tickets);
  sluice_fake_cuda_pump();
  sluice_fake_cuda_unlock();
}

void sluice_fake_cuda_destroy_graph(sluice_fake_graph_t* graph) {
  if (graph == NULL) return;
  sluice_fake_cuda_lock();
  sluice_fake_cuda_pump();
  for (node_t *node = graph->head, *next; node != NULL; node = next) {
    next = node->next;
    if (node->op.drop != NULL) node->op.drop(node->op.user);
    free(node);
  }
  for (int i = 0; i < MAX_STREAMS; ++i) {
    if (graph->places[i] != NULL) end_stream(graph->places[i]);
  }
  free(graph->marks);
  free(graph);
  sluice_fake_cuda_unlock();
}
