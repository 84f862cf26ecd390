// SPDX-License-Identifier: Apache-2.0
/* GEMMs through the callback of the host (sluice/context.h), one call per GEMM on the calling thread. */
#include "backend/gemm/host/gemm_host.h"

#include "backend/base/dtype.h"

typedef struct sluice_gemm_host_s {
  sluice_gemm_t base;
  sluice_host_gemm_fn_t fn;
  void* user;
} sluice_gemm_host_t;

static void host_destroy(sluice_gemm_t* gemm) { sluice_free(gemm->allocator, gemm, sizeof(sluice_gemm_host_t)); }

/* The callback takes matrices that have one stride of 1. The strides of a matrix with a single row or column do not
 * matter, so `repair` sets one of them to 1. */
static int has_unit_stride(int64_t rows, int64_t cols, const sluice_matrix_t* matrix) {
  return matrix->row_stride == 1 || matrix->col_stride == 1 || rows <= 1 || cols <= 1;
}

static void repair(int64_t rows, int64_t cols, int64_t* row_stride, int64_t* col_stride) {
  if (*row_stride == 1 || *col_stride == 1) return;
  if (rows <= 1) {
    *row_stride = 1;
  } else if (cols <= 1) {
    *col_stride = 1;
  }
}

/* The host may still decline these dtypes in the call. */
static int host_supports(const sluice_gemm_t* gemm, const sluice_grouped_gemm_t* list) {
  (void)gemm;
  switch (list->dtype_ab) {
    case SLUICE_DTYPE_F32:
    case SLUICE_DTYPE_BF16:
    case SLUICE_DTYPE_F16: break;
    default: return 0;
  }
  if (list->dtype_c != list->dtype_ab && list->dtype_c != SLUICE_DTYPE_F32) return 0;
  for (int64_t i = 0; i < list->count; ++i) {
    const sluice_gemm_problem_t* p = &list->problems[i];
    if (!has_unit_stride(p->m, p->k, &p->a) || !has_unit_stride(p->k, p->n, &p->b) ||
        !has_unit_stride(p->m, p->n, &p->c)) {
      return 0;
    }
  }
  return 1;
}

int32_t sluice_gemm_host_call(const sluice_gemm_t* gemm, const sluice_grouped_gemm_t* list, int64_t index) {
  const sluice_gemm_host_t* host = (const sluice_gemm_host_t*)gemm;
  const sluice_gemm_problem_t* p = &list->problems[index];
  if (p->m == 0 || p->n == 0) return 0;
  if (p->k == 0 && list->beta != 0.0f) return 0;
  sluice_host_gemm_args_t args = {
      .m = p->m,
      .n = p->n,
      .k = p->k,
      .a = p->a.data,
      .b = p->b.data,
      .c = p->c.data,
      .a_row_stride = p->a.row_stride,
      .a_col_stride = p->a.col_stride,
      .b_row_stride = p->b.row_stride,
      .b_col_stride = p->b.col_stride,
      .c_row_stride = p->c.row_stride,
      .c_col_stride = p->c.col_stride,
      .dtype_ab = list->dtype_ab,
      .dtype_c = list->dtype_c,
      .beta = list->beta,
  };
  repair(p->m, p->k, &args.a_row_stride, &args.a_col_stride);
  repair(p->k, p->n, &args.b_row_stride, &args.b_col_stride);
  repair(p->m, p->n, &args.c_row_stride, &args.c_col_stride);
  return host->fn(host->user, &args);
}

static sluice_status_t host_run(sluice_gemm_t* gemm, const sluice_grouped_gemm_t* list) {
  for (int64_t i = 0; i < list->count; ++i) {
    int32_t answer = sluice_gemm_host_call(gemm, list, i);
    if (answer != 0) {
      const sluice_gemm_problem_t* p = &list->problems[i];
      return sluice_error_record(SLUICE_E_UNSUPPORTED, -1, -1, answer,
                                 "the host's gemm declined GEMM %lld, [%lld, %lld, %lld] %s -> %s, with %d",
                                 (long long)i, (long long)p->m, (long long)p->n, (long long)p->k,
                                 sluice_dtype_name(list->dtype_ab), sluice_dtype_name(list->dtype_c), (int)answer);
    }
  }
  return SLUICE_OK;
}

static const sluice_gemm_vtable_t host_vtable = {
    .destroy = host_destroy,
    .supports = host_supports,
    .run = host_run,
};

sluice_status_t sluice_gemm_host_create(sluice_host_gemm_fn_t fn, void* user, sluice_allocator_t* allocator,
                                        sluice_gemm_t** out_gemm) {
  *out_gemm = NULL;
  if (fn == NULL) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "gemm \"host\" needs the host's function: set host_gemm in the context's config");
  }
  sluice_gemm_host_t* host = sluice_alloc_zeroed(allocator, sizeof *host, "gemm host");
  if (host == NULL) return sluice_alloc_status();
  host->base.vtable = &host_vtable;
  host->base.allocator = allocator;
  memcpy(host->base.name, "host", sizeof "host");
  host->fn = fn;
  host->user = user;
  *out_gemm = &host->base;
  return SLUICE_OK;
}
