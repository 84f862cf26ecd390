// SPDX-License-Identifier: Apache-2.0
#include "backend/gemm/cublas/cublas_streams.h"

#include <string.h>

#include "backend/base/math.h"

enum { ALIGNMENT = 256 };

uint64_t sluice_cublas_streams_part(uint64_t bytes) {
  return bytes / SLUICE_CUBLAS_NUM_STREAMS / ALIGNMENT * ALIGNMENT;
}

static sluice_status_t of_driver(const sluice_cublas_streams_t* s, int code, const char* what) {
  return code == 0 ? SLUICE_OK : sluice_cuda_fail(s->driver, code, "streams for GEMMs: %s", what);
}

static sluice_status_t of_cublas(int code, const char* what) {
  if (code == 0) return SLUICE_OK;
  return sluice_error_record(code == SLUICE_CUBLAS_ALLOC_FAILED ? SLUICE_E_NO_MEMORY : SLUICE_E_EXTERNAL, -1, -1, code,
                             "gemm \"cublas\": streams for GEMMs: %s: cublasStatus_t %d", what, code);
}

/* Opens stream `i`. The stream and the workspace of its handle are set once. */
static sluice_status_t open_one(sluice_cublas_streams_t* s, const sluice_cublas_symbols_t* symbols, int32_t i,
                                char* scratch, uint64_t bytes) {
  SLUICE_TRY(of_driver(s, s->driver->cuStreamCreateWithPriority(&s->streams[i], SLUICE_CU_STREAM_NON_BLOCKING, 0),
                       "none is made"));
  SLUICE_TRY(of_driver(s, s->driver->cuEventCreate(&s->ended[i], SLUICE_CU_EVENT_DISABLE_TIMING),
                       "an event cannot be created"));
  const int code = symbols->cublasCreate_v2(&s->handles[i]);
  if (code != 0) s->handles[i] = NULL;
  SLUICE_TRY(of_cublas(code, "cuBLAS cannot be initialized"));
  SLUICE_TRY(of_cublas(symbols->cublasSetMathMode(s->handles[i], SLUICE_CUBLAS_MATH_FULL_REDUCTION),
                       "reductions in full precision cannot be set"));
  SLUICE_TRY(of_cublas(symbols->cublasSetStream_v2(s->handles[i], s->streams[i]), "a stream cannot be set"));
  const uint64_t part = sluice_cublas_streams_part(bytes);
  return of_cublas(symbols->cublasSetWorkspace_v2(s->handles[i], scratch + (uint64_t)i * part, part),
                   "a workspace cannot be set");
}

sluice_status_t sluice_cublas_streams_open(const sluice_cuda_driver_t* driver, const sluice_cublas_symbols_t* symbols,
                                           char* scratch, uint64_t bytes, sluice_cublas_streams_t* s) {
  s->driver = driver;
  SLUICE_TRY(
      of_driver(s, driver->cuEventCreate(&s->begun, SLUICE_CU_EVENT_DISABLE_TIMING), "an event cannot be created"));
  for (int32_t i = 1; i < SLUICE_CUBLAS_NUM_STREAMS; ++i) SLUICE_TRY(open_one(s, symbols, i, scratch, bytes));
  return SLUICE_OK;
}

void sluice_cublas_streams_close(sluice_cublas_streams_t* s, const sluice_cublas_symbols_t* symbols) {
  for (int32_t i = 1; i < SLUICE_CUBLAS_NUM_STREAMS; ++i) {
    if (s->handles[i] != NULL) (void)symbols->cublasDestroy_v2(s->handles[i]);
    if (s->ended[i] != NULL) (void)s->driver->cuEventDestroy_v2(s->ended[i]);
    if (s->streams[i] != NULL) (void)s->driver->cuStreamDestroy_v2(s->streams[i]);
  }
  if (s->begun != NULL) (void)s->driver->cuEventDestroy_v2(s->begun);
  memset(s, 0, sizeof *s);
}

sluice_status_t sluice_cublas_streams_fork(sluice_cublas_streams_t* s, sluice_stream_t caller, int64_t count) {
  const int32_t wanted = (int32_t)sluice_min(count, SLUICE_CUBLAS_NUM_STREAMS);
  memset(s->load, 0, sizeof s->load);
  s->forked = 1;
  SLUICE_TRY(of_driver(s, s->driver->cuEventRecord(s->begun, caller), "the start of GEMMs cannot be recorded"));
  while (s->forked < wanted) {
    SLUICE_TRY(of_driver(s, s->driver->cuStreamWaitEvent(s->streams[s->forked], s->begun, 0),
                         "a stream cannot wait for the start of GEMMs"));
    ++s->forked;
  }
  return SLUICE_OK;
}

int32_t sluice_cublas_streams_next(sluice_cublas_streams_t* s, double work) {
  int32_t least = 0;
  for (int32_t i = 1; i < s->forked; ++i) {
    if (s->load[i] < s->load[least]) least = i;
  }
  s->load[least] += work;
  return least;
}

sluice_status_t sluice_cublas_streams_join(sluice_cublas_streams_t* s, sluice_stream_t caller, sluice_status_t status) {
  sluice_error_info_t why;
  if (status != SLUICE_OK) sluice_error_capture(&why);
  sluice_status_t joined = SLUICE_OK;
  for (int32_t i = 1; i < s->forked; ++i) {
    int code = s->driver->cuEventRecord(s->ended[i], s->streams[i]);
    if (code == 0) code = s->driver->cuStreamWaitEvent(caller, s->ended[i], 0);
    if (code != 0 && joined == SLUICE_OK) joined = of_driver(s, code, "the caller's stream cannot wait for GEMMs");
  }
  s->forked = 1;
  return status == SLUICE_OK ? joined : sluice_error_adopt(&why);
}
