// SPDX-License-Identifier: Apache-2.0
/* Checks arguments for all implementations, and decodes packed weights for implementations that do not read them. */
#include "backend/gemm/gemm.h"

#include <stdio.h>

#include "backend/base/dtype.h"
#include "backend/base/math.h"

void sluice_gemm_destroy(sluice_gemm_t* gemm) {
  if (gemm != NULL) gemm->vtable->destroy(gemm);
}

int sluice_gemm_supports(const sluice_gemm_t* gemm, const sluice_grouped_gemm_t* list) {
  return gemm->vtable->supports(gemm, list);
}

/* Returns columns [j0, j0 + n) of a GEMM as a GEMM, with their part of B decoded to `scratch`. */
static sluice_gemm_problem_t decoded_part(const sluice_grouped_gemm_t* list, int64_t index, int64_t j0, int64_t n,
                                          char* scratch) {
  const sluice_gemm_problem_t* p = &list->problems[index];
  const sluice_packed_t* packed = &list->packed[index];
  const int transposed = packed->transposed;
  const int64_t ld = transposed ? p->b.col_stride : p->b.row_stride;
  const int64_t rows = transposed ? n : p->k, cols = transposed ? p->k : n;
  for (int64_t r = 0; r < rows; ++r) {
    sluice_packed_decode(packed, p->b.data, ld, (transposed ? j0 : 0) + r, transposed ? 0 : j0, cols, list->dtype_ab,
                         scratch + (uint64_t)(r * cols) * sluice_dtype_bytes(list->dtype_ab));
  }
  sluice_gemm_problem_t part = {p->m, n, p->k, p->a, {scratch, cols, 1}, p->c};
  if (transposed) part.b = (sluice_matrix_t){scratch, 1, cols};
  part.c.data = (char*)p->c.data + j0 * p->c.col_stride * (int64_t)sluice_dtype_bytes(list->dtype_c);
  return part;
}

/* Runs one GEMM in parts of the columns of C. Each part covers the whole of k, so that a 16-bit result is rounded once.
 */
static sluice_status_t run_packed(sluice_gemm_t* gemm, const sluice_grouped_gemm_t* list, int64_t index) {
  enum { EVEN = 2 }; /* with 4 bits, parts begin with whole bytes */
  const sluice_gemm_problem_t* p = &list->problems[index];
  const uint64_t column_bytes = (uint64_t)p->k * sluice_dtype_bytes(list->dtype_ab);
  int64_t most = p->n;
  if (column_bytes > 0) most = sluice_min(p->n, (int64_t)(SLUICE_GEMM_SCRATCH_BYTES / 2 / column_bytes));
  if (most < p->n) most = most / EVEN * EVEN;
  if (most < 1 && p->n > 0) {
    return SLUICE_FAIL(SLUICE_E_UNSUPPORTED,
                       "gemm %s: a packed weight with %lld elements to sum over is too deep to be decoded for it: "
                       "choose gemm \"native\"",
                       gemm->name, (long long)p->k);
  }
  const uint64_t bytes = (uint64_t)most * column_bytes;
  char* scratch = sluice_alloc(gemm->allocator, bytes, "gemm: a decoded part of a packed weight");
  if (scratch == NULL) return sluice_alloc_status();
  sluice_status_t status = SLUICE_OK;
  for (int64_t j0 = 0; j0 < p->n && status == SLUICE_OK; j0 += most) {
    const sluice_gemm_problem_t part = decoded_part(list, index, j0, sluice_min(p->n - j0, most), scratch);
    sluice_grouped_gemm_t one = *list;
    one.problems = &part;
    one.count = 1;
    one.packed = NULL;
    status = gemm->vtable->run(gemm, &one);
  }
  sluice_free(gemm->allocator, scratch, bytes);
  return status;
}

sluice_status_t sluice_gemm_run_decoded(sluice_gemm_t* gemm, const sluice_grouped_gemm_t* list) {
  if (gemm->vtable->decodes || list->packed == NULL) return gemm->vtable->run(gemm, list);
  for (int64_t i = 0; i < list->count; ++i) {
    sluice_grouped_gemm_t one = *list;
    one.problems = &list->problems[i];
    one.count = 1;
    one.packed = NULL;
    if (sluice_gemm_is_packed(list, i)) {
      SLUICE_TRY(run_packed(gemm, list, i));
    } else {
      SLUICE_TRY(gemm->vtable->run(gemm, &one));
    }
  }
  return SLUICE_OK;
}

/* Checks the shape of a packed weight, and its strides from row to row and along a row. */
static sluice_status_t check_packed(const sluice_grouped_gemm_t* list, int64_t index) {
  const sluice_gemm_problem_t* p = &list->problems[index];
  const sluice_packed_t* packed = &list->packed[index];
  char what[64];
  snprintf(what, sizeof what, "gemm: the packed weight of GEMM %lld", (long long)index);
  const int64_t cols = packed->transposed ? p->k : p->n;
  SLUICE_TRY(sluice_packed_check_shape(packed->format, packed->block_cols, cols, what));
  const int64_t step = packed->transposed ? p->b.row_stride : p->b.col_stride;
  const int64_t ld = packed->transposed ? p->b.col_stride : p->b.row_stride;
  const int64_t codes_in_byte = 8 / sluice_packed_format(packed->format)->bits;
  if ((cols > 1 && step != 1) || ld % codes_in_byte != 0) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "%s: strides of %lld along a row and %lld between rows, expected 1 and whole bytes", what,
                       (long long)step, (long long)ld);
  }
  return SLUICE_OK;
}

static sluice_status_t check(const sluice_grouped_gemm_t* list, int64_t index) {
  const sluice_gemm_problem_t* p = &list->problems[index];
  if (p->m < 0 || p->n < 0 || p->k < 0) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "gemm: GEMM %lld has the negative size [%lld, %lld, %lld]",
                       (long long)index, (long long)p->m, (long long)p->n, (long long)p->k);
  }
  return sluice_gemm_is_packed(list, index) ? check_packed(list, index) : SLUICE_OK;
}

sluice_status_t sluice_gemm_run(sluice_gemm_t* gemm, const sluice_grouped_gemm_t* list) {
  if (list->count < 0 || (list->count > 0 && list->problems == NULL)) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "gemm: a list of %lld GEMMs at %p", (long long)list->count,
                       (const void*)list->problems);
  }
  if (list->beta != 0.0f && list->beta != 1.0f) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "gemm: beta is %g, expected 0 or 1", (double)list->beta);
  }
  for (int64_t i = 0; i < list->count; ++i) SLUICE_TRY(check(list, i));
  if (!gemm->vtable->supports(gemm, list)) {
    return SLUICE_FAIL(SLUICE_E_UNSUPPORTED, "gemm %s does not take %s operands with a %s result and these strides%s",
                       gemm->name, sluice_dtype_name(list->dtype_ab), sluice_dtype_name(list->dtype_c),
                       list->packed != NULL ? ", or no packed weights" : "");
  }
  return sluice_gemm_run_decoded(gemm, list);
}
