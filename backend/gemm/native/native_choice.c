#include <stdio.h>
#include <string.h>

#include "backend/base/status.h"
#include "backend/gemm/native/native_kernels.h"

int sluice_native_sets(sluice_native_set_t out_sets[SLUICE_NATIVE_SETS]) {
  out_sets[0] = (sluice_native_set_t){"avx512", "AVX-512 (F, BW, DQ, VL)", sluice_native_avx512()};
  out_sets[1] = (sluice_native_set_t){"avx2", "AVX2 with FMA and F16C", sluice_native_avx2()};
  return SLUICE_NATIVE_SETS;
}

sluice_status_t sluice_native_choose(const sluice_native_set_t* sets, int count, const char* wanted,
                                     const sluice_native_kernels_t** out_kernels, char* why, size_t why_bytes) {
  *out_kernels = NULL;
  const sluice_native_set_t* widest = NULL;
  const sluice_native_set_t* named = NULL;
  for (int i = 0; i < count; ++i) {
    if (widest == NULL && sets[i].kernels != NULL) widest = &sets[i];
    if (wanted != NULL && strcmp(sets[i].name, wanted) == 0) named = &sets[i];
  }
  if (wanted == NULL || wanted[0] == '\0') {
    if (widest == NULL) {
      snprintf(why, why_bytes, "this processor has neither %s nor %s, which it is written for", sets[0].needs,
               sets[1].needs);
      return SLUICE_E_NOT_FOUND;
    }
    *out_kernels = widest->kernels;
    return SLUICE_OK;
  }
  if (named == NULL) {
    return SLUICE_FAIL(
        SLUICE_E_INVALID_ARGUMENT,
        "SLUICE_NATIVE is \"%.64s\": it takes %s or %s, or nothing for the widest that the processor has", wanted,
        sets[0].name, sets[1].name);
  }
  if (named->kernels == NULL) {
    return SLUICE_FAIL(SLUICE_E_UNSUPPORTED,
                       "SLUICE_NATIVE is \"%s\", but this processor has no %s; it has %s. Unset it", named->name,
                       named->needs, widest != NULL ? widest->needs : "none that \"native\" is written for");
  }
  *out_kernels = named->kernels;
  return SLUICE_OK;
}
