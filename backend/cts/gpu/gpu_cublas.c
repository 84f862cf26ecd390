// SPDX-License-Identifier: Apache-2.0
#include "backend/cts/gpu/gpu_cublas.h"

#include "backend/cts/gpu/gpu_rig.h"
#ifdef SLUICE_GPU_SUITE_FAKE
#include "backend/gemm/cublas/fake/fake_cublas.h"
#endif

sluice_gemm_t* gpu_cublas_open(int32_t how, sluice_allocator_t* host) {
  sluice_gemm_t* gemm = NULL;
  sluice_gemm_cublas_options_t options = {.device = gpu_rig.device, .memory = &gpu_rig.memory, .how = how};
#ifdef SLUICE_GPU_SUITE_FAKE
  sluice_cublas_symbols_t symbols = sluice_fake_cublas(1);
  sluice_cublaslt_symbols_t lt = sluice_fake_cublaslt();
  options.symbols = &symbols, options.lt_symbols = &lt;
#endif
  if (sluice_gemm_cublas_create(&options, host, &gemm) != SLUICE_OK) gpu_die("cublas");
  return gemm;
}
