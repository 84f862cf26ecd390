// SPDX-License-Identifier: Apache-2.0
/* A probe of a calibration: one op at one size. Private to backend/calibrate. */
#pragma once

#include "backend/calibrate/calibration.h"
#include "backend/cost/machine.h"
#include "backend/moe/context/context.h"

#define SLUICE_PROBE_ROUNDS 9
#define SLUICE_PROBES       96

enum {
  SLUICE_PROBE_GEMM = 0, /* + form */
  SLUICE_PROBE_ROWS = 3,
  SLUICE_PROBE_COPY,
  SLUICE_PROBE_ACTIVATION,
  SLUICE_PROBE_ACTIVATION_GRAD,
  SLUICE_PROBE_RELU,
  SLUICE_PROBE_RELU_GRAD,
  SLUICE_PROBE_EXCHANGE,
  SLUICE_PROBE_HOT_EXCHANGE,  /* all ranks send to the first one, and no other rank receives anything */
  SLUICE_PROBE_TWO_EXCHANGES, /* concurrent: the second is almost empty, as in a backward op */
  SLUICE_PROBE_LAUNCH,
  SLUICE_PROBE_COPY_IN, /* from host memory, at most SLUICE_BENCH_BYTES / 2 */
  SLUICE_PROBE_KINDS
};

typedef struct sluice_probe_s {
  int32_t kind;
  int32_t is_held_out;
  int32_t is_left_out; /* too long for this calibration */
  int32_t repeats;     /* in one sample, the same on all ranks */
  int64_t size;        /* rows of an expert, or bytes, or jobs of a launch */
  int32_t count;
  double samples[SLUICE_PROBE_ROUNDS];
  double seconds; /* the lower quartile, maximum over ranks */
} sluice_probe_t;

/* Memory and sizes that probes share. */
typedef struct sluice_bench_s {
  sluice_context_t* context;
  int64_t model_width, hidden_width; /* as measured */
  int32_t dtype;
  uint64_t element;
  char* memory;
  uint64_t bytes;
  char *rows, *pre_activation, *weights, *grads, *send, *recv; /* parts of `memory` */
  int32_t* index;                                              /* [SLUICE_BENCH_ROWS] */
  float *scalars, *sums;                                       /* [SLUICE_BENCH_ROWS] */
  char* copied;                     /* target of copies on the host; page-locked with device memory */
  sluice_allocator_t device_memory; /* of a device with its own memory, which holds everything else */
} sluice_bench_t;

#define SLUICE_BENCH_ROWS  2048
#define SLUICE_BENCH_BYTES ((int64_t)8 << 20) /* of an exchange or copy, at most */

sluice_status_t sluice_bench_open(sluice_context_t* context, const sluice_calibration_t* wanted,
                                  sluice_bench_t* out_bench);
void sluice_bench_close(sluice_bench_t* bench);
/* Runs the probe `repeats` times. stream: of the surrounding job, with device memory; launches are jobs themselves. */
sluice_status_t sluice_bench_run(sluice_bench_t* bench, const sluice_probe_t* probe, int32_t repeats,
                                 sluice_stream_t stream);
/* The same from outside a job, and its seconds: on the host's clock, or the device's with device memory. */
sluice_status_t sluice_bench_time(sluice_bench_t* bench, const sluice_probe_t* probe, int32_t repeats,
                                  double* out_seconds);

/* Submits the jobs in this order, and joins. fn: as in device.h. */
sluice_status_t sluice_bench_run_jobs(sluice_bench_t* bench, const sluice_job_t* jobs, int32_t count,
                                      sluice_job_fn_t fn, void* user);

/* Work on a lane, and its time. */
typedef struct sluice_bench_job_s {
  int32_t lane;
  const sluice_probe_t* probe;
  int32_t repeats;
  double seconds;
} sluice_bench_job_t;

/* With device memory (probe_on_device.c). _run runs jobs concurrently, timed by the device, and waits for them; _launch
 * runs a chain of `count` empty jobs over two lanes. */
sluice_status_t sluice_bench_open_on_device(sluice_bench_t* bench);
sluice_status_t sluice_bench_send_tables_on_device(sluice_bench_t* bench);
/* [SLUICE_BENCH_ROWS] each. */
void sluice_bench_fill_tables(int32_t* index, float* scalars);
void sluice_bench_close_on_device(sluice_bench_t* bench);
sluice_status_t sluice_bench_run_on_device(sluice_bench_t* bench, sluice_bench_job_t* jobs, int32_t count);
sluice_status_t sluice_bench_launch_on_device(sluice_bench_t* bench, int32_t count, double* out_seconds);
static inline int sluice_bench_on_device_memory(const sluice_bench_t* bench) {
  return bench->context->device->memory != NULL;
}
/* Shares of speed while lanes run together, with copies of two sizes in both directions; collective. */
sluice_status_t sluice_bench_shares(sluice_bench_t* bench, double seconds, sluice_machine_t* machine);
/* The burst of the link after a pause (token_bucket.h), in seconds of line time; collective. */
sluice_status_t sluice_bench_token_bucket(sluice_bench_t* bench, double seconds, double* out_bucket);
/* Exchanges during GEMMs (contention.h), into a machine that has its GEMMs and exchanges; collective. */
sluice_status_t sluice_bench_contention(sluice_bench_t* bench, double seconds, sluice_machine_t* machine);
/* Whole passes of a small layer (passes_fit.h), into an otherwise measured machine; collective. */
sluice_status_t sluice_bench_passes(sluice_bench_t* bench, double seconds, sluice_machine_t* machine);
/* Replaces each time by the maximum over all ranks. */
sluice_status_t sluice_bench_longest(sluice_bench_t* bench, double* seconds, int32_t count);
