// SPDX-License-Identifier: Apache-2.0
/* Saved buffers in host memory: budgets count all of them. */
#include "backend/base/pages.h"
#include "backend/moe/step/saved_plain.h"

/* The pool that keeps offloaded rows between steps. -1: none. */
static int32_t pool_of(int32_t which, uint64_t bytes) { return bytes > 0 ? sluice_engine_pool_of(which) : -1; }

static sluice_status_t allocate(sluice_step_t* step, int32_t which, uint64_t bytes, sluice_stream_t stream,
                                uint64_t* out_counted) {
  (void)stream;
  const int32_t pool = pool_of(which, bytes);
  if (pool >= 0) {
    return sluice_pool_take(&step->moe->context->own_pools[pool], bytes, sluice_saved_names[which], &step->saved[which],
                            out_counted);
  }
  SLUICE_TRY(sluice_saved_allocate_plain(step, which, bytes));
  *out_counted = sluice_counted_bytes(bytes);
  return SLUICE_OK;
}

static void release(sluice_step_t* step, int32_t which) {
  const int32_t pool = pool_of(which, step->saved_bytes[which]);
  if (pool >= 0) {
    (void)sluice_pool_give(&step->moe->context->own_pools[pool], step->saved[which]);
  } else {
    sluice_saved_release_plain(step, which);
  }
}

static sluice_allocator_t* allocator(sluice_context_t* context, int32_t which) {
  (void)which;
  return &context->allocator;
}

static sluice_status_t take_given(sluice_step_t* step, int32_t which, uint64_t bytes) {
  sluice_pages_advise(step->saved[which], bytes); /* fresh from the host's allocator */
  return SLUICE_OK;
}

static sluice_status_t allocate_deferred(sluice_step_t* step, int32_t tensor, uint64_t bytes, uint64_t most,
                                         sluice_stream_t stream) {
  (void)most, (void)stream;
  step->deferred_bytes[tensor] = bytes;
  if (bytes == 0) return SLUICE_OK;
  step->deferred[tensor] = sluice_alloc(&step->moe->context->allocator, bytes, "gradient rows of wgrad");
  return step->deferred[tensor] != NULL ? SLUICE_OK : sluice_alloc_status();
}

static void release_deferred(sluice_step_t* step, int32_t tensor) {
  sluice_free(&step->moe->context->allocator, step->deferred[tensor], step->deferred_bytes[tensor]);
}

const sluice_saved_memory_t sluice_saved_in_host_memory = {.allocate = allocate,
                                                           .release = release,
                                                           .allocator = allocator,
                                                           .take_given = take_given,
                                                           .allocate_deferred = allocate_deferred,
                                                           .release_deferred = release_deferred};
