// SPDX-License-Identifier: Apache-2.0
/* The checked entries of an exchange: they remember what broke a communicator, and wait. */
#include <stdio.h>
#include <time.h>

#include "backend/base/clock.h"
#include "backend/base/math.h"
#include "backend/comm/comm.h"
#include "backend/comm/comm_stragglers.h"
#include "backend/comm/comm_life.h"
#include "backend/group/wait.h"

sluice_status_t sluice_comm_fail_third(const sluice_comm_t* comm) {
  return SLUICE_FAIL_PEER(SLUICE_E_INTERNAL, comm->rank, -1,
                          "rank %d started a third exchange while two are in flight; wait for the first of them",
                          comm->rank);
}

/* Replaces PEER_LOST by the peer's own reason, if the peer has published one. */
static sluice_status_t explain_loss(sluice_comm_t* comm, sluice_status_t status) {
  if (status != SLUICE_E_PEER_LOST) return status;
  sluice_error_info_t why;
  sluice_error_capture(&why);
  SLUICE_TRY(sluice_comm_check_given_up(comm, why.peer, ""));
  return sluice_error_adopt(&why);
}

typedef sluice_status_t (*start_fn_t)(sluice_comm_t* comm, const sluice_exchange_t* exchange,
                                      sluice_comm_request_t** out_request);

static sluice_status_t start_by(start_fn_t start, sluice_comm_t* comm, const sluice_exchange_t* exchange,
                                sluice_comm_request_t** out_request) {
  *out_request = NULL;
  SLUICE_TRY(sluice_comm_check_usable(comm));
  sluice_status_t status = start(comm, exchange, out_request);
  if (status != SLUICE_OK) return sluice_comm_fail_and_tell(comm, explain_loss(comm, status));
  ++comm->num_started;
  return SLUICE_OK;
}

sluice_status_t sluice_comm_exchange_start(sluice_comm_t* comm, const sluice_exchange_t* exchange,
                                           sluice_comm_request_t** out_request) {
  return start_by(comm->vtable->exchange_start, comm, exchange, out_request);
}

sluice_status_t sluice_comm_exchange(sluice_comm_t* comm, const sluice_exchange_t* exchange, const char* phase) {
  sluice_comm_request_t* request;
  SLUICE_TRY(sluice_comm_exchange_start(comm, exchange, &request));
  return sluice_comm_exchange_wait(comm, request, phase);
}

sluice_status_t sluice_comm_exchange_headers(sluice_comm_t* comm, const sluice_exchange_t* exchange,
                                             const char* phase) {
  sluice_comm_request_t* request;
  const sluice_comm_vtable_t* vtable = comm->vtable;
  SLUICE_TRY(start_by(vtable->headers_start != NULL ? vtable->headers_start : vtable->exchange_start, comm, exchange,
                      &request));
  return sluice_comm_exchange_wait(comm, request, phase);
}

sluice_status_t sluice_comm_exchange_enqueue(sluice_comm_t* comm, const sluice_exchange_t* exchange,
                                             sluice_stream_t stream) {
  SLUICE_TRY(sluice_comm_check_usable(comm));
  sluice_status_t status = comm->vtable->exchange_enqueue(comm, exchange, stream);
  return status == SLUICE_OK ? SLUICE_OK : sluice_comm_fail_and_tell(comm, status);
}

void sluice_comm_group_begin(sluice_comm_t* comm) {
  if (comm->vtable->group_begin != NULL) comm->vtable->group_begin(comm);
}

sluice_status_t sluice_comm_group_end(sluice_comm_t* comm, sluice_stream_t stream, sluice_status_t status) {
  if (comm->vtable->group_end == NULL) return status;
  if (status == SLUICE_OK) status = sluice_comm_check_usable(comm);
  const sluice_status_t ended = comm->vtable->group_end(comm, stream, status);
  if (status != SLUICE_OK) return status;
  return ended == SLUICE_OK ? SLUICE_OK : sluice_comm_fail_and_tell(comm, ended);
}

static void abandon(sluice_comm_t* comm, sluice_comm_request_t* request) {
  if (comm->vtable->abandon != NULL) comm->vtable->abandon(comm, request);
}

static void warn(const sluice_comm_t* comm, sluice_wait_t* wait, uint64_t now_ns, int32_t missing, const char* phase) {
  char call[128];
  (void)snprintf(call, sizeof call, "%s (call %llu)", phase, (unsigned long long)comm->call_number);
  sluice_wait_warn(wait, now_ns, comm->rank, missing, call);
}

sluice_status_t sluice_comm_exchange_wait(sluice_comm_t* comm, sluice_comm_request_t* request, const char* phase) {
  if (phase == NULL) phase = "an exchange";
  if (!sluice_comm_is_inherited(comm) && atomic_load(&comm->broken) != SLUICE_OK) {
    /* A request of a broken communicator is only released. */
    if (comm->vtable->exchange_wait(comm, request, 0, NULL) == SLUICE_E_TIMED_OUT) abandon(comm, request);
  }
  SLUICE_TRY(sluice_comm_check_usable(comm));

  sluice_wait_t wait = sluice_wait_begin(comm->timeout_ns, comm->warn_ns);
  if (comm->vtable->publish == NULL) wait.note_ns = UINT64_MAX;
  for (;;) {
    const uint64_t slice_end_ns = sluice_wait_slice_end(&wait);
    int32_t missing = -1;
    sluice_status_t status = comm->vtable->exchange_wait(comm, request, slice_end_ns, &missing);
    if (status == SLUICE_OK) return SLUICE_OK;
    if (status != SLUICE_E_TIMED_OUT) {
      sluice_comm_mark_broken(comm, status);
      /* Ignore transport errors that follow our own abort. */
      int is_aborted = atomic_load(&comm->broken) == SLUICE_E_ABORTED;
      return is_aborted && status != SLUICE_E_ABORTED ? sluice_comm_check_usable(comm) : explain_loss(comm, status);
    }
    if (atomic_load(&comm->broken) != SLUICE_OK) { /* aborted during the wait, on a transport that did not notice */
      abandon(comm, request);
      return sluice_comm_check_usable(comm);
    }
    if (comm->vtable->is_interrupted != NULL && comm->vtable->is_interrupted(comm)) {
      sluice_comm_abort(comm);
      abandon(comm, request);
      return SLUICE_FAIL_PEER(SLUICE_E_ABORTED, comm->rank, -1, "rank %d was interrupted in %s (call %llu)", comm->rank,
                              phase, (unsigned long long)comm->call_number);
    }
    const uint64_t now_ns = sluice_now_ns();
    if (sluice_wait_takes_note(&wait, now_ns)) sluice_comm_publish_note(comm, phase);
    if (now_ns >= wait.deadline_ns) {
      status = sluice_comm_fail_timed_out(comm, missing, now_ns - wait.start_ns, phase);
      sluice_comm_mark_broken(comm, status);
      sluice_error_info_t why;
      sluice_error_capture(&why);
      abandon(comm, request);
      return sluice_error_adopt(&why);
    }
    warn(comm, &wait, now_ns, missing, phase);
    if (now_ns < slice_end_ns) {
      /* Sleep, so that a transport that returns early does not make this a busy loop. */
      struct timespec pause = {.tv_sec = 0, .tv_nsec = (long)sluice_min_u64(slice_end_ns - now_ns, 1000000)};
      nanosleep(&pause, NULL);
    }
  }
}
