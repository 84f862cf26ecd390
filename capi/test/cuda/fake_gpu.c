// SPDX-License-Identifier: Apache-2.0
/* The fake driver, cuBLAS(Lt) and NCCL as one shared object. A test puts it into the loader's path under the vendors'
 * names libcuda.so.1, libcublas.so.13, libcublasLt.so.13 and libnccl.so.2, and libsluice opens it. All memory counts as
 * memory of the current context's device (or device 0), so that a host without CUDA can pass its own. */
#include <string.h>

#include "backend/comm/nccl/fake/fake_nccl.h"
#include "backend/device/cuda/fake/fake_cuda.h"
#include "backend/gemm/cublas/fake/fake_cublas.h"

__attribute__((constructor)) static void begin(void) { sluice_fake_cuda_reset(); }

static int any_memory(void* out_value, int attribute, unsigned long long pointer) {
  unsigned int type = SLUICE_CU_MEMORY_DEVICE;
  int ordinal = sluice_fake_current_device() > 0 ? sluice_fake_current_device() : 0;
  (void)pointer;
  if (attribute == SLUICE_CU_POINTER_MEMORY_TYPE) memcpy(out_value, &type, sizeof type);
  if (attribute == SLUICE_CU_POINTER_DEVICE_ORDINAL) memcpy(out_value, &ordinal, sizeof ordinal);
  return 0;
}

static sluice_cuda_driver_t driver(void) {
  sluice_cuda_driver_t table = *sluice_fake_cuda_driver();
  table.cuPointerGetAttribute = any_memory;
  return table;
}

/* Indirect functions, which dlsym resolves to the entries of the table. */
#define EXPORT(name, table)                                                                     \
  static void (*resolve_##name(void))(void) { return (void (*)(void))(uintptr_t)(table).name; } \
  __attribute__((visibility("default"), ifunc("resolve_" #name))) void name(void);

#define SYMBOL(name, parameters) EXPORT(name, driver())
#include "backend/device/cuda/cuda_symbols.inc"
#undef SYMBOL
#define SYMBOL(required, name, parameters) EXPORT(name, sluice_fake_cublas(1))
#include "backend/gemm/cublas/cublas_symbols.inc"
#undef SYMBOL
#define SYMBOL(result, name, parameters) EXPORT(name, sluice_fake_cublaslt())
#include "backend/gemm/cublas/cublaslt_symbols.inc"
#undef SYMBOL
#define SYMBOL(result, name, parameters) EXPORT(name, sluice_fake_nccl())
#include "backend/comm/nccl/nccl_register_symbols.inc"
#include "backend/comm/nccl/nccl_symbols.inc"
#undef SYMBOL

/* The library does not call this function: hosts use it to capture their streams. */
#define SHOWN __attribute__((visibility("default")))
SHOWN int cuStreamBeginCapture_v2(void* stream, int mode) {
  (void)mode; /* thread-local: the only one here */
  sluice_fake_cuda_begin_capture(stream);
  return 0;
}
SHOWN int cuStreamEndCapture(void* stream, void** out_graph) {
  sluice_fake_graph_t* graph = NULL;
  int code = sluice_fake_cuda_end_capture(stream, &graph);
  *out_graph = graph;
  return code;
}
/* The fake launches the graph itself. */
SHOWN int cuGraphInstantiateWithFlags(void** out_launchable, void* graph, unsigned long long flags) {
  (void)flags;
  *out_launchable = graph;
  return 0;
}
SHOWN int cuGraphLaunch(void* launchable, void* stream) {
  sluice_fake_cuda_launch_graph(launchable, stream);
  return 0;
}
SHOWN int cuGraphExecDestroy(void* launchable) {
  (void)launchable;
  return 0;
}
SHOWN int cuGraphDestroy(void* graph) {
  sluice_fake_cuda_destroy_graph(graph);
  return 0;
}
