// SPDX-License-Identifier: Apache-2.0
/* The CUDA driver as one table of symbols, loaded by name at run time. libsluice does not link CUDA; tests fill the
 * table themselves (fake/). */
#pragma once

#include <stddef.h>

#include "backend/base/status.h"

typedef struct sluice_cuda_driver_s {
/* NOLINTNEXTLINE(bugprone-macro-parentheses): a declarator */
#define SYMBOL(name, parameters) int(*name) parameters;
#include "backend/device/cuda/cuda_symbols.inc"
#undef SYMBOL
  int version; /* the version that the driver supports; 13000 is CUDA 13.0 */
} sluice_cuda_driver_t;

/* Driver API 12.0 (R525) added cuLibraryLoadData. */
#define SLUICE_CUDA_MIN_VERSION 12000

/* Values of cuda.h that Sluice uses; `./test --vendor` compares them. */
enum {
  SLUICE_CU_INVALID_VALUE = 1,
  SLUICE_CU_OUT_OF_MEMORY = 2,
  SLUICE_CU_NOT_READY = 600,
  SLUICE_CU_STREAM_NON_BLOCKING = 1,
  SLUICE_CU_EVENT_DEFAULT = 0,
  SLUICE_CU_EVENT_DISABLE_TIMING = 2,
  SLUICE_CU_MEMHOSTALLOC_PORTABLE = 1,
  SLUICE_CU_MEMHOSTREGISTER_PORTABLE = 1,
  SLUICE_CU_POINTER_MEMORY_TYPE = 2,
  SLUICE_CU_POINTER_DEVICE_ORDINAL = 9,
  SLUICE_CU_MEMORY_HOST = 1,
  SLUICE_CU_MEMORY_DEVICE = 2,
  SLUICE_CU_CAPTURE_NONE = 0,
  SLUICE_CU_ATTRIBUTE_SMS = 16,
  SLUICE_CU_ATTRIBUTE_PCI_BUS = 33,
  SLUICE_CU_ATTRIBUTE_PCI_DEVICE = 34,
  SLUICE_CU_ATTRIBUTE_PCI_DOMAIN = 50,
  SLUICE_CU_ATTRIBUTE_MAJOR = 75,
  SLUICE_CU_ATTRIBUTE_MINOR = 76,
  SLUICE_CU_ATTRIBUTE_HOST_NUMA_ID = 134
};

/* Opens `library` (NULL: libcuda.so.1), resolves every symbol, initialises the driver and checks its version. Errors:
 * NOT_FOUND (no library, a missing symbol, a version below the minimum, no device: says which and what to install),
 * EXTERNAL. Threads: thread-safe; the library stays open. */
sluice_status_t sluice_cuda_driver_open(const char* library, sluice_cuda_driver_t* out_driver);
/* Does the second half, for a table that is already filled. */
sluice_status_t sluice_cuda_driver_start(sluice_cuda_driver_t* driver);

/* Records a failed driver call, with `what` as a printf format: OUT_OF_MEMORY becomes NO_MEMORY, all else EXTERNAL,
 * with the driver's name and text for `code` as native code. */
sluice_status_t sluice_cuda_fail(const sluice_cuda_driver_t* driver, int code, const char* what, ...)
    __attribute__((format(printf, 3, 4)));
