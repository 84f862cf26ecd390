// SPDX-License-Identifier: Apache-2.0
#include "backend/gemm/cublas/fake/fake_cublas.h"

#include <stdlib.h>
#include <string.h>

#include "backend/device/cuda/fake/fake_record.h"
#include "backend/gemm/cublas/fake/fake_gemms.h"

enum { NOT_INITIALIZED = 1, INVALID_VALUE = 7 };

typedef struct handle_s {
  void* stream;
  int has_workspace, math, sms;
} handle_t;

/* Atomic, since ranks are threads and call at the same time. */
static struct {
  _Atomic int version, declines_halves, last_compute, last_sms, fail_code, failed;
  _Atomic int64_t handles, single, grouped, calls;
  int64_t fail_at;
} state = {.version = 130002, .fail_at = -1};

void sluice_fake_cublas_fail_call(int64_t nth, int code) {
  state.calls = 0;
  state.fail_at = nth;
  state.fail_code = code;
  state.failed = 0;
}
int sluice_fake_cublas_failed(void) { return state.failed; }

int sluice_fake_cublas_planned(void) {
  if (state.calls++ != state.fail_at) return 0;
  state.failed = 1;
  return state.fail_code;
}

int64_t sluice_fake_cublas_handles(void) { return state.handles; }
int64_t sluice_fake_cublas_single_calls(void) { return state.single; }
int64_t sluice_fake_cublas_grouped_calls(void) { return state.grouped; }
int sluice_fake_cublas_last_compute(void) { return state.last_compute; }
int sluice_fake_cublas_last_sms(void) { return state.last_sms; }
void sluice_fake_cublas_set_version(int version) { state.version = version; }

static int fake_create(void** out_handle) {
  int code = sluice_fake_cublas_planned();
  if (code != 0) return code;
  *out_handle = calloc(1, sizeof(handle_t));
  ++state.handles;
  return 0;
}
static int fake_destroy(void* handle) {
  int code = sluice_fake_cublas_planned();
  free(handle);
  --state.handles;
  return code;
}
static int fake_version(void* handle, int* out_version) {
  (void)handle;
  *out_version = state.version;
  return sluice_fake_cublas_planned();
}
static int fake_set_stream(void* handle, void* stream) {
  ((handle_t*)handle)->stream = stream;
  ((handle_t*)handle)->has_workspace = 0; /* as cuBLAS does */
  return sluice_fake_cublas_planned();
}
static int fake_set_workspace(void* handle, void* workspace, size_t bytes) {
  if ((uintptr_t)workspace % 256 != 0) return INVALID_VALUE;
  ((handle_t*)handle)->has_workspace = bytes > 0;
  return sluice_fake_cublas_planned();
}
static int fake_set_math(void* handle, int mode) {
  ((handle_t*)handle)->math = mode;
  return sluice_fake_cublas_planned();
}

static int fake_set_sms(void* handle, int sms) {
  if (sms < 0 || sms > SLUICE_FAKE_SMS) return INVALID_VALUE;
  ((handle_t*)handle)->sms = sms;
  return sluice_fake_cublas_planned();
}

static double scalar(const void* data, int64_t i, int compute) {
  return compute == SLUICE_CUBLAS_COMPUTE_64F ? ((const double*)data)[i] : (double)((const float*)data)[i];
}

static int fake_gemm(void* opaque, int trans_a, int trans_b, int m, int n, int k, const void* alpha, const void* a,
                     int type_a, int lda, const void* b, int type_b, int ldb, const void* beta, void* c, int type_c,
                     int ldc, int compute, int algorithm) {
  const handle_t* handle = opaque;
  int code = sluice_fake_cublas_planned();
  if (code != 0) return code;
  if (!handle->has_workspace || handle->math != SLUICE_CUBLAS_MATH_FULL_REDUCTION) return NOT_INITIALIZED;
  const fake_gemm_t p = {trans_a,
                         trans_b,
                         m,
                         n,
                         k,
                         lda,
                         ldb,
                         ldc,
                         type_a,
                         type_c,
                         scalar(alpha, 0, compute),
                         scalar(beta, 0, compute),
                         a,
                         b,
                         c,
                         {0},
                         handle->sms};
  if (sluice_fake_gemm_is_wrong(&p) || type_a != type_b || algorithm != SLUICE_CUBLAS_ALGORITHM_DEFAULT)
    return INVALID_VALUE;
  if ((compute == SLUICE_CUBLAS_COMPUTE_64F) != (type_a == SLUICE_CUBLAS_R_64F)) return SLUICE_CUBLAS_NOT_SUPPORTED;
  ++state.single;
  state.last_compute = compute;
  state.last_sms = handle->sms;
  sluice_fake_gemm_enqueue(handle->stream, "single", &p);
  return 0;
}

/* The arrays on the host are read at the call. The tables of pointers are device memory, which is read when the call
 * runs, and at each launch of a graph that contains it. */
typedef struct grouped_s {
  const void* const* a;
  const void* const* b;
  void* const* c;
  int count;
  int wants_alignment;
  fake_gemm_t problems[];
} grouped_t;

/* cuBLAS sees only the address of the table. Whether it faults depends on its kernel; the fake writes NaN to C. */
static int is_misaligned(const fake_gemm_t* p) {
  return ((uintptr_t)p->a | (uintptr_t)p->b | (uintptr_t)p->c) % 16 != 0;
}

static void run_grouped(void* user) {
  grouped_t* g = user;
  if (sluice_fake_is_dry()) return;
  for (int i = 0; i < g->count; ++i) {
    g->problems[i].a = g->a[i];
    g->problems[i].b = g->b[i];
    g->problems[i].c = g->c[i];
    sluice_fake_gemm_run(&g->problems[i]);
    if (g->wants_alignment && is_misaligned(&g->problems[i])) sluice_fake_gemm_poison(&g->problems[i]);
  }
}

static void note_grouped(void* user, const sluice_fake_moment_t* moment) {
  grouped_t* g = user;
  const void* const tables[] = {g->a, g->b, (const void*)g->c};
  for (int i = 0; i < 3; ++i) sluice_fake_cuda_note_at(moment, tables[i], (uint64_t)g->count * sizeof(void*), 0);
  for (int i = 0; i < g->count; ++i) g->problems[i].moment = *moment;
}

static void* grouped_again(const void* user) {
  const grouped_t* from = user;
  size_t bytes = sizeof *from + (size_t)from->count * sizeof from->problems[0];
  grouped_t* g = malloc(bytes);
  memcpy(g, from, bytes);
  return g;
}

static int fake_grouped(void* opaque, const int* trans_a, const int* trans_b, const int* m, const int* n, const int* k,
                        const void* alpha, const void* const* a, int type_a, const int* lda, const void* const* b,
                        int type_b, const int* ldb, const void* beta, void* const* c, int type_c, const int* ldc,
                        int num_groups, const int* group_sizes, int compute) {
  const handle_t* handle = opaque;
  int code = sluice_fake_cublas_planned();
  if (code != 0) return code;
  if (!handle->has_workspace || num_groups < 1 || type_a != type_b || type_a != type_c) return INVALID_VALUE;
  int is_half = type_a == SLUICE_CUBLAS_R_16BF || type_a == SLUICE_CUBLAS_R_16F;
  if (state.declines_halves && is_half) return state.declines_halves;
  grouped_t* g = malloc(sizeof *g + (size_t)num_groups * sizeof g->problems[0]);
  *g = (grouped_t){
      .a = a, .b = b, .c = c, .count = num_groups, .wants_alignment = is_half || compute == SLUICE_CUBLAS_COMPUTE_TF32};
  for (int i = 0; i < num_groups; ++i) {
    g->problems[i] = (fake_gemm_t){trans_a[i],
                                   trans_b[i],
                                   m[i],
                                   n[i],
                                   k[i],
                                   lda[i],
                                   ldb[i],
                                   ldc[i],
                                   type_a,
                                   type_c,
                                   scalar(alpha, i, compute),
                                   scalar(beta, i, compute),
                                   NULL,
                                   NULL,
                                   NULL,
                                   {0},
                                   handle->sms};
    if (group_sizes[i] == 1 && !sluice_fake_gemm_is_wrong(&g->problems[i])) continue;
    free(g);
    return INVALID_VALUE;
  }
  ++state.grouped;
  state.last_compute = compute;
  state.last_sms = handle->sms;
  sluice_fake_gemm_record(handle->stream, "grouped", g->problems, g->count);
  sluice_fake_op_enqueue(
      handle->stream,
      &(sluice_fake_op_t){
          .name = "GEMMs", .run = run_grouped, .drop = free, .user = g, .note = note_grouped, .again = grouped_again});
  return 0;
}

sluice_cublas_symbols_t sluice_fake_cublas(int with_groups) {
  static const int answers[] = {0, 0, SLUICE_CUBLAS_NOT_SUPPORTED, SLUICE_CUBLAS_ARCH_MISMATCH,
                                SLUICE_CUBLAS_INVALID_VALUE};
  state.declines_halves = answers[with_groups];
  return (sluice_cublas_symbols_t){.cublasCreate_v2 = fake_create,
                                   .cublasDestroy_v2 = fake_destroy,
                                   .cublasGetVersion_v2 = fake_version,
                                   .cublasSetStream_v2 = fake_set_stream,
                                   .cublasSetWorkspace_v2 = fake_set_workspace,
                                   .cublasSetMathMode = fake_set_math,
                                   .cublasSetSmCountTarget = fake_set_sms,
                                   .cublasGemmEx = fake_gemm,
                                   .cublasGemmGroupedBatchedEx = with_groups ? fake_grouped : NULL};
}
