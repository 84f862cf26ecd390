// SPDX-License-Identifier: Apache-2.0
#include "backend/swap/run/tier.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { PAGE = 4096 };

static uint64_t whole_pages(uint64_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

static sluice_status_t open_file(sluice_tier_t* tier, const char* path) {
  if (snprintf(tier->path, sizeof tier->path, "%s", path) >= (int)sizeof tier->path)
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_swap_config_t: path has over %d bytes", PATH_MAX - 1);
  /* O_EXCL and O_NOFOLLOW: no other process may have the file open, and a symbolic link is refused. */
  if (sluice_descriptor_open(&tier->descriptor, path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW) < 0) {
    return SLUICE_FAIL(SLUICE_E_EXTERNAL, "swap: %s: creating the file: %s", path, strerror(errno));
  }
  if (unlink(path) == 0) return SLUICE_OK;
  const int error = errno;
  sluice_descriptor_close(&tier->descriptor);
  return SLUICE_FAIL(SLUICE_E_EXTERNAL, "swap: %s: unlinking the file: %s", path, strerror(error));
}

sluice_status_t sluice_tier_open(sluice_tier_t* tier, const char* path, uint64_t budget,
                                 sluice_allocator_t* allocator) {
  *tier = (sluice_tier_t){.allocator = allocator, .budget = budget, .is_file = path != NULL};
  tier->descriptor.fd = -1;
  if (path != NULL) SLUICE_TRY(open_file(tier, path));
  sluice_pool_init(&tier->pool, allocator, 0);
  return SLUICE_OK;
}

void sluice_tier_close(sluice_tier_t* tier) {
  sluice_pool_deinit(&tier->pool);
  sluice_descriptor_close(&tier->descriptor);
  sluice_free(tier->allocator, tier->taken, (uint64_t)tier->capacity * sizeof *tier->taken);
}

static sluice_status_t make_room(sluice_tier_t* tier) {
  if (tier->count < tier->capacity) return SLUICE_OK;
  const int32_t capacity = 2 * tier->capacity + 16;
  sluice_tier_place_t* taken =
      sluice_alloc(tier->allocator, (uint64_t)capacity * sizeof *taken, "swap: places in the file");
  if (taken == NULL) return sluice_alloc_status();
  if (tier->count > 0) memcpy(taken, tier->taken, (size_t)tier->count * sizeof *taken);
  sluice_free(tier->allocator, tier->taken, (uint64_t)tier->capacity * sizeof *taken);
  tier->taken = taken, tier->capacity = capacity;
  return SLUICE_OK;
}

/* Takes the first gap that is large enough, so that the file stays small. */
static sluice_status_t take_of_file(sluice_tier_t* tier, sluice_tier_place_t* place) {
  SLUICE_TRY(make_room(tier));
  int32_t index = 0;
  for (; index < tier->count; ++index) {
    const sluice_tier_place_t* next = tier->taken + index;
    if (next->at - place->at >= place->bytes) break;
    place->at = next->at + whole_pages(next->bytes);
  }
  memmove(tier->taken + index + 1, tier->taken + index, (size_t)(tier->count - index) * sizeof *tier->taken);
  tier->taken[index] = *place;
  ++tier->count;
  return SLUICE_OK;
}

sluice_status_t sluice_tier_take(sluice_tier_t* tier, uint64_t bytes, sluice_tier_place_t* out_place) {
  if (bytes > tier->budget - tier->used) {
    return SLUICE_FAIL(SLUICE_E_OVER_BUDGET,
                       "swap: %llu bytes would be copied out in addition to %llu, more than the budget of %llu: give a "
                       "larger budget, or swap fewer layers",
                       (unsigned long long)bytes, (unsigned long long)tier->used, (unsigned long long)tier->budget);
  }
  sluice_tier_place_t place = {.bytes = bytes};
  uint64_t counted = 0;
  SLUICE_TRY(tier->is_file ? take_of_file(tier, &place)
                           : sluice_pool_take(&tier->pool, bytes, "swap: host memory", &place.memory, &counted));
  tier->used += bytes;
  *out_place = place;
  return SLUICE_OK;
}

void sluice_tier_give(sluice_tier_t* tier, const sluice_tier_place_t* place) {
  tier->used -= place->bytes;
  if (!tier->is_file) {
    (void)sluice_pool_give(&tier->pool, place->memory);
    return;
  }
  int32_t index = 0;
  while (tier->taken[index].at != place->at) ++index;
  --tier->count;
  memmove(tier->taken + index, tier->taken + index + 1, (size_t)(tier->count - index) * sizeof *tier->taken);
}

sluice_status_t sluice_tier_write(const sluice_tier_t* tier, const sluice_tier_place_t* place, uint64_t from,
                                  const void* data, uint64_t bytes) {
  if (tier->is_file)
    return sluice_file_write_at(tier->descriptor.fd, "swap", tier->path, place->at + from, data, bytes);
  memcpy((char*)place->memory + from, data, bytes);
  return SLUICE_OK;
}

sluice_status_t sluice_tier_read(const sluice_tier_t* tier, const sluice_tier_place_t* place, uint64_t from, void* to,
                                 uint64_t bytes) {
  if (tier->is_file) return sluice_file_read_at(tier->descriptor.fd, "swap", tier->path, place->at + from, to, bytes);
  memcpy(to, (const char*)place->memory + from, bytes);
  return SLUICE_OK;
}
