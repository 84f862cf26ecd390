// SPDX-License-Identifier: Apache-2.0
/* Messages of the MPI plugin; empty in a build without MPI. */
#ifdef SLUICE_NO_MPI

typedef int sluice_no_mpi_t; /* ISO C does not allow an empty file */

#else

#include "backend/comm/mpi/mpi_messages.h"

#include <stdio.h>
#include <stdlib.h>

#include "backend/comm/mpi/mpi_calls.h"

enum { NUM_TAGS = 32767 }; /* the number that MPI guarantees */

typedef struct endpoint_s {
  sluice_mpi_messages_t* all;
  int tag;
} endpoint_t;

typedef struct request_s {
  MPI_Request request;
  int is_receive;
  int peer;
} request_t;

static sluice_status_t fail_memory(sluice_host_failure_t* out_failure) {
  snprintf(out_failure->message, sizeof out_failure->message, "no memory for a request");
  return SLUICE_E_NO_MEMORY;
}

static sluice_status_t open_endpoint(void* user, void** out_endpoint, sluice_host_failure_t* out_failure) {
  MPI_Comm from;
  sluice_mpi_messages_t* all = sluice_mpi_messages_of(user, &from);
  *out_endpoint = NULL;
  if (all->comm == MPI_COMM_NULL) {
    const int code = MPI_Comm_dup(from, &all->comm);
    if (code != MPI_SUCCESS) return sluice_mpi_fail(out_failure, "MPI_Comm_dup", code, -1);
    (void)MPI_Comm_set_errhandler(all->comm, MPI_ERRORS_RETURN);
  }
  const int tag = all->num_opened++ %
                  NUM_TAGS; /* counted even after a failed allocation, so that the next tag is the same on all ranks */
  endpoint_t* e = malloc(sizeof *e);
  if (e == NULL) return fail_memory(out_failure);
  *e = (endpoint_t){.all = all, .tag = tag};
  *out_endpoint = e;
  return SLUICE_OK;
}

static sluice_status_t begin(endpoint_t* e, int32_t peer, int is_receive, void* data, uint64_t bytes,
                             void** out_request, sluice_host_failure_t* out_failure) {
  request_t* r = malloc(sizeof *r);
  *out_request = NULL;
  if (r == NULL) return fail_memory(out_failure);
  r->is_receive = is_receive;
  r->peer = peer;
  const int code = is_receive ? MPI_Irecv(data, (int)bytes, MPI_BYTE, peer, e->tag, e->all->comm, &r->request)
                              : MPI_Isend(data, (int)bytes, MPI_BYTE, peer, e->tag, e->all->comm, &r->request);
  if (code != MPI_SUCCESS) {
    free(r);
    return sluice_mpi_fail(out_failure, is_receive ? "MPI_Irecv" : "MPI_Isend", code, peer);
  }
  *out_request = r;
  return SLUICE_OK;
}

static sluice_status_t send_bytes(void* endpoint, int32_t peer, const void* data, uint64_t bytes, void** out_request,
                                  sluice_host_failure_t* out_failure) {
  return begin(endpoint, peer, 0, (void*)(uintptr_t)data, bytes, out_request, out_failure);
}

static sluice_status_t receive_bytes(void* endpoint, int32_t peer, void* data, uint64_t bytes, void** out_request,
                                     sluice_host_failure_t* out_failure) {
  return begin(endpoint, peer, 1, data, bytes, out_request, out_failure);
}

static sluice_status_t test(void* endpoint, void* request, int32_t* out_is_done, sluice_host_failure_t* out_failure) {
  (void)endpoint;
  request_t* r = request;
  int is_done = 0;
  const int code = MPI_Test(&r->request, &is_done, MPI_STATUS_IGNORE);
  const sluice_status_t status =
      code == MPI_SUCCESS ? SLUICE_OK : sluice_mpi_fail(out_failure, "MPI_Test", code, r->peer);
  *out_is_done = is_done;
  if (is_done || status != SLUICE_OK) free(r);
  return status;
}

/* A matched receive completes; an unmatched one is cancelled. A send ends only when it is received. */
static int32_t give_up(void* endpoint, void* request) {
  (void)endpoint;
  request_t* r = request;
  int is_done = 0;
  if (r->is_receive) (void)MPI_Cancel(&r->request);
  const uint64_t deadline_ns = sluice_mpi_now_ns() + (r->is_receive ? SLUICE_MPI_CANCEL_NS : 0);
  do {
    if (MPI_Test(&r->request, &is_done, MPI_STATUS_IGNORE) != MPI_SUCCESS) break;
  } while (!is_done && sluice_mpi_now_ns() < deadline_ns);
  if (!is_done) (void)MPI_Request_free(&r->request);
  free(r);
  return is_done;
}

static void close_endpoint(void* endpoint, int32_t is_clean) {
  endpoint_t* e = endpoint;
  if (!is_clean) e->all->is_dirty = 1;
  free(e);
}

const sluice_sized_messages_t sluice_mpi_sized_messages = {
    .open = open_endpoint,
    .send = send_bytes,
    .receive = receive_bytes,
    .test = test,
    .give_up = give_up,
    .close = close_endpoint,
};

#endif /* SLUICE_NO_MPI */
