// SPDX-License-Identifier: Apache-2.0
/* Predicts a step of the optimizer without running it: the bytes of its plan, and a simulation. */
#include <math.h>

#include "backend/base/dtype.h"
#include "backend/base/math.h"
#include "backend/base/structs.h"
#include "backend/optim/buckets/plan.h"
#include "backend/optim/on_device/on_device.h"
#include "sluice/optimizer.h"

enum {
  DEFAULT_BUCKET = 1 << 22,
  STATE_BYTES = 12,       /* master and both moments per element */
  MOMENT_BYTES = 8,       /* per element of an f32 parameter that is its own master */
  STEPS_OF_A_FILE = 2,    /* the last whole one, and the one being written */
  MOST_BUCKETS = 1 << 20, /* bound on the buckets of a simulated plan */
};

SLUICE_DEFINE_INIT(sluice_optimizer_workload, .bucket = DEFAULT_BUCKET, .param_dtype = SLUICE_DTYPE_BF16,
                   .grad_dtype = SLUICE_DTYPE_BF16, .num_slots = SLUICE_BUCKET_MAX_SLOTS, .world_size = 1)
SLUICE_DEFINE_INIT(sluice_optimizer_prediction, 0)

/* ---- the request ---- */

static sluice_status_t require_dtype(int32_t dtype, const char* field) {
  return SLUICE_REQUIRE(dtype == SLUICE_DTYPE_F32 || dtype == SLUICE_DTYPE_BF16 || dtype == SLUICE_DTYPE_F16,
                        "sluice_optimizer_workload_t: %s is %s (%d); known are f32, bf16 and f16", field,
                        sluice_dtype_name(dtype), dtype);
}

static sluice_status_t require_number(double x, const char* field) {
  return SLUICE_REQUIRE(isfinite(x) && x >= 0.0, "sluice_optimizer_workload_t: %s is %g; give a number from 0 on",
                        field, x);
}

static sluice_status_t check_workload(const sluice_optimizer_workload_t* w) {
  SLUICE_TRY(sluice_struct_check_next(w->next, "sluice_optimizer_workload_t"));
  SLUICE_TRY(SLUICE_REQUIRE(w->count >= 1, "sluice_optimizer_workload_t: count is %lld; give at least 1",
                            (long long)w->count));
  SLUICE_TRY(SLUICE_REQUIRE(w->bucket >= 1 && (w->count - 1) / w->bucket < MOST_BUCKETS,
                            "sluice_optimizer_workload_t: bucket is %lld, for %lld elements; give at least 1, and at "
                            "most %d buckets",
                            (long long)w->bucket, (long long)w->count, MOST_BUCKETS));
  SLUICE_TRY(SLUICE_REQUIRE(w->sum_buckets >= 0,
                            "sluice_optimizer_workload_t: sum_buckets is %lld; give k, or 0 for the fastest k",
                            (long long)w->sum_buckets));
  SLUICE_TRY(SLUICE_REQUIRE(w->world_size >= 1, "sluice_optimizer_workload_t: world_size is %d; give at least 1",
                            w->world_size));
  SLUICE_TRY(SLUICE_REQUIRE(w->sums_on_device == 0 || w->sums_on_device == 1,
                            "sluice_optimizer_workload_t: sums_on_device is %d; give 0 or 1", w->sums_on_device));
  SLUICE_TRY(require_dtype(w->param_dtype, "param_dtype"));
  SLUICE_TRY(require_dtype(w->grad_dtype, "grad_dtype"));
  SLUICE_TRY(require_number(w->update_rate, "update_rate"));
  SLUICE_TRY(require_number(w->copy_in_rate, "copy_in_rate"));
  SLUICE_TRY(require_number(w->copy_out_rate, "copy_out_rate"));
  SLUICE_TRY(require_number(w->sum_rate, "sum_rate"));
  return require_number(w->sum_seconds, "sum_seconds");
}

/* ---- the form of the step, and its prices ---- */

/* Gradients are staged in f32 if they are summed, or if updates read them from a slot. */
static sluice_bucket_form_t form_of(const sluice_optimizer_workload_t* w) {
  const int stages = w->world_size > 1 || w->num_slots > 0;
  return (sluice_bucket_form_t){
      .counts = &w->count,
      .num_lines = 1,
      .num_slots = w->num_slots,
      .bucket = w->bucket < w->count ? w->bucket : w->count,
      .chunk = w->sum_buckets > 0 ? w->sum_buckets : 1,
      .num_grad_slots = !stages             ? 0
                        : w->world_size > 1 ? SLUICE_BUCKET_MAX_SLOTS
                                            : w->num_slots,
      .sums = w->world_size > 1,
      .decides = w->decides != 0 && stages,
  };
}

static double per_byte(double rate) { return rate > 0.0 ? 1.0 / rate : 0.0; }

static int has_master(const sluice_optimizer_workload_t* w) {
  return w->num_slots > 0 || w->param_dtype != SLUICE_DTYPE_F32;
}

/* Master (or parameter) and both moments are read and written; the gradient is read; a parameter that has a master is
 * written. */
static double update_bytes(const sluice_optimizer_workload_t* w, int32_t num_grad_slots) {
  const double grad = num_grad_slots > 0 ? sizeof(float) : (double)sluice_dtype_bytes(w->grad_dtype);
  return 2.0 * STATE_BYTES + grad + (has_master(w) ? (double)sluice_dtype_bytes(w->param_dtype) : 0.0);
}

/* Returns the bytes over a rank's link: its gradients to the ranks that sum them, then the sums back. */
static double sum_bytes(const sluice_optimizer_workload_t* w) {
  return (double)(w->world_size - 1) / w->world_size * (double)(sluice_dtype_bytes(w->grad_dtype) + sizeof(float));
}

static sluice_bucket_prices_t prices_of(const sluice_optimizer_workload_t* w, int32_t num_grad_slots) {
  const double update = per_byte(w->update_rate);
  sluice_bucket_prices_t prices = {
      .seconds_per_element =
          {
              [SLUICE_BUCKET_COPY_IN] = STATE_BYTES * per_byte(w->copy_in_rate),
              [SLUICE_BUCKET_COPY_OUT] = STATE_BYTES * per_byte(w->copy_out_rate),
              [SLUICE_BUCKET_UPDATE] = update_bytes(w, num_grad_slots) * update,
              [SLUICE_BUCKET_LOOK] = sizeof(float) * update,
              [SLUICE_BUCKET_STAGE] = (double)(sluice_dtype_bytes(w->grad_dtype) + sizeof(float)) * update,
          },
  };
  if (w->world_size == 1) return prices;
  prices.seconds[SLUICE_BUCKET_STAGE] = w->sum_seconds;
  prices.seconds_per_element[SLUICE_BUCKET_STAGE] = sum_bytes(w) * per_byte(w->sum_rate);
  return prices;
}

/* ---- the result ---- */

typedef struct step_s {
  double seconds;
  double by_kind[SLUICE_BUCKET_NUM_KINDS];
  uint64_t slot_bytes, staging_bytes;
} step_t;

static sluice_status_t simulate(const sluice_bucket_form_t* form, int64_t chunk, const sluice_bucket_prices_t* prices,
                                step_t* out_step) {
  sluice_allocator_t* allocator = sluice_process_allocator();
  sluice_bucket_form_t with = *form;
  with.chunk = chunk;
  *out_step = (step_t){.seconds = 0.0};
  sluice_bucket_plan_t* plan;
  SLUICE_TRY(sluice_bucket_plan_create(&with, allocator, &plan));
  out_step->slot_bytes = sluice_bucket_state_bytes(with.bucket, with.num_slots);
  out_step->staging_bytes = sluice_bucket_plan_bytes(plan) - out_step->slot_bytes;
  for (int32_t i = 0; i < plan->num_ops; ++i) {
    const sluice_bucket_op_t* op = plan->ops + i;
    out_step->by_kind[op->kind] +=
        prices->seconds[op->kind] + prices->seconds_per_element[op->kind] * (double)op->count;
  }
  const sluice_status_t status = sluice_bucket_simulate(plan, prices, allocator, &out_step->seconds);
  sluice_bucket_plan_destroy(plan, allocator);
  return status;
}

/* Returns the bytes that the sum of one chunk receives. */
static uint64_t receive_bytes(const sluice_optimizer_workload_t* w, int64_t sum_buckets) {
  if (w->world_size == 1 || !w->sums_on_device) return 0;
  const int64_t buckets = sluice_min(sum_buckets, sluice_ceil_div(w->count, w->bucket));
  return sluice_device_sum_receive_bytes(sluice_min(w->count, buckets * w->bucket), w->world_size);
}

static void count_bytes(const sluice_optimizer_workload_t* w, const step_t* step, sluice_optimizer_prediction_t* out) {
  const uint64_t count = (uint64_t)w->count;
  out->param_bytes = count * sluice_dtype_bytes(w->param_dtype);
  out->grad_bytes = count * sluice_dtype_bytes(w->grad_dtype);
  out->slot_bytes = step->slot_bytes;
  out->staging_bytes = step->staging_bytes + receive_bytes(w, out->sum_buckets);
  out->state_bytes = count * (uint64_t)(has_master(w) ? STATE_BYTES : MOMENT_BYTES);
  out->file_bytes = count * STATE_BYTES * STEPS_OF_A_FILE;
  const uint64_t here = out->param_bytes + out->grad_bytes;
  out->near_bytes = here + out->slot_bytes + out->staging_bytes + (w->num_slots == 0 ? out->state_bytes : 0);
  const uint64_t masters = w->param_dtype == SLUICE_DTYPE_F32 ? 0 : count * sizeof(float);
  const uint64_t wide_grads = w->grad_dtype == SLUICE_DTYPE_F32 ? 0 : count * sizeof(float);
  out->whole_bytes = here + count * MOMENT_BYTES + masters + wide_grads;
}

static sluice_status_t predict(const sluice_optimizer_workload_t* w, sluice_optimizer_prediction_t* out) {
  const sluice_bucket_form_t form = form_of(w);
  const sluice_bucket_prices_t prices = prices_of(w, form.num_grad_slots);
  int best = 0;
  step_t step;
  for (int i = 0; i < SLUICE_BUCKET_NUM_CHUNKS; ++i) {
    SLUICE_TRY(simulate(&form, sluice_bucket_chunks[i], &prices, &step));
    out->seconds_by_k[i] = step.seconds;
    if (step.seconds < out->seconds_by_k[best]) best = i;
  }
  out->sum_buckets = w->sum_buckets > 0 ? w->sum_buckets : sluice_bucket_chunks[best];
  SLUICE_TRY(simulate(&form, out->sum_buckets, &prices, &step));
  count_bytes(w, &step, out);
  out->seconds = step.seconds;
  out->update_seconds = step.by_kind[SLUICE_BUCKET_UPDATE] + step.by_kind[SLUICE_BUCKET_LOOK];
  out->copy_in_seconds = step.by_kind[SLUICE_BUCKET_COPY_IN];
  out->copy_out_seconds = step.by_kind[SLUICE_BUCKET_COPY_OUT];
  *(w->world_size > 1 ? &out->sum_seconds : &out->update_seconds) += step.by_kind[SLUICE_BUCKET_STAGE];
  return SLUICE_OK;
}

sluice_status_t sluice_optimizer_predict(const sluice_optimizer_workload_t* workload,
                                         sluice_optimizer_prediction_t* out_prediction) {
  SLUICE_TRY(SLUICE_REQUIRE(workload != NULL && out_prediction != NULL, "sluice_optimizer_predict: %s is NULL",
                            workload == NULL ? "workload" : "out_prediction"));
  SLUICE_READ_STRUCT(sluice_optimizer_workload, w, workload, sizeof w);
  SLUICE_TRY(sluice_struct_check_size(out_prediction, "sluice_optimizer_prediction_t"));
  SLUICE_TRY(check_workload(&w));
  sluice_optimizer_prediction_t found = {.struct_size = out_prediction->struct_size};
  SLUICE_TRY(predict(&w, &found));
  sluice_struct_give(out_prediction, &found, sizeof found);
  return SLUICE_OK;
}
