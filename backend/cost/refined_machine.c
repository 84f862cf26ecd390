// SPDX-License-Identifier: Apache-2.0
#include "backend/cost/refined_machine.h"

#include <math.h>

#include "backend/cost/fit.h"

#define MOST_FACTOR 20 /* largest correction of a lane: beyond it, something else was measured */
#define HELD_OUT(i) ((i) % 3 == 2)

void sluice_timed_passes_add(sluice_timed_passes_t* f, const sluice_timed_pass_t* pass) {
  f->passes[f->count++ % SLUICE_TIMED_PASSES] = *pass;
}

static int32_t num_kept(const sluice_timed_passes_t* f) {
  return f->count < SLUICE_TIMED_PASSES ? (int32_t)f->count : SLUICE_TIMED_PASSES;
}

static sluice_status_t predict(const sluice_machine_t* m, const sluice_timed_pass_t* p, sluice_prediction_t* out) {
  const sluice_choice_t choice = {.num_chunks = p->num_chunks, .wgrad_mode = p->wgrad_mode};
  return sluice_predict_pass_lanes(m, &p->work, &choice, p->direction, out);
}

static double bounded(double factor) { return fmin(fmax(factor, 1.0 / MOST_FACTOR), MOST_FACTOR); }

static void scale_link(sluice_link_t* link, double factor) {
  link->startup_seconds *= factor, link->per_peer_seconds *= factor;
  sluice_curve_scale(&link->bytes, factor);
}

static void scale(sluice_machine_t* m, double compute, double comm) {
  for (int32_t d = 0; d < SLUICE_MACHINE_DTYPES; ++d) {
    for (int32_t form = 0; form < SLUICE_FORM_COUNT; ++form) sluice_curve_scale(&m->gemm[d][form], compute);
  }
  sluice_curve_scale(&m->rows, compute);
  m->gemm_call_seconds *= compute, m->activation_seconds *= compute, m->activation_grad_seconds *= compute;
  m->relu_seconds *= compute, m->relu_grad_seconds *= compute;
  scale_link(&m->exchange, comm), scale_link(&m->node_exchange, comm);
  sluice_curve_scale(&m->exchange_contention, comm), sluice_curve_scale(&m->compute_contention, comm);
  m->second_exchange_seconds *= comm, m->second_exchange_contention *= comm, m->second_compute_contention *= comm;
}

/* Measured over predicted times of lanes; 1 for a lane that was never busy. The start of an op does not count for the
 * lane. */
static sluice_status_t fit_lanes(const sluice_timed_passes_t* f, sluice_machine_t* m) {
  double compute[SLUICE_TIMED_PASSES], comm[SLUICE_TIMED_PASSES];
  int32_t num_compute = 0, num_comm = 0;
  sluice_machine_t bare = *m;
  bare.op_seconds = 0;
  for (int32_t i = 0; i < num_kept(f); ++i) {
    const sluice_timed_pass_t* p = &f->passes[i];
    sluice_prediction_t said = {0};
    if (HELD_OUT(i)) continue;
    SLUICE_TRY(predict(&bare, p, &said));
    if (said.busy[SLUICE_LANE_COMPUTE] > 0) compute[num_compute++] = p->compute / said.busy[SLUICE_LANE_COMPUTE];
    if (said.busy[SLUICE_LANE_COMM] > 0) comm[num_comm++] = p->comm / said.busy[SLUICE_LANE_COMM];
  }
  scale(m, num_compute > 0 ? bounded(sluice_median(compute, num_compute)) : 1,
        num_comm > 0 ? bounded(sluice_median(comm, num_comm)) : 1);
  return SLUICE_OK;
}

static sluice_status_t fit_rest(const sluice_timed_passes_t* f, sluice_machine_t* m) {
  double rest[SLUICE_TIMED_PASSES];
  int32_t count = 0;
  m->pass_seconds = 0;
  for (int32_t i = 0; i < num_kept(f); ++i) {
    sluice_prediction_t said = {0};
    if (HELD_OUT(i)) continue;
    SLUICE_TRY(predict(m, &f->passes[i], &said));
    rest[count++] = f->passes[i].seconds - said.total;
  }
  m->pass_seconds = fmax(0, sluice_median(rest, count));
  return SLUICE_OK;
}

static sluice_status_t fill_error(const sluice_timed_passes_t* f, sluice_machine_t* m) {
  double errors[SLUICE_TIMED_PASSES];
  int32_t count = 0;
  for (int32_t i = 0; i < num_kept(f); ++i) {
    sluice_prediction_t said = {0};
    if (!HELD_OUT(i) || f->passes[i].seconds <= 0) continue;
    SLUICE_TRY(predict(m, &f->passes[i], &said));
    errors[count++] = fabs(said.total / f->passes[i].seconds - 1);
  }
  m->error_count = count;
  m->error_median = count > 0 ? sluice_median(errors, count) : 0;
  m->error_p90 = count > 0 ? sluice_quantile(errors, count, 0.9) : 0;
  return SLUICE_OK;
}

sluice_status_t sluice_machine_refine(const sluice_timed_passes_t* f, const sluice_machine_t* machine,
                                      sluice_machine_t* out_machine) {
  const int64_t count = f == NULL ? 0 : f->count;
  if (count < SLUICE_TIMED_PASSES_LEAST) {
    return SLUICE_FAIL(SLUICE_E_STATE,
                       "machine: only %lld of the timed passes can be predicted with the tuner's machine; run at least "
                       "%d passes of fused experts without a memory budget",
                       (long long)count, SLUICE_TIMED_PASSES_LEAST);
  }
  sluice_machine_t m = *machine;
  m.provenance = SLUICE_MACHINE_REFINED;
  SLUICE_TRY(fit_lanes(f, &m));
  SLUICE_TRY(fit_rest(f, &m));
  SLUICE_TRY(fill_error(f, &m));
  *out_machine = m;
  return SLUICE_OK;
}
