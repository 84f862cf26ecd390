#include "backend/gemm/cublas/fake/fake_cublas.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/dtype.h"
#include "backend/device/cuda/fake/fake_cuda.h"
#include "backend/gemm/cublas/fake/fake_cublas_parts.h"

enum { NOT_INITIALIZED = 1, INVALID_VALUE = 7 };

typedef struct handle_s {
  void* stream;
  int has_workspace, math;
} handle_t;

/* Ranks are threads and call at the same time: without atomics a handle that is given back is now and then not counted.
 */
static struct {
  _Atomic int64_t calls;
  int64_t fail_at;
  _Atomic int fail_code, failed, version, declines_halves, last_compute;
  _Atomic int64_t handles, single, grouped;
} state = {.fail_at = -1, .version = 130002};

void sluice_fake_cublas_fail_call(int64_t nth, int code) {
  state.calls = 0;
  state.fail_at = nth;
  state.fail_code = code;
  state.failed = 0;
}
int sluice_fake_cublas_failed(void) { return state.failed; }
int64_t sluice_fake_cublas_handles(void) { return state.handles; }
int64_t sluice_fake_cublas_single_calls(void) { return state.single; }
int64_t sluice_fake_cublas_grouped_calls(void) { return state.grouped; }
int sluice_fake_cublas_last_compute(void) { return state.last_compute; }
void sluice_fake_cublas_set_version(int version) { state.version = version; }

int sluice_fake_cublas_planned(void) {
  if (state.calls++ != state.fail_at) return 0;
  state.failed = 1;
  return state.fail_code;
}

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
  ((handle_t*)handle)->has_workspace = 0; /* as the real one */
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

/* ---- products -------------------------------------------------------------------------------------------------- */

static double element(const void* data, int64_t at, int type) {
  switch (type) {
    case SLUICE_CUBLAS_R_16BF: return (double)sluice_bf16_to_f32(((const uint16_t*)data)[at]);
    case SLUICE_CUBLAS_R_16F: return (double)sluice_f16_to_f32(((const uint16_t*)data)[at]);
    case SLUICE_CUBLAS_R_64F: return ((const double*)data)[at];
    default: return (double)((const float*)data)[at];
  }
}
static void set_element(void* data, int64_t at, int type, double x) {
  switch (type) {
    case SLUICE_CUBLAS_R_16BF: ((uint16_t*)data)[at] = sluice_f32_to_bf16((float)x); break;
    case SLUICE_CUBLAS_R_16F: ((uint16_t*)data)[at] = sluice_f32_to_f16((float)x); break;
    case SLUICE_CUBLAS_R_64F: ((double*)data)[at] = x; break;
    default: ((float*)data)[at] = (float)x; break;
  }
}

static void note_columns(const fake_product_t* p, const void* data, int type, int rows, int columns, int ld,
                         int is_write) {
  uint64_t bytes = type == SLUICE_CUBLAS_R_64F ? 8 : type == SLUICE_CUBLAS_R_32F ? 4 : 2;
  for (int64_t j = 0; j < columns; ++j) {
    sluice_fake_cuda_note_at(&p->moment, (const char*)data + (uint64_t)(j * ld) * bytes, (uint64_t)rows * bytes,
                             is_write);
  }
}

static void multiply(const fake_product_t* p) {
  note_columns(p, p->a, p->type, p->trans_a ? p->k : p->m, p->trans_a ? p->m : p->k, p->lda, 0);
  note_columns(p, p->b, p->type, p->trans_b ? p->n : p->k, p->trans_b ? p->k : p->n, p->ldb, 0);
  note_columns(p, p->c, p->type_c, p->m, p->n, p->ldc, 1);
  for (int64_t j = 0; j < p->n; ++j) {
    for (int64_t i = 0; i < p->m; ++i) {
      double sum = 0;
      for (int64_t l = 0; l < p->k; ++l) {
        sum += element(p->a, p->trans_a ? i * p->lda + l : l * p->lda + i, p->type) *
               element(p->b, p->trans_b ? l * p->ldb + j : j * p->ldb + l, p->type);
      }
      int64_t at = j * p->ldc + i;
      double old = p->beta != 0 ? p->beta * element(p->c, at, p->type_c) : 0;
      set_element(p->c, at, p->type_c, p->alpha * sum + old);
    }
  }
}

int sluice_fake_cublas_is_wrong(const fake_product_t* p) {
  int rows_a = p->trans_a ? p->k : p->m, rows_b = p->trans_b ? p->n : p->k;
  return p->m <= 0 || p->n <= 0 || p->k <= 0 || p->lda < rows_a || p->ldb < rows_b || p->ldc < p->m;
}

static double scalar(const void* data, int64_t i, int compute) {
  return compute == SLUICE_CUBLAS_COMPUTE_64F ? ((const double*)data)[i] : (double)((const float*)data)[i];
}

static void run_one(void* user) { multiply(user); }

static void note_one(void* user, const sluice_fake_moment_t* moment) { ((fake_product_t*)user)->moment = *moment; }

static void* one_again(const void* user) {
  fake_product_t* p = malloc(sizeof *p);
  memcpy(p, user, sizeof *p);
  return p;
}

static void enqueue(void* stream, const sluice_fake_op_t* op) {
  sluice_fake_cuda_lock();
  sluice_fake_cuda_enqueue(stream, op);
  sluice_fake_cuda_unlock();
}

void sluice_fake_cublas_enqueue(void* stream, const fake_product_t* p) {
  fake_product_t* kept = malloc(sizeof *kept);
  *kept = *p;
  enqueue(stream,
          &(sluice_fake_op_t){.run = run_one, .drop = free, .user = kept, .note = note_one, .again = one_again});
}

static int fake_gemm(void* opaque, int trans_a, int trans_b, int m, int n, int k, const void* alpha, const void* a,
                     int type_a, int lda, const void* b, int type_b, int ldb, const void* beta, void* c, int type_c,
                     int ldc, int compute, int algorithm) {
  const handle_t* handle = opaque;
  int code = sluice_fake_cublas_planned();
  if (code != 0) return code;
  if (!handle->has_workspace || handle->math != SLUICE_CUBLAS_MATH_FULL_REDUCTION) return NOT_INITIALIZED;
  const fake_product_t p = {
      trans_a, trans_b, m, n,  k, lda, ldb, ldc, type_a, type_c, scalar(alpha, 0, compute), scalar(beta, 0, compute),
      a,       b,       c, {0}};
  if (sluice_fake_cublas_is_wrong(&p) || type_a != type_b || algorithm != SLUICE_CUBLAS_ALGORITHM_DEFAULT)
    return INVALID_VALUE;
  if ((compute == SLUICE_CUBLAS_COMPUTE_64F) != (type_a == SLUICE_CUBLAS_R_64F)) return SLUICE_CUBLAS_NOT_SUPPORTED;
  ++state.single;
  state.last_compute = compute;
  sluice_fake_cublas_enqueue(handle->stream, &p);
  return 0;
}

/* The tables of pointers are device memory: read when the call runs, not when it is made. */
typedef struct grouped_s {
  const void* const* a;
  const void* const* b;
  void* const* c;
  int count;
  int wants_alignment;
  fake_product_t products[];
} grouped_t;

/* The real one, which sees only the table's address, then faults or not as its kernel happens to load; here C is NaN.
 */
static int is_misaligned(const fake_product_t* p) {
  return ((uintptr_t)p->a | (uintptr_t)p->b | (uintptr_t)p->c) % 16 != 0;
}
static void poison(const fake_product_t* p) {
  for (int64_t j = 0; j < p->n; ++j) {
    for (int64_t i = 0; i < p->m; ++i) set_element(p->c, j * p->ldc + i, p->type_c, NAN);
  }
}

static void run_grouped(void* user) {
  grouped_t* g = user;
  for (int i = 0; i < g->count; ++i) {
    g->products[i].a = g->a[i];
    g->products[i].b = g->b[i];
    g->products[i].c = g->c[i];
    multiply(&g->products[i]);
    if (g->wants_alignment && is_misaligned(&g->products[i])) poison(&g->products[i]);
  }
}

static void note_grouped(void* user, const sluice_fake_moment_t* moment) {
  grouped_t* g = user;
  for (int i = 0; i < g->count; ++i) g->products[i].moment = *moment;
}

static void* grouped_again(const void* user) {
  const grouped_t* from = user;
  size_t bytes = sizeof *from + (size_t)from->count * sizeof from->products[0];
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
  grouped_t* g = malloc(sizeof *g + (size_t)num_groups * sizeof g->products[0]);
  *g = (grouped_t){
      .a = a, .b = b, .c = c, .count = num_groups, .wants_alignment = is_half || compute == SLUICE_CUBLAS_COMPUTE_TF32};
  for (int i = 0; i < num_groups; ++i) {
    g->products[i] = (fake_product_t){trans_a[i],
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
                                      {0}};
    if (group_sizes[i] == 1 && !sluice_fake_cublas_is_wrong(&g->products[i])) continue;
    free(g);
    return INVALID_VALUE;
  }
  ++state.grouped;
  state.last_compute = compute;
  enqueue(
      handle->stream,
      &(sluice_fake_op_t){.run = run_grouped, .drop = free, .user = g, .note = note_grouped, .again = grouped_again});
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
                                   .cublasGemmEx = fake_gemm,
                                   .cublasGemmGroupedBatchedEx = with_groups ? fake_grouped : NULL};
}
