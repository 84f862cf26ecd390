// SPDX-License-Identifier: Apache-2.0
/* Headers over separate TCP connections. NCCL starts a group after all earlier groups of its communicator, so a header
 * sent through NCCL would wait for the rows of earlier passes. */
#include <stdio.h>

#include "backend/base/log.h"
#include "backend/comm/nccl/nccl_state.h"

static sluice_status_t connect_all(nccl_comm_t* comm) {
  sluice_comm_t* tcp = NULL;
  comm->has_connected = 1;
  const sluice_status_t status = comm->open_headers(&comm->base, &tcp);
  if (status == SLUICE_OK) {
    atomic_store(&comm->headers, tcp);
    return SLUICE_OK;
  }
  if (comm->comm == NULL || atomic_load(&comm->base.broken) != SLUICE_OK) return status;
  sluice_error_info_t why;
  sluice_error_capture(&why);
  sluice_log(SLUICE_LOG_WARN,
             "rank %d: nccl: no TCP connections for headers, so headers wait for all exchanges before them: %s",
             comm->base.rank, why.message);
  return SLUICE_OK;
}

sluice_status_t sluice_nccl_headers_start(sluice_comm_t* base, const sluice_exchange_t* exchange,
                                          sluice_comm_request_t** out_request) {
  nccl_comm_t* comm = sluice_nccl_downcast(base);
  if (!comm->has_connected) SLUICE_TRY(connect_all(comm));
  sluice_comm_t* tcp = atomic_load(&comm->headers);
  if (tcp == NULL) return base->vtable->exchange_start(base, exchange, out_request);
  sluice_comm_request_t* request = SLUICE_FREE_REQUEST(comm->requests);
  if (request == NULL) return sluice_comm_fail_third(base);
  SLUICE_TRY(tcp->vtable->exchange_start(tcp, exchange, &request->header));
  request->is_used = 1;
  *out_request = request;
  return SLUICE_OK;
}

/* Checks whether NCCL reports that an exchange has failed. */
static sluice_status_t look_at_exchanges(nccl_comm_t* comm) {
  if (atomic_load(&comm->is_aborted)) return sluice_nccl_fail_aborted(comm);
  const int state = sluice_nccl_state(comm);
  if (state == 0 || state == SLUICE_NCCL_IN_PROGRESS) return SLUICE_OK;
  return sluice_nccl_fail(comm, state, "an exchange that was enqueued");
}

/* Gives up because of another rank: the other ranks learn it from the connections when these end. */
static void give_up(nccl_comm_t* comm, sluice_comm_t* tcp, sluice_status_t status) {
  sluice_error_info_t why;
  char note[32];
  sluice_error_capture(&why);
  sluice_comm_mark_broken(tcp, status);
  (void)snprintf(note, sizeof note, "because %d", why.peer);
  sluice_nccl_note_gone(comm, why.peer >= 0 ? note : "aborted");
  sluice_nccl_end_kernels(comm);
  (void)sluice_error_adopt(&why);
}

sluice_status_t sluice_nccl_headers_wait(nccl_comm_t* comm, sluice_comm_request_t* request, uint64_t deadline_ns,
                                         int32_t* out_peer) {
  sluice_comm_t* tcp = atomic_load(&comm->headers);
  sluice_status_t status = tcp->vtable->exchange_wait(tcp, request->header, deadline_ns, out_peer);
  if (status == SLUICE_E_TIMED_OUT) {
    status = look_at_exchanges(comm);
    if (status == SLUICE_OK) return SLUICE_E_TIMED_OUT;
  } else if (status != SLUICE_OK && atomic_load(&comm->is_aborted)) {
    status = sluice_nccl_fail_aborted(comm);
  } else if (status != SLUICE_OK) {
    give_up(comm, tcp, status);
  }
  request->header = NULL;
  request->is_used = 0;
  return status;
}

void sluice_nccl_headers_abandon(nccl_comm_t* comm, sluice_comm_request_t* request) {
  sluice_comm_t* tcp = atomic_load(&comm->headers);
  sluice_comm_mark_broken(tcp, atomic_load(&comm->base.broken));
  tcp->vtable->abandon(tcp, request->header);
  sluice_nccl_end_kernels(comm);
  request->header = NULL;
  request->is_used = 0;
}

void sluice_nccl_headers_close(nccl_comm_t* comm) {
  sluice_comm_t* tcp = atomic_load(&comm->headers);
  if (tcp == NULL) return;
  atomic_store(&comm->headers, NULL);
  sluice_comm_mark_broken(tcp, atomic_load(&comm->base.broken)); /* no farewell */
  tcp->vtable->destroy(tcp);
}
