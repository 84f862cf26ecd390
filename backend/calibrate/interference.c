/* How lanes slow each other down: two kinds of work of about equal length, each alone and then together
 * [MPMoE's alpha(y, x)]. */
#include <math.h>
#include <string.h>

#include "backend/base/clock.h"
#include "backend/calibrate/probe.h"
#include "backend/cost/fit.h"

#define WORKS  3 /* GEMMs, exchanges, copies */
#define ROUNDS 5

typedef struct work_s {
  int32_t lane;
  sluice_probe_t probe;
  int32_t repeats;
} work_t;

typedef struct pair_s {
  sluice_bench_t* bench;
  const work_t* works[2];
  double seconds[2];
} pair_t;

static sluice_status_t run_work(void* user, int32_t index, sluice_stream_t stream) {
  pair_t* pair = user;
  uint64_t begin = sluice_now_ns();
  sluice_status_t status =
      sluice_bench_run(pair->bench, &pair->works[index]->probe, pair->works[index]->repeats, stream);
  pair->seconds[index] = (double)(sluice_now_ns() - begin) * 1e-9;
  return status;
}

static sluice_status_t run_on_device(pair_t* pair, int32_t count) {
  sluice_bench_job_t jobs[2];
  for (int32_t i = 0; i < count; ++i) {
    const work_t* work = pair->works[i];
    jobs[i] = (sluice_bench_job_t){work->lane, &work->probe, work->repeats, 0};
  }
  SLUICE_TRY(sluice_bench_run_on_device(pair->bench, jobs, count));
  for (int32_t i = 0; i < count; ++i) pair->seconds[i] = jobs[i].seconds;
  return SLUICE_OK;
}

/* One work alone, or two lanes together. */
static sluice_status_t run_pair(pair_t* pair) {
  sluice_device_t* device = pair->bench->context->device;
  int32_t count = pair->works[1] == NULL ? 1 : 2;
  if (sluice_bench_on_device_memory(pair->bench)) return run_on_device(pair, count);
  SLUICE_TRY(device->vtable->begin(device, count, run_work, pair, NULL));
  sluice_status_t status = SLUICE_OK;
  for (int32_t i = count - 1; i >= 0 && status == SLUICE_OK; --i) { /* the calling thread's lane last: it may run now */
    const sluice_job_t job = {i, pair->works[i]->lane, NULL, 0, 1};
    status = device->vtable->submit(device, &job);
  }
  sluice_status_t joined = device->vtable->join(device);
  return status != SLUICE_OK ? status : joined;
}

/* Median over rounds, longest over ranks. */
static sluice_status_t measure(pair_t* pair, double* out_seconds) {
  double first[ROUNDS], second[ROUNDS];
  for (int32_t i = 0; i < ROUNDS; ++i) {
    double barrier = 0;
    SLUICE_TRY(sluice_bench_longest(pair->bench, &barrier, 1));
    SLUICE_TRY(run_pair(pair));
    first[i] = pair->seconds[0], second[i] = pair->seconds[1];
  }
  out_seconds[0] = sluice_median(first, ROUNDS), out_seconds[1] = sluice_median(second, ROUNDS);
  return sluice_bench_longest(pair->bench, out_seconds, 2);
}

/* So many repeats that the work takes `seconds`, alike on all ranks. */
static sluice_status_t size_work(sluice_bench_t* b, work_t* work, double seconds) {
  pair_t alone = {b, {work, NULL}, {0, 0}};
  work->repeats = 2;
  SLUICE_TRY(run_pair(&alone));
  SLUICE_TRY(run_pair(&alone));
  double took = alone.seconds[0] / 2;
  SLUICE_TRY(sluice_bench_longest(b, &took, 1));
  double repeats = seconds / (took > 1e-7 ? took : 1e-7);
  work->repeats = repeats < 2 ? 2 : repeats > 4096 ? 4096 : (int32_t)repeats;
  return SLUICE_OK;
}

static double clamp_share(double share) { return share < 0.05 ? 0.05 : share > 1 ? 1 : share; }

/* While both run, each does a part of its work; the longer one does its rest alone. */
static void shares_of(const double* alone, const double* together, double* out_share) {
  int32_t shorter = together[0] <= together[1] ? 0 : 1, longer = 1 - shorter;
  double both = together[shorter];
  out_share[shorter] = clamp_share(alone[shorter] / both);
  out_share[longer] = clamp_share((alone[longer] - (together[longer] - both)) / both);
}

sluice_status_t sluice_bench_shares(sluice_bench_t* b, double seconds, double (*out_share)[1 << SLUICE_NUM_LANES]) {
  memset(out_share, 0, sizeof(double[SLUICE_NUM_LANES][1 << SLUICE_NUM_LANES]));
  if (b->context->comm == NULL) return SLUICE_OK;
  const int64_t bytes = 1 << 20;
  work_t works[WORKS] = {{SLUICE_LANE_COMPUTE, {.kind = SLUICE_PROBE_GEMM, .size = 256}, 0},
                         {SLUICE_LANE_COMM, {.kind = SLUICE_PROBE_EXCHANGE, .size = bytes}, 0},
                         {SLUICE_LANE_COPY_OUT, {.kind = SLUICE_PROBE_COPY, .size = 4 * bytes}, 0}};
  double part = seconds / (ROUNDS * 6.0), alone[WORKS], pair_share[SLUICE_NUM_LANES][SLUICE_NUM_LANES];
  for (int32_t i = 0; i < SLUICE_NUM_LANES * SLUICE_NUM_LANES; ++i) (&pair_share[0][0])[i] = 1;
  for (int32_t i = 0; i < WORKS; ++i) {
    SLUICE_TRY(size_work(b, &works[i], part));
    pair_t single = {b, {&works[i], NULL}, {0, 0}};
    double took[2];
    SLUICE_TRY(measure(&single, took));
    alone[i] = took[0];
  }
  for (int32_t i = 0; i < WORKS; ++i) {
    for (int32_t j = i + 1; j < WORKS; ++j) {
      pair_t pair = {b, {&works[i], &works[j]}, {0, 0}};
      double together[2], share[2], single[] = {alone[i], alone[j]};
      SLUICE_TRY(measure(&pair, together));
      shares_of(single, together, share);
      pair_share[works[i].lane][works[j].lane] = share[0];
      pair_share[works[j].lane][works[i].lane] = share[1];
    }
  }
  for (int32_t lane = 0; lane < SLUICE_NUM_LANES; ++lane) { /* a copy in is a copy out */
    int32_t from = lane == SLUICE_LANE_COPY_IN ? SLUICE_LANE_COPY_OUT : lane;
    for (int32_t set = 0; set < 1 << SLUICE_NUM_LANES; ++set) {
      double share = 1; /* more than one beside it: their effects multiply */
      for (int32_t other = 0; other < SLUICE_NUM_LANES; ++other) {
        int32_t as = other == SLUICE_LANE_COPY_IN ? SLUICE_LANE_COPY_OUT : other;
        if (other != lane && (set >> other & 1) && as != from) share *= pair_share[from][as];
      }
      if ((set >> lane & 1) && set != 1 << lane) out_share[lane][set] = share < 0.05 ? 0.05 : share;
    }
  }
  return SLUICE_OK;
}
