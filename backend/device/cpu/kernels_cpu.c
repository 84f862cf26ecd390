// SPDX-License-Identifier: Apache-2.0
/* Selects the vectorised kernels at run time: the build has no -march, and ifuncs run before a sanitizer is ready. */
#include "backend/device/cpu/kernels_paths.h"

const sluice_kernels_t* sluice_cpu_kernels(void) {
  const sluice_kernels_t* kernels = sluice_cpu_kernels_avx512();
  if (kernels == NULL) kernels = sluice_cpu_kernels_avx2();
  return kernels != NULL ? kernels : sluice_cpu_kernels_portable();
}
