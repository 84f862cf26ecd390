// SPDX-License-Identifier: Apache-2.0
// The CPU build of the kernels, by name, from the sources that nvcc compiles; SLUICE_IN_ORDERS: the second build.
#ifdef SLUICE_IN_ORDERS
#include "backend/device/cuda/fake/lane_orders.h"
#define sluice_emulated_kernel sluice_ordered_kernel
#endif
#include "backend/device/cuda/kernels/sluice_kernels.cu"

typedef void (*emulated_fn_t)(int64_t warps, const void* args);

extern "C" emulated_fn_t sluice_emulated_kernel(const char* name, size_t* out_bytes);

#define ENTRY(name, args) {"sluice_" #name, sluice_##name##_on_cpu, sizeof(args)},
static const struct {
  const char* name;
  emulated_fn_t fn;
  size_t bytes;
} kernels[] = {
#define KERNEL(name, args) ENTRY(name, args)
#define KERNEL_DTYPES(name, args) \
  ENTRY(name##_f32, args) ENTRY(name##_bf16, args) ENTRY(name##_f16, args) ENTRY(name##_f64, args)
#include "backend/device/cuda/kernels/kernel_list.inc"
#undef KERNEL
#undef KERNEL_DTYPES
};

extern "C" emulated_fn_t sluice_emulated_kernel(const char* name, size_t* out_bytes) {
  for (const auto& kernel : kernels) {
    if (strcmp(kernel.name, name) != 0) continue;
    *out_bytes = kernel.bytes;
    return kernel.fn;
  }
  return nullptr;
}
