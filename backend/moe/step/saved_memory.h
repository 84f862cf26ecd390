// SPDX-License-Identifier: Apache-2.0
/* The memory of steps' saved buffers, and what a budget counts of it. On a device INPUT and PRE_ACTIVATION lie in
 * device memory, offloaded rows in page-locked host memory, and META in plain host memory, which has no budget; on a
 * CPU all of them lie in host memory, with a pool for offloaded rows between steps. Private to moe/step. */
#pragma once

#include <string.h>

#include "backend/model/pass_sizes.h"
#include "backend/moe/layer/layer.h"

typedef struct sluice_saved_memory_s {
  /* Allocates step->saved[which] from the library. *out_counted: bytes that count in a budget. */
  sluice_status_t (*allocate)(sluice_step_t* step, int32_t which, uint64_t bytes, sluice_stream_t stream,
                              uint64_t* out_counted);
  void (*release)(sluice_step_t* step, int32_t which);
  /* Whether a budget counts the buffer; NULL: every buffer. */
  int (*is_counted)(int32_t which);
  /* The allocator that is charged for a buffer of the host. */
  sluice_allocator_t* (*allocator)(sluice_context_t* context, int32_t which);
  /* Accepts a buffer of the host: INVALID_ARGUMENT, naming the buffer, if rows may not lie there. */
  sluice_status_t (*take_given)(sluice_step_t* step, int32_t which, uint64_t bytes);
  /* The most bytes that dgrad leaves under the plan in force, by deferred tensor; 0: the bytes of the rows. NULL: 0
   * for each. */
  sluice_status_t (*most_deferred)(const sluice_moe_t* moe, uint64_t* out_bytes);
  sluice_status_t (*allocate_deferred)(sluice_step_t* step, int32_t tensor, uint64_t bytes, uint64_t most,
                                       sluice_stream_t stream);
  void (*release_deferred)(sluice_step_t* step, int32_t tensor);
} sluice_saved_memory_t;

extern const sluice_saved_memory_t sluice_saved_in_host_memory;
extern const sluice_saved_memory_t sluice_saved_in_device_memory;

extern const char* const sluice_saved_names[SLUICE_SAVED_COUNT];

static inline int sluice_saved_is_counted(const sluice_saved_memory_t* memory, int32_t which) {
  return memory->is_counted == NULL || memory->is_counted(which);
}
static inline sluice_status_t sluice_saved_most_deferred(const sluice_saved_memory_t* memory, const sluice_moe_t* moe,
                                                         uint64_t* out_bytes) {
  memset(out_bytes, 0, SLUICE_NUM_DEFERRED * sizeof *out_bytes);
  return memory->most_deferred == NULL ? SLUICE_OK : memory->most_deferred(moe, out_bytes);
}

/* Bytes of a block as the allocator counts it. */
static inline uint64_t sluice_counted_bytes(uint64_t bytes) { return sluice_align_up(bytes == 0 ? 1 : bytes); }
