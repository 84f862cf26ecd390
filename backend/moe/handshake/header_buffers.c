// SPDX-License-Identifier: Apache-2.0
#include "backend/moe/handshake/header_buffers.h"

#include "backend/model/pass_sizes.h"

sluice_status_t sluice_header_buffers_take(sluice_context_t* context, sluice_header_buffers_t* out_buffers) {
  const uint64_t w = (uint64_t)context->world_size;
  sluice_arena_t* arena = &context->header;
  SLUICE_TRY(
      sluice_arena_reset(arena, sluice_headers_bytes(context->world_size), "headers")); /* reserved: cannot fail */
  out_buffers->send = sluice_arena_take(arena, w * SLUICE_HEADER_BYTES);
  out_buffers->recv = sluice_arena_take(arena, w * SLUICE_HEADER_BYTES);
  out_buffers->arrays = sluice_exchange_arrays_in(
      sluice_arena_take(arena, sluice_exchange_arrays_bytes(context->world_size)), context->world_size);
  for (uint64_t r = 0; r < w; ++r) {
    out_buffers->arrays.send[r] = out_buffers->send + r * SLUICE_HEADER_BYTES;
    out_buffers->arrays.recv[r] = out_buffers->recv + r * SLUICE_HEADER_BYTES;
    out_buffers->arrays.send_bytes[r] = out_buffers->arrays.recv_bytes[r] = SLUICE_HEADER_BYTES;
  }
  return SLUICE_OK;
}

sluice_status_t sluice_header_exchange(sluice_comm_t* comm, const sluice_exchange_arrays_t* arrays, const char* phase) {
  const sluice_exchange_t exchange = sluice_exchange_of(arrays);
  return sluice_comm_exchange_headers(comm, &exchange, phase);
}
