// SPDX-License-Identifier: Apache-2.0
#include "backend/comm/nccl/nccl_memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char* sluice_nccl_memory_refusal(const sluice_nccl_symbols_t* nccl, char* out, size_t out_bytes) {
  int version = 0;
  const char* wanted = getenv("SLUICE_NCCL_REGISTER");
  if (wanted != NULL && strcmp(wanted, "0") == 0) return "SLUICE_NCCL_REGISTER is 0";
  if (nccl->ncclGetVersion(&version) != 0) return "the version of NCCL cannot be read";
  if (version < SLUICE_NCCL_REGISTER_VERSION) {
    snprintf(out, out_bytes, "NCCL's version is %d, registered buffers need 2.23.0 (%d) or later", version,
             SLUICE_NCCL_REGISTER_VERSION);
    return out;
  }
#define SYMBOL(result, name, parameters) \
  if (nccl->name == NULL) return "NCCL has no symbol " #name;
#include "backend/comm/nccl/nccl_register_symbols.inc"
#undef SYMBOL
  return NULL;
}

int sluice_nccl_memory_take(const sluice_nccl_symbols_t* nccl, pthread_mutex_t* mutex, void* const* comm,
                            uint64_t bytes, sluice_nccl_block_t* out_block, const char** out_what) {
  *out_what = "ncclMemAlloc";
  *out_block = (sluice_nccl_block_t){.data = NULL};
  void* data = NULL;
  int code = nccl->ncclMemAlloc(&data, bytes);
  if (code != 0) return code;
  void* handle = NULL;
  *out_what = "ncclCommRegister";
  pthread_mutex_lock(mutex);
  code = *comm != NULL ? nccl->ncclCommRegister(*comm, data, bytes, &handle) : SLUICE_NCCL_REMOTE_ERROR;
  pthread_mutex_unlock(mutex);
  if (code != 0 && code != SLUICE_NCCL_IN_PROGRESS) {
    (void)nccl->ncclMemFree(data);
    return code;
  }
  *out_block = (sluice_nccl_block_t){.data = data, .handle = handle};
  return 0;
}

void sluice_nccl_memory_give(const sluice_nccl_symbols_t* nccl, const sluice_cuda_driver_t* driver,
                             pthread_mutex_t* mutex, void* const* comm, const sluice_nccl_block_t* block) {
  /* The call may return the error of an earlier launch instead: the second call waits. */
  if (driver->cuCtxSynchronize() != 0) (void)driver->cuCtxSynchronize();
  pthread_mutex_lock(mutex);
  if (*comm != NULL) (void)nccl->ncclCommDeregister(*comm, block->handle);
  pthread_mutex_unlock(mutex);
  (void)nccl->ncclMemFree(block->data);
}
