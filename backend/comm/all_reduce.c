/* The all-reduce: the transport's own, or one exchange of small data, two of large. */
#include "backend/base/clock.h"
#include "backend/base/math.h"
#include "backend/comm/comm.h"
#include "backend/comm/comm_laggards.h"
#include "backend/comm/comm_usable.h"

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

/* The arrays of one exchange and what it receives, in one block. */
typedef struct reduce_scratch_s {
  const void** send;
  uint64_t* send_bytes;
  void** recv;
  uint64_t* recv_bytes;
  int64_t* received;
} reduce_scratch_t;

static sluice_status_t run_exchange(sluice_comm_t* comm, const reduce_scratch_t* s, const char* phase) {
  sluice_exchange_t exchange = {
      .send = s->send, .send_bytes = s->send_bytes, .recv = s->recv, .recv_bytes = s->recv_bytes};
  sluice_comm_request_t* request;
  SLUICE_TRY(sluice_comm_exchange_start(comm, &exchange, &request));
  return sluice_comm_exchange_wait(comm, request, phase);
}

/* Every rank sends everything to every rank. */
static sluice_status_t reduce_small(sluice_comm_t* comm, int64_t* data, int64_t count, int32_t op,
                                    const reduce_scratch_t* s, const char* phase) {
  for (int32_t r = 0; r < comm->world_size; ++r) {
    s->send[r] = data;
    s->recv[r] = s->received + r * count;
    s->send_bytes[r] = s->recv_bytes[r] = r == comm->rank ? 0 : (uint64_t)count * sizeof *data;
  }
  SLUICE_TRY(run_exchange(comm, s, phase));
  for (int32_t r = 0; r < comm->world_size; ++r) {
    if (r != comm->rank) reduce_into(data, s->received + r * count, count, op);
  }
  return SLUICE_OK;
}

/* Rank r reduces slice r of everyone, then everyone gathers the slices. */
static sluice_status_t reduce_large(sluice_comm_t* comm, int64_t* data, int64_t count, int32_t op,
                                    const reduce_scratch_t* s, const char* phase) {
  int32_t w = comm->world_size;
  int64_t quotient = count / w;
  int64_t rest = count % w;
#define SLICE_BEGIN(r) (quotient * (r) + ((r) < rest ? (r) : rest))
  int64_t begin = SLICE_BEGIN(comm->rank);
  int64_t mine = SLICE_BEGIN(comm->rank + 1) - begin;
  for (int32_t r = 0; r < w; ++r) {
    s->send[r] = data + SLICE_BEGIN(r);
    s->send_bytes[r] = r == comm->rank ? 0 : (uint64_t)(SLICE_BEGIN(r + 1) - SLICE_BEGIN(r)) * sizeof *data;
    s->recv[r] = s->received + r * mine;
    s->recv_bytes[r] = r == comm->rank ? 0 : (uint64_t)mine * sizeof *data;
  }
  SLUICE_TRY(run_exchange(comm, s, phase));
  for (int32_t r = 0; r < w; ++r) {
    if (r != comm->rank) reduce_into(data + begin, s->received + r * mine, mine, op);
  }
  for (int32_t r = 0; r < w; ++r) {
    s->recv[r] = data + SLICE_BEGIN(r);
    s->recv_bytes[r] = s->send_bytes[r]; /* what went out as slice r comes back reduced */
    s->send[r] = data + begin;
    s->send_bytes[r] = r == comm->rank ? 0 : (uint64_t)mine * sizeof *data;
  }
#undef SLICE_BEGIN
  return run_exchange(comm, s, phase);
}

static sluice_status_t reduce_by_exchanges(sluice_comm_t* comm, int64_t* data, int64_t count, int32_t op,
                                           const char* phase) {
  uint64_t w = (uint64_t)comm->world_size;
  uint64_t whole = (uint64_t)count * sizeof *data;
  int small = whole * (w - 1) <= SMALL_REDUCE_BYTES || w == 2;
  uint64_t slice = small ? whole : ((uint64_t)count / w + 1) * sizeof *data;
  uint64_t bytes = w * (4 * sizeof(uint64_t) + slice);
  char* block = sluice_alloc(sluice_process_allocator(), bytes, "all-reduce scratch");
  if (block == NULL) return sluice_comm_fail_and_tell(comm, SLUICE_E_NO_MEMORY);
  reduce_scratch_t s = {.send = (const void**)(void*)block,
                        .send_bytes = (uint64_t*)(void*)(block + w * 8),
                        .recv = (void**)(void*)(block + w * 16),
                        .recv_bytes = (uint64_t*)(void*)(block + w * 24),
                        .received = (int64_t*)(void*)(block + w * 32)};
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
