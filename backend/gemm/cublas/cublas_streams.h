// SPDX-License-Identifier: Apache-2.0
/* Streams for GEMMs side by side: the caller's and some of our own, each with a cuBLAS handle and a workspace. */
#ifndef SLUICE_BACKEND_GEMM_CUBLAS_CUBLAS_STREAMS_H_
#define SLUICE_BACKEND_GEMM_CUBLAS_CUBLAS_STREAMS_H_

#include "backend/device/cuda/cuda_driver.h"
#include "backend/gemm/cublas/cublas_symbols.h"

enum { SLUICE_CUBLAS_SIDE = 3, SLUICE_CUBLAS_NUM_STREAMS = SLUICE_CUBLAS_SIDE + 1 };

/* The caller's stream is number 0, and its handle is not here. */
typedef struct sluice_cublas_streams_s {
  const sluice_cuda_driver_t* driver;
  void* handles[SLUICE_CUBLAS_NUM_STREAMS];
  void* streams[SLUICE_CUBLAS_NUM_STREAMS];
  void* ended[SLUICE_CUBLAS_NUM_STREAMS]; /* events */
  void* begun;
  int32_t forked;                         /* streams that the caller's last fork has, its own with them */
  double load[SLUICE_CUBLAS_NUM_STREAMS]; /* since the fork */
} sluice_cublas_streams_t;

/* scratch: `bytes` of device memory at a multiple of 256, of which each stream has an equal part. The device's context
 * is current. After an error, close. Errors: NO_MEMORY, EXTERNAL. */
sluice_status_t sluice_cublas_streams_open(const sluice_cuda_driver_t* driver, const sluice_cublas_symbols_t* symbols,
                                           char* scratch, uint64_t bytes, sluice_cublas_streams_t* s);
void sluice_cublas_streams_close(sluice_cublas_streams_t* s, const sluice_cublas_symbols_t* symbols);
/* Bytes of a stream's part. */
uint64_t sluice_cublas_streams_part(uint64_t bytes);

/* What is on the caller's stream comes before what is enqueued on `count` streams, until the join; also in a capture.
 */
sluice_status_t sluice_cublas_streams_fork(sluice_cublas_streams_t* s, sluice_stream_t caller, int64_t count);
/* The stream that has least to do, which then has `work` more. */
int32_t sluice_cublas_streams_next(sluice_cublas_streams_t* s, double work);
/* What follows on the caller's stream comes after all of it. Passes `status` on, and joins whatever it is. */
sluice_status_t sluice_cublas_streams_join(sluice_cublas_streams_t* s, sluice_stream_t caller, sluice_status_t status);

#endif /* SLUICE_BACKEND_GEMM_CUBLAS_CUBLAS_STREAMS_H_ */
