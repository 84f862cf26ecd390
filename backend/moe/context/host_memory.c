// SPDX-License-Identifier: Apache-2.0
/* The functions of row_memory.h for rows in host memory. */
#include <string.h>

#include "backend/base/pages.h"
#include "backend/moe/context/context.h"
#include "backend/moe/context/row_memory.h"

static sluice_status_t open(sluice_context_t* context, sluice_stream_t stream, int32_t* out_captured) {
  (void)context, (void)stream;
  *out_captured = 0;
  return SLUICE_OK;
}

static sluice_status_t fill(sluice_context_t* context, sluice_stream_t stream, void* to, int32_t value,
                            uint64_t bytes) {
  (void)context, (void)stream;
  memset(to, value, bytes);
  return SLUICE_OK;
}

static sluice_status_t copy(sluice_context_t* context, sluice_stream_t stream, void* to, const void* from,
                            uint64_t bytes) {
  (void)context, (void)stream;
  memcpy(to, from, bytes);
  return SLUICE_OK;
}

static sluice_status_t read(sluice_context_t* context, sluice_stream_t stream, const void* data, void* out,
                            uint64_t bytes) {
  return copy(context, stream, out, data, bytes);
}

static sluice_status_t exchange(sluice_context_t* context, const sluice_exchange_t* exchange, sluice_stream_t stream,
                                sluice_comm_request_t** out_request) {
  (void)stream;
  return sluice_comm_exchange_start(context->comm, exchange, out_request);
}

/* All scratch lies in one arena. */
static sluice_status_t take_scratch(sluice_pass_memory_t* memory, uint64_t total, uint64_t scalars,
                                    sluice_arena_t** out_host, uint64_t* out_with_rows) {
  (void)scalars;
  *out_host = &memory->slots;
  *out_with_rows = total;
  return SLUICE_OK;
}

static uint64_t base_bytes(sluice_context_t* context) {
  const uint64_t idle = sluice_engine_idle_bytes(context); /* steps use these blocks first, or the pools free them */
  uint64_t sized = context->header.capacity + sluice_pass_memory_row_bytes(&context->pass_memory) +
                   sluice_pass_memory_host_bytes(&context->pass_memory);
  const sluice_template_cache_t* cache = &context->templates;
  for (int32_t i = 0; i < cache->count && cache->block == NULL; ++i) sized += sluice_align_up(cache->items[i]->bytes);
  sized += sluice_align_up(cache->block_bytes);
  if (cache->capacity > 0) sized += sluice_align_up((uint64_t)cache->capacity * sizeof(sluice_template_t*));
  if (context->device->vtable->events_bytes != NULL) {
    sized += context->device->vtable->events_bytes(context->device, -1);
  }
  return context->allocator.current_bytes - sized - context->step_bytes - idle;
}

/* Destroying the device joins the lanes, which use the objects that are released next. */
static void end_lanes(sluice_context_t* context) {
  if (context->device != NULL) context->device->vtable->destroy(context->device);
}

static void end_memory(sluice_context_t* context) { sluice_allocator_deinit(&context->device_allocator); }

const sluice_row_memory_t sluice_rows_in_host_memory = {.counts_host_memory = 1,
                                                        .can_give_back = 1,
                                                        .has_host_threads = 1,
                                                        .open = open,
                                                        .fill = fill,
                                                        .copy = copy,
                                                        .read = read,
                                                        .exchange = exchange,
                                                        .advise = sluice_pages_advise_tensor,
                                                        .advise_slices = sluice_pages_advise_slices,
                                                        .take_scratch = take_scratch,
                                                        .base_bytes = base_bytes,
                                                        .end_lanes = end_lanes,
                                                        .end_memory = end_memory};
