// SPDX-License-Identifier: Apache-2.0
#include "backend/cts/comm/comm_suite_ranks.h"

#include <time.h>

#include "backend/base/clock.h"
#include "backend/cts/comm/comm_suite_exchange.h"

void cts_sleep_ns(uint64_t ns) {
  struct timespec t = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
  nanosleep(&t, NULL);
}

int cts_meet(cts_rank_t* me) {
  cts_world_t* world = me->world;
  if (world->transport->meeting != NULL) {
    int64_t one = 1;
    return sluice_comm_all_reduce_i64(world->transport->meeting, &one, 1, SLUICE_REDUCE_SUM, "the suite's meeting") ==
           SLUICE_OK;
  }
  uint64_t deadline_ns = sluice_now_ns() + 2 * PATIENT_NS;
  int came = 1;
  pthread_mutex_lock(&world->mutex);
  uint64_t round = world->round;
  if (++world->num_waiting == world->world_size) {
    world->num_waiting = 0;
    ++world->round;
    pthread_cond_broadcast(&world->met);
  }
  while (world->round == round && came) came = sluice_cond_wait_until(&world->met, &world->mutex, deadline_ns) == 0;
  pthread_mutex_unlock(&world->mutex);
  return came;
}

sluice_status_t cts_create_end(cts_world_t* world, void* shared, int32_t rank, int32_t world_size, uint64_t timeout_ns,
                               sluice_comm_t** out_comm) {
  sluice_comm_config_t config;
  sluice_comm_config_init(&config, sizeof config);
  config.rank = rank;
  config.world_size = world_size;
  config.timeout_ns = timeout_ns != 0 ? timeout_ns : PATIENT_NS;
  config.warn_ns = world->c->warn_ns;
  return world->transport->create(shared, &config, out_comm);
}

int cts_is_culprit(const cts_rank_t* me) { return me->rank == me->world->world_size - 1; }

int cts_hurry(cts_rank_t* me, uint64_t timeout_ns) {
  me->comm->timeout_ns = timeout_ns;
  return cts_meet(me);
}

void cts_check_broken_and_destroy(cts_rank_t* me, sluice_status_t status) {
  CTS_TRY(me, cts_run_exchange(me, me->comm, 0, cts_small_size) == status);
  int64_t x = 0;
  CTS_TRY(me, sluice_comm_all_reduce_i64(me->comm, &x, 1, SLUICE_REDUCE_SUM, NULL) == status);
  uint64_t begin_ns = sluice_now_ns();
  sluice_comm_abort(me->comm);
  sluice_comm_abort(me->comm);
  sluice_comm_destroy(me->comm);
  me->comm = NULL;
  CTS_TRY(me, sluice_now_ns() - begin_ns < BOUNDED_NS);
}

void cts_renew(cts_rank_t* me) {
  cts_world_t* world = me->world;
  sluice_comm_destroy(me->comm);
  me->comm = NULL;
  CTS_TRY(me, cts_meet(me));
  if (world->num_here == 1 || me->rank == 0) {
    world->transport->close(world->shared);
    world->shared = world->transport->open(world->world_size);
  }
  CTS_TRY(me, cts_meet(me));
  CTS_TRY(me, world->shared != NULL);
  CTS_TRY(me, cts_create_end(world, world->shared, me->rank, world->world_size, PATIENT_NS, &me->comm) == SLUICE_OK);
  CTS_TRY(me, cts_run_exchange(me, me->comm, 1, cts_uneven_size) == SLUICE_OK);
  CTS_TRY(me, cts_run_exchange(me, me->comm, 2, cts_small_size) == SLUICE_OK);
}
