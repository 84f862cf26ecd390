// SPDX-License-Identifier: Apache-2.0
/* The registered buffers of a communicator: device memory that NCCL allocated and registered. Sends from it and
 * receives into it avoid NCCL's own buffers if the link allows that. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/comm/nccl/nccl_state.h"

const char* sluice_nccl_refusal_of_memory(sluice_comm_t* base) {
  nccl_comm_t* comm = sluice_nccl_downcast(base);
  const sluice_nccl_symbols_t* nccl = &comm->nccl;
  int version = 0;
  const char* wanted = getenv("SLUICE_NCCL_REGISTER");
  if (wanted != NULL && strcmp(wanted, "0") == 0) return "SLUICE_NCCL_REGISTER is 0";
  if (nccl->ncclGetVersion(&version) != 0) return "the version of NCCL cannot be read";
  if (version < SLUICE_NCCL_REGISTER_VERSION) {
    snprintf(comm->refusal_text, sizeof comm->refusal_text,
             "NCCL's version is %d, registered buffers need 2.23.0 (%d) or later", version,
             SLUICE_NCCL_REGISTER_VERSION);
    return comm->refusal_text;
  }
#define SYMBOL(result, name, parameters) \
  if (nccl->name == NULL) return "NCCL has no symbol " #name;
#include "backend/comm/nccl/nccl_register_symbols.inc"
#undef SYMBOL
  return NULL;
}

/* Allocates a block and registers it. Returns NCCL's code; on a failure *out_what names the call that failed, and
 * nothing is left. */
static int allocate_and_register(nccl_comm_t* comm, uint64_t bytes, sluice_nccl_block_t* block, const char** out_what) {
  *out_what = "ncclMemAlloc";
  void* data = NULL;
  int code = comm->nccl.ncclMemAlloc(&data, bytes);
  if (code != 0) return code;
  void* handle = NULL;
  *out_what = "ncclCommRegister";
  pthread_mutex_lock(&comm->mutex);
  code = comm->comm != NULL ? comm->nccl.ncclCommRegister(comm->comm, data, bytes, &handle) : SLUICE_NCCL_REMOTE_ERROR;
  pthread_mutex_unlock(&comm->mutex);
  if (code != 0 && code != SLUICE_NCCL_IN_PROGRESS) {
    (void)comm->nccl.ncclMemFree(data);
    return code;
  }
  block->data = data;
  block->handle = handle;
  return 0;
}

static sluice_status_t take_registered(nccl_comm_t* comm, uint64_t bytes, sluice_nccl_block_t* block) {
  const char* what = NULL;
  int code = allocate_and_register(comm, bytes, block, &what);
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
  if (comm->comm == NULL) sluice_comm_mark_broken(base, status);
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
  /* Messages may be in flight. The call may return the error of an earlier launch instead: the second call waits. An
   * aborted communicator has deregistered its buffers itself. */
  if (comm->driver->cuCtxSynchronize() != 0) (void)comm->driver->cuCtxSynchronize();
  pthread_mutex_lock(&comm->mutex);
  if (comm->comm != NULL) (void)comm->nccl.ncclCommDeregister(comm->comm, block->handle);
  pthread_mutex_unlock(&comm->mutex);
  (void)comm->nccl.ncclMemFree(block->data);
  if (is_current) (void)sluice_cuda_leave(comm->device);
  sluice_free(sluice_process_allocator(), block, sizeof *block);
}
