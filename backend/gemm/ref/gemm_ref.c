// SPDX-License-Identifier: Apache-2.0
/* The plain GEMM: C[i][j] = sum over k, ascending, of A[i][k] * B[k][j], plus beta * C[i][j].
 *
 * The sum of one element starts at zero, adds one rounded product after the other in f32 (f64 for f64), adds C last and
 * is rounded once to C's dtype. The sum does not depend on m, n or the strides, so a row has the same bits in every
 * chunking. Operands are first copied, tile by tile, into f32 on the stack; this conversion is exact. The loops over
 * tiles thus need no strides and no dtypes, and the compiler can vectorise over j, which reorders no sum.
 */
#include "backend/base/dtype.h"
#include "backend/gemm/gemm.h"

enum { TILE_M = 32, TILE_N = 64, TILE_K = 64 };

#define REAL    float
#define NAME(x) x##_f32
#include "backend/gemm/ref/gemm_ref_tile.inc"
#undef REAL
#undef NAME
#define REAL    double
#define NAME(x) x##_f64
#include "backend/gemm/ref/gemm_ref_tile.inc"
#undef REAL
#undef NAME

static void ref_destroy(sluice_gemm_t* gemm) { sluice_free(gemm->allocator, gemm, sizeof *gemm); }

static int ref_supports(const sluice_gemm_t* gemm, const sluice_grouped_gemm_t* list) {
  (void)gemm;
  switch (list->dtype_ab) {
    case SLUICE_DTYPE_F32:
    case SLUICE_DTYPE_BF16:
    case SLUICE_DTYPE_F16: return list->dtype_c == list->dtype_ab || list->dtype_c == SLUICE_DTYPE_F32;
    case SLUICE_DTYPE_F64: return list->dtype_c == SLUICE_DTYPE_F64;
    default: return 0;
  }
}

static sluice_status_t ref_run(sluice_gemm_t* gemm, const sluice_grouped_gemm_t* list) {
  (void)gemm;
  for (int64_t i = 0; i < list->count; ++i) {
    if (list->dtype_ab == SLUICE_DTYPE_F64) {
      gemm_f64(list, i);
    } else {
      gemm_f32(list, i);
    }
  }
  return SLUICE_OK;
}

static const sluice_gemm_vtable_t ref_vtable = {
    .destroy = ref_destroy,
    .supports = ref_supports,
    .run = ref_run,
    .decodes = 1,
};

sluice_status_t sluice_gemm_ref_create(sluice_allocator_t* allocator, sluice_gemm_t** out_gemm) {
  *out_gemm = NULL;
  sluice_gemm_t* gemm = sluice_alloc_zeroed(allocator, sizeof *gemm, "gemm ref");
  if (gemm == NULL) return sluice_alloc_status();
  gemm->vtable = &ref_vtable;
  gemm->allocator = allocator;
  memcpy(gemm->name, "ref", sizeof "ref");
  *out_gemm = gemm;
  return SLUICE_OK;
}
