// SPDX-License-Identifier: Apache-2.0
/* Samples of exchanges during GEMMs, measured on the machine of a context: the communication lane exchanges, and the
 * compute lane multiplies until the exchange is done. */
#include <stdatomic.h>

#include "backend/base/clock.h"
#include "backend/calibrate/contention.h"
#include "backend/calibrate/probe.h"

#define TRIALS        3    /* exchanges that measure how many a sample holds */
#define MOST          512  /* exchanges of a sample */
#define LONGEST_PIECE 1e-3 /* seconds of one GEMM: the end of exchanges is noticed only between GEMMs */
#define PIECES        8    /* GEMMs that measure the time of one alone */
#define KEPT          16   /* kinds of exchanges whose number per sample is remembered */

typedef struct contention_probe_s {
  sluice_bench_t* bench;
  sluice_probe_t exchange, problem;
  int32_t repeats; /* consecutive exchanges, the same on all ranks */
  _Atomic int32_t is_done;
  int64_t num_gemms;
  double exchanging, multiplying; /* seconds */
  /* Number of exchanges of a kind per sample, set at its first sample. */
  struct {
    int64_t bytes;
    int32_t num_second, repeats;
  } known[KEPT];
  int32_t num_known;
} contention_probe_t;

enum { EXCHANGES = 0, PROBLEMS = 1 };

static sluice_status_t run_job(void* user, int32_t index, sluice_stream_t stream) {
  (void)stream;
  contention_probe_t* s = user;
  sluice_status_t status = SLUICE_OK;
  uint64_t begin = sluice_now_ns();
  if (index == EXCHANGES) {
    status = sluice_bench_run(s->bench, &s->exchange, s->repeats, NULL);
    s->exchanging = (double)(sluice_now_ns() - begin) * 1e-9;
    atomic_store(&s->is_done, 1);
    return status;
  }
  do {
    status = sluice_bench_run(s->bench, &s->problem, 1, NULL);
    ++s->num_gemms;
  } while (status == SLUICE_OK && !atomic_load(&s->is_done));
  s->multiplying = (double)(sluice_now_ns() - begin) * 1e-9;
  return status;
}

static sluice_status_t run_lanes(contention_probe_t* s, int with_gemms) {
  /* The lane of the calling thread comes last: it may run at once. */
  const sluice_job_t jobs[] = {{EXCHANGES, SLUICE_LANE_COMM, NULL, 0, 1}, {PROBLEMS, SLUICE_LANE_COMPUTE, NULL, 0, 1}};
  double barrier = 0;
  SLUICE_TRY(sluice_bench_longest(s->bench, &barrier, 1));
  atomic_store(&s->is_done, 0);
  s->num_gemms = 0;
  return sluice_bench_run_jobs(s->bench, jobs, with_gemms ? 2 : 1, run_job, s);
}

static sluice_status_t sample_once(contention_probe_t* s, sluice_contention_sample_t* out) {
  SLUICE_TRY(run_lanes(s, 0));
  out->alone = s->exchanging / s->repeats;
  uint64_t begin = sluice_now_ns();
  SLUICE_TRY(sluice_bench_run(s->bench, &s->problem, PIECES, NULL));
  double problem = (double)(sluice_now_ns() - begin) * 1e-9 / PIECES;
  SLUICE_TRY(run_lanes(s, 1));
  out->busy = s->exchanging / s->repeats;
  out->lost = (s->multiplying - (double)s->num_gemms * problem) / s->repeats;
  return SLUICE_OK;
}

/* Sets the repeats so that a sample takes `seconds`, alone plus during GEMMs. */
static sluice_status_t find_repeats(contention_probe_t* s, int32_t num_second, double seconds) {
  for (int32_t i = 0; i < s->num_known; ++i) {
    if (s->known[i].bytes != s->exchange.size || s->known[i].num_second != num_second) continue;
    s->repeats = s->known[i].repeats;
    return SLUICE_OK;
  }
  sluice_contention_sample_t trial;
  s->repeats = TRIALS;
  SLUICE_TRY(sample_once(s, &trial));
  double each = trial.alone + trial.busy;
  SLUICE_TRY(sluice_bench_longest(s->bench, &each, 1));
  double repeats = seconds / (each > 1e-7 ? each : 1e-7);
  s->repeats = repeats < 1 ? 1 : repeats > MOST ? MOST : (int32_t)repeats;
  if (s->num_known < KEPT) {
    s->known[s->num_known].bytes = s->exchange.size;
    s->known[s->num_known].num_second = num_second;
    s->known[s->num_known++].repeats = s->repeats;
  }
  return SLUICE_OK;
}

static sluice_status_t sample(void* user, int64_t bytes, int32_t num_second, double seconds,
                              sluice_contention_sample_t* out) {
  contention_probe_t* s = user;
  s->exchange =
      (sluice_probe_t){.kind = num_second ? SLUICE_PROBE_TWO_EXCHANGES : SLUICE_PROBE_EXCHANGE, .size = bytes};
  SLUICE_TRY(find_repeats(s, num_second, seconds));
  return sample_once(s, out);
}

static sluice_status_t longest(void* user, double* seconds, int32_t count) {
  const contention_probe_t* s = user;
  return sluice_bench_longest(s->bench, seconds, count);
}

/* Many rows, as in the GEMMs of a layer, but at most LONGEST_PIECE seconds of work. */
static int64_t rows_of_a_piece(const sluice_bench_t* b, const sluice_machine_t* m) {
  int64_t rows = 256;
  double flops = 2.0 * (double)b->model_width * (double)b->hidden_width;
  while (rows > 1 &&
         sluice_machine_gemm(m, b->dtype, SLUICE_FORM_FORWARD, (double)rows) * flops * (double)rows > LONGEST_PIECE) {
    rows /= 2;
  }
  return rows;
}

sluice_status_t sluice_bench_contention(sluice_bench_t* b, double seconds, sluice_machine_t* machine) {
  if (b->context->comm == NULL) return SLUICE_OK;
  contention_probe_t s = {.bench = b, .problem = {.kind = SLUICE_PROBE_GEMM, .size = rows_of_a_piece(b, machine)}};
  const sluice_contention_source_t source = {sample, longest, &s};
  return sluice_contention_measure(&source, seconds, machine);
}
