// SPDX-License-Identifier: Apache-2.0
/* Cases of silent or late ranks: deadlines name them, after a warning. */
#include <stdio.h>
#include <string.h>

#include "backend/base/clock.h"
#include "backend/cts/comm/comm_suite_case.h"

static void wait_silent_rank(cts_rank_t* me) {
  CTS_TRY(me, cts_run_exchange(me, me->comm, 0, cts_small_size) == SLUICE_OK);
  CTS_TRY(me, cts_hurry(me, SHORT_NS));
  if (!cts_is_culprit(me)) {
    uint64_t begin_ns = sluice_now_ns();
    CTS_TRY(me, cts_run_exchange(me, me->comm, 1, cts_small_size) == SLUICE_E_TIMED_OUT);
    CTS_TRY(me, cts_last_peer() == me->world->world_size - 1);
    uint64_t took_ns = sluice_now_ns() - begin_ns;
    CTS_TRY(me, took_ns >= SHORT_NS && took_ns < SHORT_NS + BOUNDED_NS);
    CTS_TRY(me, cts_meet(me));
    cts_check_broken_and_destroy(me, SLUICE_E_TIMED_OUT);
  } else {
    CTS_TRY(me, cts_meet(me));
  }
  if (me->failure[0] == '\0') cts_renew(me);
}

static void wait_silent_rank_two_in_flight(cts_rank_t* me) {
  CTS_TRY(me, cts_hurry(me, SHORT_NS));
  if (!cts_is_culprit(me)) {
    cts_exchange_t first, second;
    CTS_TRY(me, cts_start(me, me->comm, 0, cts_small_size, &first) == SLUICE_OK);
    CTS_TRY(me, cts_start(me, me->comm, 1, cts_medium_size, &second) == SLUICE_OK);
    CTS_TRY(me, cts_finish(me, me->comm, &first) == SLUICE_E_TIMED_OUT);
    CTS_TRY(me, cts_last_peer() == me->world->world_size - 1);
    uint64_t begin_ns = sluice_now_ns();
    CTS_TRY(me, sluice_comm_exchange_wait(me->comm, second.request, NULL) == SLUICE_E_TIMED_OUT);
    CTS_TRY(me, sluice_now_ns() - begin_ns < BOUNDED_NS);
    CTS_TRY(me, cts_meet(me));
    sluice_comm_destroy(me->comm); /* before the buffers: some transports cannot cancel a message */
    me->comm = NULL;
    cts_release(&second);
  } else {
    CTS_TRY(me, cts_meet(me));
  }
  cts_renew(me);
}

/* Whether a rank in this process was warned that it waits for the last one. */
static int is_warned(cts_world_t* world) {
  char expected[32];
  snprintf(expected, sizeof expected, "for rank %d", world->world_size - 1);
  pthread_mutex_lock(&world->mutex);
  int is_named = world->num_warnings > 0 && strstr(world->warnings, expected) != NULL;
  pthread_mutex_unlock(&world->mutex);
  return is_named;
}

static void wait_late_rank(cts_rank_t* me) {
  cts_world_t* world = me->world;
  CTS_TRY(me, cts_meet(me));
  /* the last rank arrives once a rank of this process has been warned, or after a while */
  if (cts_is_culprit(me)) {
    int sees_it = world->num_here > 1 && cts_exception_of(world->transport, world->c) == NULL;
    uint64_t give_up_ns = sluice_now_ns() + (sees_it ? PATIENT_NS / 2 : SHORT_NS);
    while (!is_warned(world) && sluice_now_ns() < give_up_ns) cts_sleep_ns(5 * MS);
  }
  CTS_TRY(me, cts_run_exchange(me, me->comm, 0, cts_uneven_size) == SLUICE_OK);
  CTS_TRY(me, cts_run_exchange(me, me->comm, 0, cts_small_size) == SLUICE_OK);
  CTS_TRY(me, cts_meet(me));
  if (cts_is_culprit(me)) return;
  CTS_TRY(me, is_warned(world));
}

const cts_case_t cts_waits_cases[] = {
    {"Wait_SilentRank_TimesOutNamingIt", wait_silent_rank, 2, 0, 0},
    {"Wait_SilentRankWithTwoInFlight_ReleasesBoth", wait_silent_rank_two_in_flight, 2, 0, 0},
    {"Wait_LateRank_WarnsAndSucceeds", wait_late_rank, 2, 1, 50 * MS},
    {NULL, NULL, 0, 0, 0},
};
