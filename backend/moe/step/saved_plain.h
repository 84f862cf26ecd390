// SPDX-License-Identifier: Apache-2.0
/* Saved buffers in plain host memory, where META always lies. Private to moe/step. */
#pragma once

#include "backend/moe/step/saved_memory.h"
#include "backend/moe/step/step.h"

static inline sluice_status_t sluice_saved_allocate_plain(sluice_step_t* step, int32_t which, uint64_t bytes) {
  step->saved[which] = sluice_alloc(&step->moe->context->allocator, bytes, sluice_saved_names[which]);
  return step->saved[which] != NULL ? SLUICE_OK : sluice_alloc_status();
}
static inline void sluice_saved_release_plain(sluice_step_t* step, int32_t which) {
  sluice_free(&step->moe->context->allocator, step->saved[which], step->saved_bytes[which]);
}
