// SPDX-License-Identifier: Apache-2.0
#include "backend/cts/device/device_suite.h"

#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "backend/base/lanes.h"
#include "backend/base/test/refused.h"

enum { MAX_JOBS = 512, MAX_WAITS = 4, SUITE_SECONDS = 280, MEETING_SECONDS = 60 };

static const cts_device_t* under_test;

/* ---- a pass: the task of each job, and what happened ---- */

typedef struct plan_s {
  int32_t lane;
  int32_t waits[MAX_WAITS];
  int32_t num_waits;
  int32_t run_on_failure;
  sluice_status_t fails; /* not OK: with this status */
  uint32_t nap_us;
  int64_t until; /* waits until this many jobs have begun or ended, at most MEETING_SECONDS */
} plan_t;

typedef struct happened_s {
  int64_t begin, end; /* order of all begins and ends; -1: did not run */
  pthread_t thread;
  int32_t deaf; /* SIGINT is blocked */
} happened_t;

typedef struct pass_s {
  plan_t plans[MAX_JOBS];
  happened_t jobs[MAX_JOBS];
  int32_t num_jobs;
  _Atomic int64_t clock;
  uint64_t result[MAX_JOBS]; /* written by jobs without a lock: join must make it visible */
} pass_t;

static sluice_status_t run_job(void* user, int32_t index, sluice_stream_t stream) {
  pass_t* pass = user;
  happened_t* job = &pass->jobs[index];
  const plan_t* plan = &pass->plans[index];
  (void)stream;
  job->begin = atomic_fetch_add(&pass->clock, 1);
  job->thread = pthread_self();
  sigset_t blocked;
  pthread_sigmask(SIG_BLOCK, NULL, &blocked);
  job->deaf = sigismember(&blocked, SIGINT);
  if (plan->nap_us > 0) usleep(plan->nap_us);
  for (int ms = 0; atomic_load(&pass->clock) < plan->until && ms < 1000 * MEETING_SECONDS; ++ms) usleep(1000);
  uint64_t sum = (uint64_t)index;
  for (int32_t i = 0; i < plan->num_waits; ++i) sum += pass->result[plan->waits[i]]; /* wraps */
  pass->result[index] = sum;
  job->end = atomic_fetch_add(&pass->clock, 1);
  if (plan->fails == SLUICE_OK) return SLUICE_OK;
  return SLUICE_FAIL_PEER(plan->fails, 5, 6, "job %d failed as planned", index);
}

static void reset(pass_t* pass) {
  memset(pass, 0, sizeof *pass);
  for (int32_t i = 0; i < MAX_JOBS; ++i) pass->jobs[i].begin = pass->jobs[i].end = -1;
}

static int32_t add(pass_t* pass, int32_t lane) {
  pass->plans[pass->num_jobs].lane = lane;
  return pass->num_jobs++;
}

static void wait_for(pass_t* pass, int32_t job, int32_t event) {
  plan_t* plan = &pass->plans[job];
  if (plan->num_waits < MAX_WAITS) plan->waits[plan->num_waits++] = event;
}

/* As run_job would have recorded it: at equal times, ends come before begins. */
static void take_times(const sluice_device_t* device, pass_t* pass) {
  const double *begin = NULL, *end = NULL;
  under_test->times(device, &begin, &end);
  for (int32_t i = 0; i < pass->num_jobs; ++i) {
    pass->jobs[i].begin = begin[i] < 0 ? -1 : 2 * (int64_t)begin[i] + 1;
    pass->jobs[i].end = end[i] < 0 ? -1 : 2 * (int64_t)end[i];
  }
}

static sluice_status_t run(sluice_device_t* device, pass_t* pass) {
  SLUICE_TRY(device->vtable->begin(device, pass->num_jobs, run_job, pass, NULL));
  for (int32_t i = 0; i < pass->num_jobs; ++i) {
    const plan_t* plan = &pass->plans[i];
    const sluice_job_t job = {i, plan->lane, plan->waits, plan->num_waits, plan->run_on_failure};
    assert_int_equal(device->vtable->submit(device, &job), SLUICE_OK);
  }
  SLUICE_TRY(device->vtable->join(device));
  if (under_test->times != NULL) take_times(device, pass);
  return SLUICE_OK;
}

/* Program order within a lane, and every awaited job has ended before its waiter begins. */
static void check_order(const pass_t* pass) {
  int64_t last_end[SLUICE_NUM_LANES] = {-1, -1, -1, -1};
  for (int32_t i = 0; i < pass->num_jobs; ++i) {
    const happened_t* job = &pass->jobs[i];
    const plan_t* plan = &pass->plans[i];
    if (job->begin < 0) continue;
    assert_true(job->begin > last_end[plan->lane]);
    last_end[plan->lane] = job->end;
    for (int32_t w = 0; w < plan->num_waits; ++w) {
      const happened_t* awaited = &pass->jobs[plan->waits[w]];
      if (awaited->begin >= 0) assert_true(awaited->end < job->begin);
    }
  }
}

static int ran(const pass_t* pass, int32_t job) { return pass->jobs[job].end >= 0; }

/* ---- fixture: a device whose allocator must be empty at the end ---- */

typedef struct fixture_s {
  sluice_allocator_t allocator;
  sluice_device_t* device;
  pass_t* pass;
} fixture_t;

static int set_up(void** state) {
  fixture_t* f = calloc(1, sizeof *f);
  sluice_allocator_init(&f->allocator, NULL, NULL, NULL);
  f->pass = malloc(sizeof *f->pass);
  reset(f->pass);
  *state = f;
  return under_test->create(&f->allocator, &f->device) == SLUICE_OK ? 0 : -1;
}

static int tear_down(void** state) {
  fixture_t* f = *state;
  if (f->device != NULL) f->device->vtable->destroy(f->device);
  uint64_t live = f->allocator.current_bytes + f->allocator.num_live;
  sluice_allocator_deinit(&f->allocator);
  free(f->pass);
  free(f);
  return live == 0 ? 0 : -1;
}

/* ---- cases ---- */

static void Device_Fresh_HasNameAndKernels(void** state) {
  fixture_t* f = *state;
  assert_string_equal(f->device->name, under_test->name);
  assert_int_equal(f->device->kernels == NULL, under_test->times != NULL);
  assert_ptr_equal(f->device->allocator, &f->allocator);
}

static void Lanes_IndependentJobs_Overlap(void** state) {
  fixture_t* f = *state;
  int32_t compute = add(f->pass, SLUICE_LANE_COMPUTE), comm = add(f->pass, SLUICE_LANE_COMM);
  f->pass->plans[compute].until = f->pass->plans[comm].until = 2; /* both have begun */
  assert_int_equal(run(f->device, f->pass), SLUICE_OK);
  assert_true(f->pass->jobs[compute].begin < f->pass->jobs[comm].end);
  assert_true(f->pass->jobs[comm].begin < f->pass->jobs[compute].end);
}

/* Each job adds the results of those it waits for, so a missed wait also changes the numbers. */
static void Events_RandomGraphs_AreRespected(void** state) {
  fixture_t* f = *state;
  uint32_t seed = 12345;
#define NEXT() (seed = seed * 1664525u + 1013904223u, seed >> 8)
  for (int graph = 0; graph < 40; ++graph) {
    uint64_t want[MAX_JOBS];
    reset(f->pass);
    int32_t jobs = graph == 0 ? 0 : 1 + (int32_t)(NEXT() % 150);
    for (int32_t i = 0; i < jobs; ++i) {
      add(f->pass, (int32_t)(NEXT() % SLUICE_NUM_LANES));
      want[i] = (uint64_t)i;
      for (uint32_t w = NEXT() % (MAX_WAITS + 1); i > 0 && w > 0; --w) {
        int32_t event = (int32_t)(NEXT() % (uint32_t)i);
        wait_for(f->pass, i, event);
        want[i] += want[event];
      }
      f->pass->plans[i].nap_us = NEXT() % 16 == 0 ? 200 : 0;
    }
    assert_int_equal(run(f->device, f->pass), SLUICE_OK);
    check_order(f->pass);
    for (int32_t i = 0; i < jobs; ++i) {
      assert_true(ran(f->pass, i));
      if (under_test->times == NULL) assert_true(f->pass->result[i] == want[i]);
    }
  }
#undef NEXT
}

static void check_failure(sluice_status_t got, sluice_status_t want, int32_t job) {
  char text[64];
  assert_int_equal(got, want);
  assert_int_equal(last_error()->status, want);
  assert_int_equal(last_error()->rank, 5);
  assert_int_equal(last_error()->peer, 6);
  snprintf(text, sizeof text, "job %d failed as planned", job);
  assert_string_equal(last_message(), text);
}

/* Whichever lane fails: later jobs are skipped, exchanges still run, and nothing waits for ever. */
static void Failure_Job_SkipsAllButExchanges(void** state) {
  fixture_t* f = *state;
  const int32_t lanes[] = {SLUICE_LANE_COMPUTE, SLUICE_LANE_COPY_OUT, SLUICE_LANE_COPY_IN};
  for (size_t l = 0; l < 3; ++l) {
    reset(f->pass);
    int32_t first = add(f->pass, SLUICE_LANE_COMM);
    f->pass->plans[first].run_on_failure = 1;
    int32_t bad = add(f->pass, lanes[l]);
    wait_for(f->pass, bad, first);
    f->pass->plans[bad].fails = SLUICE_E_EXTERNAL;
    int32_t skipped[8], exchanges[8];
    for (int i = 0; i < 8; ++i) {
      skipped[i] = add(f->pass, i % SLUICE_NUM_LANES);
      wait_for(f->pass, skipped[i], bad);
      if (i > 0) wait_for(f->pass, skipped[i], skipped[i - 1]);
      exchanges[i] = add(f->pass, SLUICE_LANE_COMM);
      wait_for(f->pass, exchanges[i], skipped[i]); /* events of skipped jobs fire */
      f->pass->plans[exchanges[i]].run_on_failure = 1;
    }
    sluice_error_info_t stale = {.status = SLUICE_E_BUSY};
    (void)sluice_error_adopt(&stale); /* the record must come from the lane */
    check_failure(run(f->device, f->pass), SLUICE_E_EXTERNAL, bad);
    check_order(f->pass);
    for (int i = 0; i < 8; ++i) {
      assert_false(ran(f->pass, skipped[i]));
      assert_true(ran(f->pass, exchanges[i]));
    }
  }
}

static void Failure_Exchange_StopsEverything(void** state) {
  fixture_t* f = *state;
  int32_t bad = add(f->pass, SLUICE_LANE_COMM);
  f->pass->plans[bad].fails = SLUICE_E_PEER_LOST;
  f->pass->plans[bad].run_on_failure = 1;
  for (int i = 0; i < 40; ++i) {
    int32_t job = add(f->pass, i % SLUICE_NUM_LANES);
    wait_for(f->pass, job, bad);
    f->pass->plans[job].run_on_failure = i % 3 == 0;
  }
  check_failure(run(f->device, f->pass), SLUICE_E_PEER_LOST, bad);
  for (int32_t i = bad + 1; i < f->pass->num_jobs; ++i) assert_false(ran(f->pass, i));
}

static void Failure_ExchangeAfterAJob_ReportsTheFirst(void** state) {
  fixture_t* f = *state;
  int32_t bad = add(f->pass, SLUICE_LANE_COMPUTE);
  int32_t worse = add(f->pass, SLUICE_LANE_COMM), after = add(f->pass, SLUICE_LANE_COMM);
  f->pass->plans[bad].fails = SLUICE_E_NO_MEMORY;
  f->pass->plans[worse].fails = SLUICE_E_PEER_LOST;
  f->pass->plans[worse].run_on_failure = f->pass->plans[after].run_on_failure = 1;
  wait_for(f->pass, worse, bad);
  check_failure(run(f->device, f->pass), SLUICE_E_NO_MEMORY, bad);
  assert_true(ran(f->pass, worse));
  assert_false(ran(f->pass, after));
}

static void Passes_Many_EachStartsClean(void** state) {
  fixture_t* f = *state;
  for (int32_t n = 0; n < 300; ++n) {
    reset(f->pass);
    for (int32_t i = 0; i < 1 + n; ++i) {
      add(f->pass, (i + n) % SLUICE_NUM_LANES);
      if (i > 0) wait_for(f->pass, i, i - 1);
    }
    int fails = n % 7 == 3 && under_test->times == NULL;
    if (fails) f->pass->plans[n / 2].fails = SLUICE_E_EXTERNAL;
    assert_int_equal(run(f->device, f->pass), fails ? SLUICE_E_EXTERNAL : SLUICE_OK);
    for (int32_t i = 0; i < f->pass->num_jobs; ++i) assert_int_equal(ran(f->pass, i), !fails || i <= n / 2);
  }
}

static int count_threads(void) {
  int count = 0;
  DIR* tasks = opendir("/proc/self/task");
  for (const struct dirent* entry = readdir(tasks); entry != NULL; entry = readdir(tasks))
    count += entry->d_name[0] != '.';
  closedir(tasks);
  return count;
}

static void Threads_OnFirstUseOnly_OnePerLane(void** state) {
  fixture_t* f = *state;
  int before = count_threads();
  for (int pass = 0; pass < 3; ++pass) {
    reset(f->pass);
    for (int i = 0; i < 10; ++i) add(f->pass, SLUICE_LANE_COMPUTE);
    assert_int_equal(run(f->device, f->pass), SLUICE_OK);
    for (int i = 0; i < 10; ++i) assert_true(pthread_equal(f->pass->jobs[i].thread, pthread_self()));
  }
  assert_int_equal(count_threads(), before);
  pthread_t comm_thread = pthread_self();
  for (int pass = 0; pass < 3; ++pass) {
    reset(f->pass);
    for (int i = 0; i < 10; ++i) add(f->pass, i % 2 == 0 ? SLUICE_LANE_COMM : SLUICE_LANE_COMPUTE);
    assert_int_equal(run(f->device, f->pass), SLUICE_OK);
    assert_false(pthread_equal(f->pass->jobs[0].thread, pthread_self()));
    for (int i = 2; i < 10; i += 2) assert_true(pthread_equal(f->pass->jobs[i].thread, f->pass->jobs[0].thread));
    if (pass > 0) assert_true(pthread_equal(f->pass->jobs[0].thread, comm_thread));
    comm_thread = f->pass->jobs[0].thread;
    assert_int_equal(f->pass->jobs[0].deaf, 1); /* the host's signal handlers stay on the host's threads */
    assert_int_equal(f->pass->jobs[1].deaf, 0);
  }
  assert_int_equal(count_threads(), before + 1);
}

static void Allocation_NthFails_LeaksNothingAndRetries(void** state) {
  fixture_t* f = *state;
  f->device->vtable->destroy(f->device);
  f->device = NULL;
  int failures = 0;
  for (int64_t nth = 0; nth < 40; ++nth) {
    f->allocator.fail_after = nth;
    sluice_device_t* device = NULL;
    if (under_test->create(&f->allocator, &device) != SLUICE_OK) {
      assert_null(device);
      assert_int_equal(f->allocator.num_live, 0);
      ++failures;
      continue;
    }
    reset(f->pass);
    for (int32_t i = 0; i < 20; ++i) add(f->pass, i % SLUICE_NUM_LANES);
    sluice_status_t status = run(device, f->pass);
    if (status != SLUICE_OK) {
      ++failures;
      assert_int_equal(status, SLUICE_E_NO_MEMORY);
      for (int32_t i = 0; i < 20; ++i) assert_false(ran(f->pass, i));
      assert_int_equal(run(device, f->pass), SLUICE_OK);
    }
    f->allocator.fail_after = -1;
    check_order(f->pass);
    device->vtable->destroy(device);
    assert_int_equal(f->allocator.num_live, 0);
  }
  assert_in_range(failures, 1, 39);
}

int cts_device_suite_run(const cts_device_t* device) {
  under_test = device;
  alarm(SUITE_SECONDS);
  const int runs_jobs = device->times == NULL; /* a device that runs nothing cannot fail */
  /* elsewhere jobs enqueue, and overlap on the device */
  const int shows_overlap = device->lanes_are_threads || !runs_jobs;
  /* cmocka skips an entry without a name. */
#define CASE_IF(applies, case) \
  { .name = (applies) ? #case : NULL, .test_func = case, .setup_func = set_up, .teardown_func = tear_down }
#define CASE(case) CASE_IF(1, case)
  const struct CMUnitTest tests[] = {
      CASE(Device_Fresh_HasNameAndKernels),
      CASE_IF(shows_overlap, Lanes_IndependentJobs_Overlap),
      CASE(Events_RandomGraphs_AreRespected),
      CASE_IF(runs_jobs, Failure_Job_SkipsAllButExchanges),
      CASE_IF(runs_jobs, Failure_Exchange_StopsEverything),
      CASE_IF(runs_jobs, Failure_ExchangeAfterAJob_ReportsTheFirst),
      CASE(Passes_Many_EachStartsClean),
      CASE_IF(device->lanes_are_threads, Threads_OnFirstUseOnly_OnePerLane),
      CASE(Allocation_NthFails_LeaksNothingAndRetries),
  };
#undef CASE
#undef CASE_IF
  return cmocka_run_group_tests_name(device->name, tests, NULL, NULL);
}
