// SPDX-License-Identifier: Apache-2.0
/* Streams for concurrent GEMMs: the caller's and some of our own, each with a cuBLAS handle and a workspace. */
#pragma once

#include "backend/device/cuda/cuda_driver.h"
#include "backend/gemm/cublas/cublas_symbols.h"

enum { SLUICE_CUBLAS_SIDE = 3, SLUICE_CUBLAS_NUM_STREAMS = SLUICE_CUBLAS_SIDE + 1 };

/* The caller's stream is number 0; this struct does not have its handle. */
typedef struct sluice_cublas_streams_s {
  const sluice_cuda_driver_t* driver;
  void* handles[SLUICE_CUBLAS_NUM_STREAMS];
  void* streams[SLUICE_CUBLAS_NUM_STREAMS];
  void* ended[SLUICE_CUBLAS_NUM_STREAMS]; /* events */
  void* begun;
  int32_t forked;                         /* streams of the last fork, including the caller's */
  double load[SLUICE_CUBLAS_NUM_STREAMS]; /* work since the fork */
} sluice_cublas_streams_t;

/* scratch: `bytes` of device memory at a multiple of 256, divided equally among the streams. The device's context must
 * be current. After an error, call close. Errors: NO_MEMORY, EXTERNAL. */
sluice_status_t sluice_cublas_streams_open(const sluice_cuda_driver_t* driver, const sluice_cublas_symbols_t* symbols,
                                           char* scratch, uint64_t bytes, sluice_cublas_streams_t* s);
void sluice_cublas_streams_close(sluice_cublas_streams_t* s, const sluice_cublas_symbols_t* symbols);
/* Bytes of each stream's part. */
uint64_t sluice_cublas_streams_part(uint64_t bytes);

/* From here to the join, work on up to `count` streams starts after the work on the caller's stream. Works in a
 * capture.
 */
sluice_status_t sluice_cublas_streams_fork(sluice_cublas_streams_t* s, sluice_stream_t caller, int64_t count);
/* Returns the stream with the least load, and adds `work` to its load. */
int32_t sluice_cublas_streams_next(sluice_cublas_streams_t* s, double work);
/* Later work on the caller's stream starts after the work of all streams. Always joins, and passes `status` on. */
sluice_status_t sluice_cublas_streams_join(sluice_cublas_streams_t* s, sluice_stream_t caller, sluice_status_t status);
