#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/optim/buckets/plan.h"
#include "sluice/context.h"

static sluice_allocator_t allocator;

static sluice_bucket_plan_t* plan_of(int64_t count, int64_t bucket, int32_t num_slots) {
  sluice_bucket_plan_t* plan = NULL;
  assert_int_equal(sluice_bucket_plan_create(count, bucket, num_slots, &allocator, &plan), SLUICE_OK);
  return plan;
}

static sluice_bucket_finding_t finding_of(const sluice_bucket_plan_t* plan) {
  sluice_bucket_finding_t finding;
  assert_int_equal(sluice_bucket_plan_check(plan, &allocator, &finding), SLUICE_OK);
  return finding;
}

static void Plan_OfAnyCountAndSlots_IsProved(void** state) {
  (void)state;
  for (int64_t count = 0; count <= 40; ++count) {
    for (int64_t bucket = 1; bucket <= 12; ++bucket) {
      for (int32_t slots = 1; slots <= 2; ++slots) {
        sluice_bucket_plan_t* plan = plan_of(count, bucket, slots);
        assert_int_equal(plan->num_ops, 4 * ((count + bucket - 1) / bucket));
        assert_int_equal(finding_of(plan).what, SLUICE_BUCKET_PROVED);
        sluice_bucket_plan_destroy(plan, &allocator);
      }
    }
  }
}

/* Copies run beside updates: with two slots the copy of a bucket waits for none of the bucket before. */
static void CopyIn_WithTwoSlots_WaitsForTheBucketBeforeTheLast(void** state) {
  (void)state;
  sluice_bucket_plan_t* plan = plan_of(100, 10, 2);
  for (int32_t i = 0; i < plan->num_ops; ++i) {
    const sluice_bucket_op_t* op = plan->ops + i;
    if (op->kind != SLUICE_BUCKET_COPY_IN || op->bucket < 2) continue;
    for (int32_t w = 0; w < op->num_waits; ++w) assert_int_equal(plan->ops[op->waits[w]].bucket, op->bucket - 2);
  }
  sluice_bucket_plan_destroy(plan, &allocator);
}

/* Each wait that is left out is a bucket that may be overwritten early, unless another wait of the op implies it. */
static void Plan_WithoutAWait_IsFoundToBeOverwritten(void** state) {
  (void)state;
  for (int32_t slots = 1; slots <= 2; ++slots) {
    sluice_bucket_plan_t* plan = plan_of(60, 10, slots);
    int dropped = 0, found = 0, implied = 0;
    for (int32_t i = 0; i < plan->num_ops; ++i) {
      sluice_bucket_op_t* op = plan->ops + i;
      const sluice_bucket_op_t was = *op;
      for (int32_t w = 0; w < was.num_waits; ++w) {
        op->waits[w] = was.waits[was.num_waits - 1];
        --op->num_waits;
        const sluice_bucket_finding_t finding = finding_of(plan);
        found += finding.what == SLUICE_BUCKET_OVERWRITTEN;
        /* A copy in that waits for the copy out of its slot need not wait for the update before that. */
        implied += finding.what == SLUICE_BUCKET_PROVED && plan->ops[was.waits[w]].kind == SLUICE_BUCKET_UPDATE &&
                   was.kind == SLUICE_BUCKET_COPY_IN;
        *op = was;
        ++dropped;
      }
    }
    assert_true(found >= 2 * 6);
    assert_int_equal(found + implied, dropped);
    sluice_bucket_plan_destroy(plan, &allocator);
  }
}

static void Plan_WithAnotherFault_IsFound(void** state) {
  (void)state;
  sluice_bucket_plan_t* plan = plan_of(60, 10, 2);
  plan->ops[4 * 3 + SLUICE_BUCKET_UPDATE].slot = 0; /* of bucket 2's slot */
  assert_int_not_equal(finding_of(plan).what, SLUICE_BUCKET_PROVED);
  plan->ops[4 * 3 + SLUICE_BUCKET_UPDATE].slot = 1;
  plan->ops[4 * 3 + SLUICE_BUCKET_STAGE].bucket = 2; /* twice staged, and bucket 3 never */
  assert_int_equal(finding_of(plan).what, SLUICE_BUCKET_MISSING);
  plan->ops[4 * 3 + SLUICE_BUCKET_STAGE].bucket = 3;
  --plan->num_ops; /* the last bucket stays where it is */
  assert_int_equal(finding_of(plan).what, SLUICE_BUCKET_MISSING);
  ++plan->num_ops;
  const sluice_bucket_op_t staged = plan->ops[1]; /* updated before it is staged, on one lane */
  plan->ops[1] = plan->ops[2];
  plan->ops[2] = staged;
  assert_int_equal(finding_of(plan).what, SLUICE_BUCKET_FOREIGN);
  plan->ops[2] = plan->ops[1];
  plan->ops[1] = staged;
  assert_int_equal(finding_of(plan).what, SLUICE_BUCKET_PROVED);
  plan->ops[2].waits[0] = 3;
  sluice_bucket_finding_t finding;
  assert_int_equal(sluice_bucket_plan_check(plan, &allocator, &finding), SLUICE_E_INVALID_ARGUMENT);
  sluice_bucket_plan_destroy(plan, &allocator);
}

static void Plan_OfSizesThatNobodyMeans_IsRefused(void** state) {
  (void)state;
  const int64_t bad[][3] = {{10, 0, 1}, {-1, 4, 1}, {10, 4, 0}, {10, 4, 3}, {INT64_C(1) << 40, 1, 1}};
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; ++i) {
    sluice_bucket_plan_t* plan = NULL;
    assert_int_equal(sluice_bucket_plan_create(bad[i][0], bad[i][1], (int32_t)bad[i][2], &allocator, &plan),
                     SLUICE_E_INVALID_ARGUMENT);
    assert_null(plan);
  }
}

static void SlotBytes_AreSixteenForEachElement(void** state) {
  (void)state;
  assert_int_equal(sluice_bucket_slot_bytes(1 << 20, 1), 16 << 20);
  assert_int_equal(sluice_bucket_slot_bytes(1 << 20, 2), 32 << 20);
  assert_int_equal(sluice_bucket_slot_bytes(1, 2), 2 * 4 * 64); /* each array aligned */
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(Plan_OfAnyCountAndSlots_IsProved),
      cmocka_unit_test(CopyIn_WithTwoSlots_WaitsForTheBucketBeforeTheLast),
      cmocka_unit_test(Plan_WithoutAWait_IsFoundToBeOverwritten),
      cmocka_unit_test(Plan_WithAnotherFault_IsFound),
      cmocka_unit_test(Plan_OfSizesThatNobodyMeans_IsRefused),
      cmocka_unit_test(SlotBytes_AreSixteenForEachElement),
  };
  sluice_allocator_init(&allocator, NULL, NULL, NULL);
  const int failed = cmocka_run_group_tests(tests, NULL, NULL);
  const int leaked = allocator.num_live != 0;
  sluice_allocator_deinit(&allocator);
  return failed + leaked;
}
