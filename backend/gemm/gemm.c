/* The checked entries every implementation shares. */
#include "backend/gemm/gemm.h"

#include "backend/base/dtype.h"

void sluice_gemm_destroy(sluice_gemm_t* gemm) {
  if (gemm != NULL) gemm->vtable->destroy(gemm);
}

int sluice_gemm_supports(const sluice_gemm_t* gemm, const sluice_grouped_gemm_t* list) {
  return gemm->vtable->supports(gemm, list);
}

sluice_status_t sluice_gemm_run(sluice_gemm_t* gemm, const sluice_grouped_gemm_t* list) {
  if (list->count < 0 || (list->count > 0 && list->problems == NULL)) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "gemm: a list of %lld GEMMs at %p", (long long)list->count,
                       (const void*)list->problems);
  }
  if (list->beta != 0.0f && list->beta != 1.0f) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "gemm: beta is %g, expected 0 or 1", (double)list->beta);
  }
  for (int64_t i = 0; i < list->count; ++i) {
    const sluice_gemm_problem_t* p = &list->problems[i];
    if (p->m < 0 || p->n < 0 || p->k < 0) {
      return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "gemm: GEMM %lld has the negative size [%lld, %lld, %lld]",
                         (long long)i, (long long)p->m, (long long)p->n, (long long)p->k);
    }
  }
  if (!gemm->vtable->supports(gemm, list)) {
    return SLUICE_FAIL(SLUICE_E_UNSUPPORTED, "gemm %s does not take %s operands with a %s result and these strides",
                       gemm->name, sluice_dtype_name(list->dtype_ab), sluice_dtype_name(list->dtype_c));
  }
  return gemm->vtable->run(gemm, list);
}
