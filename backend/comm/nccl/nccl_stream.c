// SPDX-License-Identifier: Apache-2.0
/* Exchanges in stream order. */
#include <string.h>

#include "backend/comm/nccl/nccl_state.h"

/* Appends the sends and receives of the exchange to the list. Device memory only. */
static sluice_status_t note_exchange(nccl_comm_t* comm, const sluice_exchange_t* e) {
  const int32_t world_size = comm->base.world_size, rank = comm->base.rank;
  sluice_nccl_posted_t* posted = &comm->posted;
  const int64_t most = posted->count + 2 * ((int64_t)world_size - 1);
  if (most > posted->room) {
    const uint64_t bytes = (uint64_t)(2 * most) * sizeof *posted->messages;
    sluice_nccl_message_t* messages = sluice_alloc(sluice_process_allocator(), bytes, "messages of an nccl group");
    if (messages == NULL) return sluice_alloc_status();
    if (posted->count > 0) memcpy(messages, posted->messages, (size_t)posted->count * sizeof *messages);
    sluice_nccl_forget_posted(comm);
    *posted = (sluice_nccl_posted_t){.messages = messages,
                                     .count = most - 2 * ((int64_t)world_size - 1),
                                     .room = 2 * most,
                                     .is_open = posted->is_open};
  }
  for (int32_t i = 1; i < world_size; ++i) {
    const int32_t peer = (rank + world_size - i) % world_size;
    if (e->recv_bytes[peer] == 0) continue;
    posted->messages[posted->count++] = (sluice_nccl_message_t){e->recv[peer], e->recv_bytes[peer], peer, 0};
  }
  for (int32_t i = 1; i < world_size; ++i) {
    const int32_t peer = (rank + i) % world_size; /* so that not all ranks begin with rank 0 */
    if (e->send_bytes[peer] == 0) continue;
    posted->messages[posted->count++] =
        (sluice_nccl_message_t){(void*)(uintptr_t)e->send[peer], e->send_bytes[peer], peer, 1};
  }
  return SLUICE_OK;
}

/* Posts the group. It is closed on every path, because an open group would collect later calls of this thread. Messages
 * between two ranks match in the order of their exchanges. */
static int post(nccl_comm_t* comm, void* stream) {
  const sluice_nccl_symbols_t* nccl = &comm->nccl;
  pthread_mutex_lock(&comm->mutex);
  if (comm->comm == NULL) {
    pthread_mutex_unlock(&comm->mutex);
    return SLUICE_NCCL_REMOTE_ERROR;
  }
  int code = nccl->ncclGroupStart();
  if (code == 0) {
    for (int64_t i = 0; i < comm->posted.count && sluice_nccl_is_taken(code); ++i) {
      const sluice_nccl_message_t* m = &comm->posted.messages[i];
      code = m->is_send ? nccl->ncclSend(m->data, m->bytes, SLUICE_NCCL_UINT8, m->peer, comm->comm, stream)
                        : nccl->ncclRecv(m->data, m->bytes, SLUICE_NCCL_UINT8, m->peer, comm->comm, stream);
    }
    int ended = nccl->ncclGroupEnd();
    if (sluice_nccl_is_taken(code)) code = ended;
  }
  pthread_mutex_unlock(&comm->mutex);
  return code;
}

static sluice_status_t run_posted(nccl_comm_t* comm, void* stream) {
  uint64_t deadline_ns = sluice_nccl_deadline_of(comm);
  SLUICE_TRY(sluice_nccl_make_ready(comm, deadline_ns));
  int code = post(comm, stream);
  if (atomic_load(&comm->is_aborted)) return sluice_nccl_fail_aborted(comm);
  if (code != 0 && code != SLUICE_NCCL_IN_PROGRESS) return sluice_nccl_fail(comm, code, "an exchange");
  /* Only then is the kernel in the stream, so that a later event covers it. */
  return code == 0 ? SLUICE_OK : sluice_nccl_settle(comm, "the set-up of an exchange", deadline_ns);
}

sluice_status_t sluice_nccl_run_group(nccl_comm_t* comm, const sluice_exchange_t* e, void* stream) {
  sluice_status_t status = note_exchange(comm, e);
  if (status == SLUICE_OK) status = run_posted(comm, stream);
  comm->posted.count = 0;
  return status;
}

void sluice_nccl_forget_posted(nccl_comm_t* comm) {
  sluice_nccl_posted_t* posted = &comm->posted;
  sluice_free(sluice_process_allocator(), posted->messages, (uint64_t)posted->room * sizeof *posted->messages);
}

sluice_status_t sluice_nccl_exchange_enqueue(sluice_comm_t* base, const sluice_exchange_t* exchange,
                                             sluice_stream_t stream) {
  nccl_comm_t* comm = sluice_nccl_downcast(base);
  if (comm->posted.is_open) return note_exchange(comm, exchange);
  SLUICE_TRY(sluice_cuda_enter(comm->device));
  sluice_status_t status = sluice_cuda_leave_with(comm->device, sluice_nccl_run_group(comm, exchange, stream));
  if (status == SLUICE_OK) ++base->num_started;
  return status;
}

void sluice_nccl_group_begin(sluice_comm_t* base) { sluice_nccl_downcast(base)->posted.is_open = 1; }

sluice_status_t sluice_nccl_group_end(sluice_comm_t* base, sluice_stream_t stream, sluice_status_t status) {
  nccl_comm_t* comm = sluice_nccl_downcast(base);
  comm->posted.is_open = 0;
  if (status == SLUICE_OK && comm->posted.count > 0) {
    status = sluice_cuda_enter(comm->device);
    if (status == SLUICE_OK) status = sluice_cuda_leave_with(comm->device, run_posted(comm, stream));
    if (status == SLUICE_OK) ++base->num_started;
  }
  comm->posted.count = 0;
  return status;
}

sluice_status_t sluice_nccl_poll(sluice_comm_t* base) {
  nccl_comm_t* comm = sluice_nccl_downcast(base);
  if (atomic_load(&comm->is_aborted)) return sluice_nccl_fail_aborted(comm);
  int state = sluice_nccl_state(comm);
  if (state == 0 || state == SLUICE_NCCL_IN_PROGRESS) return SLUICE_OK;
  sluice_status_t status = sluice_nccl_fail(comm, state, "an exchange that was enqueued");
  sluice_comm_mark_broken(base, status);
  return status;
}
