// SPDX-License-Identifier: Apache-2.0
/* Predicted durations of steps: which ops overlap, and which k (buckets per chunk) is chosen. */
#include <math.h>

#include "backend/optim/buckets/simulate.h"
#include "third_party/bazel/test.h"

static sluice_allocator_t allocator;

/* 16 buckets of 100 elements. A sum takes `latency` plus one second per element, an update one second per element. */
static const int64_t count = 1600;

static sluice_bucket_prices_t prices_of(double latency) {
  return (sluice_bucket_prices_t){
      .seconds = {[SLUICE_BUCKET_STAGE] = latency},
      .seconds_per_element = {[SLUICE_BUCKET_STAGE] = 1.0, [SLUICE_BUCKET_UPDATE] = 1.0, [SLUICE_BUCKET_LOOK] = 0.25},
  };
}

static sluice_bucket_form_t form_of(int64_t chunk, int32_t decides) {
  return (sluice_bucket_form_t){.counts = &count,
                                .num_lines = 1,
                                .bucket = 100,
                                .chunk = chunk,
                                .num_grad_slots = 2,
                                .sums = 1,
                                .decides = decides};
}

static double seconds_of(sluice_bucket_form_t form, double latency) {
  const sluice_bucket_prices_t prices = prices_of(latency);
  sluice_bucket_plan_t* plan = NULL;
  double seconds = -1.0;
  assert_int_equal(sluice_bucket_plan_create(&form, &allocator, &plan), SLUICE_OK);
  assert_int_equal(sluice_bucket_simulate(plan, &prices, &allocator, &seconds), SLUICE_OK);
  sluice_bucket_plan_destroy(plan, &allocator);
  return seconds;
}

#define ASSERT_SECONDS(call, wanted) assert_true(fabs((call) - (wanted)) < 1e-9)

TEST(Step_OfEqualSumsAndUpdates_TakesOneOfThemAndAChunk) {
  ASSERT_SECONDS(seconds_of(form_of(1, 0), 0.0), 1600.0 + 100.0);
  ASSERT_SECONDS(seconds_of(form_of(4, 0), 0.0), 1600.0 + 400.0);
  ASSERT_SECONDS(seconds_of(form_of(SLUICE_BUCKET_ALL, 0), 0.0), 3200.0); /* sums, then updates */
}

/* The sums set the pace, and the last chunk is updated after the last sum. */
TEST(Step_WhoseSumsAreSlow_TakesTheirTimeAndOneUpdate) {
  ASSERT_SECONDS(seconds_of(form_of(2, 0), 50.0), 8 * (200.0 + 50.0) + 200.0);
}

TEST(Step_WithOneSlotOfGradients_OverlapsNothing) {
  sluice_bucket_form_t form = form_of(1, 0);
  form.num_grad_slots = 1;
  ASSERT_SECONDS(seconds_of(form, 0.0), 3200.0);
}

/* Only looks at earlier sums overlap the sums. The updates wait for the verdict. */
TEST(Step_ThatDecides_UpdatesBehindAllSums) { ASSERT_SECONDS(seconds_of(form_of(1, 1), 0.0), 1600.0 + 25.0 + 1600.0); }

TEST(Chunk_IsLargerWhereExchangesAreDear) {
  static const double latencies[] = {0.0, 5.0, 13.0, 60.0, 10000.0};
  static const int64_t wanted[] = {1, 1, 2, 4, SLUICE_BUCKET_ALL};
  for (int i = 0; i < 5; ++i) {
    const sluice_bucket_prices_t prices = prices_of(latencies[i]);
    const sluice_bucket_form_t form = form_of(1, 0);
    const int64_t best = sluice_bucket_best_chunk(&form, &prices, &allocator, 77);
    double least = INFINITY;
    for (int k = 0; k < SLUICE_BUCKET_NUM_CHUNKS; ++k) {
      least = fmin(least, seconds_of(form_of(sluice_bucket_chunks[k], 0), latencies[i]));
    }
    assert_true(seconds_of(form_of(best, 0), latencies[i]) == least);
    assert_int_equal(best, wanted[i]);
  }
}

TEST(Chunk_WithoutMemoryToFindOut_IsTheOther) {
  const sluice_bucket_prices_t prices = prices_of(1.0);
  const sluice_bucket_form_t form = form_of(1, 0);
  for (int64_t nth = 0; nth < 12; ++nth) { /* three allocations for each k */
    allocator.fail_after = nth;
    assert_int_equal(sluice_bucket_best_chunk(&form, &prices, &allocator, 77), 77);
  }
  allocator.fail_after = -1;
  assert_int_equal(allocator.num_live, 0);
}

int main(void) {
  sluice_allocator_init(&allocator, NULL, NULL, NULL);
  const int failed = run_cases(NULL, NULL);
  sluice_allocator_deinit(&allocator);
  return failed;
}
