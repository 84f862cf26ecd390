/* Registered buffers: whether all ranks have them, and the blocks. */
#include <string.h>

#include "backend/base/log.h"
#include "backend/comm/nccl/nccl_parts.h"

sluice_status_t sluice_nccl_tell_word(nccl_comm_t* comm) {
  uint64_t world_size = (uint64_t)comm->base.world_size, bytes = world_size * 5 * sizeof(void*);
  comm->refusal = sluice_nccl_memory_refusal(&comm->nccl, comm->refusal_text, sizeof comm->refusal_text);
  if (comm->refusal == NULL && !comm->base.wants_memory) comm->refusal = "its slots are bounded or come from the host";
  comm->words[comm->base.rank] = comm->refusal == NULL;
  const void** at = sluice_alloc_zeroed(sluice_process_allocator(), bytes, "nccl agreement");
  if (at == NULL) return SLUICE_E_NO_MEMORY;
  void** recv = (void**)(at + world_size);
  uint64_t* word_bytes = (uint64_t*)(void*)(at + 2 * world_size);
  for (int32_t p = 0; p < comm->base.world_size; ++p) {
    at[p] = &comm->words[comm->base.rank];
    recv[p] = &comm->words[p];
    word_bytes[p] = p == comm->base.rank ? 0 : sizeof *comm->words;
  }
  const sluice_exchange_t exchange = {at, word_bytes, recv, word_bytes};
  sluice_status_t status = sluice_nccl_run_staged(comm, &comm->requests[AGREEMENT], &exchange, at + 3 * world_size,
                                                  (void**)(at + 4 * world_size));
  sluice_free(sluice_process_allocator(), at, bytes);
  return status;
}

/* What the ranks said; who asks has waited for an exchange that came later, so that this one is over. */
static sluice_status_t decide(nccl_comm_t* comm) {
  int32_t refuses = -1;
  sluice_status_t status = sluice_nccl_wait_staged(comm, &comm->requests[AGREEMENT], sluice_nccl_deadline_of(comm));
  if (status == SLUICE_E_TIMED_OUT) {
    sluice_nccl_abort_group(comm);
    return SLUICE_FAIL_PEER(SLUICE_E_TIMED_OUT, comm->base.rank, -1,
                            "rank %d: nccl: the first exchange took longer than %.1f s: a rank is missing",
                            comm->base.rank, (double)comm->base.timeout_ns / 1e9);
  }
  SLUICE_TRY(status);
  for (int32_t p = comm->base.world_size - 1; p >= 0; --p) refuses = comm->words[p] == 0 ? p : refuses;
  comm->registers = refuses < 0 ? REGISTERED : UNREGISTERED;
  if (refuses < 0) return SLUICE_OK;
  const char* why = comm->refusal;
  sluice_log(SLUICE_LOG_INFO, "rank %d: nccl: exchanges go without registered buffers: rank %d has none%s%s",
             comm->base.rank, refuses, why != NULL ? "; here: " : "", why != NULL ? why : "");
  return SLUICE_OK;
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
    return sluice_nccl_fail(comm, code,
                            "a buffer cannot be registered (SLUICE_NCCL_REGISTER=0 on all ranks does without)");
  }
  return sluice_nccl_settle(comm, "the registration of a buffer", sluice_nccl_deadline_of(comm));
}

static sluice_status_t decide_and_take(nccl_comm_t* comm, uint64_t bytes, sluice_nccl_block_t* block) {
  if (comm->registers == UNDECIDED) SLUICE_TRY(decide(comm));
  return comm->registers == REGISTERED ? take_registered(comm, bytes, block) : SLUICE_OK;
}

sluice_status_t sluice_nccl_allocate(sluice_comm_t* base, uint64_t bytes, void** out_data) {
  nccl_comm_t* comm = sluice_nccl_downcast(base);
  *out_data = NULL;
  if (!comm->is_ready) comm->base.wants_memory = 0; /* too early: no registered buffers at all */
  if (!comm->is_ready || comm->registers == UNREGISTERED) return SLUICE_OK;
  sluice_nccl_block_t* block = sluice_alloc_zeroed(sluice_process_allocator(), sizeof *block, "nccl block");
  if (block == NULL) return SLUICE_E_NO_MEMORY;
  sluice_status_t status = sluice_cuda_enter(comm->device);
  if (status == SLUICE_OK) status = sluice_nccl_leave_with(comm, decide_and_take(comm, bytes, block));
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
