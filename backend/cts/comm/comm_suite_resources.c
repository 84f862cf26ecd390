// SPDX-License-Identifier: Apache-2.0
/* Cases of resources: each allocation that fails, and handles that a fork inherits. */
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backend/cts/comm/comm_suite_case.h"

#define MAX_NTH_ALLOCATIONS 64

static void create_nth_allocation_fails(cts_rank_t* me) {
  cts_world_t* world = me->world;
  sluice_allocator_t* allocator = sluice_process_allocator();
  for (int64_t n = 0; n < MAX_NTH_ALLOCATIONS; ++n) {
    uint64_t num_before = allocator->num_live;
    sluice_comm_t* comm = NULL;
    sluice_status_t status = SLUICE_E_NO_MEMORY;
    allocator->fail_after = n;
    void* shared = world->transport->open(1);
    if (shared != NULL) status = cts_create_end(world, shared, 0, 1, 0, &comm);
    int is_over = allocator->fail_after >= 0; /* fewer allocations than n: nothing failed */
    allocator->fail_after = -1;
    CTS_TRY(me, status == (is_over ? SLUICE_OK : SLUICE_E_NO_MEMORY));
    CTS_TRY(me, (comm != NULL) == is_over);
    sluice_comm_destroy(comm);
    if (shared != NULL) world->transport->close(shared);
    CTS_TRY(me, allocator->num_live == num_before);
    if (is_over) return;
  }
  cts_fail_check(me, __FILE__, __LINE__, "creation ends after a few allocations");
}

static void all_reduce_allocation_fails(cts_rank_t* me) {
  int64_t data[4] = {0};
  CTS_TRY(me, cts_meet(me));
  if (me->rank == 0) {
    sluice_process_allocator()->fail_after = 0; /* the others wait below until it has occurred */
    sluice_status_t status = sluice_comm_all_reduce_i64(me->comm, data, 4, SLUICE_REDUCE_SUM, NULL);
    CTS_TRY(me, cts_meet(me));
    CTS_TRY(me, status == SLUICE_E_NO_MEMORY);
    cts_check_broken_and_destroy(me, SLUICE_E_NO_MEMORY);
  } else {
    CTS_TRY(me, cts_meet(me));
    CTS_TRY(me, sluice_comm_all_reduce_i64(me->comm, data, 4, SLUICE_REDUCE_SUM, NULL) == SLUICE_E_PEER_LOST);
    CTS_TRY(me, cts_last_peer() == 0);
  }
}

/* Runs in the child: every entry returns at once with the reason. Exit code 0 or the line that failed. */
static int use_inherited(sluice_comm_t* comm, sluice_comm_request_t* request) {
  sluice_exchange_t none = {NULL, NULL, NULL, NULL};
  sluice_comm_request_t* other;
  int64_t x = 1;
  if (sluice_comm_exchange_wait(comm, request, NULL) != SLUICE_E_STATE) return 2;
  if (sluice_comm_exchange_start(comm, &none, &other) != SLUICE_E_STATE) return 3;
  if (sluice_comm_all_reduce_i64(comm, &x, 1, SLUICE_REDUCE_SUM, NULL) != SLUICE_E_STATE) return 4;
  if (strstr(last_message(), "fork") == NULL) return 5;
  sluice_comm_abort(comm);
  sluice_comm_destroy(comm);
  return 0;
}

static void fork_with_request(cts_rank_t* me) {
  cts_exchange_t e;
  CTS_TRY(me, cts_start(me, me->comm, 0, cts_small_size, &e) == SLUICE_OK);
  CTS_TRY(me, cts_meet(me));
  if (me->rank == 0) {
    pid_t child = fork();
    if (child == 0) _exit(use_inherited(me->comm, e.request));
    int code = -1;
    CTS_TRY(me, child > 0 && waitpid(child, &code, 0) == child);
    CTS_TRY(me, WIFEXITED(code));
    CTS_TRY(me, WEXITSTATUS(code) == 0);
  }
  CTS_TRY(me, cts_finish(me, me->comm, &e) == SLUICE_OK);
  CTS_TRY(me, cts_run_exchange(me, me->comm, 1, cts_uneven_size) == SLUICE_OK);
}

const cts_case_t cts_resources_cases[] = {
    {"Create_NthAllocationFails_LeaksNothing", create_nth_allocation_fails, 0, 0, 0},
    {"AllReduce_AllocationFails_PeersLearn", all_reduce_allocation_fails, 2, 0, 0},
    {"Fork_ChildHandles_AreInert", fork_with_request, 1, 0, 0},
    {NULL, NULL, 0, 0, 0},
};
