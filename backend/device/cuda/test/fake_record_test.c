// SPDX-License-Identifier: Apache-2.0
/* The fake driver: its record of calls; dry runs, which skip the work of large kernels and copies; hardware queues that
 * streams share; kernels that are loaded lazily. */
#include <unistd.h>

#include "backend/device/cuda/fake/fake_cuda.h"
#include "backend/device/cuda/fake/fake_record.h"
#include "backend/device/cuda/kernels/kernel_args.h"
#include "third_party/bazel/test.h"

#define GIB ((uint64_t)1 << 30)

static const sluice_cuda_driver_t* driver;
static void *context, *stream, *library;

static int open_driver(void** state) {
  (void)state;
  sluice_fake_cuda_reset();
  driver = sluice_fake_cuda_driver();
  assert_int_equal(driver->cuDevicePrimaryCtxRetain(&context, 100), 0);
  assert_int_equal(driver->cuCtxPushCurrent_v2(context), 0);
  assert_int_equal(driver->cuLibraryLoadData(&library, "", NULL, NULL, 0, NULL, NULL, 0), 0);
  stream = sluice_fake_cuda_open_stream(0);
  return 0;
}

static int close_driver(void** state) {
  (void)state;
  sluice_fake_cuda_close_stream(stream);
  assert_int_equal(driver->cuLibraryUnload(library), 0);
  assert_int_equal(driver->cuCtxPopCurrent_v2(&context), 0);
  assert_int_equal(driver->cuDevicePrimaryCtxRelease_v2(100), 0);
  sluice_fake_cuda_reset();
  return 0;
}

static char* allocate(uint64_t bytes) {
  unsigned long long data = 0;
  assert_int_equal(driver->cuMemAlloc_v2(&data, bytes), 0);
  return (char*)(uintptr_t)data;
}
static void release(const void* data) {
  assert_int_equal(driver->cuMemFree_v2((unsigned long long)(uintptr_t)data), 0);
}

static void launch(const char* name, const void* args, unsigned blocks) {
  void* kernel = NULL;
  void* parameters[1] = {(void*)(uintptr_t)args};
  assert_int_equal(driver->cuLibraryGetKernel(&kernel, library, name), 0);
  assert_int_equal(driver->cuLaunchKernel(kernel, blocks, 1, 1, 256, 1, 1, 0, stream, parameters, NULL), 0);
}

static void copy(void* to, const void* from, uint64_t bytes) {
  assert_int_equal(
      driver->cuMemcpyAsync((unsigned long long)(uintptr_t)to, (unsigned long long)(uintptr_t)from, bytes, stream), 0);
}

static char* recorded(void) {
  char* text = NULL;
  size_t bytes = 0;
  FILE* out = open_memstream(&text, &bytes);
  sluice_fake_cuda_write_record(out);
  fclose(out);
  return text;
}

TEST_FIXTURE(Record_CallsOfAStream_StandInTheirOrderWithTheirBytes, open_driver, close_driver) {
  char *rows = allocate(4096), *index = allocate(64), *out = allocate(4096), *spare = allocate(64);
  const int32_t of[4] = {3, 0, -1, 2};
  void *event = NULL, *urgent = NULL;
  memcpy(index, of, sizeof of);
  assert_int_equal(driver->cuStreamCreateWithPriority(&urgent, SLUICE_CU_STREAM_NON_BLOCKING, -2), 0);
  assert_int_equal(driver->cuEventCreate(&event, SLUICE_CU_EVENT_DISABLE_TIMING), 0);
  sluice_fake_cuda_record(1);
  const sluice_gather_args_t args = {.src = rows,
                                     .index = (const int32_t*)(const void*)index,
                                     .dst = out,
                                     .units = 4,
                                     .row_bytes = 32,
                                     .src_stride_bytes = 32,
                                     .piece = 16};
  launch("sluice_gather_rows", &args, 1);
  copy(out, rows, 100);
  assert_int_equal(driver->cuEventRecord(event, stream), 0);
  assert_int_equal(driver->cuEventSynchronize(event), 0);
  release(spare);
  sluice_fake_cuda_record(0);
  launch("sluice_gather_rows", &args, 1); /* after the record has ended */
  char *text = recorded(), want[400];
  /* The launch reads an index of 16 bytes and three rows of 32 bytes (-1 is no row), and writes four rows. */
  snprintf(want, sizeof want,
           "[\n[\"priority\", 0, %d, -2],\n[\"launch\", 0, %d, \"sluice_gather_rows\", 4, 32, 112, 128],\n"
           "[\"copy\", 0, %d, \"device\", 100],\n[\"record\", 0, %d, 1],\n"
           "[\"host_wait\", 0, 1, \"synchronize\"],\n[\"host_call\", 0, \"cuMemFree\"]\n]",
           sluice_fake_stream_number(urgent), sluice_fake_stream_number(stream), sluice_fake_stream_number(stream),
           sluice_fake_stream_number(stream));
  assert_string_equal(text, want);
  assert_int_equal(driver->cuStreamDestroy_v2(urgent), 0);
  free(text);
  release(rows);
  release(index);
  release(out);
  assert_int_equal(driver->cuEventDestroy_v2(event), 0);
}

static int64_t resident_bytes(void) {
  long long all = 0, resident = 0;
  FILE* file = fopen("/proc/self/statm", "r");
  assert_non_null(file);
  assert_int_equal(fscanf(file, "%lld %lld", &all, &resident), 2);
  fclose(file);
  return (int64_t)resident * sysconf(_SC_PAGESIZE);
}

TEST_FIXTURE(Dry_RowsOfManyGiB_TakeNoPagesAndAreNotWritten, open_driver, close_driver) {
  sluice_fake_cuda_make_dry();
  sluice_fake_cuda_set_memory(100 * GIB);
  const int64_t before = resident_bytes();
  char *rows = allocate(40 * GIB), *out = allocate(40 * GIB), *index = allocate(4096);
  unsigned long long more = 0;
  assert_int_equal(driver->cuMemAlloc_v2(&more, 40 * GIB), SLUICE_CU_OUT_OF_MEMORY);
  rows[0] = 1;
  const sluice_gather_args_t args = {.src = rows,
                                     .index = (const int32_t*)(const void*)index,
                                     .dst = out,
                                     .units = 1000,
                                     .row_bytes = 16384,
                                     .src_stride_bytes = 16384,
                                     .piece = 16};
  launch("sluice_gather_rows", &args, 125);
  copy(out, rows, 4 * GIB);
  assert_int_equal(out[0], 0);
  assert_true(resident_bytes() - before < (int64_t)(GIB / 16));
  release(rows);
  release(out);
  release(index);
}

TEST_FIXTURE(Dry_RoutesAndSmallCopies_AreDone, open_driver, close_driver) {
  sluice_fake_cuda_make_dry();
  int32_t* ids = (int32_t*)(void*)allocate(4096);
  int32_t* tiles = (int32_t*)(void*)allocate(4096);
  int32_t* counts = (int32_t*)(void*)allocate(4096);
  for (int i = 0; i < 6; ++i) ids[i] = i % 3;
  const sluice_route_args_t args = {.ids = ids,
                                    .tile_counts = tiles,
                                    .counts = counts,
                                    .units = 1,
                                    .num_routes = 6,
                                    .top_k = 1,
                                    .num_experts = 3,
                                    .ids_t = 1};
  launch("sluice_route_count", &args, 1);
  launch("sluice_route_scan_tiles", &args, 1);
  copy(ids, counts, 12);
  for (int i = 0; i < 3; ++i) assert_int_equal(ids[i], 2);
  const uint64_t table = 4 << 20; /* of routes, as a step keeps it */
  char *routes = allocate(table), *kept = allocate(table);
  routes[table - 1] = 7;
  copy(kept, routes, table);
  assert_int_equal(kept[table - 1], 7);
  release(routes);
  release(kept);
  release(ids);
  release(tiles);
  release(counts);
}

TEST(KernelWork_EachKernelOfTheImage_IsKnown) {
  static const char* const names[] = {
#define KERNEL(name, args)        "sluice_" #name,
#define KERNEL_DTYPES(name, args) "sluice_" #name "_f32",
#include "backend/device/cuda/kernels/kernel_list.inc"
#undef KERNEL
#undef KERNEL_DTYPES
  };
  static const int64_t ones[512] = {[0 ... 511] = 1};
  for (size_t i = 0; i < sizeof names / sizeof names[0]; ++i) {
    int64_t units = 0, length = 0;
    if (!sluice_fake_kernel_work(names[i], ones, &units, &length)) fail_msg("%s is not in kernel_work.c", names[i]);
    assert_int_equal(units, 1);
    assert_true(length >= 1);
  }
  int64_t units = 0, length = 0;
  assert_false(sluice_fake_kernel_work("sluice_unheard_of", ones, &units, &length));
}

/* ---- hardware queues ------------------------------------------------------------------------------------------- */

/* Two operations on different streams. The first waits for the second. */
typedef struct pair_s {
  int has_run[2];
} pair_t;
static pair_t pair;
static int is_other_done(void* user) { return user == NULL || pair.has_run[1]; }
static int needs_other(const void* user, const void* other) { return user != NULL && other == NULL; }
static void note_run(void* user) { pair.has_run[user == NULL] = 1; }

/* Submits the first on a stream, the second on the eighth or ninth after it, and waits for the second. */
static int wait_for_the_second(int32_t distance, int is_submitted, char* why, size_t bytes) {
  const sluice_fake_op_t op = {.name = "the second", .ready = is_other_done, .waits_for = needs_other, .run = note_run};
  sluice_fake_op_t first = op;
  void* streams[10];
  memset(&pair, 0, sizeof pair);
  first.name = "the first", first.user = &pair;
  for (int i = 0; i <= distance; ++i) streams[i] = sluice_fake_cuda_open_stream(0);
  sluice_fake_cuda_lock();
  sluice_fake_cuda_enqueue(streams[0], &first);
  if (is_submitted) sluice_fake_cuda_enqueue(streams[distance], &op);
  sluice_fake_cuda_unlock();
  const int code = driver->cuStreamSynchronize(streams[is_submitted ? distance : 0]);
  (void)sluice_fake_cuda_deadlocked(why, bytes);
  if (code == 0) assert_true(pair.has_run[0] && pair.has_run[1]);
  pair.has_run[1] = 1;
  for (int i = 0; i <= distance; ++i) sluice_fake_cuda_close_stream(streams[i]);
  return code;
}

TEST(Queues_NinthStreamSharesTheFirstOnesQueue_WorkThatWaitsForItIsADeadlock) {
  enum { TIMED_OUT = 702 };
  char why[400];
  for (int round = 0; round < 4; ++round) {
    assert_int_equal(open_driver(NULL), 0);
    int code = 0;
    if (round == 0) code = wait_for_the_second(7, 1, why, sizeof why);
    if (round == 1) code = wait_for_the_second(8, 1, why, sizeof why);
    sluice_fake_cuda_set_queues(9, round == 3);
    if (round == 2) code = wait_for_the_second(8, 1, why, sizeof why);
    if (round == 3) code = wait_for_the_second(8, 0, why, sizeof why);
    sluice_fake_cuda_set_queues(8, 0);
    print_message("%d %s\n", code, why);
    assert_int_equal(code, round % 2 == 0 ? 0 : TIMED_OUT);
    if (round == 1) {
      assert_non_null(strstr(why, "the first (stream 9, queue 1 of device 0) waits for work of stream 17"));
      assert_non_null(strstr(why, "the second (stream 17, queue 1 of device 0) comes in its queue after stream 9"));
    }
    if (round == 3) assert_non_null(strstr(why, "the host waits, and the first (stream 9"));
    if (code == 0) assert_int_equal(close_driver(NULL), 0);
    if (code != 0) assert_int_equal(driver->cuCtxPopCurrent_v2(&context), TIMED_OUT); /* as every later call */
    sluice_fake_cuda_reset();
  }
}

/* ---- kernels that are loaded lazily ---------------------------------------------------------------------------- */

/* The first launch loads the kernel: it invalidates a capture, and may wait for the device, here for work that the same
 * host would submit later. */
TEST(LazyLoading_FirstLaunch_SpoilsACaptureAndMayWaitForTheDevice) {
  const sluice_words_args_t args = {0};
  const sluice_fake_op_t blocked = {.name = "a blocked op", .ready = is_other_done};
  void *kernel = NULL, *parameters[1] = {(void*)(uintptr_t)&args};
  sluice_fake_graph_t* graph = NULL;
  char why[400];
  assert_int_equal(open_driver(NULL), 0);
  assert_int_equal(driver->cuLibraryGetKernel(&kernel, library, "sluice_write_words"), 0);
  for (int is_loaded = 0; is_loaded < 2; ++is_loaded) {
    sluice_fake_cuda_begin_capture(stream);
    const int code = driver->cuLaunchKernel(kernel, 1, 1, 1, 256, 1, 1, 0, stream, parameters, NULL);
    assert_int_equal(code, is_loaded ? 0 : 900);
    assert_int_equal(sluice_fake_cuda_end_capture(stream, &graph), is_loaded ? 0 : 901);
    sluice_fake_cuda_destroy_graph(graph);
    launch("sluice_write_words", &args, 1);
  }
  sluice_fake_op_t op = blocked;
  op.user = &pair;
  memset(&pair, 0, sizeof pair);
  sluice_fake_cuda_set_queues(8, 1);
  sluice_fake_cuda_set_load_waits(1);
  sluice_fake_cuda_lock();
  sluice_fake_cuda_enqueue(stream, &op);
  sluice_fake_cuda_unlock();
  launch("sluice_write_words", &args, 1); /* loaded: does not wait */
  assert_int_equal(driver->cuLibraryGetKernel(&kernel, library, "sluice_gather_scalars"), 0);
  assert_int_equal(driver->cuLaunchKernel(kernel, 1, 1, 1, 256, 1, 1, 0, stream, parameters, NULL), 702);
  assert_true(sluice_fake_cuda_deadlocked(why, sizeof why));
  assert_non_null(strstr(why, "a blocked op"));
  sluice_fake_cuda_set_load_waits(0);
  sluice_fake_cuda_set_queues(8, 0);
  pair.has_run[1] = 1;
  sluice_fake_cuda_close_stream(stream);
  assert_int_equal(driver->cuCtxPopCurrent_v2(&context), 702);
  sluice_fake_cuda_reset();
}
