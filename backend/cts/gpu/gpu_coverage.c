// SPDX-License-Identifier: Apache-2.0
#include "backend/cts/gpu/gpu_coverage.h"

#include <stdio.h>

#include "backend/cts/gpu/gpu_rig.h"
#ifdef SLUICE_GPU_SUITE_FAKE
#include "backend/device/cuda/fake/fake_cuda.h"
#include "backend/device/cuda/fake/lane_orders.h"
#endif

#ifdef SLUICE_GPU_SUITE_FAKE

void gpu_begin_coverage(void) {
  if (!sluice_fake_orders_begin()) printf("     ThreadSanitizer: lanes and warps have one order\n");
}

void gpu_report_coverage(void) {
  static const char* const names[] = {
#define KERNEL(name, args) "sluice_" #name,
#define KERNEL_DTYPES(name, args) \
  "sluice_" #name "_f32", "sluice_" #name "_bf16", "sluice_" #name "_f16", "sluice_" #name "_f64",
#include "backend/device/cuda/kernels/kernel_list.inc"
#undef KERNEL
#undef KERNEL_DTYPES
  };
  char problem[400];
  const int64_t problems = sluice_fake_orders_end(problem, sizeof problem);
  gpu_report("lanes and warps have no race, and the same bits in every order", problems > 0 ? problem : NULL);
  for (size_t i = 0; i < sizeof names / sizeof names[0]; ++i) {
    gpu_report(names[i], sluice_fake_cuda_has_kernel(names[i]) ? NULL : "no part launches it");
  }
}

#else

void gpu_begin_coverage(void) {}
void gpu_report_coverage(void) { gpu_report("coverage", "the driver does not tell: run the suite over the fake one"); }

#endif
