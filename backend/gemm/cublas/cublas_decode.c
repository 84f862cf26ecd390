// SPDX-License-Identifier: Apache-2.0
#include "backend/gemm/cublas/cublas_decode.h"

#include "backend/base/dtype.h"

/* The properties that all weights of one launch share. */
typedef struct kind_s {
  int32_t format, block_cols;
  int64_t cols;
} kind_t;

static kind_t kind_of(const sluice_grouped_gemm_t* list, int64_t index) {
  const sluice_packed_t* packed = &list->packed[index];
  const sluice_gemm_problem_t* p = &list->problems[index];
  return (kind_t){packed->format, packed->block_cols, packed->transposed ? p->k : p->n};
}

static int is_same(kind_t a, kind_t b) {
  return a.format == b.format && a.block_cols == b.block_cols && a.cols == b.cols;
}

/* Bytes of the decoded B; 0 if B is not packed, or if no row is multiplied by it. */
static uint64_t bytes_of(const sluice_grouped_gemm_t* list, int64_t index) {
  const sluice_gemm_problem_t* p = &list->problems[index];
  if (!sluice_gemm_is_packed(list, index) || p->m == 0) return 0;
  return sluice_align_up((uint64_t)p->n * (uint64_t)p->k * sluice_dtype_bytes(list->dtype_ab));
}

int sluice_cublas_can_decode(const sluice_grouped_gemm_t* list) {
  for (int64_t i = 0; i < list->count; ++i) {
    if (bytes_of(list, i) > list->scratch_bytes) return 0;
  }
  return 1;
}

/* Returns the GEMM with its decoded weight at `out`, and fills `weight` for the launch that decodes it. */
static sluice_gemm_problem_t decoded_at(const sluice_grouped_gemm_t* list, int64_t index, void* out,
                                        sluice_cuda_packed_t* weight) {
  const sluice_packed_t* packed = &list->packed[index];
  sluice_gemm_problem_t p = list->problems[index];
  const int64_t rows = packed->transposed ? p.n : p.k, cols = packed->transposed ? p.k : p.n;
  const int64_t ld = packed->transposed ? p.b.col_stride : p.b.row_stride;
  *weight = (sluice_cuda_packed_t){.codes = p.b.data,
                                   .scales = packed->scales,
                                   .out = out,
                                   .rows = rows,
                                   .row_bytes = ld * sluice_packed_format(packed->format)->bits / 8,
                                   .scales_ld = packed->scales_ld,
                                   .half = packed->half};
  p.b = packed->transposed ? (sluice_matrix_t){out, 1, cols} : (sluice_matrix_t){out, cols, 1};
  return p;
}

sluice_status_t sluice_cublas_decode_next(const sluice_grouped_gemm_t* list, int64_t* inout_next,
                                          sluice_cublas_decoded_t* decoded, sluice_grouped_gemm_t* out_part) {
  int64_t count = 0, waiting = 0; /* GEMMs; weights that are not launched yet */
  uint64_t used = 0;
  kind_t kind = {0};
  int64_t i = *inout_next;
  for (; i < list->count && count < SLUICE_CUDA_DECODED; ++i, ++count) {
    const uint64_t bytes = bytes_of(list, i);
    if (bytes > list->scratch_bytes - used) break;
    if (bytes == 0) {
      decoded->problems[count] = list->problems[i];
      continue;
    }
    if (waiting > 0 && !is_same(kind, kind_of(list, i))) {
      SLUICE_TRY(sluice_cuda_decode(list->stream, kind.format, kind.block_cols, kind.cols, list->dtype_ab,
                                    decoded->weights, waiting));
      waiting = 0;
    }
    kind = kind_of(list, i);
    decoded->problems[count] = decoded_at(list, i, (char*)list->scratch + used, &decoded->weights[waiting++]);
    used += bytes;
  }
  *out_part = *list;
  out_part->problems = decoded->problems;
  out_part->count = count;
  out_part->packed = NULL;
  *inout_next = i;
  if (waiting == 0) return SLUICE_OK;
  return sluice_cuda_decode(list->stream, kind.format, kind.block_cols, kind.cols, list->dtype_ab, decoded->weights,
                            waiting);
}
