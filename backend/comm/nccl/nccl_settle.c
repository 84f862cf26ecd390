// SPDX-License-Identifier: Apache-2.0
/* Waits for background work of NCCL: creation, connection, launch. */
#include <sched.h>
#include <time.h>

#include "backend/base/clock.h"
#include "backend/base/math.h"
#include "backend/comm/nccl/nccl_state.h"

#define POLL_NS UINT64_C(50000)
#define SPIN_NS UINT64_C(200000) /* most groups are launched sooner, and a sleep takes longer than that */

int sluice_nccl_state(nccl_comm_t* comm) {
  int state = 0;
  pthread_mutex_lock(&comm->mutex);
  int code = comm->comm != NULL ? comm->nccl.ncclCommGetAsyncError(comm->comm, &state) : 0;
  pthread_mutex_unlock(&comm->mutex);
  return code != 0 ? code : state;
}

void sluice_nccl_nap(void) {
  const struct timespec t = {.tv_nsec = POLL_NS};
  nanosleep(&t, NULL);
}

sluice_status_t sluice_nccl_settle(nccl_comm_t* comm, const char* what, uint64_t deadline_ns) {
  const uint64_t begin_ns = sluice_now_ns();
  for (;;) {
    if (atomic_load(&comm->is_aborted)) return sluice_nccl_fail_aborted(comm);
    int state = sluice_nccl_state(comm);
    if (state == 0) return SLUICE_OK;
    if (state != SLUICE_NCCL_IN_PROGRESS) return sluice_nccl_fail(comm, state, what);
    const uint64_t now_ns = sluice_now_ns();
    if (now_ns >= deadline_ns) {
      sluice_nccl_abort_group(comm);
      return SLUICE_FAIL_PEER(SLUICE_E_TIMED_OUT, comm->base.rank, -1,
                              "rank %d: nccl: %s took longer than %.1f s: a rank is missing, or the network between "
                              "ranks does not work; see NCCL_DEBUG=INFO on all ranks",
                              comm->base.rank, what, (double)comm->base.timeout_ns / 1e9);
    }
    if (now_ns - begin_ns < SPIN_NS) {
      (void)sched_yield();
    } else {
      sluice_nccl_nap();
    }
  }
}

sluice_status_t sluice_nccl_make_ready(nccl_comm_t* comm, uint64_t deadline_ns) {
  if (comm->is_ready) return SLUICE_OK;
  SLUICE_TRY(sluice_nccl_settle(comm, "the start of the group", deadline_ns));
  comm->is_ready = 1;
  return SLUICE_OK;
}

uint64_t sluice_nccl_deadline_of(const nccl_comm_t* comm) {
  return sluice_add_saturating(sluice_now_ns(), comm->base.timeout_ns);
}
