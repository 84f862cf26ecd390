// SPDX-License-Identifier: Apache-2.0
/* Splits the host's communicator.
 *
 * If that communicator is non-blocking, NCCL returns before the new handle exists: a thread of NCCL sets it, sometimes
 * shortly after the host's communicator has left IN_PROGRESS, and until then the host's communicator accepts no other
 * call (NVIDIA/nccl issue 1472). Therefore the memory for the handle outlives the call, and the call waits, so that the
 * host can use its communicator afterwards. */
#include <stdatomic.h>

#include "backend/base/clock.h"
#include "backend/comm/nccl/nccl_state.h"

typedef struct split_s {
  _Atomic(void*) made; /* NCCL stores it with release order */
  struct split_s* next;
} split_t;

/* Splits that never ended: NCCL may still write to them and cannot be told to stop. They are leaked, 16 bytes each. */
static _Atomic(split_t*) abandoned;

static void abandon(split_t* split) {
  split->next = atomic_load(&abandoned);
  while (!atomic_compare_exchange_weak(&abandoned, &split->next, split)) {
  }
}

static int state_of(const nccl_comm_t* comm, void* parent) {
  int state = 0;
  int code = comm->nccl.ncclCommGetAsyncError(parent, &state);
  return code != 0 ? code : state;
}

static sluice_status_t fail_late(const nccl_comm_t* comm) {
  return SLUICE_FAIL_PEER(SLUICE_E_TIMED_OUT, comm->base.rank, -1,
                          "rank %d: nccl: the split of the host's communicator took longer than %.1f s: a rank of it "
                          "takes no part, or the network between ranks does not work; see NCCL_DEBUG=INFO on all ranks",
                          comm->base.rank, (double)comm->base.timeout_ns / 1e9);
}

sluice_status_t sluice_nccl_split(nccl_comm_t* comm, void* parent, int32_t color, sluice_nccl_config_t* config) {
  uint64_t deadline_ns = sluice_nccl_deadline_of(comm);
  split_t* split = sluice_alloc_zeroed(sluice_process_allocator(), sizeof *split, "nccl split");
  if (split == NULL) return sluice_alloc_status();
  int code = comm->nccl.ncclCommSplit(parent, color, comm->base.rank, (void**)(void*)&split->made, config);
  int is_under_way = code == SLUICE_NCCL_IN_PROGRESS, is_late = 0;
  while ((code == 0 && atomic_load(&split->made) == NULL) || code == SLUICE_NCCL_IN_PROGRESS) {
    is_late = sluice_now_ns() >= deadline_ns;
    if (is_late) break;
    sluice_nccl_nap();
    code = state_of(comm, parent);
  }
  comm->comm = atomic_load(&split->made); /* also after a failure: it is then ended with everything else */
  if (comm->comm == NULL && is_under_way) {
    abandon(split);
  } else {
    sluice_free(sluice_process_allocator(), split, sizeof *split);
  }
  if (is_late) return fail_late(comm);
  return code == 0 ? SLUICE_OK : sluice_nccl_fail(comm, code, "the host's communicator cannot be split");
}
