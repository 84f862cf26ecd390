// SPDX-License-Identifier: Apache-2.0
/* Measures the time of a pass on the CPU's lanes beyond its jobs, which only spin.
 *
 *   bazel run //backend/device/cpu:lanes_bench [-- CHUNKS JOB_US PASSES]
 *
 * A forward: per chunk two jobs of the communication lane, then three of the calling thread, then two of the
 * communication lane; the first jobs of all chunks come first. Medians over the passes. */
#include <stdio.h>
#include <stdlib.h>

#include "backend/base/clock.h"
#include "backend/device/device.h"

enum { MAX_CHUNKS = 256, JOBS_PER_CHUNK = 7, MAX_PASSES = 100000 };

typedef struct {
  uint64_t job_ns;
  uint64_t jobs_cpu_ns; /* of the calling thread */
  int32_t num_jobs;
  sluice_job_t jobs[JOBS_PER_CHUNK * MAX_CHUNKS];
  int32_t waits[JOBS_PER_CHUNK * MAX_CHUNKS];
} bench_t;

static bench_t bench;

static sluice_status_t run_job(void* user, int32_t index, sluice_stream_t stream) {
  (void)user, (void)stream;
  if (bench.job_ns == 0) return SLUICE_OK;
  uint64_t begin_ns = sluice_now_ns(), begin_cpu_ns = sluice_thread_cpu_ns();
  while (sluice_now_ns() - begin_ns < bench.job_ns) {
  }
  uint64_t cpu_ns = sluice_thread_cpu_ns() - begin_cpu_ns;
  if (bench.jobs[index].lane == SLUICE_LANE_COMPUTE) bench.jobs_cpu_ns += cpu_ns;
  return SLUICE_OK;
}

static int32_t add(int32_t lane, int32_t waits_for) {
  int32_t index = bench.num_jobs++;
  bench.waits[index] = waits_for;
  bench.jobs[index] = (sluice_job_t){
      .index = index, .lane = lane, .waits = &bench.waits[index], .num_waits = waits_for >= 0, .run_on_failure = 0};
  return index;
}

static void add_jobs(int32_t chunks) {
  int32_t arrived[MAX_CHUNKS];
  for (int32_t i = 0; i < chunks; ++i) {
    add(SLUICE_LANE_COMM, -1);
    arrived[i] = add(SLUICE_LANE_COMM, -1);
  }
  for (int32_t i = 0; i < chunks; ++i) {
    add(SLUICE_LANE_COMPUTE, arrived[i]);
    add(SLUICE_LANE_COMPUTE, -1);
    int32_t computed = add(SLUICE_LANE_COMPUTE, -1);
    add(SLUICE_LANE_COMM, computed);
    add(SLUICE_LANE_COMM, -1);
  }
}

static sluice_status_t run_pass(sluice_device_t* device) {
  SLUICE_TRY(device->vtable->begin(device, bench.num_jobs, run_job, NULL, NULL));
  for (int32_t i = 0; i < bench.num_jobs; ++i) SLUICE_TRY(device->vtable->submit(device, &bench.jobs[i]));
  return device->vtable->join(device);
}

static int by_size(const void* a, const void* b) {
  double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

static long argument(int argc, char** argv, int place, long otherwise, long most) {
  long value = argc > place ? strtol(argv[place], NULL, 10) : otherwise;
  return value < 0 ? 0 : value > most ? most : value;
}

int main(int argc, char** argv) {
  int32_t chunks = (int32_t)argument(argc, argv, 1, 8, MAX_CHUNKS);
  bench.job_ns = (uint64_t)argument(argc, argv, 2, 0, 1000000) * 1000;
  int32_t passes = (int32_t)argument(argc, argv, 3, 2000, MAX_PASSES);
  double* walk = malloc(sizeof *walk * (size_t)(passes > 0 ? passes : 1));
  sluice_device_t* device = NULL;
  if (walk == NULL || passes == 0 || sluice_cpu_device_create(sluice_process_allocator(), &device) != SLUICE_OK) {
    free(walk);
    return 1;
  }
  add_jobs(chunks);
  device->counts_waits = 1;
  uint64_t reading_ns = sluice_thread_cpu_reading_ns(), wakes = 0, caller_wakes = 0, wake_cpu_ns = 0;
  for (int32_t i = 0; i < passes; ++i) {
    bench.jobs_cpu_ns = 0;
    uint64_t begin_ns = sluice_thread_cpu_ns();
    if (run_pass(device) != SLUICE_OK) exit(1);
    const sluice_lane_waits_t* waits = &device->waits;
    uint64_t took = sluice_thread_cpu_ns() - begin_ns;
    uint64_t of_caller = bench.job_ns == 0 ? 0 : 3 * (uint64_t)chunks;
    uint64_t other = bench.jobs_cpu_ns + waits->caller_cpu_ns + (of_caller + waits->num_caller_wakes + 1) * reading_ns;
    walk[i] = took > other ? (double)(took - other) : 0;
    wakes += waits->num_wakes, caller_wakes += waits->num_caller_wakes, wake_cpu_ns += waits->cpu_ns;
  }
  qsort(walk, (size_t)passes, sizeof *walk, by_size);
  double median = walk[passes / 2], count = passes;
  printf(
      "%d jobs of %.0f us: walking %.1f us of the caller, %.0f ns per job; %.1f wake-ups, %.1f of the caller, %.1f "
      "us\n",
      bench.num_jobs, (double)bench.job_ns * 1e-3, median * 1e-3, median / bench.num_jobs, (double)wakes / count,
      (double)caller_wakes / count, (double)wake_cpu_ns * 1e-3 / count);
  device->vtable->destroy(device);
  free(walk);
  return 0;
}
