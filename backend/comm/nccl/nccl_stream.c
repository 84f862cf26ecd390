#include "backend/comm/nccl/nccl_stream.h"

#include "backend/comm/nccl/nccl_failure.h"
#include "backend/comm/nccl/nccl_settle.h"

/* Device memory only. The group is closed on every path: an open one would swallow this thread's next calls. */
static int post(nccl_comm_t* comm, const sluice_exchange_t* e, void* stream) {
  const sluice_nccl_symbols_t* nccl = &comm->nccl;
  int32_t world_size = comm->base.world_size, rank = comm->base.rank;
  pthread_mutex_lock(&comm->mutex);
  if (comm->comm == NULL) {
    pthread_mutex_unlock(&comm->mutex);
    return SLUICE_NCCL_REMOTE_ERROR;
  }
  int code = nccl->ncclGroupStart();
  if (code == 0) {
    for (int32_t i = 1; i < world_size && sluice_nccl_is_taken(code); ++i) {
      int32_t peer = (rank + world_size - i) % world_size;
      if (e->recv_bytes[peer] == 0) continue;
      code = nccl->ncclRecv(e->recv[peer], e->recv_bytes[peer], SLUICE_NCCL_UINT8, peer, comm->comm, stream);
    }
    for (int32_t i = 1; i < world_size && sluice_nccl_is_taken(code); ++i) {
      int32_t peer = (rank + i) % world_size; /* not all to rank 0 at once */
      if (e->send_bytes[peer] == 0) continue;
      code = nccl->ncclSend(e->send[peer], e->send_bytes[peer], SLUICE_NCCL_UINT8, peer, comm->comm, stream);
    }
    int ended = nccl->ncclGroupEnd();
    if (sluice_nccl_is_taken(code)) code = ended;
  }
  pthread_mutex_unlock(&comm->mutex);
  return code;
}

sluice_status_t sluice_nccl_run_group(nccl_comm_t* comm, const sluice_exchange_t* e, void* stream) {
  uint64_t deadline_ns = sluice_nccl_deadline_of(comm);
  SLUICE_TRY(sluice_nccl_make_ready(comm, deadline_ns));
  int code = post(comm, e, stream);
  if (atomic_load(&comm->is_aborted)) return sluice_nccl_fail_aborted(comm);
  if (code != 0 && code != SLUICE_NCCL_IN_PROGRESS) return sluice_nccl_fail(comm, code, "an exchange");
  /* Only then the kernel is in the stream, and an event after it means something. */
  return code == 0 ? SLUICE_OK : sluice_nccl_settle(comm, "the set-up of an exchange", deadline_ns);
}

sluice_status_t sluice_nccl_exchange_enqueue(sluice_comm_t* base, const sluice_exchange_t* exchange,
                                             sluice_stream_t stream) {
  nccl_comm_t* comm = sluice_nccl_downcast(base);
  sluice_status_t broken = atomic_load(&base->broken);
  if (broken != SLUICE_OK) {
    return SLUICE_FAIL_PEER(broken, base->rank, -1, "rank %d: this nccl communicator is no longer usable", base->rank);
  }
  SLUICE_TRY(sluice_cuda_enter(comm->device));
  sluice_status_t status = sluice_cuda_leave_with(comm->device, sluice_nccl_run_group(comm, exchange, stream));
  sluice_nccl_mark_broken(base, status);
  if (status == SLUICE_OK) ++base->num_started;
  return status;
}

sluice_status_t sluice_nccl_poll(sluice_comm_t* base) {
  nccl_comm_t* comm = sluice_nccl_downcast(base);
  if (atomic_load(&comm->is_aborted)) return sluice_nccl_fail_aborted(comm);
  int state = sluice_nccl_state(comm);
  if (state == 0 || state == SLUICE_NCCL_IN_PROGRESS) return SLUICE_OK;
  sluice_status_t status = sluice_nccl_fail(comm, state, "an exchange that was enqueued");
  sluice_nccl_mark_broken(base, status);
  return status;
}
