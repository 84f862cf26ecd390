// SPDX-License-Identifier: Apache-2.0
/* Measures how lanes slow each other down: three kinds of work of about equal length, each alone, then in pairs and all
 * together [MPMoE's alpha(y, x) and alpha(y, all)]. */
#include <string.h>

#include "backend/base/clock.h"
#include "backend/calibrate/probe.h"
#include "backend/calibrate/shares.h"
#include "backend/cost/fit.h"

#define WORKS  3 /* GEMMs, exchanges, copies */
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
  sluice_device_t* device = pair->bench->context->device;
  const int32_t count = pair->count;
  if (sluice_bench_on_device_memory(pair->bench)) return run_on_device(pair);
  SLUICE_TRY(device->vtable->begin(device, count, run_work, pair, NULL));
  sluice_status_t status = SLUICE_OK;
  /* the lane of the calling thread last: it may run at once */
  for (int32_t i = count - 1; i >= 0 && status == SLUICE_OK; --i) {
    const sluice_job_t job = {i, pair->works[i]->lane, NULL, 0, 1};
    status = device->vtable->submit(device, &job);
  }
  sluice_status_t joined = device->vtable->join(device);
  return status != SLUICE_OK ? status : joined;
}

/* Median over rounds, longest over ranks. */
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

/* The work that represents a lane: copies in are measured as copies out. */
static int32_t work_of(int32_t lane) {
  static const int32_t works[SLUICE_NUM_LANES] = {
      [SLUICE_LANE_COMPUTE] = 0, [SLUICE_LANE_COMM] = 1, [SLUICE_LANE_COPY_OUT] = 2, [SLUICE_LANE_COPY_IN] = 2};
  return works[lane];
}

/* For every set of lanes, from the works in it. */
static void fill_shares(double (*pair)[WORKS], const double* all, double (*out_share)[1 << SLUICE_NUM_LANES]) {
  for (int32_t lane = 0; lane < SLUICE_NUM_LANES; ++lane) {
    for (int32_t set = 0; set < 1 << SLUICE_NUM_LANES; ++set) {
      if (!(set >> lane & 1) || set == 1 << lane) continue;
      const int32_t own = work_of(lane);
      int32_t others = 0, last = own;
      for (int32_t other = 0; other < SLUICE_NUM_LANES; ++other) {
        const int32_t work = work_of(other);
        if (!(set >> other & 1) || work == own || (others >> work & 1)) continue;
        others |= 1 << work, last = work;
      }
      const int32_t is_one = (others & (others - 1)) == 0;
      out_share[lane][set] = others == 0 ? 1 : is_one ? pair[own][last] : all[own];
    }
  }
}

sluice_status_t sluice_bench_shares(sluice_bench_t* b, double seconds, double (*out_share)[1 << SLUICE_NUM_LANES]) {
  memset(out_share, 0, sizeof(double[SLUICE_NUM_LANES][1 << SLUICE_NUM_LANES]));
  if (b->context->comm == NULL) return SLUICE_OK;
  const int64_t bytes = 1 << 20;
  work_t works[WORKS] = {{SLUICE_LANE_COMPUTE, {.kind = SLUICE_PROBE_GEMM, .size = 256}, 0},
                         {SLUICE_LANE_COMM, {.kind = SLUICE_PROBE_EXCHANGE, .size = bytes}, 0},
                         {SLUICE_LANE_COPY_OUT, {.kind = SLUICE_PROBE_COPY, .size = 4 * bytes}, 0}};
  double part = seconds / (ROUNDS * 8.0), alone[WORKS], took[WORKS], all[WORKS];
  double pair_share[WORKS][WORKS] = {{1, 1, 1}, {1, 1, 1}, {1, 1, 1}};
  for (int32_t i = 0; i < WORKS; ++i) {
    SLUICE_TRY(size_work(b, &works[i], part));
    together_t single = {.bench = b, .works = {&works[i]}, .count = 1};
    SLUICE_TRY(measure(&single, &alone[i]));
  }
  for (int32_t i = 0; i < WORKS; ++i) {
    for (int32_t j = i + 1; j < WORKS; ++j) {
      together_t pair = {.bench = b, .works = {&works[i], &works[j]}, .count = 2};
      double share[2];
      const double single[] = {alone[i], alone[j]};
      SLUICE_TRY(measure(&pair, took));
      sluice_shares_of_two(single, took, share);
      pair_share[i][j] = share[0], pair_share[j][i] = share[1];
    }
  }
  together_t three = {.bench = b, .works = {&works[0], &works[1], &works[2]}, .count = WORKS};
  SLUICE_TRY(measure(&three, took));
  sluice_shares_of_three(alone, took, (const double(*)[WORKS])pair_share, all);
  fill_shares(pair_share, all, out_share);
  return SLUICE_OK;
}
