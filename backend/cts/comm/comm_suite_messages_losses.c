// SPDX-License-Identifier: Apache-2.0
/* Cases of endpoints that fail, leave, or have no memory: all calls return, and the rank at fault is named. */
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backend/base/clock.h"
#include "backend/cts/comm/comm_suite_case.h"

static int32_t last_rank(const cts_rank_t* me) { return me->world->world_size - 1; }

/* ---- one gives up ------------------------------------------------------------------------------------------------ */

/* The last rank gives up; rank 0 waits for it, and all others wait for rank 0, which sends nothing. */
static void gives_up(cts_rank_t* me, void (*give_up)(cts_rank_t* me, sluice_messages_t* m)) {
  sluice_messages_t* m;
  sluice_message_completion_t c;
  unsigned char* payload = cts_make_payload(me->rank, 1, CTS_LARGE_BYTES);
  CTS_TRY(me, sluice_messages_open(me->comm, NULL, &m) == SLUICE_OK);
  CTS_TRY(me, cts_meet(me));
  if (cts_is_culprit(me)) {
    cts_sleep_ns(100 * MS); /* so that the others are usually waiting by then */
    give_up(me, m);
    CTS_TRY(me, sluice_messages_next(m, 0, &c) == SLUICE_E_ABORTED);
    CTS_TRY(me, sluice_messages_receive(m, 0, 1, 1, NULL) == SLUICE_E_ABORTED);
    CTS_TRY(me, cts_send(m, 0, 1, payload, CTS_LARGE_BYTES, 1) == SLUICE_E_ABORTED);
    sluice_messages_abort(m);
  } else {
    const uint64_t begin_ns = sluice_now_ns();
    CTS_TRY(me, sluice_messages_receive(m, me->rank == 0 ? last_rank(me) : 0, 2, 2, NULL) == SLUICE_OK);
    CTS_TRY(me, sluice_messages_wait(m, NULL, &c) == SLUICE_E_PEER_LOST);
    CTS_TRY(me, cts_last_peer() == last_rank(me));
    CTS_TRY(me, sluice_now_ns() - begin_ns < BOUNDED_NS);
    CTS_TRY(me, cts_send(m, 0, 1, payload, CTS_LARGE_BYTES, 1) == SLUICE_E_PEER_LOST);
    CTS_TRY(me, cts_last_peer() == last_rank(me));
  }
  CTS_TRY(me, cts_meet(me));
  const uint64_t begin_ns = sluice_now_ns();
  sluice_messages_close(m);
  CTS_TRY(me, sluice_now_ns() - begin_ns < BOUNDED_NS);
  free(payload);
}

static void abort_endpoint(cts_rank_t* me, sluice_messages_t* m) {
  (void)me;
  sluice_messages_abort(m);
}
static void abort_communicator(cts_rank_t* me, sluice_messages_t* m) {
  (void)m;
  sluice_comm_abort(me->comm);
}
static void aborts(cts_rank_t* me) { gives_up(me, abort_endpoint); }
static void aborts_communicator(cts_rank_t* me) { gives_up(me, abort_communicator); }

/* Exchanges continue after an endpoint was aborted. */
static void exchange_after_abort(cts_rank_t* me) {
  sluice_messages_t* m;
  CTS_TRY(me, sluice_messages_open(me->comm, NULL, &m) == SLUICE_OK);
  CTS_TRY(me, cts_meet(me));
  if (cts_is_culprit(me)) sluice_messages_abort(m);
  CTS_TRY(me, cts_run_exchange(me, me->comm, 0, cts_uneven_size) == SLUICE_OK);
  sluice_messages_close(m);
  CTS_TRY(me, cts_run_exchange(me, me->comm, 1, cts_uneven_size) == SLUICE_OK);
  CTS_TRY(me, sluice_messages_open(me->comm, NULL, &m) == SLUICE_OK);
  sluice_messages_close(m);
}

static void* abort_soon(void* m) {
  cts_sleep_ns(100 * MS);
  sluice_messages_abort(m);
  return NULL;
}

static void abort_from_other_thread(cts_rank_t* me) {
  sluice_messages_t* m;
  sluice_message_completion_t c;
  CTS_TRY(me, sluice_messages_open(me->comm, NULL, &m) == SLUICE_OK);
  if (me->rank == 0) {
    pthread_t thread;
    CTS_TRY(me, sluice_messages_receive(m, 0, 1, 1, NULL) == SLUICE_OK);
    CTS_TRY(me, pthread_create(&thread, NULL, abort_soon, m) == 0);
    const uint64_t begin_ns = sluice_now_ns();
    const sluice_status_t status = sluice_messages_wait(m, NULL, &c);
    const uint64_t took_ns = sluice_now_ns() - begin_ns;
    pthread_join(thread, NULL);
    CTS_TRY(me, status == SLUICE_E_ABORTED);
    CTS_TRY(me, took_ns < BOUNDED_NS);
  }
  CTS_TRY(me, cts_meet(me));
  sluice_messages_close(m);
}

/* ---- one leaves -------------------------------------------------------------------------------------------------- */

static void leave_early(cts_rank_t* me) {
  enum { BYTES = 3000000 };
  sluice_messages_t* m;
  sluice_message_completion_t c;
  unsigned char* payload = cts_make_payload(me->rank, 1, BYTES);
  CTS_TRY(me, sluice_messages_open(me->comm, NULL, &m) == SLUICE_OK);
  if (me->rank == 0) {
    CTS_TRY(me, cts_send(m, 1, 1, payload, BYTES, 1) == SLUICE_OK);
    CTS_TRY(me, cts_await(m, SLUICE_MESSAGE_SENT, 1, &c));
    sluice_messages_close(m); /* messages that were sent still arrive */
    CTS_TRY(me, cts_meet(me));
    CTS_TRY(me, cts_meet(me));
    free(payload);
    return;
  }
  CTS_TRY(me, cts_meet(me));
  /* a rank that needs nothing from it continues */
  CTS_TRY(me, cts_send(m, me->rank, 7, payload, BYTES, 2) == SLUICE_OK);
  CTS_TRY(me, cts_await(m, SLUICE_MESSAGE_SENT, 2, &c));
  CTS_TRY(me, cts_meet(me)); /* before one is lost to the others */
  if (me->rank == 1) {
    CTS_TRY(me, sluice_messages_receive(m, 0, 1, 3, NULL) == SLUICE_OK);
    CTS_TRY(me, cts_await(m, SLUICE_MESSAGE_RECEIVED, 3, &c));
    CTS_TRY(me, cts_is_intact(&c, 0, BYTES));
    sluice_messages_release(m, c.arrival);
    sluice_status_t status = sluice_messages_receive(m, 0, 1, 4, NULL); /* a rank that does is notified */
    if (status == SLUICE_OK) status = sluice_messages_wait(m, NULL, &c);
    CTS_TRY(me, status == SLUICE_E_PEER_LOST);
    CTS_TRY(me, cts_last_peer() == 0);
  }
  sluice_messages_close(m);
  free(payload);
}

/* With partial messages in both directions, on all ranks at once. */
static void close_under_way(cts_rank_t* me) {
  sluice_messages_t* m;
  unsigned char* payload = cts_make_payload(me->rank, 1, CTS_LARGE_BYTES);
  CTS_TRY(me, sluice_messages_open(me->comm, NULL, &m) == SLUICE_OK);
  for (uint64_t i = 0; i < 10; ++i) {
    sluice_status_t status = sluice_messages_receive(m, cts_next_rank(me), 100 + i, 0, NULL);
    if (status == SLUICE_OK) status = cts_send(m, cts_next_rank(me), i, payload, CTS_LARGE_BYTES, 0);
    CTS_TRY(me, status == SLUICE_OK || status == SLUICE_E_PEER_LOST); /* a rank that has finished this already */
    if (status != SLUICE_OK) break;
  }
  const uint64_t begin_ns = sluice_now_ns();
  sluice_messages_close(m);
  CTS_TRY(me, sluice_now_ns() - begin_ns < BOUNDED_NS);
  memset(payload, 0xee, CTS_LARGE_BYTES);
  free(payload);
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

static void too_much_unexpected(cts_rank_t* me) {
  enum { BYTES = 100000 };
  sluice_messages_t* m;
  sluice_message_completion_t c;
  const sluice_messages_config_t config = {.max_unexpected_bytes = 3 * BYTES + 50};
  unsigned char* payload = cts_make_payload(me->rank, 1, BYTES);
  CTS_TRY(me, sluice_messages_open(me->comm, &config, &m) == SLUICE_OK);
  if (me->rank == 0) { /* three are kept, the fourth is not */
    CTS_TRY(me, cts_meet(me));
    sluice_status_t status = sluice_messages_receive(m, 0, 99, 0, NULL);
    if (status == SLUICE_OK) status = sluice_messages_wait(m, NULL, &c);
    CTS_TRY(me, status == SLUICE_E_OVER_BUDGET);
    CTS_TRY(me, cts_last_peer() == 1);
  } else {
    for (uint64_t i = 0; i < 4 && me->rank == 1; ++i) {
      CTS_TRY(me, cts_send(m, 0, i, payload, BYTES, i) == SLUICE_OK);
      if (i < 3) CTS_TRY(me, cts_await(m, SLUICE_MESSAGE_SENT, i, &c));
    }
    CTS_TRY(me, cts_meet(me));
    sluice_status_t status = sluice_messages_receive(m, me->rank, 5, 5, NULL);
    while (status == SLUICE_OK) status = sluice_messages_wait(m, NULL, &c); /* the fourth may have been sent */
    CTS_TRY(me, status == SLUICE_E_PEER_LOST);
    CTS_TRY(me, cts_last_peer() == 0);
  }
  CTS_TRY(me, cts_meet(me));
  sluice_messages_close(m);
  free(payload);
}

static void too_long(cts_rank_t* me, const sluice_messages_config_t* config, uint64_t max_bytes) {
  enum { BYTES = 100000 };
  sluice_messages_t* m;
  sluice_message_completion_t c;
  unsigned char* payload = cts_make_payload(me->rank, 1, BYTES);
  CTS_TRY(me, sluice_messages_open(me->comm, config, &m) == SLUICE_OK);
  if (me->rank == 0) {
    CTS_TRY(me, sluice_messages_receive_up_to(m, 1, 7, max_bytes, 7, NULL) == SLUICE_OK);
    CTS_TRY(me, sluice_messages_receive_up_to(m, 1, 8, max_bytes, 8, NULL) == SLUICE_OK);
    CTS_TRY(me, cts_meet(me));
    CTS_TRY(me, cts_await(m, SLUICE_MESSAGE_RECEIVED, 7, &c)); /* as long as allowed */
    CTS_TRY(me, c.payload_bytes == BYTES - 1);
    sluice_messages_release(m, c.arrival);
    CTS_TRY(me, sluice_messages_wait(m, NULL, &c) == SLUICE_E_OVER_BUDGET);
    CTS_TRY(me, cts_last_peer() == 1);
  } else {
    CTS_TRY(me, cts_meet(me));
    if (me->rank == 1) {
      CTS_TRY(me, cts_send(m, 0, 7, payload, BYTES - 1, 7) == SLUICE_OK);
      CTS_TRY(me, cts_await(m, SLUICE_MESSAGE_SENT, 7, &c));
      const sluice_status_t status = cts_send(m, 0, 8, payload, BYTES, 8);
      CTS_TRY(me, status == SLUICE_OK || status == SLUICE_E_PEER_LOST);
    }
    sluice_status_t status = sluice_messages_receive(m, me->rank, 5, 5, NULL);
    while (status == SLUICE_OK) status = sluice_messages_wait(m, NULL, &c); /* the long one may have been sent */
    CTS_TRY(me, status == SLUICE_E_PEER_LOST);
    CTS_TRY(me, cts_last_peer() == 0);
  }
  CTS_TRY(me, cts_meet(me));
  sluice_messages_close(m);
  free(payload);
}

static void longer_than_its_receive(cts_rank_t* me) { too_long(me, NULL, 100000 - 1); }

static void longer_than_any(cts_rank_t* me) {
  const sluice_messages_config_t config = {.max_message_bytes = 100000 - 1};
  too_long(me, &config, UINT64_MAX);
}

/* Opens alone, sends to itself, receives; each allocation fails once. */
static void nth_allocation(cts_rank_t* me) {
  sluice_allocator_t* allocator = sluice_process_allocator();
  for (int64_t n = 0; n < 64; ++n) {
    const uint64_t num_before = allocator->num_live;
    cts_world_t* world = me->world;
    void* shared = world->transport->open(1);
    sluice_comm_t* comm;
    sluice_messages_t* m = NULL;
    sluice_message_completion_t c;
    sluice_message_span_t spans[20];
    for (int i = 0; i < 20; ++i) spans[i] = (sluice_message_span_t){.data = "four", .bytes = 4};
    const sluice_message_t message = {.peer = 0, .num_spans = 20, .tag = 1, .spans = spans};
    CTS_TRY(me, shared != NULL && cts_create_end(world, shared, 0, 1, 0, &comm) == SLUICE_OK);
    allocator->fail_after = n;
    sluice_status_t status = sluice_messages_open(comm, NULL, &m);
    if (status == SLUICE_OK) status = sluice_messages_send(m, &message, 1, NULL);
    if (status == SLUICE_OK) status = sluice_messages_receive(m, 0, 1, 2, NULL);
    for (int both = 0; both < 2 && status == SLUICE_OK; ++both) status = sluice_messages_wait(m, NULL, &c);
    const int is_over = allocator->fail_after >= 0;
    allocator->fail_after = -1;
    CTS_TRY(me, status == (is_over ? SLUICE_OK : SLUICE_E_NO_MEMORY));
    sluice_messages_close(m);
    sluice_comm_destroy(comm);
    world->transport->close(shared);
    CTS_TRY(me, allocator->num_live == num_before);
    if (is_over) return;
  }
  cts_fail_check(me, __FILE__, __LINE__, "opening and one message end after a few allocations");
}

/* All ranks open together, and one allocation of any rank fails: all or none have an endpoint, and no rank hangs. */
static sluice_status_t opened[MAX_WORLD_SIZE]; /* by ranks that meet before another reads */

static void nth_allocation_of_an_opening(cts_rank_t* me) {
  sluice_allocator_t* allocator = sluice_process_allocator();
  if (me->world->num_here == 1) return; /* ranks that are processes have their own allocators */
  for (int64_t n = 0, is_over = 0; !is_over; ++n) {
    sluice_messages_t* m;
    CTS_TRY(me, n < 200);
    CTS_TRY(me, cts_meet(me));
    if (me->rank == 0) allocator->fail_after = n;
    CTS_TRY(me, cts_meet(me));
    opened[me->rank] = sluice_messages_open(me->comm, NULL, &m);
    CTS_TRY(me, (m != NULL) == (opened[me->rank] == SLUICE_OK));
    CTS_TRY(me, cts_meet(me));
    is_over = allocator->fail_after >= 0;
    CTS_TRY(me, cts_meet(me));
    if (me->rank == 0) allocator->fail_after = -1;
    CTS_TRY(me, (opened[me->rank] == SLUICE_OK) == is_over);
    CTS_TRY(me, cts_meet(me));
    sluice_messages_close(m);
    if (!is_over) cts_renew(me);
    if (me->failure[0] != '\0') return;
  }
}

/* The receiver has no memory: it reports that, and the others learn that it is lost. */
static void no_memory_for_arrival(cts_rank_t* me) {
  sluice_allocator_t memory;
  sluice_messages_t* m;
  sluice_message_completion_t c;
  unsigned char* payload = cts_make_payload(me->rank, 1, 500000);
  sluice_allocator_init(&memory, NULL, NULL, NULL);
  memory.limit = me->rank == 0 ? 400000 : 0;
  const sluice_messages_config_t config = {.allocator = &memory};
  CTS_TRY(me, sluice_messages_open(me->comm, &config, &m) == SLUICE_OK);
  CTS_TRY(me, sluice_messages_receive(m, cts_next_rank(me), 1, 1, NULL) == SLUICE_OK);
  CTS_TRY(me, cts_meet(me));
  if (me->rank == 1) CTS_TRY(me, cts_send(m, 0, 1, payload, 500000, 2) == SLUICE_OK);
  sluice_status_t status;
  do {
    status = sluice_messages_wait(m, NULL, &c);
  } while (status == SLUICE_OK);
  CTS_TRY(me, status == (me->rank == 0 ? SLUICE_E_OVER_BUDGET : SLUICE_E_PEER_LOST));
  CTS_TRY(me, cts_last_peer() == (me->rank == 0 ? 1 : 0));
  CTS_TRY(me, cts_meet(me));
  sluice_messages_close(m);
  CTS_TRY(me, memory.num_live == 0);
  sluice_allocator_deinit(&memory);
  free(payload);
}

/* ---- fork -------------------------------------------------------------------------------------------------------- */

/* Runs in the child: every entry returns at once. Exit code 0 or the line that failed. */
static int use_inherited(sluice_messages_t* m, sluice_message_request_t request) {
  sluice_message_completion_t c;
  if (sluice_messages_receive(m, 0, 1, 1, NULL) != SLUICE_E_STATE) return 2;
  if (cts_send(m, 0, 1, "x", 1, 1) != SLUICE_E_STATE) return 3;
  if (sluice_messages_next(m, 0, &c) != SLUICE_E_STATE) return 4;
  if (sluice_messages_wait(m, NULL, &c) != SLUICE_E_STATE) return 5;
  if (sluice_messages_cancel(m, request) != 0) return 6;
  sluice_messages_abort(m);
  sluice_messages_close(m);
  return 0;
}

static void fork_with_messages(cts_rank_t* me) {
  sluice_messages_t* m;
  sluice_message_completion_t c;
  sluice_message_request_t request;
  CTS_TRY(me, sluice_messages_open(me->comm, NULL, &m) == SLUICE_OK);
  CTS_TRY(me, sluice_messages_receive(m, cts_next_rank(me), 1, 1, &request) == SLUICE_OK);
  CTS_TRY(me, cts_meet(me));
  if (me->rank == 0) {
    const pid_t child = fork();
    if (child == 0) _exit(use_inherited(m, request));
    int code = -1;
    CTS_TRY(me, child > 0 && waitpid(child, &code, 0) == child);
    CTS_TRY(me, WIFEXITED(code));
    CTS_TRY(me, WEXITSTATUS(code) == 0);
  }
  CTS_TRY(me, cts_meet(me));
  CTS_TRY(me, cts_send(m, cts_previous_rank(me), 1, "still", 5, 2) == SLUICE_OK);
  for (int both = 0; both < 2; ++both) CTS_TRY(me, sluice_messages_wait(m, NULL, &c) == SLUICE_OK);
  sluice_messages_close(m);
}

const cts_case_t cts_messages_losses_cases[] = {
    {"AbortMessages_WhilePeersWait_AllNameIt", aborts, 2, 0, 0},
    {"AbortCommunicator_WithMessages_AllNameIt", aborts_communicator, 2, 0, 0},
    {"AbortMessages_Exchanges_GoOn", exchange_after_abort, 2, 0, 0},
    {"AbortMessages_FromAnotherThread_EndsTheWait", abort_from_other_thread, 1, 0, 0},
    {"CloseMessages_AllIsSent_HurtsOnlyWhoNeedsMore", leave_early, 2, 0, 0},
    {"CloseMessages_HalfOfThemOut_Ends", close_under_way, 1, 0, 0},
    {"Messages_MoreThanIsKept_IsOverBudgetNamingTheSender", too_much_unexpected, 2, 0, 0},
    {"Messages_LongerThanTheReceiveAllows_IsOverBudgetNamingTheSender", longer_than_its_receive, 2, 0, 0},
    {"Messages_LongerThanMaxMessageBytes_IsOverBudgetNamingTheSender", longer_than_any, 2, 0, 0},
    {"Messages_NthAllocationFails_LeaksNothing", nth_allocation, 0, 0, 0},
    {"OpenMessages_NthAllocationOfAnyRankFails_AllOrNone", nth_allocation_of_an_opening, 2, 0, 0},
    {"Message_NoMemoryForIt_IsToldOnBothSides", no_memory_for_arrival, 2, 0, 0},
    {"Fork_ChildMessages_AreInert", fork_with_messages, 1, 0, 0},
    {NULL, NULL, 0, 0, 0},
};
