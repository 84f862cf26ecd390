// SPDX-License-Identifier: Apache-2.0
/* The waits of a pass that the CPU device reports on request. */
#include <time.h>

#include "backend/device/device.h"
#include "third_party/bazel/test.h"

enum { TRIES = 50 };

/* Op 0 is on the communication lane and takes some time; op 1, on the calling thread, waits for it. */
static sluice_status_t work(void* user, int32_t index, sluice_stream_t stream) {
  (void)user, (void)stream;
  const struct timespec nap = {.tv_nsec = 2000000};
  if (index == 0) nanosleep(&nap, NULL);
  return SLUICE_OK;
}

static void run_pass(sluice_device_t* device) {
  const int32_t first = 0;
  const sluice_job_t jobs[] = {{.index = 0, .lane = SLUICE_LANE_COMM},
                               {.index = 1, .lane = SLUICE_LANE_COMPUTE, .waits = &first, .num_waits = 1}};
  assert_int_equal(device->vtable->begin(device, 2, work, NULL, NULL), SLUICE_OK);
  for (int i = 0; i < 2; ++i) assert_int_equal(device->vtable->submit(device, &jobs[i]), SLUICE_OK);
  assert_int_equal(device->vtable->join(device), SLUICE_OK);
}

TEST(Waits_AskedFor_AreCountedForThatPass) {
  sluice_device_t* device = NULL;
  assert_int_equal(sluice_cpu_device_create(sluice_process_allocator(), &device), SLUICE_OK);
  device->counts_waits = 1;
  int tries = 0; /* on a busy machine the lane may finish its 2 ms before the caller starts to wait */
  do run_pass(device);
  while (device->waits.caller_ns == 0 && ++tries < TRIES);
  const sluice_lane_waits_t* waits = &device->waits;
  assert_true(waits->num_wakes >= waits->num_caller_wakes && waits->num_caller_wakes == 1);
  assert_true(waits->caller_ns > 0 && waits->caller_cpu_ns > 0);
  assert_true(waits->caller_cpu_ns <= waits->cpu_ns && waits->caller_cpu_ns <= waits->caller_ns + 1000000);
  device->vtable->destroy(device);
}

TEST(Waits_NotAskedFor_AreNotCounted) {
  sluice_device_t* device = NULL;
  assert_int_equal(sluice_cpu_device_create(sluice_process_allocator(), &device), SLUICE_OK);
  for (int i = 0; i < 3; ++i) run_pass(device);
  assert_true(device->waits.num_wakes == 0 && device->waits.caller_ns == 0 && device->waits.cpu_ns == 0);
  device->counts_waits = 1;
  run_pass(device);
  device->counts_waits = 0;
  run_pass(device);
  assert_true(device->waits.num_wakes == 0 && device->waits.caller_ns == 0 && device->waits.cpu_ns == 0);
  device->vtable->destroy(device);
}

/* Ops 0 .. LAST run on the calling thread, long enough for a needless wake-up of the lane. Op LAST + 1, on the lane,
 * waits for op LAST. */
enum { LAST = 20 };

static sluice_status_t nap(void* user, int32_t index, sluice_stream_t stream) {
  (void)user, (void)stream;
  const struct timespec time = {.tv_nsec = 200000};
  if (index <= LAST) nanosleep(&time, NULL);
  return SLUICE_OK;
}

TEST(Lane_WaitingForTheLastOfMany_IsWokenOnce) {
  const int32_t last = LAST;
  sluice_device_t* device = NULL;
  assert_int_equal(sluice_cpu_device_create(sluice_process_allocator(), &device), SLUICE_OK);
  device->counts_waits = 1;
  uint64_t posts = 0; /* 0 in a pass whose lane goes to sleep after the last op has ended */
  for (int pass = 0; pass < 3 || (posts == 0 && pass < TRIES); ++pass) {
    assert_int_equal(device->vtable->begin(device, LAST + 2, nap, NULL, NULL), SLUICE_OK);
    for (int32_t i = 0; i <= LAST + 1; ++i) {
      const sluice_job_t job = {.index = i,
                                .lane = i <= LAST ? SLUICE_LANE_COMPUTE : SLUICE_LANE_COMM,
                                .waits = &last,
                                .num_waits = i > LAST};
      assert_int_equal(device->vtable->submit(device, &job), SLUICE_OK);
    }
    assert_int_equal(device->vtable->join(device), SLUICE_OK);
    /* At most one wake-up of the lane, however long it slept, and one of the caller at the end. */
    assert_true(device->waits.num_wakes <= 2 && device->waits.num_caller_wakes <= 1);
    posts = device->waits.num_caller_posts;
    assert_true(posts <= 1);
    assert_true(posts == 0 || device->waits.caller_cpu_ns > 0);
  }
  assert_int_equal(posts, 1);
  device->vtable->destroy(device);
}
