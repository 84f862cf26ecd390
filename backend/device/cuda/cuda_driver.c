// SPDX-License-Identifier: Apache-2.0
#include "backend/device/cuda/cuda_driver.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

sluice_status_t sluice_cuda_fail(const sluice_cuda_driver_t* driver, int code, const char* what, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, what);
  vsnprintf(text, sizeof text, what, arguments);
  va_end(arguments);
  const char* name = NULL;
  const char* meaning = NULL;
  if (driver->cuGetErrorName(code, &name) != 0 || name == NULL) name = "unknown error";
  if (driver->cuGetErrorString(code, &meaning) != 0 || meaning == NULL) meaning = "no text";
  sluice_status_t status = code == SLUICE_CU_OUT_OF_MEMORY ? SLUICE_E_NO_MEMORY : SLUICE_E_EXTERNAL;
  return sluice_error_record(status, -1, -1, code, "cuda: %s: %s (%d, %s)", text, name, code, meaning);
}

sluice_status_t sluice_cuda_driver_start(sluice_cuda_driver_t* driver) {
  int code = driver->cuDriverGetVersion(&driver->version);
  if (code != 0) return sluice_cuda_fail(driver, code, "the version of the driver cannot be read");
  if (driver->version < SLUICE_CUDA_MIN_VERSION) {
    return SLUICE_FAIL(SLUICE_E_NOT_FOUND,
                       "cuda: the driver supports CUDA %d.%d, Sluice needs 12.0 or later: update the NVIDIA driver to "
                       "R525 or later",
                       driver->version / 1000, driver->version % 1000 / 10);
  }
  code = driver->cuInit(0);
  if (code != 0) {
    const char* name = NULL;
    if (driver->cuGetErrorName(code, &name) != 0 || name == NULL) name = "unknown error";
    return sluice_error_record(SLUICE_E_NOT_FOUND, -1, -1, code,
                               "cuda: the driver is installed but cannot be initialized: %s (%d); is a GPU visible to "
                               "this process (nvidia-smi, CUDA_VISIBLE_DEVICES)?",
                               name, code);
  }
  return SLUICE_OK;
}

sluice_status_t sluice_cuda_driver_open(const char* library, sluice_cuda_driver_t* out_driver) {
  memset(out_driver, 0, sizeof *out_driver);
  if (library == NULL) library = "libcuda.so.1";
  void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == NULL) {
    return SLUICE_FAIL(SLUICE_E_NOT_FOUND, "cuda: no NVIDIA driver: %s; install one of CUDA 12.0 or later", dlerror());
  }
#define SYMBOL(name, parameters)                                                                         \
  *(void**)&out_driver->name = dlsym(handle, #name);                                                     \
  if (out_driver->name == NULL) {                                                                        \
    return SLUICE_FAIL(SLUICE_E_NOT_FOUND,                                                               \
                       "cuda: %s has no " #name                                                          \
                       ": Sluice needs a driver of CUDA 12.0 or later (R525); update the NVIDIA driver", \
                       library);                                                                         \
  }
#include "backend/device/cuda/cuda_symbols.inc"
#undef SYMBOL
  return sluice_cuda_driver_start(out_driver);
}
