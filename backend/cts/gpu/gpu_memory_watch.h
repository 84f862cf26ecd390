// SPDX-License-Identifier: Apache-2.0
/* Checks that device memory is returned after each case of gpu_layer. */
#pragma once

#include <stddef.h>
#include <stdio.h>

/* The pools of the driver vary by less. */
#define GPU_MEMORY_LOSS ((size_t)64 << 20)

typedef enum gpu_memory_watch_kind_e {
  GPU_MEMORY_LOSSES_ARE_NOTED = 0,
  GPU_MEMORY_LOSSES_FAIL, /* after MOST_LOADS of them */
  GPU_MEMORY_NOT_WATCHED
} gpu_memory_watch_kind_t;

typedef struct gpu_memory_watch_s {
  gpu_memory_watch_kind_t kind;
  size_t free_before;
  int num_cases, num_losses;
} gpu_memory_watch_t;

/* After a case: `now` bytes are free. NULL, or the problem.
 *
 * Code that is loaded on first use keeps its memory: kernels, and code of cuBLAS for a dtype or a shape, which may be
 * loaded in later cases. The driver decides how often this happens, so a loss is only noted. A case that leaks loses
 * memory repeatedly, so with many cases too many losses are a failure. */
static inline const char* gpu_memory_seen(gpu_memory_watch_t* w, size_t now) {
  enum { WARM_UP = 8, MOST_LOADS = 4 };
  static char text[128];
  if (w->kind == GPU_MEMORY_NOT_WATCHED) return NULL;
  if (++w->num_cases <= WARM_UP) w->free_before = now;
  if (now + GPU_MEMORY_LOSS >= w->free_before) return NULL;
  snprintf(text, sizeof text, "%zu bytes of the device have not come back, loss %d", w->free_before - now,
           ++w->num_losses);
  w->free_before = now;
  if (w->kind == GPU_MEMORY_LOSSES_FAIL && w->num_losses > MOST_LOADS) return text;
  printf("     note: %s\n", text);
  return NULL;
}
