// SPDX-License-Identifier: Apache-2.0
/* The storage of pieces that were copied out: blocks of host memory, or a file that was unlinked. Private to
 * backend/swap/run. */
#pragma once

#include <limits.h>

#include "backend/base/alloc.h"
#include "backend/base/file_io.h"
#include "backend/memory/pool.h"

/* A place of a tier. */
typedef struct sluice_tier_place_s {
  void* memory; /* in host memory */
  uint64_t at;  /* in a file */
  uint64_t bytes;
} sluice_tier_place_t;

typedef struct sluice_tier_s {
  sluice_allocator_t* allocator;
  sluice_pool_t pool; /* of host memory */
  int32_t is_file;
  char path[PATH_MAX];
  sluice_descriptor_t descriptor;
  uint64_t budget, used;
  sluice_tier_place_t* taken; /* of a file, by `at` */
  int32_t count, capacity;
} sluice_tier_t;

/* path: NULL: host memory. Errors: EXTERNAL, NO_MEMORY. The tier stays at its address until close. */
sluice_status_t sluice_tier_open(sluice_tier_t* tier, const char* path, uint64_t budget, sluice_allocator_t* allocator);
void sluice_tier_close(sluice_tier_t* tier);

/* Errors: OVER_BUDGET, NO_MEMORY. */
sluice_status_t sluice_tier_take(sluice_tier_t* tier, uint64_t bytes, sluice_tier_place_t* out_place);
void sluice_tier_give(sluice_tier_t* tier, const sluice_tier_place_t* place);

/* Write and read a part of a piece, from byte `from` on. Any thread. Errors: EXTERNAL. */
sluice_status_t sluice_tier_write(const sluice_tier_t* tier, const sluice_tier_place_t* place, uint64_t from,
                                  const void* data, uint64_t bytes);
sluice_status_t sluice_tier_read(const sluice_tier_t* tier, const sluice_tier_place_t* place, uint64_t from, void* to,
                                 uint64_t bytes);
