// SPDX-License-Identifier: Apache-2.0
/* The trace of a CUDA context, on fakes: ops have the device's times, and some failures leave a pass without times. */
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "backend/base/clock.h"
#include "backend/base/lanes.h"
#include "backend/device/cuda/fake/fake_cuda.h"
#include "capi/test/cuda/fake_rigs.h"
#include "capi/test/cuda/fakes.h"
#include "third_party/bazel/test.h"

enum { MOST_EVENTS = 512, BLOCKED_MS = 60, UNKNOWN_ERROR = 999 };

static void open_rig(rig_t* rig) {
  sluice_moe_config_t config = rig_config();
  config.restore_input = config.restore_pre_activation = SLUICE_RESTORE_OFFLOAD;
  open_all(rig, &config);
}

/* Work that the host has enqueued on its stream before the pass; a thread ends it with a signal. */
static _Atomic int is_over;
static int blocker_is_ready(void* user) {
  (void)user;
  return is_over;
}
static void blocker_run(void* user) { (void)user; }
static void* end_blocker(void* user) {
  const struct timespec nap = {.tv_nsec = BLOCKED_MS * 1000000L};
  (void)user;
  nanosleep(&nap, NULL);
  sluice_fake_cuda_lock();
  is_over = 1;
  sluice_fake_cuda_pump();
  sluice_fake_cuda_unlock();
  return NULL;
}

TEST(Trace_OfABlockedStream_HasTheDevicesTimes) {
  static sluice_trace_event_t events[MOST_EVENTS];
  rig_t rig;
  sluice_step_t* step = NULL;
  pthread_t thread;
  int64_t count = 0;
  open_rig(&rig);
  assert_int_equal(sluice_context_trace(rig.context, MOST_EVENTS), SLUICE_OK);
  assert_int_equal(rig_forward(&rig, &step), SLUICE_OK);
  assert_int_equal(sluice_context_take_trace(rig.context, events, MOST_EVENTS, &count), SLUICE_OK);
  is_over = 0;
  const sluice_fake_op_t blocker = {.ready = blocker_is_ready, .run = blocker_run, .drop = blocker_run};
  sluice_fake_cuda_lock();
  sluice_fake_cuda_enqueue(fakes_stream(0), &blocker);
  sluice_fake_cuda_unlock();
  uint64_t begin_ns = sluice_now_ns();
  pthread_create(&thread, NULL, end_blocker, NULL);
  assert_int_equal(rig_backward(&rig, step), SLUICE_OK);
  pthread_join(thread, NULL);
  sluice_step_drop(step);
  assert_int_equal(sluice_context_take_trace(rig.context, events, MOST_EVENTS, &count), SLUICE_OK);
  assert_in_range(count, 8, MOST_EVENTS);
  uint64_t lane_end[SLUICE_NUM_LANES] = {0};
  int num_lanes = 0;
  for (int64_t i = 0; i < count; ++i) {
    const sluice_trace_event_t* e = &events[i];
    if (e->chunk < 0 && strcmp(e->op, "pass") == 0) continue;
    assert_true(e->begin_ns <= e->end_ns);
    /* The op was enqueued long before the stream was free, and ran afterwards. */
    if (e->begin_ns < begin_ns + (BLOCKED_MS - 5) * UINT64_C(1000000)) {
      fail_msg("%s of chunk %d began %.3f ms after the call", e->op, e->chunk, (double)(e->begin_ns - begin_ns) / 1e6);
    }
    assert_true(e->end_ns <= sluice_now_ns());
    assert_true(e->begin_ns + 1000 >= lane_end[e->lane]); /* ops of a lane are in order; times are in units of 0.5 us */
    num_lanes += lane_end[e->lane] == 0;
    lane_end[e->lane] = e->end_ns;
  }
  assert_true(num_lanes >= 2); /* offloaded rows are copied in on a lane of their own */
  (void)close_all(&rig);
}

/* If an event cannot be created, the pass has no times but succeeds. Nothing leaks. */
TEST(Trace_NthCallFails_LeaksNothing) {
  int done = 0, kept = 0, nth = 0;
  for (; !done; nth += 2) {
    rig_t rig;
    open_rig(&rig);
    assert_int_equal(sluice_context_trace(rig.context, MOST_EVENTS), SLUICE_OK);
    sluice_fake_cuda_fail_call(nth, UNKNOWN_ERROR);
    sluice_status_t status = rig_round(&rig, NULL);
    done = !sluice_fake_cuda_failed();
    kept += status == SLUICE_OK && !done;
    sluice_fake_cuda_fail_call(-1, 0);
    rig_reset(&rig);
    if (rig_round(&rig, NULL) != SLUICE_OK) fail_msg("after call %d: %s", nth, last_message());
    (void)close_all(&rig);
  }
  assert_true(kept > 10); /* including failures of events around ops */
}
