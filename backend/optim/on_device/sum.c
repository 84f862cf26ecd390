// SPDX-License-Identifier: Apache-2.0
#include "backend/optim/on_device/sum.h"

#include "backend/base/alloc.h"
#include "backend/base/dtype.h"
#include "backend/base/math.h"
#include "backend/comm/exchange_arrays.h"
#include "backend/device/adam_kernels.h"

static int64_t longest_slice(int64_t count, int32_t world_size) { return sluice_ceil_div(count, world_size); }

uint64_t sluice_device_sum_receive_bytes(int64_t count, int32_t world_size) {
  return sluice_align_up((uint64_t)(longest_slice(count, world_size) * world_size) * sizeof(float));
}

static sluice_status_t exchange(sluice_comm_t* comm, const sluice_exchange_arrays_t* arrays, sluice_stream_t stream) {
  const sluice_exchange_t all = sluice_exchange_of(arrays);
  return sluice_comm_exchange_enqueue(comm, &all, stream);
}

/* Receives this rank's slice of every rank's gradients, in rank order. */
static sluice_status_t scatter(sluice_device_t* device, sluice_comm_t* comm, sluice_stream_t stream,
                               const sluice_device_sum_t* sum, const sluice_exchange_arrays_t* arrays) {
  const int32_t w = comm->world_size, me = comm->rank;
  const int64_t width = (int64_t)sluice_dtype_bytes(sum->dtype), stride = longest_slice(sum->count, w) * width;
  const sluice_slice_t mine = sluice_slice_of(sum->count, me, w);
  for (int32_t r = 0; r < w; ++r) {
    const sluice_slice_t slice = sluice_slice_of(sum->count, r, w);
    arrays->send[r] = (const char*)sum->from + slice.begin * width;
    arrays->recv[r] = (char*)sum->receive + r * stride;
    arrays->send_bytes[r] = r == me ? 0 : (uint64_t)(slice.count * width);
    arrays->recv_bytes[r] = r == me ? 0 : (uint64_t)(mine.count * width);
  }
  SLUICE_TRY(device->memory->copy(device, stream, arrays->recv[me], arrays->send[me], (uint64_t)(mine.count * width)));
  return exchange(comm, arrays, stream);
}

static sluice_status_t add(sluice_device_t* device, const sluice_comm_t* comm, sluice_stream_t stream,
                           const sluice_device_sum_t* sum) {
  const sluice_slice_t mine = sluice_slice_of(sum->count, comm->rank, comm->world_size);
  if (mine.count == 0) return SLUICE_OK;
  const sluice_device_parts_t parts = {sum->receive, sum->dtype, comm->world_size,
                                       longest_slice(sum->count, comm->world_size)};
  return device->memory->adam->sum(device, stream, &parts, mine.count, sum->out + mine.begin);
}

static sluice_status_t gather(sluice_comm_t* comm, sluice_stream_t stream, const sluice_device_sum_t* sum,
                              const sluice_exchange_arrays_t* arrays) {
  const int32_t w = comm->world_size, me = comm->rank;
  const sluice_slice_t mine = sluice_slice_of(sum->count, me, w);
  for (int32_t r = 0; r < w; ++r) {
    const sluice_slice_t slice = sluice_slice_of(sum->count, r, w);
    arrays->send[r] = sum->out + mine.begin;
    arrays->recv[r] = sum->out + slice.begin;
    arrays->send_bytes[r] = r == me ? 0 : (uint64_t)mine.count * sizeof(float);
    arrays->recv_bytes[r] = r == me ? 0 : (uint64_t)slice.count * sizeof(float);
  }
  return exchange(comm, arrays, stream);
}

sluice_status_t sluice_device_sum(sluice_device_t* device, sluice_comm_t* comm, sluice_stream_t stream,
                                  const sluice_device_sum_t* sum) {
  const uint64_t bytes = sluice_exchange_arrays_bytes(comm->world_size);
  void* block = sluice_alloc(sluice_process_allocator(), bytes, "optimizer: a sum on a device");
  if (block == NULL) return sluice_alloc_status();
  const sluice_exchange_arrays_t arrays = sluice_exchange_arrays_in(block, comm->world_size);
  sluice_status_t status = scatter(device, comm, stream, sum, &arrays);
  if (status == SLUICE_OK) status = add(device, comm, stream, sum);
  if (status == SLUICE_OK) status = gather(comm, stream, sum, &arrays);
  sluice_free(sluice_process_allocator(), block, bytes);
  return status;
}
