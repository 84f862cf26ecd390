// SPDX-License-Identifier: Apache-2.0
/* The sim device beyond lanes and events: jobs that slow each other down, and rejected models. All costs and shares are
 * powers of two, so times are exact. */
#include "backend/device/sim/sim_device.h"

#include <stdint.h>
#include <string.h>

#include "backend/base/test/refused.h"

enum { COMPUTE = 1 << SLUICE_LANE_COMPUTE, COMM = 1 << SLUICE_LANE_COMM, OUT = 1 << SLUICE_LANE_COPY_OUT };
enum { MAX_JOBS = 4 };

typedef struct job_s {
  int32_t lane;
  double seconds;
  sluice_overlap_t overlap;
  double line; /* of `seconds` */
} job_t;

static double cost(void* user, int32_t index) { return ((const job_t*)user)[index].seconds; }

static sluice_overlap_t overlap(void* user, int32_t index) { return ((const job_t*)user)[index].overlap; }

static double line(void* user, int32_t index) { return ((const job_t*)user)[index].line; }

static double ends[MAX_JOBS];

/* Jobs without waits; the end of each in ends[i]. */
static void run(sluice_sim_model_t model, const job_t* jobs, int32_t num_jobs) {
  sluice_allocator_t allocator;
  sluice_device_t* device = NULL;
  sluice_sim_result_t result;
  sluice_allocator_init(&allocator, NULL, NULL, NULL);
  model.cost = cost;
  model.user = (void*)(uintptr_t)jobs;
  assert_int_equal(sluice_sim_device_create(&model, &allocator, &device), SLUICE_OK);
  assert_int_equal(device->vtable->begin(device, num_jobs, NULL, NULL, NULL), SLUICE_OK);
  for (int32_t i = 0; i < num_jobs; ++i) {
    const sluice_job_t job = {.index = i, .lane = jobs[i].lane};
    assert_int_equal(device->vtable->submit(device, &job), SLUICE_OK);
  }
  assert_int_equal(device->vtable->join(device), SLUICE_OK);
  sluice_sim_device_result(device, &result);
  memcpy(ends, result.end, (size_t)num_jobs * sizeof *ends);
  device->vtable->destroy(device);
  assert_int_equal(allocator.num_live, 0);
  sluice_allocator_deinit(&allocator);
}

/* The second exchange defines its overlap with computation; the first leaves it to the shares (of 1). */
TEST(Overlap_OfTheRunningExchange_ReplacesTheShares) {
  const job_t jobs[] = {
      {SLUICE_LANE_COMPUTE, 4, {0, 0}}, {SLUICE_LANE_COMM, 2, {0, 0}}, {SLUICE_LANE_COMM, 1, {0.25, 0.5}}};
  const sluice_sim_model_t model = {.overlap = overlap};
  run(model, jobs, 3);
  /* From 2 on the exchange needs 1 / 0.25 and computation 2 / 0.5 seconds: both end at 6. */
  assert_true(ends[1] == 2 && ends[2] == 6 && ends[0] == 6);
}

/* With the copy lane busy too, an exchange with its own overlap keeps its share for the copy. */
TEST(Overlap_WithAThirdLane_KeepsTheShareOfThatLane) {
  const job_t jobs[] = {
      {SLUICE_LANE_COMPUTE, 8, {0, 0}}, {SLUICE_LANE_COMM, 1, {0.5, 0.5}}, {SLUICE_LANE_COPY_OUT, 4, {0, 0}}};
  sluice_sim_model_t model = {.overlap = overlap};
  model.share[SLUICE_LANE_COMM][COMM | OUT] = 0.5;
  run(model, jobs, 3);
  assert_true(ends[1] == 4); /* 1 / (0.5 * 0.5) */
  assert_true(ends[2] == 4);
  assert_true(ends[0] == 4 + 8 - 4 * 0.5);
}

/* A bucket of 1 s is full at first, and the second of other work in each exchange refills it. */
TEST(TokenBucket_ExchangesInARow_LineTimeIsEarnedDuringOtherWork) {
  const job_t jobs[] = {
      {SLUICE_LANE_COMM, 4, {0, 0}, 3}, {SLUICE_LANE_COMM, 4.5, {0, 0}, 4}, {SLUICE_LANE_COMM, 0.5, {0, 0}, 0.5}};
  const sluice_sim_model_t model = {.bucket = 1, .line = line};
  run(model, jobs, 3);
  assert_true(ends[0] == 3 && ends[1] == 7 && ends[2] == 7.5);
}

/* The delay of an exchange by computation earns tokens for the next one, up to the size of the bucket. */
TEST(TokenBucket_HeldUpByComputation_IsEarnedForTheNext) {
  const job_t jobs[] = {{SLUICE_LANE_COMPUTE, 4, {0, 0}, 0},
                        {SLUICE_LANE_COMM, 2, {0.5, 1}, 2},
                        {SLUICE_LANE_COMM, 4, {1, 1}, 4},
                        {SLUICE_LANE_COMM, 4, {1, 1}, 4}};
  const sluice_sim_model_t model = {.bucket = 0.5, .line = line, .overlap = overlap};
  run(model, jobs, 4);
  assert_true(ends[1] == 3); /* 2 less 0.5, at half speed */
  assert_true(ends[2] == 3 + 3.5 && ends[3] == 6.5 + 4);
}

TEST(Create_ShareOutsideItsRange_IsRefusedByName) {
  const double wrong[] = {-0.5, 1.5};
  for (int i = 0; i < 2; ++i) {
    sluice_allocator_t allocator;
    sluice_device_t* device = NULL;
    sluice_sim_model_t model = {.cost = cost};
    sluice_allocator_init(&allocator, NULL, NULL, NULL);
    model.share[SLUICE_LANE_COMM][COMPUTE | COMM] = wrong[i];
    REFUSED(sluice_sim_device_create(&model, &allocator, &device), SLUICE_E_INVALID_ARGUMENT, "share[1][3]");
    assert_null(device);
    sluice_allocator_deinit(&allocator);
  }
}

TEST(Join_JobThatWaitsForALaterOneOfItsLane_IsInternal) {
  sluice_allocator_t allocator;
  sluice_device_t* device = NULL;
  const job_t jobs[] = {{SLUICE_LANE_COMM, 1, {0, 0}}, {SLUICE_LANE_COMM, 1, {0, 0}}};
  const sluice_sim_model_t model = {.cost = cost, .user = (void*)(uintptr_t)jobs};
  const int32_t later[] = {1};
  const sluice_job_t submitted[] = {{.index = 0, .lane = SLUICE_LANE_COMM, .waits = later, .num_waits = 1},
                                    {.index = 1, .lane = SLUICE_LANE_COMM}};
  sluice_allocator_init(&allocator, NULL, NULL, NULL);
  assert_int_equal(sluice_sim_device_create(&model, &allocator, &device), SLUICE_OK);
  assert_int_equal(device->vtable->begin(device, 2, NULL, NULL, NULL), SLUICE_OK);
  for (int i = 0; i < 2; ++i) assert_int_equal(device->vtable->submit(device, &submitted[i]), SLUICE_OK);
  REFUSED(device->vtable->join(device), SLUICE_E_INTERNAL, "job 0 of lane 1 waits for ever");
  device->vtable->destroy(device);
  sluice_allocator_deinit(&allocator);
}
