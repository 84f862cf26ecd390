// SPDX-License-Identifier: Apache-2.0
/* Predicted steps of the optimizer: bytes computed by hand, and seconds that follow without a simulation. */
#include <math.h>
#include <stdint.h>

#include "backend/base/test/refused.h"
#include "sluice/optimizer.h"

static const int64_t phi = 1000000, bucket = 65536; /* aligned without padding */

static sluice_optimizer_workload_t workload(void) {
  DEFAULTS(sluice_optimizer_workload, w);
  w.count = phi;
  w.bucket = bucket;
  return w;
}

static sluice_optimizer_prediction_t predicted(const sluice_optimizer_workload_t* w) {
  DEFAULTS(sluice_optimizer_prediction, p);
  if (sluice_optimizer_predict(w, &p) != SLUICE_OK) {
    fail_msg("%s", last_message());
  }
  return p;
}

static void expect_near(double found, double wanted) {
  if (fabs(found - wanted) > 1e-9 * fabs(wanted) + 1e-15) fail_msg("%.12g, wanted %.12g", found, wanted);
}

/* AxoNN's numbers: 20 phi bytes if all states are near; with buckets 4 phi, and 16 bytes for each element of each slot.
 * */
TEST(HalfPrecision_WithStatesInHostMemory_TakesFourPhiAndSixteenABucket) {
  for (int32_t slots = 1; slots <= 2; ++slots) {
    sluice_optimizer_workload_t w = workload();
    w.num_slots = slots;
    w.sum_buckets = 1;
    const sluice_optimizer_prediction_t p = predicted(&w);
    assert_true(p.whole_bytes == 20u * (uint64_t)phi);
    assert_true(p.near_bytes == 4u * (uint64_t)phi + 16u * (uint64_t)(slots * bucket));
    assert_true(p.near_bytes == p.param_bytes + p.grad_bytes + p.slot_bytes + p.staging_bytes);
    assert_true(p.state_bytes == 12u * (uint64_t)phi);
    assert_true(p.file_bytes == 24u * (uint64_t)phi);
  }
}

TEST(AllBucketsAtOnce_StagesEveryGradient) {
  sluice_optimizer_workload_t w = workload();
  w.world_size = 2;
  w.sum_buckets = INT64_MAX;
  const uint64_t whole_buckets = (uint64_t)((phi + bucket - 1) / bucket * bucket);
  assert_true(predicted(&w).staging_bytes == 4u * whole_buckets);
  w.decides = 1;
  assert_true(predicted(&w).staging_bytes == 4u * (uint64_t)phi);
  w.sum_buckets = 2;
  assert_true(predicted(&w).staging_bytes == 4u * (uint64_t)phi); /* every chunk has a slot */
  w.decides = 0;
  assert_true(predicted(&w).staging_bytes == 4u * (uint64_t)(2 * 2 * bucket));
}

TEST(StatesThatLieNear_AreCountedThereAndHaveNoSlots) {
  sluice_optimizer_workload_t w = workload();
  w.num_slots = 0;
  w.param_dtype = w.grad_dtype = SLUICE_DTYPE_F32;
  sluice_optimizer_prediction_t p = predicted(&w);
  assert_true(p.state_bytes == 8u * (uint64_t)phi); /* an f32 parameter is its own master weight */
  assert_true(p.near_bytes == 16u * (uint64_t)phi && p.whole_bytes == p.near_bytes);
  assert_true(p.slot_bytes == 0 && p.staging_bytes == 0);
  w.param_dtype = SLUICE_DTYPE_F16;
  p = predicted(&w);
  assert_true(p.state_bytes == 12u * (uint64_t)phi);
}

TEST(OneBucket_TakesItsCopiesAndItsUpdateInTurns) {
  sluice_optimizer_workload_t w = workload();
  w.bucket = 2 * phi;
  w.update_rate = 3e9, w.copy_in_rate = 2e9, w.copy_out_rate = 1e9;
  const sluice_optimizer_prediction_t p = predicted(&w);
  const double in = 12e6 / 2e9, out = 12e6 / 1e9, stage = 6e6 / 3e9, update = 30e6 / 3e9;
  expect_near(p.copy_in_seconds, in);
  expect_near(p.copy_out_seconds, out);
  expect_near(p.update_seconds, stage + update);
  expect_near(p.seconds, in + update + out); /* gradients are staged while the states are copied in */
  for (int i = 0; i < 4; ++i) expect_near(p.seconds_by_k[i], p.seconds);
}

/* If sums only have a cost per call, one call is best; if they only have a cost per byte, many calls are. */
TEST(K_IsTheOneThatTakesLeast) {
  sluice_optimizer_workload_t w = workload();
  w.num_slots = 0;
  w.world_size = 2;
  w.sum_seconds = 1.0;
  sluice_optimizer_prediction_t p = predicted(&w);
  assert_true(p.sum_buckets == INT64_MAX);
  expect_near(p.seconds, 1.0);
  expect_near(p.seconds_by_k[0], 16.0);
  expect_near(p.seconds_by_k[1], 8.0);
  expect_near(p.seconds_by_k[2], 4.0);
  w.sum_seconds = 0.0;
  w.sum_rate = 1e9, w.update_rate = 10e9;
  p = predicted(&w);
  assert_true(p.sum_buckets == 1);
  const double sums = 3e6 / 1e9, updates = 30e6 / 10e9; /* half of each element's 6 bytes go over the link */
  expect_near(p.sum_seconds, sums);
  expect_near(p.update_seconds, updates);
  expect_near(p.seconds_by_k[3], sums + updates);
  assert_true(p.seconds > sums && p.seconds < 1.1 * sums);
  w.sum_buckets = 4;
  p = predicted(&w);
  assert_true(p.sum_buckets == 4);
  expect_near(p.seconds, p.seconds_by_k[2]);
}

TEST(BadArguments_AreRefusedByName) {
  DEFAULTS(sluice_optimizer_prediction, p);
#define REFUSED_FIELD(field, value, text)                 \
  do {                                                    \
    sluice_optimizer_workload_t w = workload();           \
    w.field = (value);                                    \
    REFUSED(sluice_optimizer_predict(&w, &p), BAD, text); \
  } while (0)
  REFUSED_FIELD(count, 0, "count is 0");
  REFUSED_FIELD(count, INT64_MAX, "bucket is 65536");
  REFUSED_FIELD(bucket, 0, "bucket is 0");
  REFUSED_FIELD(sum_buckets, -1, "sum_buckets is -1");
  REFUSED_FIELD(world_size, 0, "world_size is 0");
  REFUSED_FIELD(num_slots, 3, "3 slots");
  REFUSED_FIELD(num_slots, -1, "-1 slots");
  REFUSED_FIELD(sums_on_device, 2, "sums_on_device is 2");
  REFUSED_FIELD(param_dtype, SLUICE_DTYPE_F64, "param_dtype is f64");
  REFUSED_FIELD(grad_dtype, 77, "grad_dtype is unknown");
  REFUSED_FIELD(update_rate, -1.0, "update_rate is -1");
  REFUSED_FIELD(copy_in_rate, (double)NAN, "copy_in_rate is nan");
  REFUSED_FIELD(copy_out_rate, (double)INFINITY, "copy_out_rate is inf");
  REFUSED_FIELD(sum_rate, -2.0, "sum_rate is -2");
  REFUSED_FIELD(sum_seconds, -3.0, "sum_seconds is -3");
  sluice_optimizer_workload_t w = workload();
  assert_int_equal(sluice_optimizer_predict(NULL, &p), SLUICE_E_INVALID_ARGUMENT);
  assert_int_equal(sluice_optimizer_predict(&w, NULL), SLUICE_E_INVALID_ARGUMENT);
  p.struct_size = 0;
  assert_int_equal(sluice_optimizer_predict(&w, &p), SLUICE_E_ABI);
  w.struct_size = 1;
  assert_int_equal(sluice_optimizer_predict(&w, &p), SLUICE_E_ABI);
}
