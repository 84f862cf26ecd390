#include "backend/optim/on_device/sum.h"

#include "backend/base/alloc.h"
#include "backend/base/check.h"
#include "backend/base/dtype.h"
#include "backend/base/math.h"
#include "backend/device/adam_kernels.h"

/* Elements [first, first + count) are those of one rank. */
typedef struct slice_s {
  int64_t first, count;
} slice_t;

static slice_t slice_of(int64_t count, int32_t rank, int32_t world_size) {
  const int64_t each = count / world_size, more = count % world_size;
  return (slice_t){each * rank + sluice_min(rank, more), each + (rank < more)};
}

static int64_t longest_slice(int64_t count, int32_t world_size) { return sluice_ceil_div(count, world_size); }

uint64_t sluice_device_sum_receive_bytes(int64_t count, int32_t world_size) {
  return sluice_align_up((uint64_t)(longest_slice(count, world_size) * world_size) * sizeof(float));
}

/* An exchange, in one block. */
typedef struct lists_s {
  const void** send; /* [W], as the others; the beginning of the block */
  void** recv;
  uint64_t *send_bytes, *recv_bytes;
  uint64_t bytes; /* of the block */
} lists_t;

static sluice_status_t take_lists(int32_t world_size, lists_t* out_lists) {
  const uint64_t w = (uint64_t)world_size;
  const uint64_t bytes = w * (2 * sizeof(void*) + 2 * sizeof(uint64_t));
  char* block = sluice_alloc(sluice_process_allocator(), bytes, "optimizer: a sum on a device");
  if (block == NULL) return sluice_alloc_status();
  out_lists->send = (const void**)(void*)block;
  out_lists->recv = (void**)(void*)(block + w * sizeof(void*));
  out_lists->send_bytes = (uint64_t*)(void*)(block + 2 * w * sizeof(void*));
  out_lists->recv_bytes = out_lists->send_bytes + w;
  out_lists->bytes = bytes;
  return SLUICE_OK;
}

static sluice_status_t exchange(sluice_comm_t* comm, const lists_t* lists, sluice_stream_t stream) {
  const sluice_exchange_t all = {lists->send, lists->send_bytes, lists->recv, lists->recv_bytes};
  return sluice_comm_exchange_enqueue(comm, &all, stream);
}

/* This rank's slice of every rank's gradients, one rank's behind the other's. */
static sluice_status_t scatter(sluice_device_t* device, sluice_comm_t* comm, sluice_stream_t stream,
                               const sluice_device_sum_t* sum, const lists_t* lists) {
  const int32_t w = comm->world_size, me = comm->rank;
  const int64_t width = (int64_t)sluice_dtype_bytes(sum->dtype), stride = longest_slice(sum->count, w) * width;
  const slice_t mine = slice_of(sum->count, me, w);
  for (int32_t r = 0; r < w; ++r) {
    const slice_t slice = slice_of(sum->count, r, w);
    lists->send[r] = (const char*)sum->from + slice.first * width;
    lists->recv[r] = (char*)sum->receive + r * stride;
    lists->send_bytes[r] = r == me ? 0 : (uint64_t)(slice.count * width);
    lists->recv_bytes[r] = r == me ? 0 : (uint64_t)(mine.count * width);
  }
  SLUICE_TRY(device->memory->copy(device, stream, lists->recv[me], lists->send[me], (uint64_t)(mine.count * width)));
  return exchange(comm, lists, stream);
}

static sluice_status_t add(sluice_device_t* device, const sluice_comm_t* comm, sluice_stream_t stream,
                           const sluice_device_sum_t* sum) {
  const slice_t mine = slice_of(sum->count, comm->rank, comm->world_size);
  if (mine.count == 0) return SLUICE_OK;
  const sluice_device_parts_t parts = {sum->receive, sum->dtype, comm->world_size,
                                       longest_slice(sum->count, comm->world_size)};
  return device->memory->adam->sum(device, stream, &parts, mine.count, sum->out + mine.first);
}

static sluice_status_t gather(sluice_comm_t* comm, sluice_stream_t stream, const sluice_device_sum_t* sum,
                              const lists_t* lists) {
  const int32_t w = comm->world_size, me = comm->rank;
  const slice_t mine = slice_of(sum->count, me, w);
  for (int32_t r = 0; r < w; ++r) {
    const slice_t slice = slice_of(sum->count, r, w);
    lists->send[r] = sum->out + mine.first;
    lists->recv[r] = sum->out + slice.first;
    lists->send_bytes[r] = r == me ? 0 : (uint64_t)mine.count * sizeof(float);
    lists->recv_bytes[r] = r == me ? 0 : (uint64_t)slice.count * sizeof(float);
  }
  return exchange(comm, lists, stream);
}

sluice_status_t sluice_device_sum(sluice_device_t* device, sluice_comm_t* comm, sluice_stream_t stream,
                                  const sluice_device_sum_t* sum) {
  lists_t lists = {.bytes = 0};
  SLUICE_TRY(take_lists(comm->world_size, &lists));
  sluice_status_t status = scatter(device, comm, stream, sum, &lists);
  if (status == SLUICE_OK) status = add(device, comm, stream, sum);
  if (status == SLUICE_OK) status = gather(comm, stream, sum, &lists);
  sluice_free(sluice_process_allocator(), lists.send, lists.bytes);
  return status;
}
