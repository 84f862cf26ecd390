// SPDX-License-Identifier: Apache-2.0
#include "backend/comm/comm_usable.h"

#include <unistd.h>

/* In the child of a fork, the parent's threads, locks and connections must not be touched. */
int sluice_comm_is_inherited(const sluice_comm_t* comm) { return comm->pid != getpid(); }

/* Only the first failure is kept, because it is the one to report. */
void sluice_comm_mark_broken(sluice_comm_t* comm, sluice_status_t status) {
  int32_t expected = SLUICE_OK;
  atomic_compare_exchange_strong(&comm->broken, &expected, status);
}

void sluice_comm_abort(sluice_comm_t* comm) {
  if (comm == NULL || sluice_comm_is_inherited(comm)) return;
  sluice_comm_mark_broken(comm, SLUICE_E_ABORTED);
  sluice_comm_abort_messages(comm);
  if (comm->vtable->abort != NULL) comm->vtable->abort(comm);
}

sluice_status_t sluice_comm_fail_and_tell(sluice_comm_t* comm, sluice_status_t status) {
  sluice_comm_mark_broken(comm, status);
  if (comm->vtable->abort != NULL) comm->vtable->abort(comm);
  return status;
}

sluice_status_t sluice_comm_check_usable(sluice_comm_t* comm) {
  if (sluice_comm_is_inherited(comm)) {
    return SLUICE_FAIL(SLUICE_E_STATE,
                       "rank %d: this %s communicator was made before fork and cannot be used in the child; make a new "
                       "one there",
                       comm->rank, comm->name);
  }
  sluice_status_t broken = atomic_load(&comm->broken);
  if (broken == SLUICE_OK) return SLUICE_OK;
  return SLUICE_FAIL_PEER(broken, comm->rank, -1,
                          "rank %d: this %s communicator is no longer usable since an earlier %s; " SLUICE_COMM_REMEDY,
                          comm->rank, comm->name, broken == SLUICE_E_ABORTED ? "abort" : sluice_status_name(broken));
}
