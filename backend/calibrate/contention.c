// SPDX-License-Identifier: Apache-2.0
#include "backend/calibrate/contention.h"

#include <math.h>
#include <string.h>

#include "backend/base/log.h"
#include "backend/cost/fit.h"

#define SIZES  6
#define PLACES (SIZES + 1) /* the last: the smallest size with a second exchange in flight */
#define ROUNDS 7
#define LONG   4 /* times its part of the time: larger sizes are skipped */

static const int64_t sizes[SIZES] = {1 << 10, 1 << 13, 1 << 15, 1 << 17, 1 << 19, 1 << 21};

typedef struct contention_s {
  const sluice_contention_source_t* source;
  double part;   /* seconds of one sample */
  int32_t count; /* sizes that are measured */
  sluice_contention_sample_t samples[PLACES][ROUNDS];
} contention_t;

static sluice_status_t sample(contention_t* l, int32_t place, int32_t round) {
  int is_second = place == SIZES;
  return l->source->sample(l->source->user, sizes[is_second ? 0 : place], is_second, l->part,
                           &l->samples[place][round]);
}

/* The first round finds the sizes that are too long: at least two remain. */
static sluice_status_t first_round(contention_t* l, const sluice_machine_t* m) {
  for (l->count = 0; l->count < SIZES; ++l->count) {
    double alone = sluice_machine_exchange(m, m->world_size, (double)sizes[l->count]);
    if (l->count >= 2 && 2 * alone > LONG * l->part) break;
    SLUICE_TRY(sample(l, l->count, 0));
  }
  return sample(l, SIZES, 0);
}

static sluice_status_t run_rounds(contention_t* l, const sluice_machine_t* m) {
  SLUICE_TRY(first_round(l, m));
  for (int32_t round = 1; round < ROUNDS; ++round) {
    sluice_log(SLUICE_LOG_INFO, "calibrating: exchanges during GEMMs: round %d of %d", round + 1, ROUNDS);
    for (int32_t place = 0; place < l->count; ++place) SLUICE_TRY(sample(l, place, round));
    SLUICE_TRY(sample(l, SIZES, round));
  }
  return SLUICE_OK;
}

/* Medians: the time alone, the extra time during GEMMs, the time that GEMMs lose. */
enum { ALONE, EXCHANGE, COMPUTE, MEDIANS };
static void medians_of(const sluice_contention_sample_t* samples, double* out) {
  double values[MEDIANS][ROUNDS];
  for (int32_t i = 0; i < ROUNDS; ++i) {
    values[ALONE][i] = samples[i].alone;
    values[EXCHANGE][i] = samples[i].busy - samples[i].alone;
    values[COMPUTE][i] = samples[i].lost;
  }
  for (int32_t k = 0; k < MEDIANS; ++k) out[k] = fmax(0, sluice_median(values[k], ROUNDS));
}

static void fit(const contention_t* l, double medians[PLACES][MEDIANS], sluice_machine_t* m) {
  double total[SIZES];
  for (int32_t i = 0; i < l->count; ++i) {
    total[i] = sluice_machine_exchange(m, m->world_size, (double)sizes[i]) + medians[i][EXCHANGE];
  }
  /* A larger exchange never takes less, and noise only adds: any excess over the next size is noise. */
  for (int32_t i = l->count - 2; i >= 0; --i) total[i] = fmin(total[i], total[i + 1]);
  m->exchange_contention.count = m->compute_contention.count = l->count;
  for (int32_t i = 0; i < l->count; ++i) {
    double alone = sluice_machine_exchange(m, m->world_size, (double)sizes[i]);
    m->exchange_contention.x[i] = m->compute_contention.x[i] = (double)sizes[i];
    m->exchange_contention.y[i] = fmax(0, total[i] - alone);
    m->compute_contention.y[i] = fmin(medians[i][COMPUTE], alone + m->exchange_contention.y[i]);
  }
  const double *first = medians[0], *both = medians[SIZES];
  m->second_exchange_seconds = fmax(0, both[ALONE] - first[ALONE]);
  m->second_exchange_contention = fmax(0, both[EXCHANGE] - first[EXCHANGE]);
  m->second_compute_contention = fmax(0, both[COMPUTE] - first[COMPUTE]);
}

sluice_status_t sluice_contention_measure(const sluice_contention_source_t* source, double seconds,
                                          sluice_machine_t* m) {
  contention_t l = {.source = source, .part = seconds / (PLACES * ROUNDS)};
  SLUICE_TRY(run_rounds(&l, m));
  double medians[PLACES][MEDIANS];
  memset(medians, 0, sizeof medians);
  for (int32_t i = 0; i < l.count; ++i) medians_of(l.samples[i], medians[i]);
  medians_of(l.samples[SIZES], medians[SIZES]);
  SLUICE_TRY(source->longest(source->user, &medians[0][0], PLACES * MEDIANS));
  fit(&l, medians, m);
  return SLUICE_OK;
}
