// SPDX-License-Identifier: Apache-2.0
/* Measures how lanes slow each other down: three kinds of work of about equal length, each alone, then in pairs and all
 * together [MPMoE's alpha(y, x) and alpha(y, all)]. Copies are measured at two sizes and in both directions. */
#include <string.h>

#include "backend/base/clock.h"
#include "backend/calibrate/probe.h"
#include "backend/calibrate/shares.h"
#include "backend/cost/fit.h"

#define WORKS  3 /* GEMMs, exchanges, copies */
#define COPY   2
#define ROUNDS 5

typedef struct work_s {
  int32_t lane;
  sluice_probe_t probe;
  int32_t repeats;
} work_t;

/* Works that run concurrently. */
typedef struct together_s {
  sluice_bench_t* bench;
  const work_t* works[WORKS];
  int32_t count;
  double seconds[WORKS];
} together_t;

static sluice_status_t run_work(void* user, int32_t index, sluice_stream_t stream) {
  together_t* pair = user;
  uint64_t begin = sluice_now_ns();
  sluice_status_t status =
      sluice_bench_run(pair->bench, &pair->works[index]->probe, pair->works[index]->repeats, stream);
  pair->seconds[index] = (double)(sluice_now_ns() - begin) * 1e-9;
  return status;
}

static sluice_status_t run_on_device(together_t* pair) {
  const int32_t count = pair->count;
  sluice_bench_job_t jobs[WORKS];
  for (int32_t i = 0; i < count; ++i) {
    const work_t* work = pair->works[i];
    jobs[i] = (sluice_bench_job_t){work->lane, &work->probe, work->repeats, 0};
  }
  SLUICE_TRY(sluice_bench_run_on_device(pair->bench, jobs, count));
  for (int32_t i = 0; i < count; ++i) pair->seconds[i] = jobs[i].seconds;
  return SLUICE_OK;
}

static sluice_status_t run_together(together_t* pair) {
  const int32_t last = pair->count - 1;
  sluice_job_t jobs[WORKS];
  if (sluice_bench_on_device_memory(pair->bench)) return run_on_device(pair);
  /* the lane of the calling thread last: it may run at once */
  for (int32_t i = 0; i <= last; ++i) jobs[last - i] = (sluice_job_t){i, pair->works[i]->lane, NULL, 0, 1};
  return sluice_bench_run_jobs(pair->bench, jobs, pair->count, run_work, pair);
}

/* The median over rounds, and its maximum over ranks. */
static sluice_status_t measure(together_t* pair, double* out_seconds) {
  double rounds[WORKS][ROUNDS];
  for (int32_t i = 0; i < ROUNDS; ++i) {
    double barrier = 0;
    SLUICE_TRY(sluice_bench_longest(pair->bench, &barrier, 1));
    SLUICE_TRY(run_together(pair));
    for (int32_t w = 0; w < pair->count; ++w) rounds[w][i] = pair->seconds[w];
  }
  for (int32_t w = 0; w < pair->count; ++w) out_seconds[w] = sluice_median(rounds[w], ROUNDS);
  return sluice_bench_longest(pair->bench, out_seconds, pair->count);
}

/* Sets the repeats so that the work takes `seconds`, the same on all ranks. */
static sluice_status_t size_work(sluice_bench_t* b, work_t* work, double seconds) {
  together_t alone = {.bench = b, .works = {work}, .count = 1};
  work->repeats = 2;
  SLUICE_TRY(run_together(&alone));
  SLUICE_TRY(run_together(&alone));
  double took = alone.seconds[0] / 2;
  SLUICE_TRY(sluice_bench_longest(b, &took, 1));
  double repeats = seconds / (took > 1e-7 ? took : 1e-7);
  work->repeats = repeats < 2 ? 2 : repeats > 4096 ? 4096 : (int32_t)repeats;
  return SLUICE_OK;
}

/* Times alone, and shares: pair[y][x], all[y]: the share that y keeps while x runs, or both others. */
typedef struct shares_s {
  double alone[WORKS], pair[WORKS][WORKS], all[WORKS];
} shares_t;

static sluice_status_t measure_alone(sluice_bench_t* b, work_t* work, double seconds, double* out_alone) {
  SLUICE_TRY(size_work(b, work, seconds));
  together_t single = {.bench = b, .works = {work}, .count = 1};
  return measure(&single, out_alone);
}

static sluice_status_t measure_pair(sluice_bench_t* b, const work_t* works, int32_t i, int32_t j, shares_t* shares) {
  together_t pair = {.bench = b, .works = {&works[i], &works[j]}, .count = 2};
  const double single[] = {shares->alone[i], shares->alone[j]};
  double share[2], took[WORKS];
  SLUICE_TRY(measure(&pair, took));
  sluice_shares_of_two(single, took, share);
  shares->pair[i][j] = share[0], shares->pair[j][i] = share[1];
  return SLUICE_OK;
}

/* Measures the third work, a copy, with GEMMs, with exchanges and with both. */
static sluice_status_t measure_copy(sluice_bench_t* b, work_t* works, double seconds, shares_t* shares) {
  double took[WORKS];
  SLUICE_TRY(measure_alone(b, &works[COPY], seconds, &shares->alone[COPY]));
  for (int32_t i = 0; i < COPY; ++i) SLUICE_TRY(measure_pair(b, works, i, COPY, shares));
  together_t three = {.bench = b, .works = {&works[0], &works[1], &works[COPY]}, .count = WORKS};
  SLUICE_TRY(measure(&three, took));
  sluice_shares_of_three(shares->alone, took, (const double(*)[WORKS])shares->pair, shares->all);
  return SLUICE_OK;
}

/* Sets the shares of every set of these three lanes that has the copies. */
static void fill_shares(const shares_t* shares, int32_t copies, double (*out_share)[1 << SLUICE_NUM_LANES]) {
  const int32_t lanes[WORKS] = {SLUICE_LANE_COMPUTE, SLUICE_LANE_COMM, copies};
  const int32_t all = 1 << lanes[0] | 1 << lanes[1] | 1 << copies;
  for (int32_t i = 0; i < COPY; ++i) {
    const int32_t pair = 1 << lanes[i] | 1 << copies;
    out_share[lanes[i]][pair] = shares->pair[i][COPY], out_share[copies][pair] = shares->pair[COPY][i];
  }
  for (int32_t i = 0; i < WORKS; ++i) out_share[lanes[i]][all] = shares->all[i];
}

/* With copies in both directions, a lane keeps the smaller of its shares with one direction. A copy keeps its share
 * without the other direction. */
static void fill_both_directions(double (*share)[1 << SLUICE_NUM_LANES]) {
  const int32_t out = 1 << SLUICE_LANE_COPY_OUT, in = 1 << SLUICE_LANE_COPY_IN;
  for (int32_t set = 0; set < 1 << SLUICE_NUM_LANES; ++set) {
    if (!(set & out) || !(set & in) || set == (out | in)) continue;
    for (int32_t lane = 0; lane < SLUICE_NUM_LANES; ++lane) {
      if (!(set >> lane & 1)) continue;
      const double with_out = share[lane][set & ~in], with_in = share[lane][set & ~out];
      share[lane][set] = with_out == 0 || (with_in > 0 && with_in < with_out) ? with_in : with_out;
    }
  }
}

sluice_status_t sluice_bench_shares(sluice_bench_t* b, double seconds, sluice_machine_t* m) {
  static const int64_t sizes[] = {256 << 10, 4 << 20}; /* in caches, and larger than most */
  enum { SIZES = sizeof sizes / sizeof sizes[0], MEASURED = 3 + SIZES * 2 * 4, SLACK = 2 };
  memset(m->share, 0, sizeof m->share);
  m->num_copy_shares = 0;
  if (b->context->comm == NULL) return SLUICE_OK;
  const double part = seconds / (ROUNDS * (MEASURED + SLACK));
  work_t works[WORKS] = {{SLUICE_LANE_COMPUTE, {.kind = SLUICE_PROBE_GEMM, .size = 256}, 0},
                         {SLUICE_LANE_COMM, {.kind = SLUICE_PROBE_EXCHANGE, .size = 1 << 20}, 0}};
  shares_t shares = {.pair = {{1, 1, 1}, {1, 1, 1}, {1, 1, 1}}};
  for (int32_t i = 0; i < COPY; ++i) SLUICE_TRY(measure_alone(b, &works[i], part, &shares.alone[i]));
  SLUICE_TRY(measure_pair(b, works, 0, 1, &shares));
  const int32_t both = 1 << SLUICE_LANE_COMPUTE | 1 << SLUICE_LANE_COMM;
  m->share[SLUICE_LANE_COMPUTE][both] = shares.pair[0][1], m->share[SLUICE_LANE_COMM][both] = shares.pair[1][0];
  for (int32_t i = 0; i < (int32_t)SIZES; ++i) {
    sluice_copy_share_t* of_size = &m->copy_share[m->num_copy_shares++];
    *of_size = (sluice_copy_share_t){.bytes = (double)sizes[i]};
    works[COPY] = (work_t){SLUICE_LANE_COPY_OUT, {.kind = SLUICE_PROBE_COPY, .size = sizes[i]}, 0};
    SLUICE_TRY(measure_copy(b, works, part, &shares));
    fill_shares(&shares, SLUICE_LANE_COPY_OUT, of_size->share);
    works[COPY] = (work_t){SLUICE_LANE_COPY_IN, {.kind = SLUICE_PROBE_COPY_IN, .size = sizes[i]}, 0};
    SLUICE_TRY(measure_copy(b, works, part, &shares));
    fill_shares(&shares, SLUICE_LANE_COPY_IN, of_size->share);
    fill_both_directions(of_size->share);
  }
  return SLUICE_OK;
}
