// SPDX-License-Identifier: Apache-2.0
/* Device memory that NCCL allocated and registered with a communicator: sends from it and receives into it avoid NCCL's
 * own buffers if the link allows that.
 *
 * Functions return NCCL's codes (0: done; IN_PROGRESS counts as done, and the caller waits for the communicator). The
 * device is entered. Threads: comm-exclusive; `mutex` is held around every use of the communicator. */
#pragma once

#include <pthread.h>

#include "backend/comm/nccl/nccl_library.h"
#include "backend/device/cuda/cuda_device.h"

typedef struct sluice_nccl_block_s {
  struct sluice_nccl_block_s* next;
  void* data;
  void* handle; /* of the registration */
} sluice_nccl_block_t;

/* Returns NULL if this NCCL can register buffers of exchanges, else the reason, in `out`. */
const char* sluice_nccl_memory_refusal(const sluice_nccl_symbols_t* nccl, char* out, size_t out_bytes);
/* Allocates a block and registers it with *comm. On a failure *out_what names the call that failed, and nothing is
 * left. */
int sluice_nccl_memory_take(const sluice_nccl_symbols_t* nccl, pthread_mutex_t* mutex, void* const* comm,
                            uint64_t bytes, sluice_nccl_block_t* out_block, const char** out_what);
/* Waits for the device, since messages may be in flight; then deregisters (an aborted communicator, *comm NULL, has
 * done so itself) and frees. */
void sluice_nccl_memory_give(const sluice_nccl_symbols_t* nccl, const sluice_cuda_driver_t* driver,
                             pthread_mutex_t* mutex, void* const* comm, const sluice_nccl_block_t* block);
