#include "backend/tune/passes.h"

#include <math.h>
#include <string.h>

#include "backend/base/log.h"
#include "backend/tune/fit.h"

#define KINDS        5 /* few tokens in 1, 2, 4 and 8 chunks; many in one */
#define SIZES        4
#define MANY         4
#define LEAST_ROUNDS 3
#define ROUNDS       9
#define MOST_OP      2e-3 /* seconds that an op may take beyond its work */
#define MOST_FACTOR  2    /* that products may be off by: beyond, something else was measured */
#define BISECTIONS   24

static const int32_t sizes[KINDS] = {1, 2, 4, 8, 1};

enum { WHOLE, COMPUTE, PARTS };
typedef struct passes_s {
  const sluice_passes_source_t* source;
  int32_t num_sizes, has_many, num_rounds;
  double samples[KINDS][PARTS][2][ROUNDS];
  double measured[KINDS][PARTS][2]; /* medians, as steps are judged by, the longest of all ranks */
} passes_t;

static int64_t tokens_of(int32_t kind) { return kind == MANY ? SLUICE_PASSES_MANY : SLUICE_PASSES_FEW; }

static sluice_status_t sample(passes_t* p, int32_t kind, int32_t round) {
  double seconds[PARTS][2];
  SLUICE_TRY(p->source->sample(p->source->user, tokens_of(kind), sizes[kind], seconds[WHOLE], seconds[COMPUTE]));
  for (int32_t part = 0; part < PARTS; ++part) {
    for (int32_t d = 0; d < 2; ++d) p->samples[kind][part][d][round] = seconds[part][d];
  }
  return SLUICE_OK;
}

/* Not counted: new slots and templates, choices of "auto". The seconds of a step. */
static sluice_status_t warm_up(passes_t* p, int32_t kind, double* out_seconds) {
  SLUICE_TRY(sample(p, kind, 0));
  SLUICE_TRY(sample(p, kind, 0));
  *out_seconds = p->samples[kind][WHOLE][0][0] + p->samples[kind][WHOLE][1][0];
  return p->source->longest(p->source->user, out_seconds, 1);
}

/* One chunk of few tokens first, then many tokens, then more chunks, as far as there is time for them. */
static sluice_status_t find_kinds(passes_t* p, double seconds) {
  double round = 0, left = seconds, took = 0;
  const int32_t most = p->source->work.world_size > 1 ? SIZES : 1; /* alone there is nothing to overlap */
  SLUICE_TRY(warm_up(p, 0, &took));
  round = took, left -= 2 * took, p->num_sizes = 1;
  if (LEAST_ROUNDS * took * SLUICE_PASSES_MANY / SLUICE_PASSES_FEW < left) { /* at worst as many times as long */
    SLUICE_TRY(warm_up(p, MANY, &took));
    round += took, left -= 2 * took, p->has_many = 1;
  }
  for (; p->num_sizes < most; ++p->num_sizes) {
    SLUICE_TRY(warm_up(p, p->num_sizes, &took));
    left -= 2 * took;
    if (p->num_sizes >= 2 && left < LEAST_ROUNDS * (round + took)) break;
    round += took;
  }
  double rounds = left / (round + 1e-9);
  p->num_rounds = rounds < LEAST_ROUNDS ? LEAST_ROUNDS : rounds > ROUNDS ? ROUNDS : (int32_t)rounds;
  return SLUICE_OK;
}

static int is_measured(const passes_t* p, int32_t kind) { return kind == MANY ? p->has_many : kind < p->num_sizes; }

static sluice_status_t measure(passes_t* p, double seconds) {
  SLUICE_TRY(find_kinds(p, seconds));
  for (int32_t round = 0; round < p->num_rounds; ++round) {
    for (int32_t i = 0; i < KINDS; ++i) {
      if (is_measured(p, i)) SLUICE_TRY(sample(p, i, round));
    }
  }
  for (int32_t i = 0; i < KINDS; ++i) {
    for (int32_t k = 0; k < 2 * PARTS && is_measured(p, i); ++k) {
      p->measured[i][k / 2][k % 2] = sluice_median(p->samples[i][k / 2][k % 2], p->num_rounds);
    }
  }
  return p->source->longest(p->source->user, &p->measured[0][0][0], KINDS * PARTS * 2);
}

static sluice_status_t predict(const passes_t* p, const sluice_machine_t* m, int32_t kind, int32_t direction,
                               sluice_prediction_t* out) {
  sluice_workload_t work = p->source->work;
  work.num_tokens = tokens_of(kind);
  const sluice_choice_t choice = {.num_chunks = sizes[kind]};
  return sluice_predict_pass_lanes(m, &work, &choice, direction, out);
}

/* ---- products ---- */

/* Measured over predicted seconds of the compute lane of one chunk; what an op takes to start is not the lane's. */
static sluice_status_t factor_of(const passes_t* p, const sluice_machine_t* m, int32_t kind, int32_t direction,
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

/* Up to few rows of an expert by one factor, from many on by the other, between by the logarithm of the rows. */
static void scale_products(sluice_curve_t* c, double few_rows, double few, double many_rows, double many) {
  for (int32_t i = 0; i < c->count; ++i) {
    double at = log(c->x[i] / few_rows) / log(many_rows / few_rows);
    c->y[i] *= few * pow(many / few, fmin(fmax(at, 0), 1));
  }
}

static sluice_status_t fit_products(const passes_t* p, sluice_machine_t* m) {
  double few[2], many[2];
  for (int32_t d = 0; d < 2; ++d) {
    SLUICE_TRY(factor_of(p, m, 0, d, &few[d]));
    many[d] = few[d];
    if (p->has_many) SLUICE_TRY(factor_of(p, m, MANY, d, &many[d]));
  }
  const sluice_workload_t* w = &p->source->work;
  const double each = (double)w->top_k * w->world_size / w->num_experts; /* rows of an expert for each token */
  for (int32_t dtype = 0; dtype < SLUICE_MACHINE_DTYPES; ++dtype) {
    sluice_curve_t* forms = m->gemm[dtype];
    if (forms[SLUICE_FORM_INPUT_GRAD].count == 0) forms[SLUICE_FORM_INPUT_GRAD] = forms[SLUICE_FORM_FORWARD];
    if (forms[SLUICE_FORM_WEIGHT_GRAD].count == 0) forms[SLUICE_FORM_WEIGHT_GRAD] = forms[SLUICE_FORM_FORWARD];
    for (int32_t form = 0; form < SLUICE_FORM_COUNT; ++form) {
      const int32_t d = form == SLUICE_FORM_FORWARD ? SLUICE_FORWARD : SLUICE_BACKWARD;
      scale_products(&forms[form], SLUICE_PASSES_FEW * each, few[d], SLUICE_PASSES_MANY * each, many[d]);
    }
  }
  return SLUICE_OK;
}

/* ---- chunks ---- */

/* `knob` above 0: so many of MOST_OP more seconds of each op; below: so much less of what jobs took. */
static sluice_machine_t turned(const sluice_machine_t* m, double knob) {
  sluice_machine_t t = *m;
  t.op_seconds = knob >= 0 ? m->op_seconds + knob * MOST_OP : m->op_seconds * (1 + knob);
  return t;
}

/* What further chunks took beyond what such a machine says of them, of all sizes and both directions together. */
static sluice_status_t chunks_beyond(const passes_t* p, const sluice_machine_t* m, double* out_seconds) {
  *out_seconds = 0;
  for (int32_t d = 0; d < 2; ++d) {
    sluice_prediction_t one = {0}, said = {0};
    SLUICE_TRY(predict(p, m, 0, d, &one));
    for (int32_t i = 1; i < p->num_sizes; ++i) {
      SLUICE_TRY(predict(p, m, i, d, &said));
      double more = p->measured[i][WHOLE][d] - p->measured[0][WHOLE][d] - (said.total - one.total);
      *out_seconds += more / (sizes[i] - 1); /* of one chunk */
    }
  }
  return SLUICE_OK;
}

/* The more an op takes, the less is left. */
static sluice_status_t fit_chunks(const passes_t* p, sluice_machine_t* m) {
  double low = -1, high = 1, beyond = 0;
  for (int32_t i = 0; i < BISECTIONS; ++i) {
    double knob = (low + high) / 2;
    const sluice_machine_t tried = turned(m, knob);
    SLUICE_TRY(chunks_beyond(p, &tried, &beyond));
    if (beyond > 0) {
      low = knob;
    } else {
      high = knob;
    }
  }
  *m = turned(m, (low + high) / 2);
  return SLUICE_OK;
}

static sluice_status_t fit_rest(const passes_t* p, sluice_machine_t* m) {
  double rest = 0;
  for (int32_t d = 0; d < 2; ++d) {
    sluice_prediction_t said = {0};
    SLUICE_TRY(predict(p, m, 0, d, &said));
    rest += p->measured[0][WHOLE][d] - said.total;
  }
  m->pass_seconds = fmax(0, rest / 2);
  return SLUICE_OK;
}

sluice_status_t sluice_passes_fit(const sluice_passes_source_t* source, double seconds, sluice_machine_t* m) {
  passes_t p;
  memset(&p, 0, sizeof p);
  p.source = source;
  m->pass_seconds = 0;
  SLUICE_TRY(measure(&p, seconds));
  SLUICE_TRY(fit_products(&p, m));
  if (p.num_sizes > 1) SLUICE_TRY(fit_chunks(&p, m));
  SLUICE_TRY(fit_rest(&p, m));
  sluice_log(SLUICE_LOG_INFO, "calibrating: a pass takes %.3f ms beside its ops, an op %.4f ms", 1e3 * m->pass_seconds,
             1e3 * m->op_seconds);
  return SLUICE_OK;
}
