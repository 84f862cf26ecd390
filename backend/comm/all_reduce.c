// SPDX-License-Identifier: Apache-2.0
/* All-reduces, which consist of exchanges: one for small data, two (reduce-scatter, all-gather) for large data. Floats
 * are summed in f32 and in rank order, rounded once, so that all ranks get the same bits, however a caller divides its
 * data into calls. */
#include "backend/base/dtype.h"
#include "backend/base/math.h"
#include "backend/comm/comm.h"
#include "backend/comm/comm_life.h"
#include "backend/comm/element_sums.h"
#include "backend/comm/exchange_arrays.h"

#define SMALL_REDUCE_BYTES UINT64_C(65536) /* received per rank; above it two exchanges are cheaper than one */

/* Floats: bytes received per rank and exchange: few enough to be in a cache when they are summed, and from each peer
 * enough for one message; at most MOST_BYTES, to bound the scratch memory with many ranks. */
#define PIECE_BYTES UINT64_C(1048576)
#define SLICE_BYTES UINT64_C(65536)
#define MOST_BYTES  UINT64_C(8388608)

enum { BLOCK = 256 }; /* elements summed at a time; their sums stay in the L1 cache */

typedef struct reduction_s {
  sluice_comm_t* comm;
  const sluice_element_sums_t *from, *to; /* the addends, and what the sum is rounded to */
  const char* phase;
  const char* data; /* of the whole call */
  char* out;
  int64_t count;
  int32_t is_in_pieces; /* 1: two exchanges may be in flight */
  int64_t piece;        /* elements exchanged at a time; the last piece may be shorter */
  sluice_exchange_arrays_t arrays;
  char* received[2]; /* for even and for odd pieces */
} reduction_t;

static sluice_status_t start_exchange(const reduction_t* r, sluice_comm_request_t** out_request) {
  const sluice_exchange_t exchange = sluice_exchange_of(&r->arrays);
  return sluice_comm_exchange_start(r->comm, &exchange, out_request);
}

/* Waits also after a failure of another step, because an exchange in flight uses the buffers. */
static sluice_status_t finish(const reduction_t* r, sluice_comm_request_t** request, sluice_status_t before) {
  if (*request == NULL) return before;
  const sluice_status_t status = sluice_comm_exchange_wait(r->comm, *request, r->phase);
  *request = NULL;
  return before != SLUICE_OK ? before : status;
}

/* data: this rank's part; received: every rank's part, `count` elements each; out: may be data. */
static void sum_in_rank_order(const reduction_t* r, const char* data, const char* received, int64_t count, char* out) {
  const sluice_element_sums_t* e = r->from;
  double sums[BLOCK]; /* holds f64, f32 or 64-bit integers */
  for (int64_t begin = 0; begin < count; begin += BLOCK) {
    const int64_t n = sluice_min(BLOCK, count - begin);
    for (int32_t rank = 0; rank < r->comm->world_size; ++rank) {
      const char* part = rank == r->comm->rank ? data : received + (uint64_t)(rank * count) * e->bytes;
      (rank == 0 ? e->load : e->add)(part + (uint64_t)begin * e->bytes, n, sums);
    }
    r->to->store(sums, n, out + (uint64_t)begin * r->to->bytes);
  }
}

/* Every rank sends everything to every rank. */
static sluice_status_t reduce_small(const reduction_t* r) {
  const uint64_t bytes = (uint64_t)r->count * r->from->bytes;
  for (int32_t p = 0; p < r->comm->world_size; ++p) {
    r->arrays.send[p] = r->data;
    r->arrays.recv[p] = r->received[0] + (uint64_t)p * bytes;
    r->arrays.send_bytes[p] = r->arrays.recv_bytes[p] = p == r->comm->rank ? 0 : bytes;
  }
  sluice_comm_request_t* request = NULL;
  SLUICE_TRY(start_exchange(r, &request));
  SLUICE_TRY(finish(r, &request, SLUICE_OK));
  sum_in_rank_order(r, r->data, r->received[0], r->count, r->out);
  return SLUICE_OK;
}

/* Returns the elements of the call that one rank sums in one piece. */
static sluice_slice_t slice_of(const reduction_t* r, int64_t index, int32_t rank) {
  const int64_t first = index * r->piece;
  const sluice_slice_t slice = sluice_slice_of(sluice_min(r->piece, r->count - first), rank, r->comm->world_size);
  return (sluice_slice_t){first + slice.begin, slice.count};
}

/* Every rank sends slice p of the piece to rank p. */
static sluice_status_t start_scatter(const reduction_t* r, int64_t index, sluice_comm_request_t** out_request) {
  const uint64_t e = r->from->bytes;
  const int32_t rank = r->comm->rank;
  const uint64_t mine = (uint64_t)slice_of(r, index, rank).count * e;
  for (int32_t p = 0; p < r->comm->world_size; ++p) {
    const sluice_slice_t theirs = slice_of(r, index, p);
    r->arrays.send[p] = r->data + (uint64_t)theirs.begin * e;
    r->arrays.send_bytes[p] = p == rank ? 0 : (uint64_t)theirs.count * e;
    r->arrays.recv[p] = r->received[index % 2] + (uint64_t)p * mine;
    r->arrays.recv_bytes[p] = p == rank ? 0 : mine;
  }
  return start_exchange(r, out_request);
}

static void sum_own_slice(const reduction_t* r, int64_t index) {
  const sluice_slice_t own = slice_of(r, index, r->comm->rank);
  sum_in_rank_order(r, r->data + (uint64_t)own.begin * r->from->bytes, r->received[index % 2], own.count,
                    r->out + (uint64_t)own.begin * r->to->bytes);
}

/* Every rank sends the sum of its slice to every rank. */
static sluice_status_t start_gather(const reduction_t* r, int64_t index, sluice_comm_request_t** out_request) {
  const uint64_t e = r->to->bytes;
  const int32_t rank = r->comm->rank;
  const sluice_slice_t own = slice_of(r, index, rank);
  for (int32_t p = 0; p < r->comm->world_size; ++p) {
    const sluice_slice_t theirs = slice_of(r, index, p);
    r->arrays.recv[p] = r->out + (uint64_t)theirs.begin * e;
    r->arrays.recv_bytes[p] = p == rank ? 0 : (uint64_t)theirs.count * e;
    r->arrays.send[p] = r->out + (uint64_t)own.begin * e;
    r->arrays.send_bytes[p] = p == rank ? 0 : (uint64_t)own.count * e;
  }
  return start_exchange(r, out_request);
}

/* For each piece, rank p sums slice p of all ranks, then all ranks gather the slices. While a piece is summed, the next
 * one is scattered and the previous one gathered: two exchanges in flight, which a communicator allows. A piece
 * overwrites only data of its own and of earlier pieces (data may end where out ends, and out has the same or a larger
 * element size). */
static sluice_status_t reduce_large(const reduction_t* r) {
  const int64_t pieces = (r->count + r->piece - 1) / r->piece;
  sluice_comm_request_t *scatter = NULL, *gather = NULL;
  sluice_status_t status = start_scatter(r, 0, &scatter);
  for (int64_t i = 0; i < pieces && status == SLUICE_OK; ++i) {
    status = finish(r, &scatter, status);
    if (status == SLUICE_OK && i + 1 < pieces) status = start_scatter(r, i + 1, &scatter);
    if (status == SLUICE_OK) sum_own_slice(r, i);
    status = finish(r, &gather, status);
    if (status == SLUICE_OK) status = start_gather(r, i, &gather);
  }
  status = finish(r, &scatter, status);
  return finish(r, &gather, status);
}

static sluice_status_t reduce_all(reduction_t* r) {
  const uint64_t w = (uint64_t)r->comm->world_size, e = r->from->bytes;
  /* Between two ranks, a second exchange would save no byte. */
  const int is_small = (uint64_t)r->count * e * (w - 1) <= SMALL_REDUCE_BYTES || (w == 2 && !r->is_in_pieces);
  /* A rank receives about one piece, or the whole small data of each rank. */
  r->piece = r->count;
  if (r->is_in_pieces) r->piece = (int64_t)(sluice_min(sluice_max(PIECE_BYTES, w * SLICE_BYTES), MOST_BYTES) / e + w);
  const uint64_t most = is_small ? w * (uint64_t)r->count * e : ((uint64_t)sluice_min(r->piece, r->count) + w) * e;
  const uint64_t arrays = sluice_exchange_arrays_bytes(r->comm->world_size);
  const int num_received = is_small || r->count <= r->piece ? 1 : 2;
  const uint64_t bytes = arrays + (uint64_t)num_received * most;
  char* block = sluice_alloc(sluice_process_allocator(), bytes, "all-reduce scratch");
  if (block == NULL) return sluice_comm_fail_and_tell(r->comm, sluice_alloc_status());
  r->arrays = sluice_exchange_arrays_in(block, r->comm->world_size);
  r->received[0] = block + arrays;
  r->received[1] = block + arrays + (uint64_t)(num_received - 1) * most;
  const sluice_status_t status = (is_small ? reduce_small : reduce_large)(r);
  sluice_free(sluice_process_allocator(), block, bytes);
  return status;
}

sluice_status_t sluice_comm_all_reduce_i64(sluice_comm_t* comm, int64_t* data, int64_t count, int32_t op,
                                           const char* phase) {
  const sluice_element_sums_t* element = op == SLUICE_REDUCE_SUM ? &sluice_i64_sums : &sluice_i64_maxima;
  reduction_t r = {.comm = comm,
                   .from = element,
                   .to = element,
                   .phase = phase != NULL ? phase : "an all-reduce",
                   .data = (const char*)(const void*)data,
                   .out = (char*)(void*)data,
                   .count = count};
  SLUICE_TRY(sluice_comm_check_usable(comm));
  return comm->world_size == 1 || count == 0 ? SLUICE_OK : reduce_all(&r);
}

static const char* phase_or(const char* phase) { return phase != NULL ? phase : "an all-reduce of floats"; }

sluice_status_t sluice_comm_all_reduce_f32(sluice_comm_t* comm, void* data, int64_t count, int32_t dtype,
                                           const char* phase) {
  const sluice_element_sums_t* element = sluice_element_sums_of(dtype);
  reduction_t r = {.comm = comm,
                   .from = element,
                   .to = element,
                   .phase = phase_or(phase),
                   .data = data,
                   .out = data,
                   .count = count,
                   .is_in_pieces = 1};
  SLUICE_TRY(SLUICE_REQUIRE(r.from != NULL, "sluice_comm_all_reduce_f32: dtype %s (%d); it sums f32, bf16, f16, f64",
                            sluice_dtype_name(dtype), dtype));
  SLUICE_TRY(sluice_comm_check_usable(comm));
  return comm->world_size == 1 || count == 0 ? SLUICE_OK : reduce_all(&r);
}

sluice_status_t sluice_comm_sum_f32(sluice_comm_t* comm, const void* data, int64_t count, int32_t dtype, float* out_sum,
                                    const char* phase) {
  reduction_t r = {.comm = comm,
                   .from = sluice_element_sums_of(dtype),
                   .to = sluice_element_sums_of(SLUICE_DTYPE_F32),
                   .phase = phase_or(phase),
                   .data = data,
                   .out = (char*)(void*)out_sum,
                   .count = count,
                   .is_in_pieces = 1};
  SLUICE_TRY(SLUICE_REQUIRE(r.from != NULL && dtype != SLUICE_DTYPE_F64,
                            "sluice_comm_sum_f32: dtype %s (%d); it sums f32, bf16, f16", sluice_dtype_name(dtype),
                            dtype));
  SLUICE_TRY(sluice_comm_check_usable(comm));
  if (count == 0) return SLUICE_OK;
  if (comm->world_size > 1) return reduce_all(&r);
  sum_in_rank_order(&r, data, NULL, count, r.out);
  return SLUICE_OK;
}
