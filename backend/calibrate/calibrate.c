// SPDX-License-Identifier: Apache-2.0
#include "backend/calibrate/calibrate.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "backend/base/dtype.h"
#include "backend/base/log.h"
#include "backend/calibrate/probe.h"
#include "backend/calibrate/token_bucket.h"
#include "backend/cost/fit.h"

#define LAUNCHES     64
#define SHORT_SAMPLE 5e-4 /* seconds: shorter probes repeat within a sample */
/* after a probe that takes more than this part of the calibration, larger sizes are skipped */
#define LONGEST_PART    60
#define SHARES_PART     0.15
#define CONTENTION_PART 0.2
#define BUCKET_PART     0.04
#define PASSES_PART     0.15
#define LEAST_ROUNDS    3

typedef struct calibration_s {
  sluice_bench_t bench;
  double bucket; /* of the link [token_bucket.h] */
  int32_t count;
  sluice_probe_t probes[SLUICE_PROBES];
} calibration_t;

/* ---- probes ---- */

static void add(calibration_t* c, int32_t kind, int64_t size, int32_t is_held_out) {
  if (c->count == SLUICE_PROBES) return;
  c->probes[c->count++] = (sluice_probe_t){.kind = kind, .size = size, .is_held_out = is_held_out, .repeats = 1};
}

/* The sizes of a kind ascend and are adjacent: after one that takes too long, the larger ones are skipped. */
static void add_probes(calibration_t* c) {
  static const int64_t rows[] = {1, 4, 16, 24, 64, 96, 128, 256, 384, 512, 1024, 1536, 2048};
  static const int64_t bytes[] = {64, 1 << 10, 1 << 13, 1 << 15, 3 << 15, 1 << 18, 3 << 18, 1 << 20, 3 << 20, 1 << 23};
  const size_t num_bytes = sizeof bytes / sizeof bytes[0];
  for (int32_t form = 0; form < SLUICE_FORM_COUNT; ++form) {
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; ++i) {
      add(c, SLUICE_PROBE_GEMM + form, rows[i], rows[i] % 3 == 0);
    }
  }
  int64_t row = c->bench.model_width * (int64_t)c->bench.element, peers = c->bench.context->world_size - 1;
  for (size_t i = 0; i < num_bytes && peers > 0; ++i) {
    if (bytes[i] >= peers) add(c, SLUICE_PROBE_EXCHANGE, bytes[i], bytes[i] % 3 == 0);
  }
  static const int64_t hot[] = {1 << 15, 1 << 18, 1 << 20}; /* the largest size that is not too long counts */
  for (size_t i = 0; i < sizeof hot / sizeof hot[0] && peers > 0; ++i) add(c, SLUICE_PROBE_HOT_EXCHANGE, hot[i], 0);
  for (size_t i = 0; i < num_bytes; ++i) {
    if (bytes[i] >= row && bytes[i] <= SLUICE_BENCH_ROWS * row) {
      add(c, SLUICE_PROBE_ROWS, bytes[i] / row * row, bytes[i] % 3 == 0);
    }
  }
  for (size_t i = 1; i < num_bytes; ++i) add(c, SLUICE_PROBE_COPY, bytes[i], bytes[i] % 3 == 0);
  add(c, SLUICE_PROBE_ACTIVATION, 256, 0);
  add(c, SLUICE_PROBE_ACTIVATION_GRAD, 256, 0);
  add(c, SLUICE_PROBE_RELU, 256, 0);
  add(c, SLUICE_PROBE_RELU_GRAD, 256, 0);
  add(c, SLUICE_PROBE_LAUNCH, LAUNCHES, 0);
}

/* ---- measuring ---- */

static int meets_others(const sluice_probe_t* p) {
  return p->kind == SLUICE_PROBE_EXCHANGE || p->kind == SLUICE_PROBE_HOT_EXCHANGE;
}

/* An exchange starts on all ranks together. Otherwise the first one after the GEMMs includes the wait of the fastest
 * rank. */
static sluice_status_t sample(calibration_t* c, sluice_probe_t* p, double* out_seconds) {
  double barrier = 0;
  if (meets_others(p)) SLUICE_TRY(sluice_bench_longest(&c->bench, &barrier, 1));
  SLUICE_TRY(sluice_bench_time(&c->bench, p, p->repeats, out_seconds));
  *out_seconds /= p->repeats;
  return SLUICE_OK;
}

/* The first round warms up, sets the repeats of each probe, and skips those that would take too long. */
static sluice_status_t first_round(calibration_t* c, double seconds) {
  for (int32_t i = 0; i < c->count; ++i) {
    sluice_probe_t* p = &c->probes[i];
    int same = i > 0 && c->probes[i - 1].kind == p->kind;
    double took = 0;
    if (same && (c->probes[i - 1].is_left_out || c->probes[i - 1].seconds > seconds / LONGEST_PART)) {
      p->is_left_out = 1;
      continue;
    }
    SLUICE_TRY(sample(c, p, &took)); /* not counted: first touches, decisions of "auto" */
    SLUICE_TRY(sample(c, p, &took));
    SLUICE_TRY(sluice_bench_longest(&c->bench, &took, 1));
    p->seconds = took;
    double repeats = SHORT_SAMPLE / (took > 1e-8 ? took : 1e-8);
    p->repeats = repeats < 1 ? 1 : repeats > 256 ? 256 : (int32_t)repeats;
  }
  return SLUICE_OK;
}

static double round_seconds(const calibration_t* c) {
  double sum = 0;
  for (int32_t i = 0; i < c->count; ++i) {
    if (!c->probes[i].is_left_out) sum += c->probes[i].seconds * c->probes[i].repeats;
  }
  return sum;
}

static sluice_status_t one_round(calibration_t* c) {
  for (int32_t i = 0; i < c->count; ++i) {
    sluice_probe_t* p = &c->probes[i];
    if (p->is_left_out) continue;
    SLUICE_TRY(sample(c, p, &p->samples[p->count]));
    ++p->count;
  }
  return SLUICE_OK;
}

/* The lower quartile: noise only adds, but the shortest time may be an outlier. */
static sluice_status_t agree_on_times(calibration_t* c) {
  double seconds[SLUICE_PROBES];
  for (int32_t i = 0; i < c->count; ++i) {
    sluice_probe_t* p = &c->probes[i];
    seconds[i] = p->is_left_out ? 0 : sluice_quantile(p->samples, p->count, 0.25);
  }
  SLUICE_TRY(sluice_bench_longest(&c->bench, seconds, c->count));
  for (int32_t i = 0; i < c->count; ++i) c->probes[i].seconds = seconds[i];
  return SLUICE_OK;
}

static sluice_status_t run_rounds(calibration_t* c, double seconds) {
  double rounds = (1 - SHARES_PART - CONTENTION_PART - BUCKET_PART - PASSES_PART) * seconds / (round_seconds(c) + 1e-6);
  int32_t count = rounds < LEAST_ROUNDS          ? LEAST_ROUNDS
                  : rounds > SLUICE_PROBE_ROUNDS ? SLUICE_PROBE_ROUNDS
                                                 : (int32_t)rounds;
  for (int32_t i = 0; i < count; ++i) {
    sluice_log(SLUICE_LOG_INFO, "calibrating: round %d of %d", i + 1, count);
    SLUICE_TRY(one_round(c));
  }
  return agree_on_times(c);
}

/* ---- curves ---- */

/* Seconds against size of a kind of probe, without held-out probes. */
static void curve_of(const calibration_t* c, int32_t kind, sluice_curve_t* out) {
  out->count = 0;
  for (int32_t i = 0; i < c->count; ++i) {
    const sluice_probe_t* p = &c->probes[i];
    if (p->kind != kind || p->is_left_out || p->is_held_out || out->count == SLUICE_CURVE_POINTS) continue;
    if (out->count > 0 && (double)p->size <= out->x[out->count - 1]) continue;
    out->x[out->count] = (double)p->size;
    out->y[out->count++] = p->seconds;
  }
  sluice_make_rising(out->y, out->count);
}

static double only(const calibration_t* c, int32_t kind) {
  for (int32_t i = 0; i < c->count; ++i) {
    if (c->probes[i].kind == kind) return c->probes[i].seconds;
  }
  return 0;
}

static int32_t dtype_of(const calibration_t* c) {
  return c->bench.dtype == SLUICE_DTYPE_BF16  ? SLUICE_MACHINE_BF16
         : c->bench.dtype == SLUICE_DTYPE_F16 ? SLUICE_MACHINE_F16
                                              : SLUICE_MACHINE_F32;
}

/* Fits the gain that interpolates between the bytes of the fullest rank and the mean, so that the exchange in which
 * only the first rank receives takes its measured time. */
static void fill_skew_gain(const calibration_t* c, sluice_machine_t* m) {
  const sluice_probe_t* hot = NULL;
  for (int32_t i = 0; i < c->count; ++i) {
    if (c->probes[i].kind == SLUICE_PROBE_HOT_EXCHANGE && !c->probes[i].is_left_out) hot = &c->probes[i];
  }
  if (hot == NULL) return;
  m->exchange_skew_gain =
      sluice_fit_skew_gain(m, (double)hot->size, sluice_token_bucket_undone(hot->seconds, hot->repeats, c->bucket));
}

/* Samples begin after a barrier, with tokens in the bucket; this computes the times without tokens. The largest
 * exchange gives the line rate, and no shorter exchange takes longer than at that rate. */
static void fill_exchange(const calibration_t* c, sluice_link_t* link) {
  sluice_curve_t* curve = &link->bytes;
  double seconds[SLUICE_CURVE_POINTS];
  curve_of(c, SLUICE_PROBE_EXCHANGE, curve);
  memcpy(seconds, curve->y, sizeof seconds);
  link->token_bucket_seconds = c->bucket;
  if (curve->count == 0) return;
  link->startup_seconds = curve->y[0];
  for (int32_t i = 0, at = 0; i < c->count && at < curve->count; ++i) {
    if (c->probes[i].kind != SLUICE_PROBE_EXCHANGE || (double)c->probes[i].size != curve->x[at]) continue;
    seconds[at] = sluice_token_bucket_undone(curve->y[at], c->probes[i].repeats, c->bucket);
    ++at;
  }
  const int32_t last = curve->count - 1;
  for (int32_t i = 0; i <= last; ++i) {
    double line = fmin(seconds[i] - link->startup_seconds, curve->x[i] * seconds[last] / curve->x[last]);
    curve->y[i] = fmax(curve->y[i] - link->startup_seconds, c->bucket > 0 ? line : 0);
  }
  sluice_make_rising(curve->y, curve->count);
}

static void fill_curves(const calibration_t* c, sluice_machine_t* m) {
  double flops_per_row = 2.0 * (double)c->bench.model_width * (double)c->bench.hidden_width;
  for (int32_t form = 0; form < SLUICE_FORM_COUNT; ++form) {
    sluice_curve_t* g = &m->gemm[dtype_of(c)][form];
    curve_of(c, SLUICE_PROBE_GEMM + form, g);
    for (int32_t i = 0; i < g->count; ++i) g->y[i] /= g->x[i] * flops_per_row;
  }
  curve_of(c, SLUICE_PROBE_ROWS, &m->rows);
  curve_of(c, SLUICE_PROBE_COPY, &m->host_copy);
  fill_exchange(c, &m->exchange);
  fill_skew_gain(c, m);
  double elements = 256.0 * (double)c->bench.hidden_width;
  m->activation_seconds = only(c, SLUICE_PROBE_ACTIVATION) / elements;
  m->activation_grad_seconds = only(c, SLUICE_PROBE_ACTIVATION_GRAD) / elements;
  m->relu_seconds = only(c, SLUICE_PROBE_RELU) / elements;
  m->relu_grad_seconds = only(c, SLUICE_PROBE_RELU_GRAD) / elements;
  m->op_seconds = only(c, SLUICE_PROBE_LAUNCH) / LAUNCHES;
}

static double curve_says(const calibration_t* c, const sluice_machine_t* m, const sluice_probe_t* p) {
  double size = (double)p->size;
  switch (p->kind) {
    case SLUICE_PROBE_ROWS: return sluice_curve_at(&m->rows, size);
    case SLUICE_PROBE_COPY: return sluice_curve_at(&m->host_copy, size);
    case SLUICE_PROBE_EXCHANGE:
      return fmax(m->exchange.startup_seconds,
                  sluice_machine_exchange(m, c->bench.context->world_size, size) - c->bucket / p->repeats);
    default:
      return sluice_machine_gemm(m, c->bench.dtype, p->kind - SLUICE_PROBE_GEMM, size) * size * 2.0 *
             (double)c->bench.model_width * (double)c->bench.hidden_width;
  }
}

static void fill_errors(const calibration_t* c, sluice_machine_t* m) {
  double errors[SLUICE_PROBES];
  int32_t count = 0;
  for (int32_t i = 0; i < c->count; ++i) {
    const sluice_probe_t* p = &c->probes[i];
    if (!p->is_held_out || p->is_left_out || p->seconds <= 0) continue;
    errors[count++] = fabs(curve_says(c, m, p) / p->seconds - 1);
  }
  m->error_count = count;
  if (count == 0) return;
  m->error_median = sluice_median(errors, count);
  m->error_p90 = sluice_quantile(errors, count, 0.9);
}

static sluice_status_t measure(calibration_t* c, double seconds, sluice_machine_t* m) {
  sluice_log(SLUICE_LOG_INFO, "calibrating: about %.0f s, %d probes", seconds, c->count);
  SLUICE_TRY(first_round(c, seconds));
  SLUICE_TRY(run_rounds(c, seconds));
  if (!sluice_bench_on_device_memory(&c->bench))
    SLUICE_TRY(sluice_bench_token_bucket(&c->bench, BUCKET_PART * seconds, &c->bucket));
  fill_curves(c, m);
  fill_errors(c, m);
  sluice_log(SLUICE_LOG_INFO, "calibrating: concurrent lanes");
  SLUICE_TRY(sluice_bench_shares(&c->bench, SHARES_PART * seconds, m));
  if (!sluice_bench_on_device_memory(
          &c->bench)) { /* no thread serves exchanges there, and lanes wait for each other by themselves */
    sluice_log(SLUICE_LOG_INFO, "calibrating: exchanges during GEMMs");
    SLUICE_TRY(sluice_bench_contention(&c->bench, CONTENTION_PART * seconds, m));
  }
  sluice_log(SLUICE_LOG_INFO, "calibrating: whole passes");
  SLUICE_TRY(sluice_bench_passes(&c->bench, PASSES_PART * seconds, m));
  sluice_log(SLUICE_LOG_INFO, "calibrated: error on %d held-out sizes: median %.1f %%, 90th percentile %.1f %%",
             m->error_count, 100 * m->error_median, 100 * m->error_p90);
  return SLUICE_OK;
}

sluice_status_t sluice_calibrate(sluice_context_t* context, const sluice_calibration_t* wanted,
                                 sluice_machine_t* out_machine) {
  calibration_t* c = sluice_alloc_zeroed(sluice_process_allocator(), sizeof *c, "calibration");
  if (c == NULL) return sluice_alloc_status();
  sluice_machine_t machine;
  sluice_machine_init(&machine);
  machine.provenance = SLUICE_MACHINE_CALIBRATED;
  machine.world_size = context->world_size;
  snprintf(machine.name, sizeof machine.name, "%s, %d ranks, %s", context->device->name, context->world_size,
           sluice_dtype_name(wanted->dtype));
  sluice_status_t status = sluice_bench_open(context, wanted, &c->bench);
  if (status == SLUICE_OK) {
    machine.gemm_model_width = c->bench.model_width, machine.gemm_hidden_width = c->bench.hidden_width;
    add_probes(c);
    status = measure(c, wanted->seconds, &machine);
    sluice_bench_close(&c->bench);
  }
  sluice_free(sluice_process_allocator(), c, sizeof *c);
  if (status == SLUICE_OK) status = sluice_machine_check(&machine);
  if (status == SLUICE_OK) *out_machine = machine;
  return status;
}
