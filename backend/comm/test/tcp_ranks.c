// SPDX-License-Identifier: Apache-2.0
#include "backend/comm/test/tcp_ranks.h"

#include <pthread.h>
#include <stdlib.h>

#include "backend/base/clock.h"

static void* run_rank(void* argument) {
  tcp_rank_t* me = argument;
  sluice_comm_config_t config;
  sluice_tcp_config_t tcp;
  sluice_comm_config_init(&config, sizeof config);
  sluice_tcp_config_init(&tcp, sizeof tcp);
  config.rank = me->rank;
  config.world_size = me->world_size;
  config.timeout_ns = me->timeout_ns;
  tcp.interfaces = me->interfaces;
  tcp.connect_timeout_ns = me->connect_timeout_ns;
  me->status = sluice_comm_create_local(me->group, &config, &me->parent);
  if (me->status != SLUICE_OK) return NULL;
  me->created_ns = sluice_now_ns();
  me->status = sluice_comm_create_tcp(me->parent, &tcp, &me->comm);
  me->created_ns = sluice_now_ns() - me->created_ns;
  sluice_error_info_init(&me->why, sizeof me->why);
  if (me->status != SLUICE_OK) sluice_error_last(&me->why);
  if (me->then != NULL && me->status == SLUICE_OK) me->then(me);
  sluice_comm_destroy(me->comm);
  int64_t one = 1;
  me->again = sluice_comm_all_reduce_i64(me->parent, &one, 1, SLUICE_REDUCE_SUM, "the parent, afterwards");
  if (me->again == SLUICE_OK && one != me->world_size) me->again = SLUICE_E_INTERNAL;
  sluice_comm_destroy(me->parent);
  return NULL;
}

void tcp_ranks_run(tcp_rank_t* ranks, int32_t world_size) {
  sluice_local_group_t* group;
  pthread_t threads[TCP_MAX_RANKS];
  if (sluice_local_group_create(world_size, &group) != SLUICE_OK) abort();
  for (int32_t r = 0; r < world_size; ++r) {
    ranks[r].group = group;
    ranks[r].rank = r;
    ranks[r].world_size = world_size;
    if (pthread_create(&threads[r], NULL, run_rank, &ranks[r]) != 0) abort();
  }
  for (int32_t r = 0; r < world_size; ++r) pthread_join(threads[r], NULL);
  sluice_local_group_destroy(group);
}

void tcp_ranks_meet(const tcp_rank_t* me) {
  int64_t one = 1;
  (void)sluice_comm_all_reduce_i64(me->parent, &one, 1, SLUICE_REDUCE_SUM, "a meeting of the test");
}

void tcp_ranks_exchange(tcp_rank_t* me) {
  uint64_t out = (uint64_t)me->rank + 7, in[TCP_MAX_RANKS] = {0}, bytes[TCP_MAX_RANKS];
  const void* send[TCP_MAX_RANKS];
  void* recv[TCP_MAX_RANKS];
  for (int32_t r = 0; r < me->world_size; ++r) {
    send[r] = &out;
    recv[r] = &in[r];
    bytes[r] = r == me->rank ? 0 : sizeof out;
  }
  const sluice_exchange_t exchange = {.send = send, .send_bytes = bytes, .recv = recv, .recv_bytes = bytes};
  sluice_comm_request_t* request;
  me->status = sluice_comm_exchange_start(me->comm, &exchange, &request);
  if (me->status == SLUICE_OK) me->status = sluice_comm_exchange_wait(me->comm, request, NULL);
  for (int32_t r = 0; r < me->world_size; ++r) {
    if (r != me->rank && me->status == SLUICE_OK && in[r] != (uint64_t)r + 7) me->status = SLUICE_E_INTERNAL;
  }
  if (me->status != SLUICE_OK) sluice_error_last(&me->why);
}
