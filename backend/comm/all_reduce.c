// SPDX-License-Identifier: Apache-2.0
/* The all-reduce: that of the transport, or one exchange for small data and two for large data. */
#include "backend/base/clock.h"
#include "backend/base/math.h"
#include "backend/comm/comm.h"
#include "backend/comm/comm_stragglers.h"
#include "backend/comm/comm_life.h"
#include "backend/comm/exchange_arrays.h"

#define SMALL_REDUCE_BYTES UINT64_C(65536) /* received per rank; above it two exchanges are cheaper than one */

static void reduce_into(int64_t* data, const int64_t* other, int64_t count, int32_t op) {
  for (int64_t i = 0; i < count; ++i) {
    if (op == SLUICE_REDUCE_SUM) {
      data[i] = (int64_t)((uint64_t)data[i] + (uint64_t)other[i]);
    } else if (other[i] > data[i]) {
      data[i] = other[i];
    }
  }
}

/* The arrays of one exchange and its receive buffer, in one block. */
typedef struct reduce_scratch_s {
  sluice_exchange_arrays_t arrays;
  int64_t* received;
} reduce_scratch_t;

static sluice_status_t run_exchange(sluice_comm_t* comm, const reduce_scratch_t* s, const char* phase) {
  const sluice_exchange_t exchange = sluice_exchange_of(&s->arrays);
  return sluice_comm_exchange(comm, &exchange, phase);
}

/* Every rank sends everything to every rank. */
static sluice_status_t reduce_small(sluice_comm_t* comm, int64_t* data, int64_t count, int32_t op,
                                    const reduce_scratch_t* s, const char* phase) {
  const sluice_exchange_arrays_t* a = &s->arrays;
  for (int32_t r = 0; r < comm->world_size; ++r) {
    a->send[r] = data;
    a->recv[r] = s->received + r * count;
    a->send_bytes[r] = a->recv_bytes[r] = r == comm->rank ? 0 : (uint64_t)count * sizeof *data;
  }
  SLUICE_TRY(run_exchange(comm, s, phase));
  for (int32_t r = 0; r < comm->world_size; ++r) {
    if (r != comm->rank) reduce_into(data, s->received + r * count, count, op);
  }
  return SLUICE_OK;
}

/* Reduce-scatter, then all-gather: rank r reduces slice r of every rank. */
static sluice_status_t reduce_large(sluice_comm_t* comm, int64_t* data, int64_t count, int32_t op,
                                    const reduce_scratch_t* s, const char* phase) {
  const sluice_exchange_arrays_t* a = &s->arrays;
  const int32_t w = comm->world_size, me = comm->rank;
  const sluice_slice_t own = sluice_slice_of(count, me, w);
  for (int32_t r = 0; r < w; ++r) {
    const sluice_slice_t theirs = sluice_slice_of(count, r, w);
    a->send[r] = data + theirs.begin;
    a->send_bytes[r] = r == me ? 0 : (uint64_t)theirs.count * sizeof *data;
    a->recv[r] = s->received + r * own.count;
    a->recv_bytes[r] = r == me ? 0 : (uint64_t)own.count * sizeof *data;
  }
  SLUICE_TRY(run_exchange(comm, s, phase));
  for (int32_t r = 0; r < w; ++r) {
    if (r != me) reduce_into(data + own.begin, s->received + r * own.count, own.count, op);
  }
  for (int32_t r = 0; r < w; ++r) {
    a->recv[r] = data + sluice_slice_of(count, r, w).begin;
    a->recv_bytes[r] = a->send_bytes[r]; /* slice r comes back reduced, with the size that was sent */
    a->send[r] = data + own.begin;
    a->send_bytes[r] = r == me ? 0 : (uint64_t)own.count * sizeof *data;
  }
  return run_exchange(comm, s, phase);
}

static sluice_status_t reduce_by_exchanges(sluice_comm_t* comm, int64_t* data, int64_t count, int32_t op,
                                           const char* phase) {
  uint64_t w = (uint64_t)comm->world_size;
  uint64_t whole = (uint64_t)count * sizeof *data;
  int small = whole * (w - 1) <= SMALL_REDUCE_BYTES || w == 2;
  uint64_t slice = small ? whole : ((uint64_t)count / w + 1) * sizeof *data;
  const uint64_t arrays = sluice_exchange_arrays_bytes(comm->world_size), bytes = arrays + w * slice;
  char* block = sluice_alloc(sluice_process_allocator(), bytes, "all-reduce scratch");
  if (block == NULL) return sluice_comm_fail_and_tell(comm, sluice_alloc_status());
  const reduce_scratch_t s = {.arrays = sluice_exchange_arrays_in(block, comm->world_size),
                              .received = (int64_t*)(void*)(block + arrays)};
  sluice_status_t status = (small ? reduce_small : reduce_large)(comm, data, count, op, &s, phase);
  sluice_free(sluice_process_allocator(), block, bytes);
  return status;
}

sluice_status_t sluice_comm_all_reduce_i64(sluice_comm_t* comm, int64_t* data, int64_t count, int32_t op,
                                           const char* phase) {
  if (phase == NULL) phase = "an all-reduce";
  SLUICE_TRY(sluice_comm_check_usable(comm));
  if (comm->world_size == 1 || count == 0) return SLUICE_OK;
  if (comm->vtable->all_reduce_i64 == NULL) return reduce_by_exchanges(comm, data, count, op, phase);
  uint64_t start_ns = sluice_now_ns();
  sluice_status_t status =
      comm->vtable->all_reduce_i64(comm, data, count, op, sluice_add_saturating(start_ns, comm->timeout_ns));
  if (status == SLUICE_E_TIMED_OUT) status = sluice_comm_fail_timed_out(comm, -1, sluice_now_ns() - start_ns, phase);
  if (status != SLUICE_OK) sluice_comm_mark_broken(comm, status);
  return status;
}
