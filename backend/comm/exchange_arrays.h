// SPDX-License-Identifier: Apache-2.0
/* The four arrays of an exchange in one block of memory, and the slices of elements that ranks own. */
#pragma once

#include "backend/base/math.h"
#include "backend/comm/comm.h"

typedef struct sluice_exchange_arrays_s { /* [W] each */
  const void** send;
  uint64_t* send_bytes;
  void** recv;
  uint64_t* recv_bytes;
} sluice_exchange_arrays_t;

static inline uint64_t sluice_exchange_arrays_bytes(int32_t world_size) {
  return (uint64_t)world_size * (2 * sizeof(void*) + 2 * sizeof(uint64_t));
}

/* Places the arrays in a block of at least that many bytes, aligned for pointers; `send` is its beginning. */
static inline sluice_exchange_arrays_t sluice_exchange_arrays_in(void* block, int32_t world_size) {
  const uint64_t w = (uint64_t)world_size;
  sluice_exchange_arrays_t arrays = {.send = (const void**)block};
  arrays.recv = (void**)(void*)(arrays.send + w);
  arrays.send_bytes = (uint64_t*)(void*)(arrays.recv + w);
  arrays.recv_bytes = arrays.send_bytes + w;
  return arrays;
}

static inline sluice_exchange_t sluice_exchange_of(const sluice_exchange_arrays_t* arrays) {
  return (sluice_exchange_t){
      .send = arrays->send, .send_bytes = arrays->send_bytes, .recv = arrays->recv, .recv_bytes = arrays->recv_bytes};
}

/* The elements [begin, begin + count) of one rank. */
typedef struct sluice_slice_s {
  int64_t begin, count;
} sluice_slice_t;

/* The first slices are longer by one if `count` is no multiple of world_size. */
static inline sluice_slice_t sluice_slice_of(int64_t count, int32_t rank, int32_t world_size) {
  const int64_t each = count / world_size, more = count % world_size;
  return (sluice_slice_t){each * rank + sluice_min(rank, more), each + (rank < more)};
}
