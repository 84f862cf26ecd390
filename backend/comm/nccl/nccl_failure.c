// SPDX-License-Identifier: Apache-2.0
/* Failures of a communicator: errors, the rank at fault, and the end of the group. */
#include <stdio.h>
#include <string.h>

#include "backend/comm/nccl/nccl_state.h"

void sluice_nccl_end_kernels(nccl_comm_t* comm) {
  pthread_mutex_lock(&comm->mutex);
  if (comm->comm != NULL) (void)comm->nccl.ncclCommAbort(comm->comm);
  comm->comm = NULL;
  pthread_mutex_unlock(&comm->mutex);
}

void sluice_nccl_abort_group(nccl_comm_t* comm) {
  sluice_comm_t* tcp = atomic_load(&comm->headers);
  sluice_nccl_end_kernels(comm);
  if (tcp != NULL) tcp->vtable->abort(tcp);
}

void sluice_nccl_note_gone(nccl_comm_t* comm, const char* why) {
  char key[32];
  if (comm->store.publish == NULL || comm->has_note) return;
  comm->has_note = 1;
  snprintf(key, sizeof key, "sluice/gone/%d", comm->base.rank);
  comm->store.publish(comm->store.user, key, why);
}

/* Returns the rank to blame for a remote error: one that aborted, else one that other ranks blame, else one that left;
 * -1: unknown. */
static int32_t find_culprit(const nccl_comm_t* comm) {
  int32_t blamed = -1, left = -1;
  for (int32_t r = 0; r < comm->base.world_size && comm->store.lookup != NULL; ++r) {
    char key[32];
    char why[32] = "";
    int named;
    snprintf(key, sizeof key, "sluice/gone/%d", r);
    if (r == comm->base.rank || comm->store.lookup(comm->store.user, key, why, (int32_t)sizeof why - 1) <= 0) continue;
    if (strcmp(why, "aborted") == 0) return r;
    if (sscanf(why, "because %d", &named) == 1 && named != comm->base.rank) blamed = named;
    if (strcmp(why, "left") == 0) left = r;
  }
  return blamed >= 0 ? blamed : left;
}

sluice_status_t sluice_nccl_fail(nccl_comm_t* comm, int code, const char* what) {
  int rank = comm->base.rank;
  sluice_status_t status = code == SLUICE_NCCL_REMOTE_ERROR ? SLUICE_E_PEER_LOST : SLUICE_E_EXTERNAL;
  char detail[256] = "";
  pthread_mutex_lock(&comm->mutex);
  const char* last = comm->comm != NULL ? comm->nccl.ncclGetLastError(comm->comm) : NULL;
  if (last != NULL) snprintf(detail, sizeof detail, "%s", last);
  pthread_mutex_unlock(&comm->mutex);
  int32_t culprit = status == SLUICE_E_PEER_LOST ? find_culprit(comm) : -1;
  char gone[48] = "";
  char why[32];
  if (culprit >= 0) snprintf(gone, sizeof gone, "rank %d is gone: ", culprit);
  status = sluice_error_record(status, rank, culprit, code, "rank %d: nccl: %s: %s%s (%d) %s; see NCCL_DEBUG=WARN",
                               rank, what, gone, comm->nccl.ncclGetErrorString(code), code, detail);
  snprintf(why, sizeof why, "because %d", culprit);
  sluice_nccl_note_gone(comm, culprit >= 0 ? why : "aborted");
  sluice_nccl_abort_group(comm);
  return status;
}

sluice_status_t sluice_nccl_fail_aborted(nccl_comm_t* comm) {
  sluice_nccl_abort_group(comm);
  return SLUICE_FAIL_PEER(SLUICE_E_ABORTED, comm->base.rank, -1, "rank %d: this communicator was aborted",
                          comm->base.rank);
}
