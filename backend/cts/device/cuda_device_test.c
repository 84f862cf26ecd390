// SPDX-License-Identifier: Apache-2.0
/* The CUDA device on the fake driver: opening, streams, pinned memory, NUMA, forks. cuda_layer_test checks the order of
 * passes and what they wait for, cuda_faults_test failing calls. */
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

TEST(Device_NoSuchOrdinal_IsNotFound) {
  sluice_device_t* device = NULL;
  REFUSED(create(SLUICE_FAKE_CUDA_DEVICES, &device), SLUICE_E_NOT_FOUND, "sees 8");
  assert_int_equal(create(-1, &device), SLUICE_E_NOT_FOUND);
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

/* ---- pinned memory ---------------------------------------------------------------------------------------------- */

TEST(PinnedPool_AtItsLimit_IsOverBudgetAndReusesIdleBlocks) {
  sluice_device_t* device = NULL;
  sluice_pinned_pool_t* pool = NULL;
  sluice_pinned_block_t a, b, c;
  void* stream = sluice_fake_cuda_open_stream(0);
  assert_int_equal(create(0, &device), SLUICE_OK);
  assert_int_equal(sluice_pinned_pool_create(device, 10000, &pool), SLUICE_OK);
  assert_int_equal(sluice_pinned_pool_take(pool, 6000, 0, stream, &a), SLUICE_OK);
  REFUSED(sluice_pinned_pool_take(pool, 6000, 0, stream, &b), SLUICE_E_OVER_BUDGET, "6016");
  assert_says("10000");
  assert_int_equal(sluice_pinned_pool_take(pool, 3000, 0, stream, &b), SLUICE_OK);
  assert_int_equal(sluice_pinned_pool_give(pool, &a, stream), SLUICE_OK);
  assert_int_equal(sluice_pinned_pool_take(pool, 5000, 0, stream, &c), SLUICE_OK); /* a, again */
  assert_ptr_equal(c.data, a.data);
  assert_int_equal(sluice_pinned_pool_give(pool, &c, stream), SLUICE_OK);
  assert_int_equal(sluice_pinned_pool_take(pool, 2000, 0, stream, &c), SLUICE_OK); /* too small for a: a is freed */
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
    assert_int_equal(sluice_pinned_pool_take(pool, 5000, 0, NULL, &a), SLUICE_OK);
    assert_int_equal(sluice_pinned_pool_take(pool, 300000, 0, NULL, &b), SLUICE_OK);
    memset(b.data, 1, 300000);
    int node = node_of_page(b.data);
    int bound = sluice_fake_cuda_registered_bytes() > 0;
    if (exists && !bound && numa_told == 1) print_message("this system refuses mbind: the driver's memory it is\n");
    assert_int_equal(sluice_fake_cuda_registered_bytes(), bound ? 8192 + 303104 : 0);
    assert_int_equal(numa_told, !bound); /* once for both blocks */
    if (!exists) assert_false(bound);
    if (bound && node >= 0) assert_int_equal(node, 0);
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
    if (status == SLUICE_OK) status = sluice_pinned_pool_take(pool, 5000, 0, NULL, &block);
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

TEST(Fork_ChildDevice_IsInert) {
  sluice_device_t* device = NULL;
  void* stream = sluice_fake_cuda_open_stream(0);
  assert_int_equal(create(0, &device), SLUICE_OK);
  pid_t child = fork();
  if (child == 0) {
    int64_t calls = sluice_fake_cuda_calls();
    sluice_status_t status = device->vtable->begin(device, 1, note_stream, NULL, stream);
    int code = status != SLUICE_E_STATE || strstr(last_message(), "fork") == NULL;
    device->vtable->destroy(device);
    _exit(code || sluice_fake_cuda_calls() != calls); /* the driver was not called */
  }
  int code = -1;
  assert_int_equal(waitpid(child, &code, 0), child);
  assert_true(WIFEXITED(code) && WEXITSTATUS(code) == 0);
  device->vtable->destroy(device);
  sluice_fake_cuda_close_stream(stream);
}

int main(void) {
  const int failed = run_cases_each(set_up, tear_down);
  drop_sysfs(); /* a failed case leaves it */
  return failed;
}
