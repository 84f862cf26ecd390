// SPDX-License-Identifier: Apache-2.0
/* The functions of row_memory.h for rows in a device's own memory. */
#include "backend/moe/context/registered_buffers.h"
#include "backend/moe/context/row_memory.h"

static sluice_status_t open(sluice_context_t* context, sluice_stream_t stream, int32_t* out_captured) {
  return context->device->memory->open(context->device, stream, out_captured);
}

static sluice_status_t check(sluice_context_t* context, const void* data, uint64_t bytes, uint64_t alignment,
                             const char* name) {
  return context->device->memory->check_memory(context->device, data, bytes, alignment, name);
}

static sluice_status_t fill(sluice_context_t* context, sluice_stream_t stream, void* to, int32_t value,
                            uint64_t bytes) {
  return context->device->memory->fill(context->device, stream, to, value, bytes);
}

static sluice_status_t copy(sluice_context_t* context, sluice_stream_t stream, void* to, const void* from,
                            uint64_t bytes) {
  return context->device->memory->copy(context->device, stream, to, from, bytes);
}

static sluice_status_t read(sluice_context_t* context, sluice_stream_t stream, const void* data, void* out,
                            uint64_t bytes) {
  return context->device->memory->read(context->device, stream, data, out, bytes);
}

static sluice_status_t exchange(sluice_context_t* context, const sluice_exchange_t* exchange, sluice_stream_t stream,
                                sluice_comm_request_t** out_request) {
  *out_request = NULL;
  return sluice_comm_exchange_enqueue(context->comm, exchange, stream);
}

static void begin_group(sluice_context_t* context) { sluice_comm_group_begin(context->comm); }

static sluice_status_t end_group(sluice_context_t* context, sluice_stream_t stream, sluice_status_t status) {
  return sluice_comm_group_end(context->comm, stream, status);
}

static sluice_status_t take_scratch(sluice_pass_memory_t* memory, uint64_t total, uint64_t scalars,
                                    sluice_arena_t** out_host, uint64_t* out_with_rows) {
  *out_host = &memory->scratch;
  *out_with_rows = scalars;
  return sluice_arena_reset(&memory->scratch, total - scalars, "scratch of a pass");
}

static uint64_t base_bytes(sluice_context_t* context) {
  const sluice_device_t* device = context->device;
  return context->device_allocator.current_bytes - sluice_pass_memory_row_bytes(&context->pass_memory) -
         device->memory->idle_bytes(device) - context->step_bytes;
}

static void limit_pool(sluice_context_t* context, uint64_t bytes) {
  context->device->memory->limit_pinned(context->device, bytes);
}

static sluice_device_scratch_t routing_scratch(const sluice_device_t* device) {
  return (sluice_device_scratch_t){device->memory->routing->route_scratch_bytes,
                                   device->memory->routing->token_copy_scratch_bytes};
}

static void destroy_timer(sluice_context_t* context, sluice_timer_t* timer) {
  context->device->memory->clock->timer_destroy(context->device, timer);
}

/* Freeing memory waits for the device, which waits for enqueued exchanges. `poll` ends exchanges whose peer is gone. */
static void end_lanes(sluice_context_t* context) {
  if (context->comm != NULL) (void)sluice_comm_poll(context->comm);
}

/* Memory is released before the device is destroyed. */
static void end_memory(sluice_context_t* context) {
  context->device->memory->release(context->device);
  sluice_allocator_deinit(&context->device_allocator);
  context->device->vtable->destroy(context->device);
}

const sluice_row_memory_t sluice_rows_in_device_memory = {.is_device = 1,
                                                          .open = open,
                                                          .check = check,
                                                          .fill = fill,
                                                          .copy = copy,
                                                          .read = read,
                                                          .exchange = exchange,
                                                          .begin_group = begin_group,
                                                          .end_group = end_group,
                                                          .take_scratch = take_scratch,
                                                          .base_bytes = base_bytes,
                                                          .limit_pool = limit_pool,
                                                          .routing_scratch = routing_scratch,
                                                          .destroy_timer = destroy_timer,
                                                          .end_lanes = end_lanes,
                                                          .end_memory = end_memory};

void sluice_engine_set_device_memory(sluice_context_t* context, sluice_device_t* device, sluice_allocate_fn_t allocate,
                                     sluice_free_fn_t release, void* allocate_user) {
  sluice_allocator_deinit(&context->device_allocator);
  device->memory->init_memory(device, allocate, release, allocate_user, &context->device_allocator);
  context->device = device;
  context->rows = &sluice_rows_in_device_memory;
  context->memory = &context->device_allocator;
  sluice_pass_memory_init(&context->pass_memory, context->memory, &context->allocator);
  sluice_registered_buffers_open(context, allocate == NULL);
}
