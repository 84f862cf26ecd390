// SPDX-License-Identifier: Apache-2.0
#include "backend/cost/predict.h"

#include <string.h>

typedef struct walk_s {
  const sluice_template_t* schedule;
  const sluice_op_costs_t* costs;
} walk_t;

static double cost_of(void* user, int32_t index) {
  const walk_t* walk = user;
  return walk->costs->seconds(walk->costs->user, &walk->schedule->ops[index]);
}

static double line_of(void* user, int32_t index) {
  const walk_t* walk = user;
  return walk->costs->line(walk->costs->user, &walk->schedule->ops[index]);
}

static sluice_overlap_t overlap_of(void* user, int32_t index) {
  const walk_t* walk = user;
  return walk->costs->overlap(walk->costs->user, &walk->schedule->ops[index]);
}

static const double (*copy_share_of(void* user, int32_t index))[1 << SLUICE_NUM_LANES] {
  const walk_t* walk = user;
  return walk->costs->copy_share(walk->costs->user, &walk->schedule->ops[index]);
}

static sluice_status_t run(sluice_device_t* device, const sluice_template_t* t) {
  SLUICE_TRY(device->vtable->begin(device, t->num_ops, NULL, NULL, NULL));
  for (int32_t i = 0; i < t->num_ops; ++i) {
    const sluice_op_t* op = &t->ops[i];
    const sluice_job_t job = {i, op->lane, t->deps + op->first_dep, op->num_deps, 0};
    SLUICE_TRY(device->vtable->submit(device, &job));
  }
  return device->vtable->join(device);
}

sluice_status_t sluice_predict(const sluice_template_t* schedule, const sluice_op_costs_t* costs,
                               sluice_allocator_t* allocator, sluice_prediction_t* out, double* out_begin,
                               double* out_end) {
  walk_t walk = {schedule, costs};
  sluice_sim_model_t model = {.cost = cost_of, .user = &walk, .overlap = costs->overlap != NULL ? overlap_of : NULL};
  if (costs->copy_share != NULL) model.copy_share = copy_share_of;
  if (costs->line != NULL) model.line = line_of, model.bucket = costs->bucket;
  if (costs->share != NULL) memcpy(model.share, costs->share, sizeof model.share);
  sluice_device_t* device = NULL;
  SLUICE_TRY(sluice_sim_device_create(&model, allocator, &device));
  sluice_status_t status = run(device, schedule);
  if (status == SLUICE_OK) {
    sluice_sim_result_t result;
    sluice_sim_device_result(device, &result);
    out->total = result.total;
    memcpy(out->busy, result.busy, sizeof out->busy);
    size_t bytes = (size_t)schedule->num_ops * sizeof(double);
    if (out_begin != NULL) memcpy(out_begin, result.begin, bytes);
    if (out_end != NULL) memcpy(out_end, result.end, bytes);
  }
  device->vtable->destroy(device);
  return status;
}
