// SPDX-License-Identifier: Apache-2.0
#include "backend/cts/comm/comm_suite_case.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "backend/base/clock.h"
#include "backend/base/math.h"

#define NUM_GUARD_BYTES   16
#define LARGE_BLOCK_BYTES (UINT64_C(2) << 20)

void cts_fail_check(cts_rank_t* me, const char* file, int line, const char* text) {
  if (me->failure[0] != '\0') return;
  snprintf(me->failure, sizeof me->failure, "rank %d, %s:%d: %s; last error: %s, peer %d, \"%.300s\"", me->rank, file,
           line, text, sluice_status_name(last_error()->status), last_error()->peer, last_message());
}

int32_t cts_last_peer(void) { return last_error()->peer; }

const cts_exception_t* cts_exception_of(const cts_transport_t* transport, const cts_case_t* c) {
  const cts_exception_t* e = transport->cannot;
  while (e != NULL && e->case_name != NULL && strcmp(e->case_name, c->name) != 0) ++e;
  return e != NULL && e->case_name != NULL ? e : NULL;
}

/* ---- ranks ---- */

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

/* ---- exchanges ---- */

uint64_t cts_uneven_size(int32_t source, int32_t target, int32_t index) {
  if ((source * 7 + target * 3 + index * 5) % 4 == 0) return 0;
  return 1 + (uint64_t)(source * 1009 + target * 377 + index * 131) % 5000;
}
uint64_t cts_one_sided_size(int32_t source, int32_t target, int32_t index) {
  (void)target;
  return source == index ? 1234 : 0;
}
uint64_t cts_zero_size(int32_t source, int32_t target, int32_t index) {
  (void)source, (void)target, (void)index;
  return 0;
}
uint64_t cts_large_size(int32_t source, int32_t target, int32_t index) {
  return LARGE_BLOCK_BYTES + (uint64_t)(source * 3 + target + index);
}
uint64_t cts_medium_size(int32_t source, int32_t target, int32_t index) {
  return 100000 + (uint64_t)(source * 3 + target + index);
}
uint64_t cts_small_size(int32_t source, int32_t target, int32_t index) {
  (void)source, (void)target, (void)index;
  return 64;
}

/* Word i of a block, unique in the suite. Words, not bytes: sanitizers make each access slow. */
static uint64_t identity_word(int32_t source, int32_t target, int32_t index, uint64_t i) {
  uint64_t block = (uint64_t)source << 48 | (uint64_t)target << 40 | (uint64_t)index << 24;
  return (block + i) * UINT64_C(0x9E3779B97F4A7C15);
}

static void fill_block(unsigned char* data, uint64_t bytes, int32_t source, int32_t target, int32_t index) {
  for (uint64_t at = 0; at < bytes; at += 8) {
    uint64_t word = identity_word(source, target, index, at / 8);
    memcpy(data + at, &word, bytes - at < 8 ? bytes - at : 8);
  }
}

static int is_block_intact(const unsigned char* data, uint64_t bytes, int32_t source, int32_t target, int32_t index) {
  for (uint64_t at = 0; at < bytes; at += 8) {
    uint64_t word = identity_word(source, target, index, at / 8);
    if (memcmp(data + at, &word, bytes - at < 8 ? bytes - at : 8) != 0) return 0;
  }
  return 1;
}

sluice_status_t cts_start(cts_rank_t* me, sluice_comm_t* comm, int32_t index, cts_size_fn_t size, cts_exchange_t* e) {
  memset(e, 0, sizeof *e);
  e->index = index;
  e->size = size;
  for (int32_t p = 0; p < me->world->world_size; ++p) {
    if (p == me->rank) {
      e->send_bytes[p] = 77;
      e->recv_bytes[p] = 99;
      continue;
    }
    e->send_bytes[p] = size(me->rank, p, index);
    e->recv_bytes[p] = size(p, me->rank, index);
    unsigned char* send = malloc(e->send_bytes[p] + 1);
    fill_block(send, e->send_bytes[p], me->rank, p, index);
    e->send[p] = send;
    e->recv[p] = malloc(e->recv_bytes[p] + NUM_GUARD_BYTES);
    memset(e->recv[p], 0xEE, e->recv_bytes[p] + NUM_GUARD_BYTES);
  }
  /* The buffers live until the wait, the arrays only until start returns. */
  struct {
    const void* send[MAX_WORLD_SIZE];
    void* recv[MAX_WORLD_SIZE];
    uint64_t send_bytes[MAX_WORLD_SIZE];
    uint64_t recv_bytes[MAX_WORLD_SIZE];
  } passing;
  memcpy(passing.send, e->send, sizeof passing.send);
  memcpy(passing.recv, e->recv, sizeof passing.recv);
  memcpy(passing.send_bytes, e->send_bytes, sizeof passing.send_bytes);
  memcpy(passing.recv_bytes, e->recv_bytes, sizeof passing.recv_bytes);
  sluice_exchange_t exchange = {
      .send = passing.send, .send_bytes = passing.send_bytes, .recv = passing.recv, .recv_bytes = passing.recv_bytes};
  sluice_status_t status = sluice_comm_exchange_start(comm, &exchange, &e->request);
  memset(&passing, 0x55, sizeof passing);
  return status;
}

void cts_release(cts_exchange_t* e) {
  for (int32_t p = 0; p < MAX_WORLD_SIZE; ++p) {
    free((void*)(uintptr_t)e->send[p]);
    free(e->recv[p]);
    e->send[p] = NULL;
    e->recv[p] = NULL;
  }
}

/* True if everything arrived unchanged and nothing was written outside of it. */
static int is_intact(const cts_rank_t* me, const cts_exchange_t* e) {
  for (int32_t p = 0; p < me->world->world_size; ++p) {
    if (p == me->rank) continue;
    const unsigned char* recv = e->recv[p];
    if (!is_block_intact(recv, e->recv_bytes[p], p, me->rank, e->index)) return 0;
    for (uint64_t i = 0; i < NUM_GUARD_BYTES; ++i) {
      if (recv[e->recv_bytes[p] + i] != 0xEE) return 0;
    }
  }
  return 1;
}

sluice_status_t cts_finish(cts_rank_t* me, sluice_comm_t* comm, cts_exchange_t* e) {
  sluice_status_t status = sluice_comm_exchange_wait(comm, e->request, "the suite's exchange");
  if (status == SLUICE_OK && !is_intact(me, e)) cts_fail_check(me, __FILE__, __LINE__, "the data arrived unchanged");
  cts_release(e);
  return status;
}

sluice_status_t cts_run_exchange(cts_rank_t* me, sluice_comm_t* comm, int32_t index, cts_size_fn_t size) {
  cts_exchange_t e;
  sluice_status_t status = cts_start(me, comm, index, size, &e);
  if (status != SLUICE_OK) {
    cts_release(&e);
    return status;
  }
  return cts_finish(me, comm, &e);
}

/* ---- messages ---- */

enum { PERIOD = 8191 };

unsigned char cts_pattern(int32_t from, uint64_t tag, uint64_t index) {
  const uint64_t i = index % PERIOD;
  return (unsigned char)((uint64_t)from * 89 + tag * 31 + i * 7 + (i >> 8) * 13);
}

unsigned char* cts_make_payload(int32_t from, uint64_t tag, uint64_t bytes) {
  unsigned char* payload = malloc(bytes + 1);
  if (payload == NULL) return NULL;
  for (uint64_t i = 0; i < sluice_min_u64(bytes, PERIOD); ++i) payload[i] = cts_pattern(from, tag, i);
  for (uint64_t done = PERIOD; done < bytes; done += PERIOD) {
    memcpy(payload + done, payload, sluice_min_u64(bytes - done, PERIOD));
  }
  return payload;
}

int cts_is_intact(const sluice_message_completion_t* c, uint64_t head_bytes, uint64_t bytes) {
  if (c->kind != SLUICE_MESSAGE_RECEIVED || c->arrival == NULL || c->payload == NULL || c->head == NULL) return 0;
  if (c->head_bytes != head_bytes || c->payload_bytes != bytes) return 0;
  if ((uintptr_t)c->payload % 64 != 0 || (uintptr_t)c->head % 64 != 0) return 0;
  for (uint64_t i = 0; i < head_bytes; ++i) {
    if (((const unsigned char*)c->head)[i] != cts_pattern(c->peer, c->tag, i)) return 0;
  }
  const unsigned char* payload = c->payload;
  for (uint64_t i = 0; i < sluice_min_u64(bytes, PERIOD); ++i) {
    if (payload[i] != cts_pattern(c->peer, c->tag, i)) return 0;
  }
  return bytes <= PERIOD || memcmp(payload, payload + PERIOD, bytes - PERIOD) == 0;
}

sluice_status_t cts_send(sluice_messages_t* m, int32_t peer, uint64_t tag, const void* payload, uint64_t bytes,
                         uint64_t user) {
  const sluice_message_span_t span = {.data = payload, .bytes = bytes};
  const sluice_message_t message = {.peer = peer, .num_spans = 1, .tag = tag, .spans = &span};
  return sluice_messages_send(m, &message, user, NULL);
}

int cts_await(sluice_messages_t* m, int32_t kind, uint64_t user, sluice_message_completion_t* out_completion) {
  return sluice_messages_wait(m, "the suite's message", out_completion) == SLUICE_OK && out_completion->kind == kind &&
         out_completion->user == user;
}
