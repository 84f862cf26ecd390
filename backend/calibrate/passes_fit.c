// SPDX-License-Identifier: Apache-2.0
#include "backend/calibrate/passes_fit.h"

#include <math.h>

#include "backend/base/dtype.h"
#include "backend/base/log.h"
#include "backend/calibrate/pass_samples.h"

#define MOST_OP     2e-3 /* seconds that an op may take beyond its work */
#define MOST_FACTOR 2    /* largest correction of GEMMs: beyond it, something else was measured */
#define BISECTIONS  24
#define NOISE       0.02 /* of a median of passes */
#define OCTAVES     3    /* most that exchanges during GEMMs may be off, up or down */
#define STEPS       4    /* tried per octave */
#define DOUBTED     2.0  /* one octave of correction is as unlikely as noise of its usual size */
#define TURNS       2

static sluice_workload_t work_of(const sluice_pass_samples_t* p, int32_t kind) {
  sluice_workload_t work = p->source->work;
  work.num_tokens = sluice_pass_kinds[kind].tokens;
  return work;
}

static sluice_status_t predict(const sluice_pass_samples_t* p, const sluice_machine_t* m, int32_t kind,
                               int32_t direction, sluice_prediction_t* out) {
  const sluice_workload_t work = work_of(p, kind);
  const sluice_choice_t choice = {.num_chunks = sluice_pass_kinds[kind].chunks};
  return sluice_predict_pass_lanes(m, &work, &choice, direction, out);
}

/* ---- GEMMs ---- */

/* Measured over predicted seconds of the compute lane of one chunk; the start of an op does not count for the lane. */
static sluice_status_t factor_of(const sluice_pass_samples_t* p, const sluice_machine_t* m, int32_t kind,
                                 int32_t direction, double* out_factor) {
  sluice_prediction_t said = {0};
  sluice_machine_t bare = *m;
  bare.op_seconds = 0;
  SLUICE_TRY(predict(p, &bare, kind, direction, &said));
  double compute = said.busy[SLUICE_LANE_COMPUTE];
  double factor = compute > 0 ? p->measured[kind][COMPUTE][direction] / compute : 1;
  *out_factor = fmin(fmax(factor, 1.0 / MOST_FACTOR), MOST_FACTOR);
  return SLUICE_OK;
}

/* Scales by `few` up to few_rows rows of an expert, by `many` from many_rows on, and in between by the logarithm. */
static void scale_gemms(sluice_curve_t* c, double few_rows, double few, double many_rows, double many) {
  for (int32_t i = 0; i < c->count; ++i) {
    double at = log(c->x[i] / few_rows) / log(many_rows / few_rows);
    c->y[i] *= few * pow(many / few, fmin(fmax(at, 0), 1));
  }
}

static sluice_status_t fit_gemms(const sluice_pass_samples_t* p, sluice_machine_t* m) {
  double few[2], many[2];
  for (int32_t d = 0; d < 2; ++d) {
    SLUICE_TRY(factor_of(p, m, FEW, d, &few[d]));
    many[d] = few[d];
    if (p->has[MANY]) SLUICE_TRY(factor_of(p, m, MANY, d, &many[d]));
  }
  const sluice_workload_t* w = &p->source->work;
  const double each = (double)w->top_k * w->world_size / w->num_experts; /* rows of an expert per token */
  for (int32_t dtype = 0; dtype < SLUICE_MACHINE_DTYPES; ++dtype) {
    sluice_curve_t* forms = m->gemm[dtype];
    if (forms[SLUICE_FORM_INPUT_GRAD].count == 0) forms[SLUICE_FORM_INPUT_GRAD] = forms[SLUICE_FORM_FORWARD];
    if (forms[SLUICE_FORM_WEIGHT_GRAD].count == 0) forms[SLUICE_FORM_WEIGHT_GRAD] = forms[SLUICE_FORM_FORWARD];
    for (int32_t form = 0; form < SLUICE_FORM_COUNT; ++form) {
      const int32_t d = form == SLUICE_FORM_FORWARD ? SLUICE_FORWARD : SLUICE_BACKWARD;
      scale_gemms(&forms[form], SLUICE_PASSES_FEW * each, few[d], SLUICE_PASSES_MANY * each, many[d]);
    }
  }
  return SLUICE_OK;
}

/* The factor is 1 up to the bytes of many tokens, and the measured one from the bytes of a full pass on. */
static sluice_status_t fit_cache_miss_factor(const sluice_pass_samples_t* p, sluice_machine_t* m) {
  const sluice_workload_t* w = &p->source->work;
  const double row = (double)(w->model_width + w->hidden_width * w->gate_factor) * (double)sluice_dtype_bytes(w->dtype);
  for (int32_t d = 0; d < 2 && p->has[FULL]; ++d) {
    double factor = 1;
    SLUICE_TRY(factor_of(p, m, FULL, d, &factor));
    const double x[] = {SLUICE_PASSES_MANY, SLUICE_PASSES_FULL, 2 * SLUICE_PASSES_FULL}, y[] = {1, factor, factor};
    sluice_curve_t* curve = &m->cache_miss_factor[d];
    curve->count = 3;
    for (int32_t i = 0; i < curve->count; ++i) curve->x[i] = x[i] * row * w->top_k, curve->y[i] = y[i];
  }
  return SLUICE_OK;
}

/* ---- chunks ---- */

/* Changes op_seconds: `knob` above 0 adds this part of MOST_OP; below 0 it removes this part of the measured value. */
static sluice_machine_t turned(const sluice_machine_t* m, double knob) {
  sluice_machine_t t = *m;
  t.op_seconds = knob >= 0 ? m->op_seconds + knob * MOST_OP : m->op_seconds * (1 + knob);
  return t;
}

/* The measured difference between several chunks and one, minus the predicted one: of the whole pass, or of its compute
 * lane. */
static sluice_status_t beyond(const sluice_pass_samples_t* p, const sluice_machine_t* m, int32_t kind, int32_t part,
                              int32_t d, double* out_seconds) {
  const int32_t whole = sluice_pass_kinds[kind].whole;
  sluice_prediction_t one = {0}, said = {0};
  sluice_machine_t asked = *m;
  if (part == COMPUTE) asked.op_seconds = 0; /* the start of an op does not count for the lane */
  SLUICE_TRY(predict(p, &asked, whole, d, &one));
  SLUICE_TRY(predict(p, &asked, kind, d, &said));
  double more = said.total - one.total;
  if (part == COMPUTE) more = said.busy[SLUICE_LANE_COMPUTE] - one.busy[SLUICE_LANE_COMPUTE];
  *out_seconds = p->measured[kind][part][d] - p->measured[whole][part][d] - more;
  return SLUICE_OK;
}

/* The sum of beyond() with few tokens over all numbers of chunks and both directions, per additional chunk. */
static sluice_status_t chunks_beyond(const sluice_pass_samples_t* p, const sluice_machine_t* m, double* out_seconds) {
  *out_seconds = 0;
  for (int32_t d = 0; d < 2; ++d) {
    for (int32_t kind = FEW_IN_2; kind <= FEW_IN_8; ++kind) {
      double seconds = 0;
      if (p->has[kind]) SLUICE_TRY(beyond(p, m, kind, WHOLE, d, &seconds));
      *out_seconds += seconds / (sluice_pass_kinds[kind].chunks - 1);
    }
  }
  return SLUICE_OK;
}

/* Finds op_seconds by bisection: the larger op_seconds, the smaller the sum of chunks_beyond(). */
static sluice_status_t fit_op(const sluice_pass_samples_t* p, double of_jobs, sluice_machine_t* m) {
  double low = -1, high = 1, seconds = 0;
  m->op_seconds = of_jobs;
  for (int32_t i = 0; i < BISECTIONS && p->has[FEW_IN_2]; ++i) {
    double knob = (low + high) / 2;
    const sluice_machine_t tried = turned(m, knob);
    SLUICE_TRY(chunks_beyond(p, &tried, &seconds));
    if (seconds > 0) {
      low = knob;
    } else {
      high = knob;
    }
  }
  if (p->has[FEW_IN_2]) *m = turned(m, (low + high) / 2);
  return SLUICE_OK;
}

static void scale_curve(sluice_curve_t* c, double factor) {
  for (int32_t i = 0; i < c->count; ++i) c->y[i] *= factor;
}

/* Scales what GEMMs lose to an exchange [COMPUTE], or the extra time of an exchange during GEMMs [WHOLE]. */
static sluice_machine_t scaled(const sluice_machine_t* m, int32_t part, double factor) {
  sluice_machine_t s = *m;
  scale_curve(part == COMPUTE ? &s.compute_contention : &s.exchange_contention, factor);
  *(part == COMPUTE ? &s.second_compute_contention : &s.second_exchange_contention) *= factor;
  return s;
}

/* The squared distance of a factor from the times of passes of many rows, and from 1, in units of usual deviations. */
static sluice_status_t misfit(const sluice_pass_samples_t* p, const sluice_machine_t* m, int32_t part, double octaves,
                              double* out_misfit) {
  const sluice_machine_t tried = scaled(m, part, exp2(octaves));
  *out_misfit = octaves * octaves / (DOUBTED * DOUBTED);
  for (int32_t kind = MANY_IN_4; kind <= FULL_IN_4; kind += FULL_IN_4 - MANY_IN_4) {
    for (int32_t d = 0; d < 2 && p->has[kind]; ++d) {
      double seconds = 0;
      SLUICE_TRY(beyond(p, &tried, kind, part, d, &seconds));
      double off = seconds / (NOISE * p->measured[sluice_pass_kinds[kind].whole][part][d] + 1e-9);
      *out_misfit += off * off;
    }
  }
  return SLUICE_OK;
}

/* Exchanges were measured during repeated GEMMs on one cached matrix; the factor corrects for those of a real pass. */
static sluice_status_t fit_contention(const sluice_pass_samples_t* p, int32_t part, sluice_machine_t* m) {
  double best = 0, least = 0;
  if (m->exchange_contention.count == 0) return SLUICE_OK;
  for (int32_t i = -OCTAVES * STEPS; i <= OCTAVES * STEPS; ++i) {
    double octaves = (double)i / STEPS, found = 0;
    SLUICE_TRY(misfit(p, m, part, octaves, &found));
    if (i == -OCTAVES * STEPS || found < least) best = octaves, least = found;
  }
  *m = scaled(m, part, exp2(best));
  return SLUICE_OK;
}

/* The cost of an op and the interference of lanes depend on each other: each is fitted again with the result of the
 * others. */
static sluice_status_t fit_chunks(const sluice_pass_samples_t* p, sluice_machine_t* m) {
  const sluice_machine_t before = *m;
  for (int32_t turn = 0; turn < TURNS; ++turn) {
    sluice_machine_t again = before;
    if (turn > 0)
      again.exchange_contention = m->exchange_contention,
      again.second_exchange_contention = m->second_exchange_contention;
    SLUICE_TRY(fit_contention(p, COMPUTE, &again));
    again.exchange_contention = before.exchange_contention,
    again.second_exchange_contention = before.second_exchange_contention;
    SLUICE_TRY(fit_op(p, before.op_seconds, &again));
    SLUICE_TRY(fit_contention(p, WHOLE, &again));
    SLUICE_TRY(fit_op(p, before.op_seconds, &again));
    *m = again;
  }
  return SLUICE_OK;
}

/* The measured time of a pass minus its prediction: the mean of both directions. */
static sluice_status_t rest_of(const sluice_pass_samples_t* p, const sluice_machine_t* m, int32_t kind,
                               double* out_rest) {
  *out_rest = 0;
  for (int32_t d = 0; d < 2; ++d) {
    sluice_prediction_t said = {0};
    SLUICE_TRY(predict(p, m, kind, d, &said));
    *out_rest += (p->measured[kind][WHOLE][d] - said.total) / 2;
  }
  return SLUICE_OK;
}

/* The time outside of ops: a constant per pass, and a part per byte of its rows. */
static sluice_status_t fit_rest(const sluice_pass_samples_t* p, sluice_machine_t* m) {
  const sluice_workload_t few_work = work_of(p, FEW), full_work = work_of(p, FULL);
  double few = 0, full = 0, of_few = sluice_bytes_touched(&few_work), of_full = sluice_bytes_touched(&full_work);
  SLUICE_TRY(rest_of(p, m, FEW, &few));
  if (p->has[FULL]) {
    SLUICE_TRY(rest_of(p, m, FULL, &full));
    m->pass_byte_seconds = fmax(0, (full - fmax(0, few)) / (of_full - of_few));
  }
  m->pass_seconds = fmax(0, few - m->pass_byte_seconds * of_few);
  return SLUICE_OK;
}

/* Each fit corrects what the previous ones left. */
sluice_status_t sluice_passes_fit(const sluice_passes_source_t* source, double seconds, sluice_machine_t* m) {
  sluice_pass_samples_t p;
  m->pass_seconds = m->pass_byte_seconds = 0;
  m->cache_miss_factor[0].count = m->cache_miss_factor[1].count = 0;
  SLUICE_TRY(sluice_pass_samples_take(source, seconds, &p));
  SLUICE_TRY(fit_gemms(&p, m));
  SLUICE_TRY(fit_cache_miss_factor(&p, m));
  if (p.source->work.world_size > 1) SLUICE_TRY(fit_chunks(&p, m));
  SLUICE_TRY(fit_rest(&p, m));
  sluice_log(SLUICE_LOG_INFO, "calibrating: a pass takes %.3f ms beyond its ops, an op %.4f ms", 1e3 * m->pass_seconds,
             1e3 * m->op_seconds);
  return SLUICE_OK;
}
