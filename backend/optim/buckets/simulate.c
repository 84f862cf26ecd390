// SPDX-License-Identifier: Apache-2.0
#include "backend/optim/buckets/simulate.h"

#include "backend/base/lanes.h"

const int64_t sluice_bucket_chunks[SLUICE_BUCKET_NUM_CHUNKS] = {1, 2, 4, SLUICE_BUCKET_ALL};

static double later(double a, double b) { return a > b ? a : b; }

sluice_status_t sluice_bucket_simulate(const sluice_bucket_plan_t* plan, const sluice_bucket_prices_t* prices,
                                       sluice_allocator_t* allocator, double* out_seconds) {
  *out_seconds = 0.0;
  const uint64_t bytes = (uint64_t)plan->num_ops * sizeof(double);
  double* ends = sluice_alloc(allocator, bytes, "optimizer: a simulated step");
  if (ends == NULL) return sluice_alloc_status();
  double lanes[SLUICE_NUM_LANES] = {0.0};
  for (int32_t i = 0; i < plan->num_ops; ++i) {
    const sluice_bucket_op_t* op = plan->ops + i;
    double at = lanes[op->lane];
    for (int32_t w = 0; w < op->num_waits; ++w) at = later(at, ends[op->waits[w]]);
    ends[i] = at + prices->seconds[op->kind] + prices->seconds_per_element[op->kind] * (double)op->count;
    lanes[op->lane] = ends[i];
    *out_seconds = later(*out_seconds, ends[i]);
  }
  sluice_free(allocator, ends, bytes);
  return SLUICE_OK;
}

static sluice_status_t seconds_with(const sluice_bucket_form_t* form, int64_t chunk,
                                    const sluice_bucket_prices_t* prices, sluice_allocator_t* allocator,
                                    double* out_seconds) {
  sluice_bucket_form_t with = *form;
  with.chunk = chunk;
  sluice_bucket_plan_t* plan;
  SLUICE_TRY(sluice_bucket_plan_create(&with, allocator, &plan));
  const sluice_status_t status = sluice_bucket_simulate(plan, prices, allocator, out_seconds);
  sluice_bucket_plan_destroy(plan, allocator);
  return status;
}

int64_t sluice_bucket_best_chunk(const sluice_bucket_form_t* form, const sluice_bucket_prices_t* prices,
                                 sluice_allocator_t* allocator, int64_t otherwise) {
  int64_t best = otherwise;
  double least = 0.0;
  for (int i = 0; i < SLUICE_BUCKET_NUM_CHUNKS; ++i) {
    double seconds;
    if (seconds_with(form, sluice_bucket_chunks[i], prices, allocator, &seconds) != SLUICE_OK) return otherwise;
    if (i > 0 && seconds >= least) continue;
    best = sluice_bucket_chunks[i];
    least = seconds;
  }
  return best;
}
