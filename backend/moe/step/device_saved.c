// SPDX-License-Identifier: Apache-2.0
/* Saved buffers with device memory: budgets count the buffers there. */
#include <stdio.h>
#include <string.h>

#include "backend/base/pages.h"
#include "backend/model/pass_sizes.h"
#include "backend/moe/layer/plan_problem.h"
#include "backend/moe/step/saved_plain.h"

enum { PLAIN, PINNED, ROWS };
static int place_of(int32_t which) {
  if (which == SLUICE_SAVED_META) return PLAIN;
  return which == SLUICE_SAVED_INPUT || which == SLUICE_SAVED_PRE_ACTIVATION ? ROWS : PINNED;
}

static sluice_status_t take(sluice_step_t* step, int32_t which, uint64_t bytes, uint64_t most, sluice_stream_t stream,
                            uint64_t* out_counted) {
  sluice_context_t* context = step->moe->context;
  if (bytes == 0) return SLUICE_OK;
  SLUICE_TRY(context->device->memory->take(context->device, stream, context->memory, place_of(which) == PINNED, bytes,
                                           most, &step->saved[which]));
  *out_counted = sluice_counted_bytes(bytes);
  return SLUICE_OK;
}

/* Under a budget both tensors of a step lie in one block, one after the other. All blocks have the largest size that
 * any of the layer's plans needs: each block serves every step, whatever the size and plan of its batch. */
static sluice_status_t take_in_block(sluice_step_t* step, int32_t which, sluice_stream_t stream,
                                     uint64_t* out_counted) {
  const sluice_moe_t* moe = step->moe;
  const int is_offloaded = place_of(which) == PINNED;
  const int32_t first = is_offloaded ? SLUICE_SAVED_HOST_INPUT : SLUICE_SAVED_INPUT;
  if (sluice_planned_block_bytes(moe, which) == 0) return SLUICE_OK;
  if (which == first || step->saved[first] == NULL) {
    const uint64_t bytes = sluice_planned_most_block_bytes(moe, is_offloaded);
    return take(step, which, bytes, bytes, stream, out_counted);
  }
  step->saved[which] = (char*)step->saved[first] + sluice_align_up(sluice_planned_block_bytes(moe, first));
  step->behind_first |= (uint8_t)(1u << which);
  return SLUICE_OK;
}

static sluice_status_t allocate(sluice_step_t* step, int32_t which, uint64_t bytes, sluice_stream_t stream,
                                uint64_t* out_counted) {
  const sluice_plan_data_t* plan = step->moe->plan;
  if (place_of(which) == PLAIN) return sluice_saved_allocate_plain(step, which, bytes);
  if (plan == NULL) return take(step, which, bytes, 0, stream, out_counted);
  const uint64_t budget = place_of(which) == PINNED ? plan->inputs.host_budget : plan->inputs.budget;
  if (budget > 0) return take_in_block(step, which, stream, out_counted);
  return take(step, which, bytes, sluice_planned_block_bytes(step->moe, which), stream, out_counted);
}

static void release(sluice_step_t* step, int32_t which) {
  if (place_of(which) == PLAIN) {
    sluice_saved_release_plain(step, which);
  } else if (!step->is_captured && !(step->behind_first >> which & 1)) {
    sluice_device_t* device = step->moe->context->device;
    device->memory->give(device, place_of(which) == PINNED, step->saved[which]);
  }
}

static int is_counted(int32_t which) { return place_of(which) == ROWS; }

static sluice_allocator_t* allocator(sluice_context_t* context, int32_t which) {
  return place_of(which) == ROWS ? context->memory : &context->allocator;
}

/* Rows in memory that the device cannot reach would cause a device fault, which ends the process. */
static sluice_status_t take_given(sluice_step_t* step, int32_t which, uint64_t bytes) {
  if (place_of(which) != ROWS) {
    sluice_pages_advise(step->saved[which], bytes); /* fresh from the host's allocator */
    return SLUICE_OK;
  }
  sluice_device_t* device = step->moe->context->device;
  char name[64];
  snprintf(name, sizeof name, "saved buffer %s", sluice_saved_names[which]);
  return device->memory->check_memory(device, step->saved[which], bytes, SLUICE_ALIGNMENT, name);
}

static sluice_status_t most_deferred(const sluice_moe_t* moe, uint64_t* out_bytes) {
  if (moe->plan == NULL) return SLUICE_OK;
  if (moe->plan->inputs.separate_wgrad) { /* the same for every plan of the layer */
    memcpy(out_bytes, moe->plan->bytes.deferred, sizeof moe->plan->bytes.deferred);
    return SLUICE_OK;
  }
  const sluice_plan_problem_t problem = sluice_layer_plan_problem(moe, moe->plan->two_levels);
  return sluice_plan_deferred_bytes(&problem, moe->plan, out_bytes);
}

/* Allocates the plan's largest size, so that a block serves every step. */
static sluice_status_t allocate_deferred(sluice_step_t* step, int32_t tensor, uint64_t bytes, uint64_t most,
                                         sluice_stream_t stream) {
  sluice_context_t* context = step->moe->context;
  if (bytes > 0 && most > 0) bytes = most;
  step->deferred_bytes[tensor] = bytes;
  if (bytes == 0) return SLUICE_OK;
  return context->device->memory->take(context->device, stream, context->memory, 0, bytes, most,
                                       &step->deferred[tensor]);
}

static void release_deferred(sluice_step_t* step, int32_t tensor) {
  sluice_device_t* device = step->moe->context->device;
  if (!step->is_captured) device->memory->give(device, 0, step->deferred[tensor]);
}

const sluice_saved_memory_t sluice_saved_in_device_memory = {.allocate = allocate,
                                                             .release = release,
                                                             .is_counted = is_counted,
                                                             .allocator = allocator,
                                                             .take_given = take_given,
                                                             .most_deferred = most_deferred,
                                                             .allocate_deferred = allocate_deferred,
                                                             .release_deferred = release_deferred};
