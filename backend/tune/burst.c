#include "backend/tune/burst.h"

#include <math.h>

#include "backend/tune/fit.h"

#define ROUNDS       5
#define SIZES        3
#define LONGEST_IDLE 15e-3 /* seconds; a bucket that fills more slowly is of no use to a layer */
#define IDLE_PART    0.25  /* of the time of a round, at most */
#define CLEARLY      0.15  /* of the second exchange: less is noise */

/* A bucket larger than two exchanges together shows in neither; a small one, little in long ones. */
static const int64_t sizes[SIZES] = {1 << 17, 1 << 19, 1 << 21};

/* Medians over rounds, the longest of all ranks. */
static sluice_status_t measure(const sluice_burst_source_t* source, int64_t bytes, double idle, double out_median[2]) {
  double took[2][ROUNDS];
  for (int32_t i = 0; i < ROUNDS; ++i) {
    double pair[2];
    SLUICE_TRY(source->pair(source->user, bytes, idle, pair));
    took[0][i] = pair[0], took[1][i] = pair[1];
  }
  for (int32_t k = 0; k < 2; ++k) out_median[k] = sluice_median(took[k], ROUNDS);
  return source->longest(source->user, out_median, 2);
}

sluice_status_t sluice_burst_measure(const sluice_burst_source_t* source, double seconds, sluice_machine_t* m) {
  m->exchange.burst_bytes = 0;
  double round = seconds / ((double)ROUNDS * SIZES), idle = fmin(LONGEST_IDLE, IDLE_PART * round), of_byte = 0;
  const double alone = sluice_machine_exchange(m, m->world_size, 0);
  for (int32_t i = 0; i < SIZES; ++i) {
    double took[2], bytes = (double)sizes[i];
    if (2 * sluice_machine_exchange(m, m->world_size, bytes) > round - idle) break;
    SLUICE_TRY(measure(source, sizes[i], idle, took));
    double saved = took[1] - took[0], each = fmax(took[1] - alone, saved) / bytes;
    if (saved < CLEARLY * took[1]) continue;
    m->exchange.burst_bytes = fmax(m->exchange.burst_bytes, saved / each);
    of_byte = each;
  }
  if (of_byte == 0) return SLUICE_OK;
  sluice_curve_t* c = &m->exchange.bytes;
  for (int32_t i = 0; i < c->count; ++i) c->y[i] = fmax(c->y[i], c->x[i] * of_byte);
  sluice_make_rising(c->y, c->count);
  return SLUICE_OK;
}
