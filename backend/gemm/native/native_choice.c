// SPDX-License-Identifier: Apache-2.0
/* The list of sets of kernels, and the choice of one. */
#include <stdio.h>
#include <string.h>

#include "backend/base/status.h"
#include "backend/gemm/native/native_kernels.h"

int sluice_native_sets(sluice_native_set_t out_sets[SLUICE_NATIVE_SETS]) {
  out_sets[0] = (sluice_native_set_t){"amx", "AVX512-BF16 and AMX (TILE, BF16) that the kernel lets this process use",
                                      sluice_native_amx()};
  out_sets[1] = (sluice_native_set_t){"avx512_bf16", "AVX-512 with BF16", sluice_native_avx512_bf16()};
  out_sets[2] = (sluice_native_set_t){"avx512", "AVX-512 (F, BW, DQ, VL)", sluice_native_avx512()};
  out_sets[3] = (sluice_native_set_t){"avx2", "AVX2 with FMA and F16C", sluice_native_avx2()};
  return SLUICE_NATIVE_SETS;
}

/* "a, b or c": the names of the sets, or what they need. */
static void enumerate(const sluice_native_set_t* sets, int count, int needs, const char* last, char* text,
                      size_t bytes) {
  size_t used = 0;
  text[0] = '\0';
  for (int i = 0; i < count && used < bytes; ++i) {
    const char* between = i == 0 ? "" : i + 1 < count ? ", " : last;
    used += (size_t)snprintf(text + used, bytes - used, "%s%s", between, needs ? sets[i].needs : sets[i].name);
  }
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
      char all[192];
      enumerate(sets, count, 1, " nor ", all, sizeof all);
      snprintf(why, why_bytes, "this processor has neither %s; \"native\" needs one of them", all);
      return SLUICE_E_NOT_FOUND;
    }
    *out_kernels = widest->kernels;
    return SLUICE_OK;
  }
  if (named == NULL) {
    char all[64];
    enumerate(sets, count, 0, " or ", all, sizeof all);
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "SLUICE_NATIVE is \"%.64s\": set it to %s, or unset it to use the widest that the processor has",
                       wanted, all);
  }
  if (named->kernels == NULL) {
    return SLUICE_FAIL(SLUICE_E_UNSUPPORTED,
                       "SLUICE_NATIVE is \"%s\", but this processor has no %s; it has %s. Unset the variable",
                       named->name, named->needs, widest != NULL ? widest->needs : "none that \"native\" supports");
  }
  *out_kernels = named->kernels;
  return SLUICE_OK;
}
