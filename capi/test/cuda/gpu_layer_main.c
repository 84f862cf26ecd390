// SPDX-License-Identifier: Apache-2.0
/* The layer's suite on a GPU, through the C ABI, as one program without a test framework.
 *
 *   gpu_layer --list            the parts
 *   gpu_layer PART [SECONDS]    runs one; a line per case, the last `N passed, N failed`; exit 0, 1, or 77: no GPU here
 *
 * Several ranks are threads that share GPU 0, with a local communicator. integration_tests/gpu/run runs this program;
 * Bazel tests the same source over the fake driver and cuBLAS (-DSLUICE_GPU_SUITE_FAKE). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/test/last_error.h"
#include "backend/moe/context/context.h"
#include "capi/src/context_on_device.h"
#include "capi/test/cuda/cuda_calibrate_suite.h"
#include "capi/test/cuda/cuda_layer_suite.h"
#ifdef SLUICE_GPU_SUITE_FAKE
#include "capi/test/cuda/fakes.h"
#else
#include "backend/cts/gpu/gpu_graphs.h"
#endif

enum { NO_GPU = 77, MOST_RANKS = 4 };
/* A rank may load a library's kernels first, under a checker slowly. */
#define TIMEOUT_NS UINT64_C(60000000000)

/* Checks that device memory is returned after each case. */
typedef enum watch_kind_e {
  GPU_MEMORY_LOSSES_ARE_NOTED = 0,
  GPU_MEMORY_LOSSES_FAIL, /* after MOST_LOADS of them */
  GPU_MEMORY_NOT_WATCHED
} watch_kind_t;

static int passed, failed;

static void report(const char* name, const char* problem) {
  passed += problem == NULL;
  failed += problem != NULL;
  printf("%s %s%s%s\n", problem == NULL ? "ok  " : "FAIL", name, problem == NULL ? "" : ": ",
         problem == NULL ? "" : problem);
  fflush(stdout);
}

#ifndef SLUICE_GPU_SUITE_FAKE

/* ---- ranks on GPU 0 -------------------------------------------------------------------------------------------- */

static void die(const char* what, int code) {
  printf("FAIL %s: %d, %s\n", what, code, last_message());
  exit(1);
}

typedef struct rank_machine_s {
  sluice_device_t* device; /* one object per rank, since only one thread at a time may enter a device */
  void* stream;
  sluice_context_t* context;
  gpu_graph_t graph;
  uint64_t before, sums[2];
} rank_machine_t;

static const sluice_cuda_driver_t* driver;
static rank_machine_t ranks[MOST_RANKS];
static _Thread_local int32_t rank_here;

static void enter(int32_t rank) {
  rank_here = rank;
  if (sluice_cuda_enter(ranks[rank].device) != SLUICE_OK) die("enter", 0);
}
static void leave(int32_t rank) {
  if (sluice_cuda_leave(ranks[rank].device) != SLUICE_OK) die("leave", 0);
}
/* Makes a call of the driver on the rank's device; the program ends if it fails. */
#define DRIVE(rank, what, call)         \
  do {                                  \
    enter(rank);                        \
    const int code_ = (call);           \
    leave(rank);                        \
    if (code_ != 0) die((what), code_); \
  } while (0)

static int32_t device_id(int32_t rank) {
  (void)rank;
  return 0;
}
static void* allocate(int32_t rank, uint64_t bytes) {
  unsigned long long data = 0;
  DRIVE(rank, "memory of a case", driver->cuMemAlloc_v2(&data, bytes));
  return (void*)(uintptr_t)data;
}
static void release(void* data) {
  const int32_t rank = rank_here;
  DRIVE(rank, "memory of a case cannot be freed", driver->cuMemFree_v2((unsigned long long)(uintptr_t)data));
}
static void settle(int32_t rank) {
  DRIVE(rank, "the stream of a rank", driver->cuStreamSynchronize(ranks[rank].stream));
}
static void copy_over(int32_t rank, unsigned long long to, unsigned long long from, uint64_t bytes) {
  DRIVE(rank, "copy", bytes == 0 ? 0 : driver->cuMemcpyAsync(to, from, bytes, ranks[rank].stream));
  settle(rank);
}
static void send(int32_t rank, void* there, const void* here, uint64_t bytes) {
  copy_over(rank, (unsigned long long)(uintptr_t)there, (unsigned long long)(uintptr_t)here, bytes);
}
static void fetch(int32_t rank, void* here, const void* there, uint64_t bytes) {
  copy_over(rank, (unsigned long long)(uintptr_t)here, (unsigned long long)(uintptr_t)there, bytes);
}
static sluice_stream_t stream_of(int32_t rank) { return ranks[rank].stream; }

static sluice_status_t make_context(int32_t rank, const sluice_context_config_t* config, sluice_comm_t* comm,
                                    sluice_context_t** out_context) {
  sluice_status_t status = sluice_context_create(config, comm, out_context);
  ranks[rank].context = *out_context;
  return status;
}

static void note(int32_t rank, int32_t direction, int32_t has_returned) {
  rank_machine_t* r = &ranks[rank];
  if (r->context == NULL) return;
  uint64_t now = sluice_cuda_device_stats(r->context->device).num_host_waits;
  if (has_returned) r->sums[direction] += now - r->before;
  r->before = now;
}

static void begin_capture(int32_t rank) {
  DRIVE(rank, "the beginning of a capture", gpu_graph_begin(ranks[rank].stream));
}
static int end_capture(int32_t rank) {
  rank_machine_t* r = &ranks[rank];
  enter(rank);
  int code = gpu_graph_end(r->stream, &r->graph);
  leave(rank);
  return code;
}
static void launch(int32_t rank) {
  DRIVE(rank, "the launch of a graph", gpu_graph_launch(&ranks[rank].graph, ranks[rank].stream));
}
static void drop_graph(int32_t rank) {
  enter(rank);
  gpu_graph_drop(&ranks[rank].graph);
  leave(rank);
}

static const world_machine_t* world(void) {
  static const world_machine_t machine = {
      .device_type = SLUICE_DEVICE_CUDA,
      .device_id = device_id,
      .allocate = allocate,
      .release = release,
      .send = send,
      .fetch = fetch,
      .make_context = make_context,
      .stream = stream_of,
      .settle = settle,
      .note = note,
      .begin_capture = begin_capture,
      .end_capture = end_capture,
      .launch = launch,
      .drop_graph = drop_graph,
      .timeout_ns = TIMEOUT_NS,
  };
  return &machine;
}

static void open_case(int32_t world_size, int32_t variant) {
  (void)world_size, (void)variant;
  for (int32_t r = 0; r < MOST_RANKS; ++r) {
    ranks[r].context = NULL;
    memset(ranks[r].sums, 0, sizeof ranks[r].sums);
  }
}

#define MEMORY_LOSS ((size_t)64 << 20) /* the pools of the driver vary by less */

static struct {
  watch_kind_t kind;
  size_t free_before;
  int num_cases, num_losses;
} watch;

/* After a case: `now` bytes are free. NULL, or the problem.
 *
 * Code that is loaded on first use keeps its memory: kernels, and code of cuBLAS for a dtype or a shape, which may be
 * loaded in later cases. The driver decides how often this happens, so a loss is only noted. A case that leaks loses
 * memory repeatedly, so with many cases too many losses are a failure. */
static const char* memory_seen(size_t now) {
  enum { WARM_UP = 8, MOST_LOADS = 4 };
  static char text[128];
  if (watch.kind == GPU_MEMORY_NOT_WATCHED) return NULL;
  if (++watch.num_cases <= WARM_UP) watch.free_before = now;
  if (now + MEMORY_LOSS >= watch.free_before) return NULL;
  snprintf(text, sizeof text, "%zu bytes of the device have not come back, loss %d", watch.free_before - now,
           ++watch.num_losses);
  watch.free_before = now;
  if (watch.kind == GPU_MEMORY_LOSSES_FAIL && watch.num_losses > MOST_LOADS) return text;
  printf("     note: %s\n", text);
  return NULL;
}

static const char* close_case(void) {
  size_t now = 0, total = 0;
  DRIVE(0, "memory info", driver->cuMemGetInfo_v2(&now, &total));
  return memory_seen(now);
}

static void watch_memory(watch_kind_t kind) { watch.kind = kind; }

static uint64_t reads(int32_t rank, int32_t direction) { return ranks[rank].sums[direction]; }

static const layer_machine_t* machine_of(int32_t world_size) {
  static const layer_machine_t gpu = {"gpu", 0, open_case, world, close_case, reads};
  (void)world_size;
  return &gpu;
}

static void open_gpu(void) {
  for (int32_t r = 0; r < MOST_RANKS; ++r) {
    sluice_status_t status = sluice_cuda_device_create(0, sluice_process_allocator(), &ranks[r].device);
    if (status == SLUICE_E_NOT_FOUND) {
      printf("no GPU: %s\n", last_message());
      exit(NO_GPU);
    }
    if (status != SLUICE_OK) die("device", 0);
    if (r == 0 && !gpu_graphs_open()) die("a driver with graphs", 0);
    driver = sluice_cuda_device_driver(ranks[0].device);
    DRIVE(r, "stream", driver->cuStreamCreateWithPriority(&ranks[r].stream, SLUICE_CU_STREAM_NON_BLOCKING, 0));
  }
}

static void close_gpu(void) {
  for (int32_t r = 0; r < MOST_RANKS; ++r) {
    enter(r);
    (void)driver->cuStreamDestroy_v2(ranks[r].stream);
    leave(r);
    if (r > 0) ranks[r].device->vtable->destroy(ranks[r].device);
  }
  ranks[0].device->vtable->destroy(ranks[0].device); /* this device owns the table `driver` */
}

#else

static const layer_machine_t* machine_of(int32_t world_size) { return fakes_layer_machine(world_size > 1); }
static void watch_memory(watch_kind_t kind) { (void)kind; }
static void open_gpu(void) {}
static void close_gpu(void) {}

#endif

/* ---- parts ----------------------------------------------------------------------------------------------------- */

static void run_cases(int32_t world_size, int only_small) {
  for (const layer_case_t* c = layer_cases; c->name != NULL; ++c) {
    char name[128];
    if (only_small && !c->is_small) continue;
    snprintf(name, sizeof name, "%s, %d ranks", c->name, world_size);
    report(name, c->run(machine_of(world_size), world_size));
  }
}

static void part_layer(double seconds) {
  (void)seconds;
  run_cases(1, 0);
}
static void part_ranks(double seconds) {
  (void)seconds;
  run_cases(2, 0);
  run_cases(4, 0);
}
/* For compute-sanitizer: few cases that launch every kernel of a layer. */
static void part_small(double seconds) {
  (void)seconds;
  watch_memory(GPU_MEMORY_NOT_WATCHED); /* a checker's own memory depends on what it checks */
  run_cases(1, 1);
  run_cases(2, 1);
}
/* Prints the result of a calibration for inspection. Fakes run small sizes. */
static void part_calibrate(double seconds) {
  static char machine[32768];
  for (int32_t w = 1; w <= 2; ++w) {
    for (int32_t dtype = SLUICE_DTYPE_F32; dtype <= SLUICE_DTYPE_BF16; ++dtype) {
      char name[128];
      const layer_machine_t* on = machine_of(w);
      const calibrate_case_t c = {.world_size = w,
                                  .dtype = dtype,
                                  .model_width = on->is_slow ? 8 : 4096,
                                  .hidden_width = on->is_slow ? 16 : 4096,
                                  .seconds = seconds < 20 ? seconds : 20,
                                  .folder = ""};
      const char* why = calibrate_run(on, &c, machine, sizeof machine);
      snprintf(name, sizeof name, "calibration in %s, %d ranks", dtype == SLUICE_DTYPE_F32 ? "f32" : "bf16", w);
      report(name, why);
      if (why == NULL) printf("%s\n", machine);
    }
  }
}
static void part_soak(double seconds) {
  watch_memory(GPU_MEMORY_LOSSES_FAIL); /* after this many cases all libraries and kernels are loaded */
  for (int32_t most = 1; most <= MOST_RANKS; most += MOST_RANKS - 1) {
    char name[128];
    int64_t count = 0;
    const char* why = layer_soak(machine_of(most), most, (uint64_t)most, seconds / 2, &count);
    snprintf(name, sizeof name, "soak up to %d ranks, seed %d, %lld cases", most, most, (long long)count);
    report(name, why);
  }
}

static const struct {
  const char* name;
  void (*run)(double seconds);
} parts[] = {{"layer", part_layer},
             {"ranks", part_ranks},
             {"calibrate", part_calibrate},
             {"small", part_small},
             {"soak", part_soak}};
enum { NUM_PARTS = sizeof parts / sizeof parts[0] };

int main(int argc, char** argv) {
  int part = -1;
  for (int i = 0; i < NUM_PARTS; ++i) {
    if (argc == 2 && strcmp(argv[1], "--list") == 0) printf("%s\n", parts[i].name);
    if (argc >= 2 && strcmp(argv[1], parts[i].name) == 0) part = i;
  }
  if (argc == 2 && strcmp(argv[1], "--list") == 0) return 0;
  if (part < 0 || argc > 3) {
    fprintf(stderr, "usage: gpu_layer --list | PART [SECONDS]\n");
    return 2;
  }
  open_gpu();
  parts[part].run(argc == 3 ? atof(argv[2]) : 240);
  close_gpu();
  printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 && passed > 0 ? 0 : 1;
}
