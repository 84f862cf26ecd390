// SPDX-License-Identifier: Apache-2.0
#include "backend/cts/comm/comm_suite_exchange.h"

#include <stdlib.h>
#include <string.h>

#define NUM_GUARD_BYTES   16
#define LARGE_BLOCK_BYTES (UINT64_C(2) << 20)

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
