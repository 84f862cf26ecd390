#include "backend/moe/context/device_memory.h"

#include "backend/moe/context/wire_memory.h"

void sluice_engine_set_far(sluice_context_t* context, sluice_device_t* device, sluice_allocate_fn_t allocate,
                           sluice_free_fn_t release, void* allocate_user) {
  sluice_allocator_deinit(&context->far_allocator);
  device->far->init_memory(device, allocate, release, allocate_user, &context->far_allocator);
  context->device = device;
  context->memory = &context->far_allocator;
  sluice_pass_memory_init(&context->pass_memory, context->memory, &context->allocator);
  sluice_wire_memory_open(context, allocate == NULL);
}
