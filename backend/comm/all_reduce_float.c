/* The all-reduce of floats: sums in f32 and in rank order, rounded once, so that all ranks get the same bits, and the
 * same ones however a caller cuts its data. Built from exchanges: one of small data, two (reduce-scatter, all-gather)
 * of large. */
#include <string.h>

#include "backend/base/check.h"
#include "backend/base/dtype.h"
#include "backend/base/math.h"
#include "backend/comm/comm.h"
#include "backend/comm/comm_usable.h"

#define SMALL_REDUCE_BYTES UINT64_C(65536)   /* received per rank; above it two exchanges are cheaper than one */
#define PIECE_BYTES        UINT64_C(8388608) /* received per rank and exchange: bounds the scratch */

enum { BLOCK = 256 }; /* elements that are summed at a time: their sums stay in the first-level cache */

/* How one element type is read into sums and written from them. */
typedef struct element_s {
  int32_t dtype;
  uint64_t bytes;
  /* sums[i] = data[i], sums[i] += data[i], data[i] = sums[i]; sums has BLOCK floats or doubles. */
  void (*load)(const void* data, int64_t count, void* sums);
  void (*add)(const void* data, int64_t count, void* sums);
  void (*store)(const void* sums, int64_t count, void* data);
} element_t;

/* NOLINTBEGIN(bugprone-macro-parentheses): types cannot stand in parentheses. */
#define DEFINE_ELEMENT(name, type, sum_type, to_sum, from_sum)            \
  static void load_##name(const void* data, int64_t count, void* sums) {  \
    const type* from = data;                                              \
    sum_type* to = sums;                                                  \
    for (int64_t i = 0; i < count; ++i) to[i] = to_sum(from[i]);          \
  }                                                                       \
  static void add_##name(const void* data, int64_t count, void* sums) {   \
    const type* from = data;                                              \
    sum_type* to = sums;                                                  \
    for (int64_t i = 0; i < count; ++i) to[i] += to_sum(from[i]);         \
  }                                                                       \
  static void store_##name(const void* sums, int64_t count, void* data) { \
    const sum_type* from = sums;                                          \
    type* to = data;                                                      \
    for (int64_t i = 0; i < count; ++i) to[i] = from_sum(from[i]);        \
  }

#define AS_IT_IS(x) (x)
DEFINE_ELEMENT(f32, float, float, AS_IT_IS, AS_IT_IS)
DEFINE_ELEMENT(f64, double, double, AS_IT_IS, AS_IT_IS)
DEFINE_ELEMENT(bf16, uint16_t, float, sluice_bf16_to_f32, sluice_f32_to_bf16)
DEFINE_ELEMENT(f16, uint16_t, float, sluice_f16_to_f32, sluice_f32_to_f16)
/* NOLINTEND(bugprone-macro-parentheses) */

static const element_t elements[] = {
    {SLUICE_DTYPE_F32, 4, load_f32, add_f32, store_f32},
    {SLUICE_DTYPE_BF16, 2, load_bf16, add_bf16, store_bf16},
    {SLUICE_DTYPE_F16, 2, load_f16, add_f16, store_f16},
    {SLUICE_DTYPE_F64, 8, load_f64, add_f64, store_f64},
};

static const element_t* find_element(int32_t dtype) {
  for (size_t i = 0; i < sizeof elements / sizeof elements[0]; ++i) {
    if (elements[i].dtype == dtype) return &elements[i];
  }
  return NULL;
}

/* The arrays of one exchange and what it receives, in one block. */
typedef struct reduction_s {
  sluice_comm_t* comm;
  const element_t *from, *to; /* what is summed, and what the sum is rounded to */
  const char* phase;
  const void** send; /* [W], as the next three; the beginning of the block */
  uint64_t* send_bytes;
  void** recv;
  uint64_t* recv_bytes;
  char* received;
} reduction_t;

static sluice_status_t run_exchange(const reduction_t* r) {
  const sluice_exchange_t exchange = {
      .send = r->send, .send_bytes = r->send_bytes, .recv = r->recv, .recv_bytes = r->recv_bytes};
  sluice_comm_request_t* request;
  SLUICE_TRY(sluice_comm_exchange_start(r->comm, &exchange, &request));
  return sluice_comm_exchange_wait(r->comm, request, r->phase);
}

/* data: the own part; received: every rank's, `count` apart; out: may be data. */
static void sum_in_rank_order(const reduction_t* r, const char* data, int64_t count, char* out) {
  const element_t* e = r->from;
  double sums[BLOCK]; /* or as many floats */
  for (int64_t begin = 0; begin < count; begin += BLOCK) {
    const int64_t n = sluice_min(BLOCK, count - begin);
    for (int32_t rank = 0; rank < r->comm->world_size; ++rank) {
      const char* part = rank == r->comm->rank ? data : r->received + (uint64_t)(rank * count) * e->bytes;
      (rank == 0 ? e->load : e->add)(part + (uint64_t)begin * e->bytes, n, sums);
    }
    r->to->store(sums, n, out + (uint64_t)begin * r->to->bytes);
  }
}

/* Every rank sends everything to every rank. */
static sluice_status_t reduce_small(const reduction_t* r, const char* data, int64_t count, char* out) {
  const uint64_t bytes = (uint64_t)count * r->from->bytes;
  for (int32_t p = 0; p < r->comm->world_size; ++p) {
    r->send[p] = data;
    r->recv[p] = r->received + (uint64_t)p * bytes;
    r->send_bytes[p] = r->recv_bytes[p] = p == r->comm->rank ? 0 : bytes;
  }
  SLUICE_TRY(run_exchange(r));
  sum_in_rank_order(r, data, count, out);
  return SLUICE_OK;
}

/* Where slice `rank` begins; the first ones are one longer where count is no multiple of W. */
static int64_t slice_begin(const reduction_t* r, int64_t count, int32_t rank) {
  const int64_t w = r->comm->world_size;
  return count / w * rank + sluice_min(rank, count % w);
}

/* Rank p sums slice p of everyone, then everyone gathers the slices. */
static sluice_status_t reduce_large(const reduction_t* r, const char* data, int64_t count, char* out) {
  const uint64_t e = r->from->bytes, to = r->to->bytes;
  const int32_t rank = r->comm->rank;
  const int64_t begin = slice_begin(r, count, rank), mine = slice_begin(r, count, rank + 1) - begin;
  for (int32_t p = 0; p < r->comm->world_size; ++p) {
    const int64_t theirs = slice_begin(r, count, p);
    r->send[p] = data + (uint64_t)theirs * e;
    r->send_bytes[p] = p == rank ? 0 : (uint64_t)(slice_begin(r, count, p + 1) - theirs) * e;
    r->recv[p] = r->received + (uint64_t)(p * mine) * e;
    r->recv_bytes[p] = p == rank ? 0 : (uint64_t)mine * e;
  }
  SLUICE_TRY(run_exchange(r));
  char* own = out + (uint64_t)begin * to;
  sum_in_rank_order(r, data + (uint64_t)begin * e, mine, own);
  for (int32_t p = 0; p < r->comm->world_size; ++p) {
    const int64_t theirs = slice_begin(r, count, p);
    r->recv[p] = out + (uint64_t)theirs * to;
    r->recv_bytes[p] = p == rank ? 0 : (uint64_t)(slice_begin(r, count, p + 1) - theirs) * to;
    r->send[p] = own;
    r->send_bytes[p] = p == rank ? 0 : (uint64_t)mine * to;
  }
  return run_exchange(r);
}

static sluice_status_t reduce_all(reduction_t* r, const char* data, int64_t count, char* out) {
  const uint64_t w = (uint64_t)r->comm->world_size, e = r->from->bytes;
  const int small = (uint64_t)count * e * (w - 1) <= SMALL_REDUCE_BYTES || w == 2;
  /* Elements at a time: what is received is W times as many, or about as many. */
  const int64_t piece = (int64_t)(small ? PIECE_BYTES / (w * e) + 1 : PIECE_BYTES / e + w);
  const uint64_t most = (uint64_t)sluice_min(piece, count);
  const uint64_t bytes = w * (4 * sizeof(uint64_t) + (small ? most : most / w + 1) * e);
  char* block = sluice_alloc(sluice_process_allocator(), bytes, "all-reduce scratch");
  if (block == NULL) return sluice_comm_fail_and_tell(r->comm, sluice_alloc_status());
  r->send = (const void**)(void*)block;
  r->send_bytes = (uint64_t*)(void*)(block + w * 8);
  r->recv = (void**)(void*)(block + w * 16);
  r->recv_bytes = (uint64_t*)(void*)(block + w * 24);
  r->received = block + w * 32;
  sluice_status_t status = SLUICE_OK;
  for (int64_t begin = 0; begin < count && status == SLUICE_OK; begin += piece) {
    status = (small ? reduce_small : reduce_large)(r, data + (uint64_t)begin * e, sluice_min(piece, count - begin),
                                                   out + (uint64_t)begin * r->to->bytes);
  }
  sluice_free(sluice_process_allocator(), block, bytes);
  return status;
}

static const char* phase_or(const char* phase) { return phase != NULL ? phase : "an all-reduce of floats"; }

sluice_status_t sluice_comm_all_reduce_f32(sluice_comm_t* comm, void* data, int64_t count, int32_t dtype,
                                           const char* phase) {
  reduction_t r = {.comm = comm, .from = find_element(dtype), .to = find_element(dtype), .phase = phase_or(phase)};
  SLUICE_TRY(SLUICE_REQUIRE(r.from != NULL, "sluice_comm_all_reduce_f32: dtype %s (%d); it sums f32, bf16, f16, f64",
                            sluice_dtype_name(dtype), dtype));
  SLUICE_TRY(sluice_comm_check_usable(comm));
  return comm->world_size == 1 || count == 0 ? SLUICE_OK : reduce_all(&r, data, count, data);
}

sluice_status_t sluice_comm_sum_f32(sluice_comm_t* comm, const void* data, int64_t count, int32_t dtype, float* out_sum,
                                    const char* phase) {
  reduction_t r = {
      .comm = comm, .from = find_element(dtype), .to = find_element(SLUICE_DTYPE_F32), .phase = phase_or(phase)};
  SLUICE_TRY(SLUICE_REQUIRE(r.from != NULL && dtype != SLUICE_DTYPE_F64,
                            "sluice_comm_sum_f32: dtype %s (%d); it sums f32, bf16, f16", sluice_dtype_name(dtype),
                            dtype));
  SLUICE_TRY(sluice_comm_check_usable(comm));
  if (count == 0) return SLUICE_OK;
  if (comm->world_size > 1) return reduce_all(&r, data, count, (char*)(void*)out_sum);
  r.from->load(data, count, out_sum);
  return SLUICE_OK;
}
