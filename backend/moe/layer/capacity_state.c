// SPDX-License-Identifier: Apache-2.0
#include "backend/moe/layer/capacity_state.h"

sluice_status_t sluice_capacity_create(sluice_moe_t* moe) {
  sluice_context_t* context = moe->context;
  if (sluice_shape_capacity(&moe->shape) == 0) return SLUICE_OK;
  moe->capacity = sluice_alloc_zeroed(&context->allocator, sizeof *moe->capacity, "state of a layer under a capacity");
  if (moe->capacity == NULL) return sluice_alloc_status();
  moe->capacity->drop_counters =
      sluice_alloc(context->memory, SLUICE_DROP_COUNTERS_BYTES, "drop counters of a layer under a capacity");
  return moe->capacity->drop_counters != NULL ? SLUICE_OK : sluice_alloc_status();
}

void sluice_capacity_destroy(sluice_moe_t* moe) {
  if (moe->capacity == NULL) return;
  sluice_free(moe->context->memory, moe->capacity->drop_counters, SLUICE_DROP_COUNTERS_BYTES);
  sluice_free(&moe->context->allocator, moe->capacity, sizeof *moe->capacity);
  moe->capacity = NULL;
}

void sluice_capacity_forget_agreed(const sluice_moe_t* moe) {
  if (moe->capacity != NULL) moe->capacity->num_kinds = 0;
}
