// SPDX-License-Identifier: Apache-2.0
#include "backend/calibrate/passes_fit.h"

#include <math.h>
#include <string.h>

#include "backend/base/dtype.h"
#include "backend/base/log.h"
#include "backend/cost/fit.h"

#define MOST_OP      2e-3 /* seconds that an op may take beyond its work */
#define MOST_FACTOR  2    /* largest correction of GEMMs: beyond it, something else was measured */
#define BISECTIONS   24
#define NOISE        0.02 /* of a median of passes */
#define OCTAVES      3    /* most that exchanges during GEMMs may be off, up or down */
#define STEPS        4    /* tried per octave */
#define DOUBTED      2.0  /* one octave of correction is as unlikely as noise of its usual size */
#define TURNS        2
#define MOST_ROUNDS  9
#define LEAST_ROUNDS 3

/* ---- samples: few and many rows, in one chunk and in several, in rounds ---- */

/* Few tokens in 1, 2, 4 and 8 chunks; many tokens, and more than a cache holds, in 1 and 4. */
enum { FEW, FEW_IN_2, FEW_IN_4, FEW_IN_8, MANY, MANY_IN_4, FULL, FULL_IN_4, KINDS };
typedef struct pass_kind_s {
  int64_t tokens;
  int32_t chunks, whole; /* whole: the kind with the same tokens in one chunk */
} pass_kind_t;

static const pass_kind_t kinds[KINDS] = {
    [FEW] = {SLUICE_PASSES_FEW, 1, FEW},      [FEW_IN_2] = {SLUICE_PASSES_FEW, 2, FEW},
    [FEW_IN_4] = {SLUICE_PASSES_FEW, 4, FEW}, [FEW_IN_8] = {SLUICE_PASSES_FEW, 8, FEW},
    [MANY] = {SLUICE_PASSES_MANY, 1, MANY},   [MANY_IN_4] = {SLUICE_PASSES_MANY, 4, MANY},
    [FULL] = {SLUICE_PASSES_FULL, 1, FULL},   [FULL_IN_4] = {SLUICE_PASSES_FULL, 4, FULL},
};
/* The most informative kinds first: later ones are skipped if there is no time. */
static const int32_t by_worth[KINDS] = {FEW, FEW_IN_2, MANY, FULL, MANY_IN_4, FULL_IN_4, FEW_IN_4, FEW_IN_8};

enum { WHOLE, COMPUTE, PARTS };
typedef struct samples_s {
  const sluice_passes_source_t* source;
  int32_t has[KINDS], num_rounds;
  double took[KINDS]; /* seconds of a step, when it was tried */
  double samples[KINDS][PARTS][2][MOST_ROUNDS];
  double measured[KINDS][PARTS][2]; /* medians, as for steps, the maximum over ranks */
} samples_t;

static sluice_status_t sample(samples_t* p, int32_t kind, int32_t round) {
  double seconds[PARTS][2];
  SLUICE_TRY(
      p->source->sample(p->source->user, kinds[kind].tokens, kinds[kind].chunks, seconds[WHOLE], seconds[COMPUTE]));
  for (int32_t part = 0; part < PARTS; ++part) {
    for (int32_t d = 0; d < 2; ++d) p->samples[kind][part][d][round] = seconds[part][d];
  }
  return SLUICE_OK;
}

/* Runs passes that do not count: they allocate slots, build templates, and let "auto" decide. */
static sluice_status_t warm_up(samples_t* p, int32_t kind) {
  SLUICE_TRY(sample(p, kind, 0));
  SLUICE_TRY(sample(p, kind, 0));
  p->took[kind] = p->samples[kind][WHOLE][0][0] + p->samples[kind][WHOLE][1][0];
  return p->source->longest(p->source->user, &p->took[kind], 1);
}

/* An upper bound: time grows at most in proportion to the tokens of the kinds tried before. */
static double guess(const samples_t* p, int32_t kind) {
  const int32_t known = p->has[kinds[kind].whole] ? kinds[kind].whole : p->has[MANY] ? MANY : FEW;
  return p->took[known] * (double)kinds[kind].tokens / (double)kinds[known].tokens;
}

static sluice_status_t find_kinds(samples_t* p, double seconds) {
  double round = 0, left = seconds;
  for (int32_t i = 0; i < KINDS; ++i) {
    const int32_t kind = by_worth[i], needed = kinds[kind].tokens == SLUICE_PASSES_FEW && kinds[kind].chunks <= 2;
    if (kinds[kind].chunks > 1 && p->source->work.world_size == 1) continue; /* a single rank has nothing to overlap */
    if (kinds[kind].chunks > 1 && !p->has[kinds[kind].whole]) continue;
    if (!needed && LEAST_ROUNDS * (round + guess(p, kind)) > left) continue;
    SLUICE_TRY(warm_up(p, kind));
    left -= 2 * p->took[kind];
    if (!needed && LEAST_ROUNDS * (round + p->took[kind]) > left) continue;
    round += p->took[kind], p->has[kind] = 1;
  }
  double rounds = left / (round + 1e-9);
  p->num_rounds = rounds < LEAST_ROUNDS ? LEAST_ROUNDS : rounds > MOST_ROUNDS ? MOST_ROUNDS : (int32_t)rounds;
  return SLUICE_OK;
}

/* Takes samples for about `seconds`, and skips kinds that would take too long. */
static sluice_status_t take_samples(const sluice_passes_source_t* source, double seconds, samples_t* p) {
  memset(p, 0, sizeof *p);
  p->source = source;
  SLUICE_TRY(find_kinds(p, seconds));
  for (int32_t round = 0; round < p->num_rounds; ++round) {
    for (int32_t i = 0; i < KINDS; ++i) {
      if (p->has[i]) SLUICE_TRY(sample(p, i, round));
    }
  }
  for (int32_t i = 0; i < KINDS; ++i) {
    for (int32_t k = 0; k < 2 * PARTS && p->has[i]; ++k) {
      p->measured[i][k / 2][k % 2] = sluice_median(p->samples[i][k / 2][k % 2], p->num_rounds);
    }
  }
  return p->source->longest(p->source->user, &p->measured[0][0][0], KINDS * PARTS * 2);
}

/* ---- predictions ---- */

static sluice_workload_t work_of(const samples_t* p, int32_t kind) {
  sluice_workload_t work = p->source->work;
  work.num_tokens = kinds[kind].tokens;
  return work;
}

static sluice_status_t predict(const samples_t* p, const sluice_machine_t* m, int32_t kind, int32_t direction,
                               sluice_prediction_t* out) {
  const sluice_workload_t work = work_of(p, kind);
  const sluice_choice_t choice = {.num_chunks = kinds[kind].chunks};
  return sluice_predict_pass_lanes(m, &work, &choice, direction, out);
}

/* ---- GEMMs ---- */

/* Measured over predicted seconds of the compute lane of one chunk; the start of an op does not count for the lane. */
static sluice_status_t factor_of(const samples_t* p, const sluice_machine_t* m, int32_t kind, int32_t direction,
                                 double* out_factor) {
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

static sluice_status_t fit_gemms(const samples_t* p, sluice_machine_t* m) {
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
static sluice_status_t fit_cache_miss_factor(const samples_t* p, sluice_machine_t* m) {
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
static sluice_status_t beyond(const samples_t* p, const sluice_machine_t* m, int32_t kind, int32_t part, int32_t d,
                              double* out_seconds) {
  const int32_t whole = kinds[kind].whole;
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
static sluice_status_t chunks_beyond(const samples_t* p, const sluice_machine_t* m, double* out_seconds) {
  *out_seconds = 0;
  for (int32_t d = 0; d < 2; ++d) {
    for (int32_t kind = FEW_IN_2; kind <= FEW_IN_8; ++kind) {
      double seconds = 0;
      if (p->has[kind]) SLUICE_TRY(beyond(p, m, kind, WHOLE, d, &seconds));
      *out_seconds += seconds / (kinds[kind].chunks - 1);
    }
  }
  return SLUICE_OK;
}

/* Finds op_seconds by bisection: the larger op_seconds, the smaller the sum of chunks_beyond(). */
static sluice_status_t fit_op(const samples_t* p, double of_jobs, sluice_machine_t* m) {
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

/* Scales what GEMMs lose to an exchange [COMPUTE], or the extra time of an exchange during GEMMs [WHOLE]. */
static sluice_machine_t scaled(const sluice_machine_t* m, int32_t part, double factor) {
  sluice_machine_t s = *m;
  sluice_curve_scale(part == COMPUTE ? &s.compute_contention : &s.exchange_contention, factor);
  *(part == COMPUTE ? &s.second_compute_contention : &s.second_exchange_contention) *= factor;
  return s;
}

/* The squared distance of a factor from the times of passes of many rows, and from 1, in units of usual deviations. */
static sluice_status_t misfit(const samples_t* p, const sluice_machine_t* m, int32_t part, double octaves,
                              double* out_misfit) {
  const sluice_machine_t tried = scaled(m, part, exp2(octaves));
  *out_misfit = octaves * octaves / (DOUBTED * DOUBTED);
  for (int32_t kind = MANY_IN_4; kind <= FULL_IN_4; kind += FULL_IN_4 - MANY_IN_4) {
    for (int32_t d = 0; d < 2 && p->has[kind]; ++d) {
      double seconds = 0;
      SLUICE_TRY(beyond(p, &tried, kind, part, d, &seconds));
      double off = seconds / (NOISE * p->measured[kinds[kind].whole][part][d] + 1e-9);
      *out_misfit += off * off;
    }
  }
  return SLUICE_OK;
}

/* Exchanges were measured during repeated GEMMs on one cached matrix; the factor corrects for those of a real pass. */
static sluice_status_t fit_contention(const samples_t* p, int32_t part, sluice_machine_t* m) {
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
static sluice_status_t fit_chunks(const samples_t* p, sluice_machine_t* m) {
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
static sluice_status_t rest_of(const samples_t* p, const sluice_machine_t* m, int32_t kind, double* out_rest) {
  *out_rest = 0;
  for (int32_t d = 0; d < 2; ++d) {
    sluice_prediction_t said = {0};
    SLUICE_TRY(predict(p, m, kind, d, &said));
    *out_rest += (p->measured[kind][WHOLE][d] - said.total) / 2;
  }
  return SLUICE_OK;
}

/* The time outside of ops: a constant per pass, and a part per byte of its rows. */
static sluice_status_t fit_rest(const samples_t* p, sluice_machine_t* m) {
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
  samples_t p;
  m->pass_seconds = m->pass_byte_seconds = 0;
  m->cache_miss_factor[0].count = m->cache_miss_factor[1].count = 0;
  SLUICE_TRY(take_samples(source, seconds, &p));
  SLUICE_TRY(fit_gemms(&p, m));
  SLUICE_TRY(fit_cache_miss_factor(&p, m));
  if (p.source->work.world_size > 1) SLUICE_TRY(fit_chunks(&p, m));
  SLUICE_TRY(fit_rest(&p, m));
  sluice_log(SLUICE_LOG_INFO, "calibrating: a pass takes %.3f ms beyond its ops, an op %.4f ms", 1e3 * m->pass_seconds,
             1e3 * m->op_seconds);
  return SLUICE_OK;
}
