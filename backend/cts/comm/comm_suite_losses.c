// SPDX-License-Identifier: Apache-2.0
/* Cases of ranks that leave or abort: the others learn which rank it was, in bounded time. */
#include "backend/base/clock.h"
#include "backend/cts/comm/comm_suite_case.h"

static void abort_peer(cts_rank_t* me) {
  CTS_TRY(me, cts_run_exchange(me, me->comm, 0, cts_small_size) == SLUICE_OK);
  if (cts_is_culprit(me)) {
    cts_sleep_ns(100 * MS);
    sluice_comm_abort(me->comm);
    CTS_TRY(me, cts_run_exchange(me, me->comm, 1, cts_small_size) == SLUICE_E_ABORTED);
    CTS_TRY(me, cts_meet(me));
    cts_check_broken_and_destroy(me, SLUICE_E_ABORTED);
  } else {
    uint64_t begin_ns = sluice_now_ns();
    CTS_TRY(me, cts_run_exchange(me, me->comm, 1, cts_medium_size) == SLUICE_E_PEER_LOST);
    CTS_TRY(me, cts_last_peer() == me->world->world_size - 1);
    CTS_TRY(me, sluice_now_ns() - begin_ns < BOUNDED_NS);
    CTS_TRY(me, cts_meet(me));
    cts_check_broken_and_destroy(me, SLUICE_E_PEER_LOST);
  }
  if (me->failure[0] == '\0') cts_renew(me);
}

static void* abort_soon(void* comm) {
  cts_sleep_ns(100 * MS);
  sluice_comm_abort(comm);
  return NULL;
}

static void abort_other_thread(cts_rank_t* me) {
  if (me->rank == 0) {
    pthread_t thread;
    CTS_TRY(me, pthread_create(&thread, NULL, abort_soon, me->comm) == 0);
    uint64_t begin_ns = sluice_now_ns();
    sluice_status_t status = cts_run_exchange(me, me->comm, 0, cts_small_size);
    uint64_t took_ns = sluice_now_ns() - begin_ns;
    pthread_join(thread, NULL);
    CTS_TRY(me, status == SLUICE_E_ABORTED);
    CTS_TRY(me, took_ns < BOUNDED_NS);
  }
  CTS_TRY(me, cts_meet(me));
  cts_renew(me);
}

static void destroy_while_peers_wait(cts_rank_t* me) {
  CTS_TRY(me, cts_run_exchange(me, me->comm, 0, cts_small_size) == SLUICE_OK);
  int is_noticed = cts_exception_of(me->world->transport, me->world->c) == NULL;
  CTS_TRY(me, cts_hurry(me, is_noticed ? PATIENT_NS : SHORT_NS)); /* without a notification, the deadline reports it */
  if (cts_is_culprit(me)) {
    sluice_comm_destroy(me->comm);
    me->comm = NULL;
    CTS_TRY(me, cts_meet(me));
  } else {
    sluice_status_t status = cts_run_exchange(me, me->comm, 1, cts_small_size);
    int32_t peer = cts_last_peer();
    CTS_TRY(me, cts_meet(me));
    CTS_TRY(me, status == SLUICE_E_PEER_LOST);
    CTS_TRY(me, peer == me->world->world_size - 1);
  }
}

/* The last rank is silent, and the others wait only for its message; the one before it gives up. */
static void third_gives_up(cts_rank_t* me, void (*give_up)(sluice_comm_t* comm)) {
  const int32_t silent = me->world->world_size - 1, quitter = silent - 1;
  CTS_TRY(me, cts_run_exchange(me, me->comm, 0, cts_small_size) == SLUICE_OK);
  CTS_TRY(me, cts_meet(me));
  if (me->rank == quitter) {
    cts_exchange_t e;
    CTS_TRY(me, cts_start(me, me->comm, silent, cts_one_sided_size, &e) == SLUICE_OK);
    cts_sleep_ns(100 * MS); /* so that the others are usually waiting by then: they get the same result either way */
    give_up(me->comm);
    if (give_up == sluice_comm_destroy) me->comm = NULL;
    CTS_TRY(me, cts_meet(me));
    sluice_comm_destroy(me->comm); /* before the buffers */
    me->comm = NULL;
    cts_release(&e);
  } else if (me->rank != silent) {
    uint64_t begin_ns = sluice_now_ns();
    sluice_status_t status = cts_run_exchange(me, me->comm, silent, cts_one_sided_size);
    int32_t peer = cts_last_peer();
    uint64_t took_ns = sluice_now_ns() - begin_ns;
    CTS_TRY(me, cts_meet(me));
    CTS_TRY(me, status == SLUICE_E_PEER_LOST);
    CTS_TRY(me, peer == quitter);
    CTS_TRY(me, took_ns < BOUNDED_NS);
  } else {
    CTS_TRY(me, cts_meet(me));
  }
}

static void third_aborts(cts_rank_t* me) { third_gives_up(me, sluice_comm_abort); }
static void third_destroys(cts_rank_t* me) { third_gives_up(me, sluice_comm_destroy); }

static void destroy_early(cts_rank_t* me) {
  /* Everything has arrived at rank 0: its departure must not hurt the others, and must not wait for them. */
  CTS_TRY(me, cts_run_exchange(me, me->comm, 0, cts_uneven_size) == SLUICE_OK);
  if (me->rank == 0) {
    uint64_t begin_ns = sluice_now_ns();
    sluice_comm_destroy(me->comm);
    me->comm = NULL;
    CTS_TRY(me, sluice_now_ns() - begin_ns < BOUNDED_NS);
    CTS_TRY(me, cts_meet(me));
    return;
  }
  CTS_TRY(me, cts_meet(me));
  CTS_TRY(me, cts_run_exchange(me, me->comm, 0, cts_zero_size) == SLUICE_OK);
}

const cts_case_t cts_losses_cases[] = {
    {"Abort_WhilePeersWait_IsPeerLostNamingIt", abort_peer, 2, 0, 0},
    {"Abort_FromAnotherThread_EndsTheWait", abort_other_thread, 2, 0, 0},
    {"Destroy_WhilePeersWait_IsPeerLostNamingIt", destroy_while_peers_wait, 2, 0, 0},
    {"Abort_ByOneOfThoseWaiting_EndsTheOthersWait", third_aborts, 3, 0, 0},
    {"Destroy_ByOneOfThoseWaiting_EndsTheOthersWait", third_destroys, 3, 0, 0},
    {"Destroy_NothingOutstanding_LeavesOthersAlone", destroy_early, 2, 0, 0},
    {NULL, NULL, 0, 0, 0},
};
