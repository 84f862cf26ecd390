// SPDX-License-Identifier: Apache-2.0
/* Makes a context keep its rows in the device's own memory. */
#pragma once

#include "backend/moe/context/context.h"

/* Takes a device with memory of its own (device.h), made with &context->allocator. From now on rows lie in its memory,
 * or in memory of the callbacks if they are not NULL. Call it before any layer is made. */
void sluice_engine_set_device_memory(sluice_context_t* context, sluice_device_t* device, sluice_allocate_fn_t allocate,
                                     sluice_free_fn_t release, void* allocate_user);
