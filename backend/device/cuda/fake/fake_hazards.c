// SPDX-License-Identifier: Apache-2.0
/* Records accesses to memory, each with the clock of its place in its stream, and finds pairs without an order. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/device/cuda/fake/fake_world.h"

static void* grown(void* list, int64_t count, int64_t* room, size_t bytes) {
  if (count < *room) return list;
  *room = *room == 0 ? 256 : 2 * *room;
  list = realloc(list, (size_t)*room * bytes);
  assert(list != NULL);
  return list;
}

static int64_t add_clock(const sluice_fake_moment_t* moment) {
  sluice_fake_world_t* w = &sluice_fake_world;
  w->clocks = grown(w->clocks, w->num_clocks, &w->room_clocks, sizeof *w->clocks);
  memcpy(w->clocks[w->num_clocks].at, moment->clock, sizeof moment->clock);
  return w->num_clocks++;
}

static sluice_fake_collect_fn_t collector;

void sluice_fake_list_accesses(const char* name, const void* args, sluice_fake_collect_fn_t collect) {
  const sluice_fake_moment_t none = {.stream = 0};
  collector = collect;
  sluice_fake_note_kernel(name, args, &none);
  collector = NULL;
}

/* Adjacent rows are one access. */
void sluice_fake_cuda_note_at(const sluice_fake_moment_t* moment, const void* data, uint64_t bytes, int is_write) {
  sluice_fake_world_t* w = &sluice_fake_world;
  if (bytes == 0 || data == NULL) return;
  if (collector != NULL) {
    collector(data, bytes, is_write);
    return;
  }
  sluice_fake_count_bytes(bytes, is_write);
  if (sluice_fake_is_dry()) return; /* a dry run writes no contents; real runs check the order */
  access_t* last = w->num_accesses > 0 ? &w->accesses[w->num_accesses - 1] : NULL;
  if (last != NULL && (last->stream != moment->stream || last->count != moment->count)) last = NULL;
  const int64_t block = sluice_fake_block_number(data);
  if (last != NULL && last->is_write == is_write && last->block == block && last->data + last->bytes == data) {
    last->bytes += bytes;
    return;
  }
  const int64_t clock = last != NULL ? last->clock : add_clock(moment);
  w->accesses = grown(w->accesses, w->num_accesses, &w->room_accesses, sizeof *w->accesses);
  w->accesses[w->num_accesses++] = (access_t){.stream = moment->stream,
                                              .is_write = is_write,
                                              .count = moment->count,
                                              .clock = clock,
                                              .block = block,
                                              .data = data,
                                              .bytes = bytes};
}

/* Returns whether one of the two ends before the other begins. */
static int ordered(const access_t* a, const access_t* b) {
  const fake_clock_t* clocks = sluice_fake_world.clocks;
  return clocks[b->clock].at[a->stream] >= a->count || clocks[a->clock].at[b->stream] >= b->count;
}

static int by_place(const void* x, const void* y) {
  const access_t *a = x, *b = y;
  if (a->block != b->block) return a->block < b->block ? -1 : 1;
  if (a->data != b->data) return a->data < b->data ? -1 : 1;
  return 0;
}

int64_t sluice_fake_cuda_hazards(char* out, size_t out_bytes) {
  int64_t found = 0;
  sluice_fake_cuda_lock();
  if (out_bytes > 0) out[0] = '\0';
  if (sluice_fake_world.num_accesses > 0)
    qsort(sluice_fake_world.accesses, (size_t)sluice_fake_world.num_accesses, sizeof(access_t), by_place);
  for (int64_t i = 0; i < sluice_fake_world.num_accesses; ++i) {
    const access_t* a = &sluice_fake_world.accesses[i];
    for (int64_t j = i + 1; j < sluice_fake_world.num_accesses; ++j) {
      const access_t* b = &sluice_fake_world.accesses[j];
      if (b->block != a->block || b->data >= a->data + a->bytes) break;
      if (!(a->is_write || b->is_write) || ordered(a, b)) continue;
      if (found++ > 0) continue;
      snprintf(out, out_bytes, "%s %p by stream %d and %s %p by stream %d are not ordered",
               a->is_write ? "write" : "read", (const void*)a->data, a->stream, b->is_write ? "write" : "read",
               (const void*)b->data, b->stream);
    }
  }
  sluice_fake_cuda_unlock();
  return found;
}

void sluice_fake_cuda_forget_accesses(void) {
  sluice_fake_cuda_lock();
  sluice_fake_world.num_accesses = sluice_fake_world.num_clocks = 0;
  sluice_fake_cuda_unlock();
}
