// SPDX-License-Identifier: Apache-2.0
#include "backend/comm/nccl/nccl_register.h"

#include <string.h>

#include "backend/comm/nccl/nccl_failure.h"
#include "backend/comm/nccl/nccl_settle.h"

const char* sluice_nccl_refusal_of_memory(sluice_comm_t* base) {
  nccl_comm_t* comm = sluice_nccl_downcast(base);
  return sluice_nccl_memory_refusal(&comm->nccl, comm->refusal_text, sizeof comm->refusal_text);
}

static sluice_status_t take_registered(nccl_comm_t* comm, uint64_t bytes, sluice_nccl_block_t* block) {
  const char* what = NULL;
  int code = sluice_nccl_memory_take(&comm->nccl, &comm->mutex, &comm->comm, bytes, block, &what);
  if (atomic_load(&comm->is_aborted) && code != 0) return sluice_nccl_fail_aborted(comm);
  if (code != 0 && strcmp(what, "ncclMemAlloc") == 0) {
    return sluice_error_record(SLUICE_E_NO_MEMORY, comm->base.rank, -1, code,
                               "rank %d: nccl: %llu bytes of device memory for exchanges: %s (%d)", comm->base.rank,
                               (unsigned long long)bytes, comm->nccl.ncclGetErrorString(code), code);
  }
  if (code != 0) {
    return sluice_nccl_fail(comm, code, "a buffer cannot be registered (set SLUICE_NCCL_REGISTER=0 to do without)");
  }
  return sluice_nccl_settle(comm, "the registration of a buffer", sluice_nccl_deadline_of(comm));
}

static sluice_status_t start_and_take(nccl_comm_t* comm, uint64_t bytes, sluice_nccl_block_t* block) {
  SLUICE_TRY(sluice_nccl_make_ready(comm, sluice_nccl_deadline_of(comm)));
  return take_registered(comm, bytes, block);
}

sluice_status_t sluice_nccl_allocate(sluice_comm_t* base, uint64_t bytes, void** out_data) {
  nccl_comm_t* comm = sluice_nccl_downcast(base);
  *out_data = NULL;
  sluice_nccl_block_t* block = sluice_alloc_zeroed(sluice_process_allocator(), sizeof *block, "nccl block");
  if (block == NULL) return sluice_alloc_status();
  sluice_status_t status = sluice_cuda_enter(comm->device);
  if (status == SLUICE_OK) status = sluice_cuda_leave_with(comm->device, start_and_take(comm, bytes, block));
  if (comm->comm == NULL) sluice_nccl_mark_broken(base, status);
  if (block->data == NULL) {
    sluice_free(sluice_process_allocator(), block, sizeof *block);
    return status;
  }
  block->next = comm->blocks;
  comm->blocks = block;
  if (status == SLUICE_OK) {
    *out_data = block->data;
    return SLUICE_OK;
  }
  sluice_error_info_t why;
  sluice_error_capture(&why);
  sluice_nccl_release(base, block->data);
  return sluice_error_adopt(&why);
}

void sluice_nccl_release(sluice_comm_t* base, void* data) {
  nccl_comm_t* comm = sluice_nccl_downcast(base);
  sluice_nccl_block_t** at = &comm->blocks;
  while (*at != NULL && (*at)->data != data) at = &(*at)->next;
  sluice_nccl_block_t* block = *at;
  if (block == NULL || sluice_cuda_is_inherited(comm->device)) return;
  *at = block->next;
  int is_current = sluice_cuda_enter(comm->device) == SLUICE_OK;
  sluice_nccl_memory_give(&comm->nccl, comm->driver, &comm->mutex, &comm->comm, block);
  if (is_current) (void)sluice_cuda_leave(comm->device);
  sluice_free(sluice_process_allocator(), block, sizeof *block);
}
