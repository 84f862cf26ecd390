// SPDX-License-Identifier: Apache-2.0
/* Plans of buckets: the checker proves each of them, and finds every removed wait; predicted durations of steps. */
#include <math.h>

#include "backend/optim/buckets/plan.h"
#include "sluice/context.h"
#include "third_party/bazel/test.h"

static sluice_allocator_t allocator;

static sluice_bucket_plan_t* plan_of_form(const sluice_bucket_form_t* form) {
  sluice_bucket_plan_t* plan = NULL;
  assert_int_equal(sluice_bucket_plan_create(form, &allocator, &plan), SLUICE_OK);
  return plan;
}

/* A plan for one line, with chunks of one bucket. */
static sluice_bucket_plan_t* plan_of(int64_t count, int64_t bucket, int32_t num_slots) {
  const sluice_bucket_form_t form = {.counts = &count,
                                     .num_lines = 1,
                                     .num_slots = num_slots,
                                     .bucket = bucket,
                                     .chunk = 1,
                                     .num_grad_slots = num_slots};
  return plan_of_form(&form);
}

static sluice_bucket_finding_t finding_of(const sluice_bucket_plan_t* plan) {
  sluice_bucket_finding_t finding;
  assert_int_equal(sluice_bucket_plan_check(plan, &allocator, &finding), SLUICE_OK);
  return finding;
}

static int is_proved(const sluice_bucket_plan_t* plan) {
  sluice_bucket_finding_t finding;
  return sluice_bucket_plan_check(plan, &allocator, &finding) == SLUICE_OK && finding.what == SLUICE_BUCKET_PROVED;
}

static int32_t count_kind(const sluice_bucket_plan_t* plan, int32_t kind) {
  int32_t count = 0;
  for (int32_t i = 0; i < plan->num_ops; ++i) count += plan->ops[i].kind == kind;
  return count;
}

static int32_t find(const sluice_bucket_plan_t* plan, int32_t kind, int32_t bucket) {
  for (int32_t i = 0; i < plan->num_ops; ++i) {
    if (plan->ops[i].kind == kind && plan->ops[i].bucket == bucket) return i;
  }
  fail();
  return -1;
}

TEST(Plan_OfAnyCountAndSlots_IsProved) {
  for (int64_t count = 0; count <= 40; ++count) {
    for (int64_t bucket = 1; bucket <= 12; ++bucket) {
      for (int32_t slots = 1; slots <= 2; ++slots) {
        sluice_bucket_plan_t* plan = plan_of(count, bucket, slots);
        assert_int_equal(plan->num_ops, 4 * ((count + bucket - 1) / bucket));
        assert_true(is_proved(plan));
        sluice_bucket_plan_destroy(plan, &allocator);
      }
    }
  }
}

/* Calls fn for each form over lines of these lengths. Returns the number of forms. */
static int32_t for_all_forms(void (*fn)(const sluice_bucket_form_t* form, sluice_bucket_plan_t* plan)) {
  static const int64_t lines[][3] = {{0, 0, 0}, {1, 0, 7}, {40, 9, 21}, {7, 7, 7}};
  static const int64_t chunks[] = {1, 2, 4, INT64_MAX};
  int32_t forms = 0;
  for (int32_t i = 0; i < 4 * 4 * 3 * 3 * 2 * 2; ++i) {
    const sluice_bucket_form_t form = {.counts = lines[i % 4],
                                       .num_lines = 3,
                                       .bucket = 5,
                                       .chunk = chunks[i / 4 % 4],
                                       .num_slots = i / 16 % 3,
                                       .num_grad_slots = i / 48 % 3,
                                       .sums = i / 144 % 2,
                                       .decides = i / 288};
    sluice_bucket_plan_t* plan = plan_of_form(&form);
    fn(&form, plan);
    sluice_bucket_plan_destroy(plan, &allocator);
    ++forms;
  }
  return forms;
}

static void check_form(const sluice_bucket_form_t* form, sluice_bucket_plan_t* plan) {
  assert_true(is_proved(plan));
  assert_int_equal(count_kind(plan, SLUICE_BUCKET_UPDATE), plan->num_buckets);
  assert_int_equal(count_kind(plan, SLUICE_BUCKET_COPY_IN), form->num_slots > 0 ? plan->num_buckets : 0);
  assert_int_equal(count_kind(plan, SLUICE_BUCKET_DECIDE), form->decides);
  const int64_t slots = form->decides ? plan->count : plan->grad_elements;
  for (int32_t i = 0; i < plan->num_ops; ++i) {
    const sluice_bucket_op_t* op = plan->ops + i;
    if (op->grad_slot >= 0) assert_true(op->grad_at >= 0 && op->grad_at + op->count <= slots);
    if (op->kind == SLUICE_BUCKET_STAGE) {
      assert_int_equal(op->lane, form->sums ? SLUICE_LANE_COMM : SLUICE_LANE_COMPUTE);
    }
  }
}

TEST(Plan_OfAnyForm_IsProvedAndStaysInItsSlots) { assert_int_equal(for_all_forms(check_form), 576); }

/* Removing a wait is found, unless another wait of the op implies the removed one. */
static int32_t dropped, found, implied;

static void drop_each(const sluice_bucket_form_t* form, sluice_bucket_plan_t* plan) {
  (void)form;
  for (int32_t i = 0; i < plan->num_ops; ++i) {
    sluice_bucket_op_t* op = plan->ops + i;
    const sluice_bucket_op_t was = *op;
    for (int32_t w = 0; w < was.num_waits; ++w) {
      op->waits[w] = was.waits[was.num_waits - 1];
      --op->num_waits;
      const sluice_bucket_finding_t finding = finding_of(plan);
      found += finding.what == SLUICE_BUCKET_OVERWRITTEN;
      /* A copy in that waits for the copy out of its slot need not wait for the earlier update of that slot. */
      implied += finding.what == SLUICE_BUCKET_PROVED && was.kind == SLUICE_BUCKET_COPY_IN &&
                 plan->ops[was.waits[w]].kind == SLUICE_BUCKET_UPDATE;
      *op = was;
      ++dropped;
    }
  }
}

TEST(Plan_OfAnyFormWithoutAWait_IsFound) {
  dropped = found = implied = 0;
  for_all_forms(drop_each);
  assert_int_equal(found + implied, dropped);
  assert_true(found > 1000);
}

TEST(Update_InAPlanThatDecides_WaitsForTheVerdict) {
  const int64_t counts[] = {20, 30};
  const sluice_bucket_form_t form = {
      .counts = counts, .num_lines = 2, .bucket = 5, .chunk = 2, .sums = 1, .decides = 1};
  sluice_bucket_plan_t* plan = plan_of_form(&form);
  const int32_t verdict = find(plan, SLUICE_BUCKET_DECIDE, 0);
  const sluice_bucket_op_t* first = plan->ops + find(plan, SLUICE_BUCKET_UPDATE, 0);
  assert_int_equal(first->num_waits, 1);
  assert_int_equal(first->waits[0], verdict);
  sluice_bucket_op_t* op = plan->ops + verdict; /* now the verdict comes before the last chunk was looked at */
  const sluice_bucket_op_t kept = op[0];
  op[0] = op[-1], op[-1] = kept;
  assert_false(is_proved(plan));
  sluice_bucket_plan_destroy(plan, &allocator);
}

TEST(Plan_WithAnotherFault_IsFound) {
  sluice_bucket_plan_t* plan = plan_of(60, 10, 2);
  sluice_bucket_op_t* update = plan->ops + find(plan, SLUICE_BUCKET_UPDATE, 3);
  sluice_bucket_op_t* stage = plan->ops + find(plan, SLUICE_BUCKET_STAGE, 3);
  update->state_slot = 0; /* the slot of bucket 2 */
  assert_false(is_proved(plan));
  update->state_slot = 1, update->grad_slot = 0;
  assert_false(is_proved(plan));
  update->grad_slot = 1, update->grad_at += 1; /* the place of another element's gradient */
  assert_int_equal(finding_of(plan).what, SLUICE_BUCKET_FOREIGN);
  update->grad_at -= 1;
  stage->bucket = 2; /* bucket 2 is staged twice, bucket 3 never */
  assert_int_equal(finding_of(plan).what, SLUICE_BUCKET_MISSING);
  stage->bucket = 3;
  --plan->num_ops; /* the last bucket is not copied out */
  assert_int_equal(finding_of(plan).what, SLUICE_BUCKET_MISSING);
  ++plan->num_ops;
  assert_true(is_proved(plan));
  update = plan->ops + find(plan, SLUICE_BUCKET_UPDATE, 0);
  const sluice_bucket_op_t kept = *update; /* the update comes before the copy in of its states */
  sluice_bucket_op_t* in = plan->ops + find(plan, SLUICE_BUCKET_COPY_IN, 0);
  *update = *in, *in = kept;
  assert_false(is_proved(plan));
  sluice_bucket_plan_destroy(plan, &allocator);
}

TEST(Plan_WhoseWaitPointsForward_IsRefused) {
  sluice_bucket_plan_t* plan = plan_of(60, 10, 2);
  plan->ops[find(plan, SLUICE_BUCKET_UPDATE, 0)].waits[0] = plan->num_ops - 1;
  sluice_bucket_finding_t finding;
  assert_int_equal(sluice_bucket_plan_check(plan, &allocator, &finding), SLUICE_E_INVALID_ARGUMENT);
  sluice_bucket_plan_destroy(plan, &allocator);
}

TEST(Plan_OfSizesThatNobodyMeans_IsRefused) {
  const int64_t bad[][5] = {{10, 0, 1, 1, 1},
                            {-1, 4, 1, 1, 1},
                            {10, 4, -1, 1, 1},
                            {10, 4, 3, 1, 1},
                            {10, 4, 1, 0, 1},
                            {10, 4, 1, 1, 3},
                            {INT64_C(1) << 40, 1, 1, 1, 1}};
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; ++i) {
    sluice_bucket_plan_t* plan = NULL;
    const sluice_bucket_form_t form = {.counts = &bad[i][0],
                                       .num_lines = 1,
                                       .bucket = bad[i][1],
                                       .num_slots = (int32_t)bad[i][2],
                                       .chunk = bad[i][3],
                                       .num_grad_slots = (int32_t)bad[i][4]};
    assert_int_equal(sluice_bucket_plan_create(&form, &allocator, &plan), SLUICE_E_INVALID_ARGUMENT);
    assert_null(plan);
  }
}

/* ---- durations: which ops overlap, and which k (buckets per chunk) is chosen ---- */

/* 16 buckets of 100 elements. A sum takes `latency` plus one second per element, an update one second per element. */
static const int64_t elements = 1600;

static sluice_bucket_prices_t prices_of(double latency) {
  return (sluice_bucket_prices_t){
      .seconds = {[SLUICE_BUCKET_STAGE] = latency},
      .seconds_per_element = {[SLUICE_BUCKET_STAGE] = 1.0, [SLUICE_BUCKET_UPDATE] = 1.0, [SLUICE_BUCKET_LOOK] = 0.25},
  };
}

static sluice_bucket_form_t chunks_of(int64_t chunk, int32_t decides) {
  return (sluice_bucket_form_t){.counts = &elements,
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
  ASSERT_SECONDS(seconds_of(chunks_of(1, 0), 0.0), 1600.0 + 100.0);
  ASSERT_SECONDS(seconds_of(chunks_of(4, 0), 0.0), 1600.0 + 400.0);
  ASSERT_SECONDS(seconds_of(chunks_of(SLUICE_BUCKET_ALL, 0), 0.0), 3200.0); /* sums, then updates */
}

/* The sums set the pace, and the last chunk is updated after the last sum. */
TEST(Step_WhoseSumsAreSlow_TakesTheirTimeAndOneUpdate) {
  ASSERT_SECONDS(seconds_of(chunks_of(2, 0), 50.0), 8 * (200.0 + 50.0) + 200.0);
}

TEST(Step_WithOneSlotOfGradients_OverlapsNothing) {
  sluice_bucket_form_t form = chunks_of(1, 0);
  form.num_grad_slots = 1;
  ASSERT_SECONDS(seconds_of(form, 0.0), 3200.0);
}

/* Only looks at earlier sums overlap the sums. The updates wait for the verdict. */
TEST(Step_ThatDecides_UpdatesBehindAllSums) {
  ASSERT_SECONDS(seconds_of(chunks_of(1, 1), 0.0), 1600.0 + 25.0 + 1600.0);
}

TEST(Chunk_IsLargerWhereExchangesAreDear) {
  static const double latencies[] = {0.0, 5.0, 13.0, 60.0, 10000.0};
  static const int64_t wanted[] = {1, 1, 2, 4, SLUICE_BUCKET_ALL};
  for (int i = 0; i < 5; ++i) {
    const sluice_bucket_prices_t prices = prices_of(latencies[i]);
    const sluice_bucket_form_t form = chunks_of(1, 0);
    const int64_t best = sluice_bucket_best_chunk(&form, &prices, &allocator, 77);
    double least = INFINITY;
    for (int k = 0; k < SLUICE_BUCKET_NUM_CHUNKS; ++k) {
      least = fmin(least, seconds_of(chunks_of(sluice_bucket_chunks[k], 0), latencies[i]));
    }
    assert_true(seconds_of(chunks_of(best, 0), latencies[i]) == least);
    assert_int_equal(best, wanted[i]);
  }
}

TEST(Chunk_WithoutMemoryToFindOut_IsTheOther) {
  const sluice_bucket_prices_t prices = prices_of(1.0);
  const sluice_bucket_form_t form = chunks_of(1, 0);
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
  const int leaked = allocator.num_live != 0;
  sluice_allocator_deinit(&allocator);
  return failed + leaked;
}
