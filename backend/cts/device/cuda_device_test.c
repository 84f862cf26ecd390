// SPDX-License-Identifier: Apache-2.0
/* The CUDA device on the fake driver: opening, ordering by events only, host waits, memory, and every error path. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backend/base/lanes.h"
#include "backend/base/test/refused.h"
#include "backend/device/cuda/cuda_memory.h"
#include "backend/device/cuda/fake/fake_cuda.h"
#include "backend/schedule/schedule.h"
#include "backend/schedule/template/template.h"
#include "sluice/moe.h"

static sluice_allocator_t allocator;

static int set_up(void** state) {
  (void)state;
  sluice_fake_cuda_reset();
  sluice_allocator_init(&allocator, NULL, NULL, NULL);
  return 0;
}

static int64_t live(void) {
  char text[200];
  int64_t count = sluice_fake_cuda_live(text, sizeof text);
  if (count != 0) print_message("left: %s\n", text);
  return count + (int64_t)allocator.num_live;
}

static int tear_down(void** state) {
  (void)state;
  int failed = live() != 0;
  sluice_allocator_deinit(&allocator);
  return failed ? -1 : 0;
}

static sluice_status_t create(int32_t ordinal, sluice_device_t** out_device) {
  return sluice_cuda_device_create_from(sluice_fake_cuda_driver(), sluice_fake_cuda_image(), ordinal, &allocator,
                                        out_device);
}

#define assert_says(text) assert_non_null(strstr(last_message(), text))

/* ---- opening --------------------------------------------------------------------------------------------------- */

TEST(Driver_NotInstalled_IsNotFoundAndSaysWhatToInstall) {
  sluice_cuda_driver_t driver;
  REFUSED(sluice_cuda_driver_open("libcuda_that_is_not_there.so.1", &driver), SLUICE_E_NOT_FOUND,
          "libcuda_that_is_not_there.so.1");
  assert_says("12.0");
}

TEST(Driver_SymbolMissing_IsNotFoundNamingIt) {
  sluice_cuda_driver_t driver;
  REFUSED(sluice_cuda_driver_open("libm.so.6", &driver), SLUICE_E_NOT_FOUND, "cuInit");
}

TEST(Driver_TooOldOrNotStarting_IsNotFound) {
  sluice_cuda_driver_t driver = *sluice_fake_cuda_driver();
  assert_int_equal(sluice_cuda_driver_start(&driver), SLUICE_OK);
  sluice_fake_cuda_set_version(11080);
  REFUSED(sluice_cuda_driver_start(&driver), SLUICE_E_NOT_FOUND, "11.8");
  sluice_fake_cuda_set_version(12000);
  sluice_fake_cuda_fail_call(1, 100); /* cuInit: no device */
  REFUSED(sluice_cuda_driver_start(&driver), SLUICE_E_NOT_FOUND, "nvidia-smi");
}

TEST(Device_OfThisMachine_OpensOrSaysWhatIsMissing) {
  sluice_device_t* device = NULL;
  sluice_status_t status = sluice_cuda_device_create(0, &allocator, &device);
  if (status == SLUICE_OK) {
    device->vtable->destroy(device);
    return;
  }
  assert_int_equal(status, SLUICE_E_NOT_FOUND);
  assert_null(device);
  print_message("no GPU here: %s\n", last_message());
}

TEST(Device_NoSuchOrdinal_IsNotFound) {
  sluice_device_t* device = NULL;
  REFUSED(create(SLUICE_FAKE_CUDA_DEVICES, &device), SLUICE_E_NOT_FOUND, "sees 8");
  assert_int_equal(create(-1, &device), SLUICE_E_NOT_FOUND);
}

/* ---- ordering: the real templates ------------------------------------------------------------------------------ */

enum { SLOT_BYTES = 64, MAX_SLOTS = 64 };

typedef struct executor_s {
  sluice_device_t* device;
  const sluice_template_t* schedule;
  unsigned char* slots;   /* device memory: [tensor][ring][SLOT_BYTES] */
  unsigned char* scratch; /* separate memory for each op's reads */
  const sluice_cuda_driver_t* driver;
} executor_t;

static unsigned char* slot(const executor_t* e, int32_t tensor, int32_t index) {
  return e->slots + (tensor * MAX_SLOTS + index) * SLOT_BYTES;
}

/* Reads or writes one slot, or all slots of a tensor, as the op declares. */
static sluice_status_t access_slots(const executor_t* e, const sluice_slot_ref_t* ref, int32_t op, int is_write,
                                    sluice_stream_t stream) {
  int32_t first = ref->slot < 0 ? 0 : ref->slot, end = ref->slot < 0 ? e->schedule->ring[ref->tensor] : first + 1;
  for (int32_t i = first; i < end; ++i) {
    unsigned long long at = (unsigned long long)(uintptr_t)slot(e, ref->tensor, i);
    unsigned long long mine = (unsigned long long)(uintptr_t)(e->scratch + op * SLOT_BYTES);
    int code = is_write ? e->driver->cuMemsetD8Async(at, (unsigned char)op, SLOT_BYTES, stream)
                        : e->driver->cuMemcpyAsync(mine, at, SLOT_BYTES, stream);
    if (code != 0) return sluice_cuda_fail(e->driver, code, "slot %d of tensor %d", i, ref->tensor);
  }
  return SLUICE_OK;
}

static sluice_status_t run_op(void* user, int32_t index, sluice_stream_t stream) {
  const executor_t* e = user;
  const sluice_op_t* op = &e->schedule->ops[index];
  for (int32_t i = 0; i < op->num_reads; ++i) SLUICE_TRY(access_slots(e, &op->reads[i], index, 0, stream));
  for (int32_t i = 0; i < op->num_writes; ++i) SLUICE_TRY(access_slots(e, &op->writes[i], index, 1, stream));
  return SLUICE_OK;
}

/* The same loop as backend/moe/pass/executor.c, over the same interface. */
static sluice_status_t run_pass(executor_t* e, sluice_stream_t stream) {
  const sluice_device_vtable_t* vtable = e->device->vtable;
  SLUICE_TRY(vtable->begin(e->device, e->schedule->num_ops, run_op, e, stream));
  sluice_status_t submitted = SLUICE_OK;
  for (int32_t i = 0; i < e->schedule->num_ops && submitted == SLUICE_OK; ++i) {
    const sluice_op_t* op = &e->schedule->ops[i];
    const sluice_job_t job = {i, op->lane, e->schedule->deps + op->first_dep, op->num_deps,
                              sluice_op_is_exchange(op->kind)};
    submitted = vtable->submit(e->device, &job);
  }
  sluice_status_t status = vtable->join(e->device);
  return status == SLUICE_OK ? submitted : status;
}

/* The host writes all inputs on its stream before and reads all slots after: entry and exit are checked too. */
static sluice_status_t host_touches(executor_t* e, sluice_stream_t stream, int is_write) {
  unsigned long long at = (unsigned long long)(uintptr_t)e->slots;
  unsigned long long away = (unsigned long long)(uintptr_t)(e->scratch + 4096 * SLOT_BYTES);
  size_t bytes = (size_t)SLUICE_T_COUNT * MAX_SLOTS * SLOT_BYTES;
  int code =
      is_write ? e->driver->cuMemsetD8Async(at, 0, bytes, stream) : e->driver->cuMemcpyAsync(away, at, bytes, stream);
  return code == 0 ? SLUICE_OK : sluice_cuda_fail(e->driver, code, "the host's own work");
}

static void open_executor(executor_t* e, const sluice_template_t* schedule) {
  e->schedule = schedule;
  e->driver = sluice_fake_cuda_driver();
  size_t bytes = (size_t)SLUICE_T_COUNT * MAX_SLOTS * SLOT_BYTES;
  e->slots = malloc(bytes);
  e->scratch = malloc(4096 * SLOT_BYTES + bytes);
  assert_int_equal(create(0, &e->device), SLUICE_OK);
}
static void close_executor(executor_t* e) {
  e->device->vtable->destroy(e->device);
  free(e->slots);
  free(e->scratch);
}

/* Two consecutive passes, like forward and backward: the second reuses slots and events of the first. */
static int64_t hazards_of(const sluice_template_t* schedule, int64_t without_wait, int64_t* out_waits) {
  executor_t e;
  char text[300];
  void* stream = sluice_fake_cuda_open_stream(0);
  open_executor(&e, schedule);
  sluice_fake_cuda_forget_accesses();
  sluice_fake_cuda_drop_wait(without_wait);
  int64_t host_waits = sluice_fake_cuda_host_waits();
  for (int pass = 0; pass < 2; ++pass) {
    assert_int_equal(host_touches(&e, stream, 1), SLUICE_OK);
    assert_int_equal(run_pass(&e, stream), SLUICE_OK);
    assert_int_equal(host_touches(&e, stream, 0), SLUICE_OK);
  }
  *out_waits = sluice_fake_cuda_waits();
  int64_t hazards = sluice_fake_cuda_hazards(text, sizeof text);
  if (hazards > 0 && without_wait < 0) print_message("%s\n", text);
  assert_int_equal(sluice_fake_cuda_host_waits(), host_waits); /* entry, exit and jobs never wait */
  assert_true(sluice_fake_cuda_idle(stream));
  close_executor(&e);
  sluice_fake_cuda_close_stream(stream);
  sluice_fake_cuda_drop_wait(-1);
  return hazards;
}

static sluice_template_spec_t spec_of(int32_t bits, int32_t n) {
  sluice_template_spec_t spec = {.num_chunks = n};
  spec.direction = bits & 1;
  spec.single_rank = (bits >> 1) & 1;
  spec.keep = (bits >> 2) & 1;
  spec.dgrad = (bits >> 3) & 1;
  spec.wgrad = (bits >> 4) & 1;
  spec.wgrad_mode = (bits >> 5) & 1;
  return spec;
}

TEST(Pass_EveryTemplate_HasNoHazardAndNoHostWait) {
  int seen = 0;
  for (int32_t n = 1; n <= 5; ++n) {
    for (int32_t bits = 0; bits < 64; ++bits) {
      sluice_template_t* schedule = NULL;
      sluice_template_spec_t spec = spec_of(bits, n);
      if (sluice_template_build(&spec, &allocator, &schedule) != SLUICE_OK) continue;
      int64_t waits;
      assert_int_equal(hazards_of(schedule, -1, &waits), 0);
      sluice_template_destroy(schedule, &allocator);
      ++seen;
    }
  }
  assert_true(seen > 100);
}

/* The check has teeth: each wait of the template, of entry and of exit is needed. */
TEST(Pass_AnyWaitLeftOut_LeavesAHazard) {
  for (int32_t direction = 0; direction < 2; ++direction) {
    sluice_template_t* schedule = NULL;
    sluice_template_spec_t spec = {.num_chunks = 3, .direction = direction, .dgrad = 1, .wgrad = 1};
    assert_int_equal(sluice_template_build(&spec, &allocator, &schedule), SLUICE_OK);
    int64_t waits, unused;
    assert_int_equal(hazards_of(schedule, -1, &waits), 0);
    assert_true(waits > 10);
    for (int64_t i = 0; i < waits; ++i) assert_true(hazards_of(schedule, i, &unused) > 0);
    sluice_template_destroy(schedule, &allocator);
  }
}

/* ---- streams --------------------------------------------------------------------------------------------------- */

static sluice_status_t note_stream(void* user, int32_t index, sluice_stream_t stream) {
  ((void**)user)[index] = stream;
  return SLUICE_OK;
}

/* A rank that sends late delays all others; a late copy delays one. */
TEST(Lanes_AreStreamsOfTheirOwn_ExchangesAboveCopies) {
  sluice_device_t* device = NULL;
  void *streams[SLUICE_NUM_LANES] = {NULL}, *host = sluice_fake_cuda_open_stream(0);
  int least = 0, greatest = 0;
  assert_int_equal(create(0, &device), SLUICE_OK);
  assert_int_equal(sluice_cuda_enter(device), SLUICE_OK);
  assert_int_equal(sluice_fake_cuda_driver()->cuCtxGetStreamPriorityRange(&least, &greatest), 0);
  assert_int_equal(sluice_cuda_leave(device), SLUICE_OK);
  assert_int_equal(device->vtable->begin(device, SLUICE_NUM_LANES, note_stream, streams, host), SLUICE_OK);
  for (int32_t lane = 0; lane < SLUICE_NUM_LANES; ++lane) {
    const sluice_job_t job = {lane, lane, NULL, 0, 0};
    assert_int_equal(device->vtable->submit(device, &job), SLUICE_OK);
  }
  assert_int_equal(device->vtable->join(device), SLUICE_OK);
  assert_ptr_equal(streams[SLUICE_LANE_COMPUTE], host);
  for (int32_t lane = 0; lane < SLUICE_NUM_LANES; ++lane) {
    for (int32_t other = 0; other < lane; ++other) assert_ptr_not_equal(streams[lane], streams[other]);
    if (lane == SLUICE_LANE_COMPUTE) continue;
    assert_int_equal(sluice_fake_cuda_priority(streams[lane]), lane == SLUICE_LANE_COMM ? greatest : least);
  }
  assert_true(greatest < least);
  device->vtable->destroy(device);
  sluice_fake_cuda_close_stream(host);
}

/* ---- host waits ------------------------------------------------------------------------------------------------ */

typedef struct trial_s {
  executor_t executor;
  int32_t exact;
  int32_t counts[8]; /* what the host reads */
  sluice_stream_t stream;
} trial_t;

/* A forward in one of the two modes: routing on the device, then (exact) one read of the counts, then the pass. */
static sluice_status_t forward(trial_t* mode) {
  executor_t* e = &mode->executor;
  SLUICE_TRY(host_touches(e, mode->stream, 1));
  if (mode->exact) {
    SLUICE_TRY(sluice_cuda_read(e->device, mode->stream, e->slots, mode->counts, sizeof mode->counts));
  }
  return run_pass(e, mode->stream);
}

TEST(Modes_ExactReadsOnce_GraphNever) {
  for (int32_t exact = 0; exact < 2; ++exact) {
    sluice_template_t* schedule = NULL;
    sluice_template_spec_t spec = {.num_chunks = 4, .keep = 1};
    assert_int_equal(sluice_template_build(&spec, &allocator, &schedule), SLUICE_OK);
    trial_t mode = {.exact = exact, .stream = sluice_fake_cuda_open_stream(0)};
    open_executor(&mode.executor, schedule);
    sluice_fake_cuda_set_capturing(mode.stream, !exact);
    int64_t before = sluice_fake_cuda_host_waits();
    memset(mode.counts, 0xff, sizeof mode.counts);
    assert_int_equal(forward(&mode), SLUICE_OK);
    assert_int_equal(sluice_fake_cuda_host_waits() - before, exact ? 1 : 0);
    sluice_cuda_stats_t stats = sluice_cuda_device_stats(mode.executor.device);
    assert_int_equal(stats.num_host_waits, exact ? 1 : 0);
    assert_int_equal(stats.bytes_read, exact ? sizeof mode.counts : 0);
    if (exact) assert_int_equal(mode.counts[0], 0); /* host-complete */
    close_executor(&mode.executor);
    sluice_fake_cuda_close_stream(mode.stream);
    sluice_template_destroy(schedule, &allocator);
  }
}

TEST(Read_WhileCapturing_IsRefused) {
  sluice_device_t* device = NULL;
  int32_t counts[2] = {1, 1}, from[2] = {5, 6};
  void* stream = sluice_fake_cuda_open_stream(0);
  assert_int_equal(create(0, &device), SLUICE_OK);
  sluice_fake_cuda_set_capturing(stream, 1);
  REFUSED(sluice_cuda_read(device, stream, from, counts, sizeof counts), SLUICE_E_STATE, "graph mode");
  assert_int_equal(counts[0], 1);
  sluice_fake_cuda_set_capturing(stream, 0);
  assert_int_equal(sluice_cuda_read(device, stream, from, counts, sizeof counts), SLUICE_OK);
  assert_int_equal(counts[1], 6);
  device->vtable->destroy(device);
  sluice_fake_cuda_close_stream(stream);
}

/* ---- errors ---------------------------------------------------------------------------------------------------- */

/* Every use of the driver by this folder, once. */
static sluice_status_t whole_life(const sluice_template_t* schedule, sluice_stream_t stream) {
  executor_t e = {.schedule = schedule, .driver = sluice_fake_cuda_driver()};
  sluice_pinned_pool_t* pool = NULL;
  sluice_pinned_block_t block = {.index = -1}, again = {.index = -1};
  sluice_allocator_t memory;
  int32_t counts[4];
  size_t bytes = (size_t)SLUICE_T_COUNT * MAX_SLOTS * SLOT_BYTES;
  sluice_status_t status = create(0, &e.device);
  if (status != SLUICE_OK) return status;
  sluice_cuda_allocator_init(e.device, &memory);
  e.scratch = malloc(4096 * SLOT_BYTES + bytes);
  e.slots = sluice_alloc(&memory, bytes, "slots of the test");
  if (e.slots == NULL) status = SLUICE_E_NO_MEMORY;
  if (status == SLUICE_OK) status = sluice_cuda_check_memory(e.device, e.slots, bytes, 64, "slots");
  if (status == SLUICE_OK) status = host_touches(&e, stream, 1);
  if (status == SLUICE_OK) status = sluice_cuda_read(e.device, stream, e.slots, counts, sizeof counts);
  if (status == SLUICE_OK) status = run_pass(&e, stream);
  if (status == SLUICE_OK) status = run_pass(&e, stream);
  if (status == SLUICE_OK) status = sluice_pinned_pool_create(e.device, 1 << 20, &pool);
  if (status == SLUICE_OK) status = sluice_pinned_pool_take(pool, 5000, stream, &block);
  if (status == SLUICE_OK) status = sluice_cuda_copy(e.device, stream, block.data, e.slots, 5000);
  if (block.index >= 0) {
    sluice_status_t given = sluice_pinned_pool_give(pool, &block, stream);
    if (status == SLUICE_OK) status = given;
  }
  if (status == SLUICE_OK) status = sluice_pinned_pool_take(pool, 4900, stream, &again);
  if (again.index >= 0) {
    assert_ptr_equal(again.data, block.data);
    sluice_status_t given = sluice_pinned_pool_give(pool, &again, stream);
    if (status == SLUICE_OK) status = given;
  }
  sluice_pinned_pool_destroy(pool);
  sluice_free(&memory, e.slots, bytes);
  sluice_allocator_deinit(&memory);
  e.device->vtable->destroy(e.device);
  free(e.scratch);
  return status;
}

static sluice_template_t* small_schedule(void) {
  sluice_template_t* schedule = NULL;
  sluice_template_spec_t spec = {.num_chunks = 2};
  assert_int_equal(sluice_template_build(&spec, &allocator, &schedule), SLUICE_OK);
  return schedule;
}

/* A failing call is reported, unless it only releases something or has a fallback. */
TEST(Driver_NthCallFails_LeaksNothingAndSaysSo) {
  static const int codes[][2] = {{2, SLUICE_E_NO_MEMORY}, {719, SLUICE_E_EXTERNAL}};
  sluice_template_t* schedule = small_schedule();
  void* stream = sluice_fake_cuda_open_stream(0);
  uint64_t before = allocator.num_live;
  int64_t told = 0, silent = 0;
  for (size_t c = 0; c < 2; ++c) {
    int64_t nth = 0;
    for (int done = 0; !done; ++nth) {
      assert_true(nth < 5000);
      sluice_fake_cuda_fail_call(nth, codes[c][0]);
      sluice_status_t status = whole_life(schedule, stream);
      done = !sluice_fake_cuda_failed();
      sluice_fake_cuda_fail_call(-1, 0);
      if (done) assert_int_equal(status, SLUICE_OK);
      if (status == SLUICE_OK) {
        ++silent;
      } else {
        assert_int_equal(last_error()->status, status);
        assert_true(last_message()[0] != '\0');
        /* A pointer that the driver does not know is host memory: INVALID_ARGUMENT. A refused block is NO_MEMORY. */
        int is_right = status == codes[c][1] || status == SLUICE_E_INVALID_ARGUMENT || status == SLUICE_E_NO_MEMORY;
        if (!is_right) fail_msg("call %lld: status %d: %s", (long long)nth, status, last_message());
        ++told;
      }
      char text[200];
      if (sluice_fake_cuda_live(text, sizeof text) != 0) fail_msg("call %lld left %s", (long long)nth, text);
      assert_int_equal(allocator.num_live, before);
      assert_int_equal(whole_life(schedule, stream), SLUICE_OK); /* the step can be repeated */
      sluice_fake_cuda_forget_accesses();
    }
  }
  print_message("%lld failures reported, %lld of them in releases\n", (long long)told, (long long)silent);
  assert_true(told > 100);
  sluice_fake_cuda_close_stream(stream);
  sluice_template_destroy(schedule, &allocator);
}

TEST(Memory_Exhausted_SaysHowMuchAndRecovers) {
  sluice_device_t* device = NULL;
  sluice_allocator_t memory;
  assert_int_equal(create(0, &device), SLUICE_OK);
  sluice_fake_cuda_set_memory(1 << 20);
  sluice_cuda_allocator_init(device, &memory);
  void* first = sluice_alloc(&memory, 900000, "first slots");
  assert_non_null(first);
  assert_null(sluice_alloc(&memory, 300000, "more slots"));
  assert_says("more slots");
  assert_says("300");
  sluice_free(&memory, first, 900000);
  first = sluice_alloc(&memory, 300000, "more slots");
  assert_non_null(first);
  sluice_free(&memory, first, 300000);
  assert_int_equal(memory.num_live, 0);
  sluice_allocator_deinit(&memory);
  device->vtable->destroy(device);
}

TEST(PinnedPool_AtItsLimit_IsOverBudgetAndReusesIdleBlocks) {
  sluice_device_t* device = NULL;
  sluice_pinned_pool_t* pool = NULL;
  sluice_pinned_block_t a, b, c;
  void* stream = sluice_fake_cuda_open_stream(0);
  assert_int_equal(create(0, &device), SLUICE_OK);
  assert_int_equal(sluice_pinned_pool_create(device, 10000, &pool), SLUICE_OK);
  assert_int_equal(sluice_pinned_pool_take(pool, 6000, stream, &a), SLUICE_OK);
  REFUSED(sluice_pinned_pool_take(pool, 6000, stream, &b), SLUICE_E_OVER_BUDGET, "6016");
  assert_says("10000");
  assert_int_equal(sluice_pinned_pool_take(pool, 3000, stream, &b), SLUICE_OK);
  assert_int_equal(sluice_pinned_pool_bytes(pool), 6016 + 3008);
  assert_int_equal(sluice_pinned_pool_give(pool, &a, stream), SLUICE_OK);
  assert_int_equal(sluice_pinned_pool_take(pool, 5000, stream, &c), SLUICE_OK); /* a, again */
  assert_ptr_equal(c.data, a.data);
  assert_int_equal(sluice_pinned_pool_give(pool, &c, stream), SLUICE_OK);
  assert_int_equal(sluice_pinned_pool_take(pool, 2000, stream, &c), SLUICE_OK); /* too small for a: a is freed */
  assert_ptr_not_equal(c.data, b.data);
  assert_int_equal(sluice_pinned_pool_give(pool, &b, stream), SLUICE_OK);
  assert_int_equal(sluice_pinned_pool_give(pool, &c, stream), SLUICE_OK);
  sluice_pinned_pool_destroy(pool);
  device->vtable->destroy(device);
  sluice_fake_cuda_close_stream(stream);
}

/* ---- NUMA ------------------------------------------------------------------------------------------------------ */

static char sysfs[64]; /* "": there is none */

static void drop_sysfs(void) {
  char command[128];
  sluice_cuda_numa_read_from(NULL);
  if (sysfs[0] == '\0') return;
  snprintf(command, sizeof command, "rm -rf %s", sysfs);
  (void)!system(command); /* NOLINT(cert-env33-c) */
  sysfs[0] = '\0';
}

/* A /sys of a host with these nodes, with device 0 (bus 1a) on `near`; replaces the last one. */
static void make_sysfs(const char* nodes, const char* near) {
  char command[1024];
  drop_sysfs();
  snprintf(sysfs, sizeof sysfs, "/tmp/sluice-sysfs-XXXXXX");
  if (mkdtemp(sysfs) == NULL) fail_msg("no folder like %s", sysfs);
  snprintf(command, sizeof command,
           "mkdir -p %s/devices/system/node %s/bus/pci/devices/0000:1a:00.0 && "
           "echo %s >%s/devices/system/node/has_memory && echo %s >%s/bus/pci/devices/0000:1a:00.0/numa_node",
           sysfs, sysfs, nodes, sysfs, near, sysfs);
  if (system(command) != 0) fail_msg("no %s", sysfs); /* NOLINT(cert-env33-c): a fixed command */
  sluice_cuda_numa_read_from(sysfs);
}

TEST(Numa_NodeOfADevice_IsTheDriversElseTheBussElseNone) {
  const sluice_cuda_driver_t* driver = sluice_fake_cuda_driver();
  make_sysfs("0-1", "1");
  sluice_fake_cuda_set_numa_node(0);
  assert_int_equal(sluice_cuda_numa_of(driver, 100).node, 0);
  sluice_fake_cuda_set_numa_node(-1); /* a driver without the attribute */
  assert_int_equal(sluice_cuda_numa_of(driver, 100).node, 1);
  assert_int_equal(sluice_cuda_numa_of(driver, 101).node, -1); /* not on this bus */
  make_sysfs("0,2", "-1");
  assert_int_equal(sluice_cuda_numa_of(driver, 100).node, -1);
  make_sysfs("0", "0"); /* one node: nothing to choose */
  sluice_fake_cuda_set_numa_node(0);
  assert_int_equal(sluice_cuda_numa_of(driver, 100).node, -1);
  sluice_cuda_numa_read_from("/nowhere");
  assert_int_equal(sluice_cuda_numa_of(driver, 100).node, -1);
  drop_sysfs();
}

/* The node of an address's page according to the kernel; < 0: unknown. */
static int node_of_page(void* data) {
  int node = -1;
  const unsigned long node_of_address = 3; /* MPOL_F_NODE | MPOL_F_ADDR */
  return syscall(SYS_get_mempolicy, &node, NULL, 0ul, data, node_of_address) == 0 ? node : -1;
}

static _Atomic int numa_told;
static void count_numa(void* user, int32_t level, const char* text) {
  (void)user;
  if (level == SLUICE_LOG_INFO && strstr(text, "the driver chooses where pinned memory is") != NULL) ++numa_told;
}

/* Node 0 exists everywhere; the second call finds a node that no host has. */
TEST(PinnedPool_OfANode_IsBoundAndRegisteredOrTheDrivers) {
  for (int exists = 1; exists >= 0; --exists) {
    sluice_device_t* device = NULL;
    sluice_pinned_pool_t* pool = NULL;
    sluice_pinned_block_t a, b;
    make_sysfs("0-1", "0");
    sluice_fake_cuda_set_numa_node(exists ? 0 : 1000);
    numa_told = 0;
    sluice_set_log(count_numa, NULL, SLUICE_LOG_INFO);
    assert_int_equal(create(0, &device), SLUICE_OK);
    assert_int_equal(sluice_pinned_pool_create(device, 1 << 20, &pool), SLUICE_OK);
    assert_int_equal(sluice_pinned_pool_take(pool, 5000, NULL, &a), SLUICE_OK);
    assert_int_equal(sluice_pinned_pool_take(pool, 300000, NULL, &b), SLUICE_OK);
    memset(b.data, 1, 300000);
    int node = node_of_page(b.data);
    int bound = sluice_fake_cuda_registered_bytes() > 0;
    if (exists && !bound && numa_told == 1) print_message("this system refuses mbind: the driver's memory it is\n");
    assert_int_equal(sluice_fake_cuda_registered_bytes(), bound ? 8192 + 303104 : 0);
    assert_int_equal(numa_told, !bound); /* once for both blocks */
    if (!exists) assert_false(bound);
    if (bound && node >= 0) assert_int_equal(node, 0);
    assert_int_equal(sluice_pinned_pool_bytes(pool), 5056 + 300032);
    assert_int_equal(sluice_pinned_pool_give(pool, &a, NULL), SLUICE_OK);
    assert_int_equal(sluice_pinned_pool_give(pool, &b, NULL), SLUICE_OK);
    sluice_pinned_pool_destroy(pool);
    assert_int_equal(sluice_fake_cuda_registered_bytes(), 0);
    device->vtable->destroy(device);
    sluice_set_log(NULL, NULL, SLUICE_LOG_ERROR);
  }
  drop_sysfs();
}

/* Whichever driver call fails, the pool returns memory or an error and leaks nothing. Registration may fail. */
TEST(PinnedPool_OfANodeNthCallFails_LeaksNothing) {
  sluice_device_t* device = NULL;
  make_sysfs("0-1", "0");
  sluice_fake_cuda_set_numa_node(0);
  assert_int_equal(create(0, &device), SLUICE_OK);
  char text[200];
  int64_t before = sluice_fake_cuda_live(text, sizeof text);
  int failures = 0, nth = 0;
  for (int done = 0; !done; ++nth) {
    sluice_pinned_pool_t* pool = NULL;
    sluice_pinned_block_t block;
    sluice_fake_cuda_fail_call(nth, 801);
    sluice_status_t status = sluice_pinned_pool_create(device, 1 << 20, &pool);
    if (status == SLUICE_OK) status = sluice_pinned_pool_take(pool, 5000, NULL, &block);
    if (status == SLUICE_OK) status = sluice_pinned_pool_give(pool, &block, NULL);
    sluice_pinned_pool_destroy(pool);
    failures += status != SLUICE_OK;
    done = !sluice_fake_cuda_failed();
    sluice_fake_cuda_fail_call(-1, 0);
    assert_int_equal(sluice_fake_cuda_live(text, sizeof text), before);
    assert_int_equal(sluice_fake_cuda_registered_bytes(), 0);
  }
  assert_in_range(failures, 3, nth - 2);
  device->vtable->destroy(device);
  drop_sysfs();
}

TEST(Begin_StreamOfAnotherDevice_IsRefused) {
  sluice_template_t* schedule = small_schedule();
  void *mine = sluice_fake_cuda_open_stream(0), *other = sluice_fake_cuda_open_stream(1);
  executor_t e;
  open_executor(&e, schedule);
  REFUSED(run_pass(&e, other), SLUICE_E_INVALID_ARGUMENT, "another context");
  assert_int_equal(run_pass(&e, mine), SLUICE_OK);
  close_executor(&e);
  sluice_fake_cuda_close_stream(mine);
  sluice_fake_cuda_close_stream(other);
  sluice_template_destroy(schedule, &allocator);
}

TEST(CheckMemory_HostOtherDeviceMisaligned_IsRefusedByName) {
  sluice_device_t *device = NULL, *second = NULL;
  sluice_allocator_t memory, memory2;
  float on_host[4];
  assert_int_equal(create(0, &device), SLUICE_OK);
  assert_int_equal(create(1, &second), SLUICE_OK);
  sluice_cuda_allocator_init(device, &memory);
  sluice_cuda_allocator_init(second, &memory2);
  char* here = sluice_alloc(&memory, 256, "here");
  char* there = sluice_alloc(&memory2, 256, "there");
  assert_int_equal(sluice_cuda_check_memory(device, here, 256, 16, "tokens"), SLUICE_OK);
  REFUSED(sluice_cuda_check_memory(device, here + 2, 200, 16, "tokens"), SLUICE_E_INVALID_ARGUMENT, "multiple of 16");
  REFUSED(sluice_cuda_check_memory(device, on_host, 16, 4, "route_weights"), SLUICE_E_INVALID_ARGUMENT,
          "route_weights");
  assert_says("host memory");
  REFUSED(sluice_cuda_check_memory(device, there, 256, 16, "w1"), SLUICE_E_INVALID_ARGUMENT, "CUDA device 1");
  assert_int_equal(sluice_cuda_check_memory(device, NULL, 0, 16, "no rows"), SLUICE_OK);
  sluice_free(&memory, here, 256);
  sluice_free(&memory2, there, 256);
  sluice_allocator_deinit(&memory);
  sluice_allocator_deinit(&memory2);
  device->vtable->destroy(device);
  second->vtable->destroy(second);
}

TEST(Fork_ChildDevice_IsInert) {
  sluice_template_t* schedule = small_schedule();
  void* stream = sluice_fake_cuda_open_stream(0);
  executor_t e;
  open_executor(&e, schedule);
  assert_int_equal(run_pass(&e, stream), SLUICE_OK);
  pid_t child = fork();
  if (child == 0) {
    int64_t calls = sluice_fake_cuda_calls();
    int code = run_pass(&e, stream) != SLUICE_E_STATE || strstr(last_message(), "fork") == NULL;
    e.device->vtable->destroy(e.device);
    _exit(code || sluice_fake_cuda_calls() != calls); /* the driver was not called */
  }
  int code = -1;
  assert_int_equal(waitpid(child, &code, 0), child);
  assert_true(WIFEXITED(code) && WEXITSTATUS(code) == 0);
  assert_int_equal(run_pass(&e, stream), SLUICE_OK);
  close_executor(&e);
  sluice_fake_cuda_close_stream(stream);
  sluice_template_destroy(schedule, &allocator);
}

int main(void) {
  const int failed = run_cases_each(set_up, tear_down);
  drop_sysfs(); /* a failed case leaves it */
  return failed;
}
