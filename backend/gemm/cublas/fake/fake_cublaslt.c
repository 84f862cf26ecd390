// SPDX-License-Identifier: Apache-2.0
/* A fake cuBLASLt on the CPU. It records descriptors; its only algorithm refuses operands with another alignment, and
 * layouts that were changed after a search or a check. */
#include <stdlib.h>
#include <string.h>

#include "backend/gemm/cublas/fake/fake_cublas.h"
#include "backend/gemm/cublas/fake/fake_gemms.h"

enum { INVALID_VALUE = 7, NUM_PREFERENCES = 16 };
#define ALGORITHM UINT64_C(0x51ce)

typedef struct desc_s {
  int compute, scale_type, trans[2];
} desc_t;

typedef struct layout_s {
  int type;
  uint64_t rows, columns;
  int64_t leading;
  int is_checked;
} layout_t;

typedef struct preference_s {
  uint64_t values[NUM_PREFERENCES];
} preference_t;

static struct {
  _Atomic int64_t live, problems, searches;
  _Atomic int declines, most_columns;
  _Atomic size_t version;
} state = {.version = 130002};

int64_t sluice_fake_cublaslt_live(void) { return state.live; }
int64_t sluice_fake_cublaslt_gemms(void) { return state.problems; }
int64_t sluice_fake_cublaslt_searches(void) { return state.searches; }
void sluice_fake_cublaslt_set_most_columns(int most) { state.most_columns = most; }
void sluice_fake_cublaslt_set(size_t version, int declines) {
  state.version = version;
  state.declines = declines;
}

static int make(void** out, size_t bytes, const void* from) {
  int code = sluice_fake_cublas_planned();
  if (code != 0) return code;
  *out = malloc(bytes);
  if (from != NULL) {
    memcpy(*out, from, bytes);
  } else {
    memset(*out, 0, bytes);
  }
  ++state.live;
  return 0;
}

static int drop(void* object) {
  free(object);
  --state.live;
  return sluice_fake_cublas_planned();
}

static int fake_create(void** out_handle) { return make(out_handle, sizeof(int), NULL); }
static size_t fake_version(void) { return state.version; }

static int fake_desc_create(void** out_desc, int compute, int scale_type) {
  const desc_t desc = {compute, scale_type, {0, 0}};
  return make(out_desc, sizeof desc, &desc);
}
static int fake_desc_set(void* desc, int attribute, const void* value, size_t bytes) {
  int code = sluice_fake_cublas_planned();
  int which = attribute - SLUICE_CUBLASLT_DESC_TRANS_A;
  if (code == 0 && (which < 0 || which > 1 || bytes != sizeof(int32_t))) code = INVALID_VALUE;
  if (code == 0) memcpy(&((desc_t*)desc)->trans[which], value, bytes);
  return code;
}

static int fake_layout_create(void** out_layout, int type, uint64_t rows, uint64_t columns, int64_t leading) {
  const layout_t layout = {type, rows, columns, leading, 0};
  return make(out_layout, sizeof layout, &layout);
}
static int fake_layout_set(void* opaque, int attribute, const void* value, size_t bytes) {
  int code = sluice_fake_cublas_planned();
  layout_t* layout = opaque;
  if (code == 0 && (attribute != SLUICE_CUBLASLT_LAYOUT_COLUMNS || bytes != sizeof(uint64_t))) code = INVALID_VALUE;
  if (code != 0) return code;
  memcpy(&layout->columns, value, bytes);
  layout->is_checked = 0;
  return 0;
}

static void note_checked(void* a, void* b, void* c) {
  ((layout_t*)a)->is_checked = ((layout_t*)b)->is_checked = ((layout_t*)c)->is_checked = 1;
}

static int fake_preference_create(void** out_preference) { return make(out_preference, sizeof(preference_t), NULL); }
static int fake_preference_set(void* preference, int attribute, const void* value, size_t bytes) {
  int code = sluice_fake_cublas_planned();
  size_t wanted = attribute == SLUICE_CUBLASLT_PREF_MAX_WORKSPACE ? 8 : 4;
  if (code == 0 && (attribute < 0 || attribute >= NUM_PREFERENCES || bytes != wanted)) code = INVALID_VALUE;
  if (code == 0) memcpy(&((preference_t*)preference)->values[attribute], value, bytes);
  return code;
}

static int fake_heuristic(void* handle, void* desc, void* layout_a, void* layout_b, void* layout_c, void* layout_d,
                          void* preference, int requested, sluice_cublaslt_result_t* out_results, int* out_count) {
  const uint64_t* wishes = ((const preference_t*)preference)->values;
  const uint64_t reductions = SLUICE_CUBLASLT_REDUCTION_INPLACE | SLUICE_CUBLASLT_REDUCTION_COMPUTE_TYPE;
  int code = sluice_fake_cublas_planned();
  *out_count = 0;
  if (code != 0) return code;
  if (handle == NULL || desc == NULL || layout_c != layout_d || requested < 1) return INVALID_VALUE;
  if (wishes[SLUICE_CUBLASLT_PREF_REDUCTIONS] != reductions) return INVALID_VALUE;
  ++state.searches;
  if (state.declines) return SLUICE_CUBLAS_NOT_SUPPORTED;
  memset(out_results, 0, sizeof *out_results);
  out_results->algorithm[0] = ALGORITHM;
  out_results->algorithm[1] = wishes[SLUICE_CUBLASLT_PREF_ALIGNMENT_A];
  out_results->algorithm[2] = wishes[SLUICE_CUBLASLT_PREF_ALIGNMENT_B];
  out_results->algorithm[3] = wishes[SLUICE_CUBLASLT_PREF_ALIGNMENT_C];
  out_results->algorithm[4] = ((const layout_t*)layout_a)->rows;
  out_results->workspace_bytes = wishes[SLUICE_CUBLASLT_PREF_MAX_WORKSPACE];
  *out_count = 1;
  note_checked(layout_a, layout_b, layout_c);
  return 0;
}

static int fake_check(void* handle, void* desc, void* layout_a, void* layout_b, void* layout_c, void* layout_d,
                      const uint64_t* algorithm, sluice_cublaslt_result_t* out_result) {
  int code = sluice_fake_cublas_planned();
  if (code != 0) return code;
  if (handle == NULL || desc == NULL || layout_c != layout_d || algorithm[0] != ALGORITHM) return INVALID_VALUE;
  if (state.most_columns != 0 && ((const layout_t*)layout_c)->columns > (uint64_t)state.most_columns) {
    return SLUICE_CUBLAS_NOT_SUPPORTED;
  }
  memset(out_result, 0, sizeof *out_result);
  note_checked(layout_a, layout_b, layout_c);
  return 0;
}

static int is_aligned(const void* data, uint64_t alignment) {
  return alignment > 0 && (uintptr_t)data % alignment == 0;
}

static double scalar(const void* data, int type) {
  return type == SLUICE_CUBLAS_R_64F ? *(const double*)data : (double)*(const float*)data;
}

static int fake_matmul(void* handle, void* opaque, const void* alpha, const void* a, void* opaque_a, const void* b,
                       void* opaque_b, const void* beta, const void* c, void* opaque_c, void* d, void* opaque_d,
                       const uint64_t* algorithm, void* workspace, size_t workspace_bytes, void* stream) {
  const desc_t* desc = opaque;
  const layout_t *la = opaque_a, *lb = opaque_b, *lc = opaque_c;
  int code = sluice_fake_cublas_planned();
  if (code != 0) return code;
  int fits = is_aligned(a, algorithm[1]) && is_aligned(b, algorithm[2]) && is_aligned(d, algorithm[3]);
  if (handle == NULL || algorithm[0] != ALGORITHM || algorithm[4] != la->rows || !fits) return INVALID_VALUE;
  if (!la->is_checked || !lb->is_checked || !lc->is_checked) return INVALID_VALUE;
  if (c != d || opaque_c != opaque_d || workspace == NULL || workspace_bytes == 0) return INVALID_VALUE;
  int is_64 = desc->compute == SLUICE_CUBLAS_COMPUTE_64F;
  if (is_64 != (la->type == SLUICE_CUBLAS_R_64F) || is_64 != (desc->scale_type == SLUICE_CUBLAS_R_64F)) {
    return SLUICE_CUBLAS_NOT_SUPPORTED;
  }
  const fake_gemm_t p = {.trans_a = desc->trans[0],
                         .trans_b = desc->trans[1],
                         .m = (int)lc->rows,
                         .n = (int)lc->columns,
                         .k = (int)(desc->trans[0] ? la->rows : la->columns),
                         .lda = (int)la->leading,
                         .ldb = (int)lb->leading,
                         .ldc = (int)lc->leading,
                         .type = la->type,
                         .type_c = lc->type,
                         .alpha = scalar(alpha, desc->scale_type),
                         .beta = scalar(beta, desc->scale_type),
                         .a = a,
                         .b = b,
                         .c = d};
  uint64_t rows_b = (uint64_t)(desc->trans[1] ? p.n : p.k);
  if (sluice_fake_gemm_is_wrong(&p) || la->type != lb->type || lb->rows != rows_b) return INVALID_VALUE;
  ++state.problems;
  sluice_fake_gemm_enqueue(stream, "lt", &p);
  return 0;
}

sluice_cublaslt_symbols_t sluice_fake_cublaslt(void) {
  return (sluice_cublaslt_symbols_t){.cublasLtCreate = fake_create,
                                     .cublasLtDestroy = drop,
                                     .cublasLtGetVersion = fake_version,
                                     .cublasLtMatmulDescCreate = fake_desc_create,
                                     .cublasLtMatmulDescDestroy = drop,
                                     .cublasLtMatmulDescSetAttribute = fake_desc_set,
                                     .cublasLtMatrixLayoutCreate = fake_layout_create,
                                     .cublasLtMatrixLayoutDestroy = drop,
                                     .cublasLtMatrixLayoutSetAttribute = fake_layout_set,
                                     .cublasLtMatmulPreferenceCreate = fake_preference_create,
                                     .cublasLtMatmulPreferenceDestroy = drop,
                                     .cublasLtMatmulPreferenceSetAttribute = fake_preference_set,
                                     .cublasLtMatmulAlgoGetHeuristic = fake_heuristic,
                                     .cublasLtMatmulAlgoCheck = fake_check,
                                     .cublasLtMatmul = fake_matmul};
}
