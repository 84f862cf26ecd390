// SPDX-License-Identifier: Apache-2.0
#include "backend/gemm/cublas/cublas_choice.h"

#include <stddef.h>
#include <string.h>

#include "backend/base/math.h"
#include "backend/gemm/cublas/cublas_streams.h"
#include "backend/gemm/gemm_form.h"

/* The unit of time is one step along k of a 128 x 256 tile on one SM, 12 ns. In this unit: the prologue and epilogue of
 * a tile, the gap between two GEMMs on a stream, a call on the host, and joining the streams. */
enum { STEPS_OF_A_TILE = 170, STEPS_OF_A_GAP = 127, STEPS_OF_A_CALL = 340, STEPS_OF_A_JOIN = 512 };
#define LEAST_GAIN 1.05 /* least speedup for streams: the estimate is rough */

/* cuBLAS's tiles on Hopper, the largest first. steps: time of one step along k; smaller tiles have a lower rate. */
static const struct {
  int64_t rows, columns;
  double steps;
} tiles[] = {{128, 256, 1.0}, {128, 128, 0.5 / 0.78}, {128, 64, 0.25 / 0.55}};

/* cuBLAS may transpose its tiles. */
static int64_t count_tiles(int64_t m, int64_t n, int32_t tile) {
  const int64_t rows = tiles[tile].rows, columns = tiles[tile].columns;
  return sluice_min(sluice_ceil_div(m, rows) * sluice_ceil_div(n, columns),
                    sluice_ceil_div(m, columns) * sluice_ceil_div(n, rows));
}

int32_t sluice_cublas_sms_of(int64_t m, int64_t n, int32_t num_sms) {
  const int64_t count = count_tiles(m, n, 0), waves = sluice_ceil_div(count, num_sms);
  return (int32_t)sluice_max(sluice_ceil_div(count, waves), num_sms / SLUICE_CUBLAS_NUM_STREAMS);
}

/* Sums over the GEMMs of a list. Each GEMM is timed alone, on the number of SMs that cuBLAS is told. */
typedef struct estimate_s {
  double steps, filled;                        /* filled: steps * SMs that have tiles */
  double of_stream[SLUICE_CUBLAS_NUM_STREAMS]; /* the steps of the GEMMs on each stream */
  int64_t count;
} estimate_t;

/* Assumes that an SM computes one tile at a time. */
static void add(const sluice_gemm_form_t* f, int32_t sms, int32_t stream, estimate_t* to) {
  double least = 0;
  int64_t used = 0;
  for (int32_t i = 0; i < (int32_t)(sizeof tiles / sizeof tiles[0]); ++i) {
    const int64_t count = count_tiles(f->m, f->n, i);
    const double steps = (double)sluice_ceil_div(count, sms) * ((double)f->k * tiles[i].steps + STEPS_OF_A_TILE);
    if (i > 0 && steps >= least) continue;
    least = steps;
    used = sluice_min(count, sms);
  }
  to->steps += least;
  to->filled += least * (double)used;
  to->of_stream[stream] += least;
  ++to->count;
}

static estimate_t estimate(const sluice_grouped_gemm_t* list, int32_t num_sms, int32_t num_streams) {
  estimate_t sum = {0};
  sluice_cublas_streams_t side = {.forked = num_streams};
  for (int64_t i = 0; i < list->count; ++i) {
    sluice_gemm_form_t f;
    if (!sluice_gemm_form(&list->problems[i], &f) || f.m == 0 || f.n == 0 || f.k == 0) continue;
    const int32_t stream = sluice_cublas_streams_next(&side, (double)f.m * (double)f.n * (double)f.k);
    add(&f, num_streams == 1 ? num_sms : sluice_cublas_sms_of(f.m, f.n, num_sms), stream, &sum);
  }
  return sum;
}

static double longer(double a, double b) { return a > b ? a : b; }

/* GEMMs that take less time than their calls on the host do not overlap on any number of streams. */
int32_t sluice_cublas_choose(const sluice_grouped_gemm_t* list, int32_t num_sms) {
  const estimate_t one = estimate(list, num_sms, 1), all = estimate(list, num_sms, SLUICE_CUBLAS_NUM_STREAMS);
  const double calls = (double)one.count * STEPS_OF_A_CALL;
  const double alone = longer(one.steps + (double)one.count * STEPS_OF_A_GAP, calls);
  double together = longer(all.filled / num_sms, calls);
  for (int32_t s = 0; s < SLUICE_CUBLAS_NUM_STREAMS; ++s) together = longer(together, all.of_stream[s]);
  return (together + STEPS_OF_A_JOIN) * LEAST_GAIN < alone ? SLUICE_CUBLAS_STREAMS : SLUICE_CUBLAS_SINGLE;
}

int32_t sluice_cublas_how_named(const char* name) {
  static const char* const names[] = {NULL, "grouped", "single", "lt", "streams"};
  for (int32_t how = SLUICE_CUBLAS_GROUPED; name != NULL && how <= SLUICE_CUBLAS_STREAMS; ++how) {
    if (strcmp(name, names[how]) == 0) return how;
  }
  return SLUICE_CUBLAS_BY_RULE;
}
