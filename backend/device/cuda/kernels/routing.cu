// SPDX-License-Identifier: Apache-2.0
/* Routing on the device: counts, offsets and permutations that the host never reads.
 *
 * A stable counting sort without atomics, so that the order (slot, token, k) and every bit are reproducible: one warp
 * counts each tile of routes, the counts are scanned over tiles and over slots, then each warp walks its tile again. */
#include "backend/device/cuda/kernels/element.cu.h"
#include "backend/device/cuda/kernels/kernel_args.h"

SLUICE_FN int64_t tiles_of(const sluice_route_args_t& a) {
  return (a.num_routes + SLUICE_CUDA_ROUTE_TILE - 1) / SLUICE_CUDA_ROUTE_TILE;
}

template <typename Args>
SLUICE_FN int64_t id_of_route(const Args& a, int64_t r) {
  const int64_t at = r / a.top_k * a.ids_t + r % a.top_k * a.ids_k;
  return a.ids_64 ? ((const int64_t*)a.ids)[at] : (int64_t)((const int32_t*)a.ids)[at];
}

/* The slot of an id, or -1. An id outside [0, E) counts as dropped and is reported in first_bad. */
template <typename Args>
SLUICE_FN int32_t slot_of_id(const Args& a, int64_t id) {
  if (id < 0 || id >= a.num_experts) return -1;
  return a.slot_of == NULL ? (int32_t)id : a.slot_of[id];
}

SLUICE_FN int32_t slot_of_route(const sluice_route_args_t& a, int64_t r) {
  return r < a.num_routes ? slot_of_id(a, id_of_route(a, r)) : -1;
}

/* first_token * K + r if the id of route r is invalid, else INT32_MAX */
SLUICE_FN int32_t bad_route(const sluice_route_args_t& a, int64_t r) {
  if (r >= a.num_routes) return INT32_MAX;
  const int64_t id = id_of_route(a, r);
  return id < -1 || id >= a.num_experts ? (int32_t)(a.first_token * a.top_k + r) : INT32_MAX;
}

/* Returns the number of set bits of `mask` below this lane. */
SLUICE_FN int32_t rank_in(uint32_t mask, int lane) { return bits_set(mask & ((1u << lane) - 1u)); }

/* tile_counts[tile, :] = routes of this tile by slot */
SLUICE_FN void route_count(const sluice_route_args_t& a, int64_t tile) {
  int32_t* counts = a.tile_counts + tile * a.num_experts;
  SLUICE_LANES(lane) {
    for (int64_t e = lane; e < a.num_experts; e += 32) counts[e] = 0;
  }
  warp_fence();
  per_lane<int32_t> bad;
  SLUICE_LANES(lane) { bad[lane] = INT32_MAX; }
  for (int64_t base = 0; base < SLUICE_CUDA_ROUTE_TILE; base += 32) {
    per_lane<int32_t> slot;
    SLUICE_LANES(lane) {
      const int64_t r = tile * SLUICE_CUDA_ROUTE_TILE + base + lane;
      const int32_t found = bad_route(a, r);
      slot[lane] = slot_of_route(a, r);
      if (found < bad[lane]) bad[lane] = found;
    }
    per_lane<uint32_t> same = warp_match(slot);
    SLUICE_LANES(lane) {
      /* One lane per slot adds, so no two write the same count. */
      if (slot[lane] >= 0 && rank_in(same[lane], lane) == 0) counts[slot[lane]] += bits_set(same[lane]);
    }
    warp_fence();
  }
  const int32_t first = warp_least(bad);
  SLUICE_LANES(lane) {
    if (lane == 0) a.tile_counts[tiles_of(a) * a.num_experts + tile] = first;
  }
}
SLUICE_KERNEL(route_count, sluice_route_args_t)

enum { TILES_AT_ONCE = 16 };

/* tile_counts[tile, e] <- rows of slot e in earlier tiles; counts[e] = the sum. Counts of a batch of tiles are loaded
 * together, before sums overwrite them: one wait for memory per batch. */
SLUICE_FN void route_scan_tiles(const sluice_route_args_t& a, int64_t unit) {
  const int64_t tiles = tiles_of(a);
  SLUICE_LANES(lane) {
    const int64_t e = unit * 32 + lane;
    if (e < a.num_experts) {
      int32_t sum = 0;
      for (int64_t first = 0; first < tiles; first += TILES_AT_ONCE) {
        int32_t* const here = a.tile_counts + first * a.num_experts + e;
        const int count = tiles - first < TILES_AT_ONCE ? (int)(tiles - first) : TILES_AT_ONCE;
        int32_t rows[TILES_AT_ONCE];
        SLUICE_UNROLL
        for (int i = 0; i < TILES_AT_ONCE; ++i) rows[i] = i < count ? here[i * a.num_experts] : 0;
        SLUICE_UNROLL
        for (int i = 0; i < TILES_AT_ONCE; ++i) {
          if (i < count) here[i * a.num_experts] = sum;
          sum += rows[i];
        }
      }
      a.counts[e] = sum;
    }
  }
}
SLUICE_KERNEL(route_scan_tiles, sluice_route_args_t)

SLUICE_FN int64_t largest(int64_t x, int64_t y) { return x > y ? x : y; }

/* Adds this chunk to the drop counters: one warp of one launch at a time writes them. */
SLUICE_FN void count_drops(const sluice_route_args_t& a, int32_t first_bad) {
  per_lane<int64_t> kept, over, most;
  SLUICE_LANES(lane) {
    kept[lane] = over[lane] = most[lane] = 0;
    for (int64_t e = lane; e < a.num_experts; e += 32) {
      const int64_t count = a.counts[e];
      kept[lane] += count;
      over[lane] += largest(count - a.capacity, 0);
      most[lane] = largest(most[lane], (count << 32) + e);
    }
  }
  const int64_t all = warp_fold(kept), dropped = warp_fold(over), top = warp_most(most);
  SLUICE_LANES(lane) {
    if (lane == 0) {
      if (a.begins) a.drop_counters[SLUICE_DROP_COUNTER_FORWARDS] += 1;
      a.drop_counters[SLUICE_DROP_COUNTER_ROUTES] += all;
      a.drop_counters[SLUICE_DROP_COUNTER_DROPPED] += dropped;
      a.drop_counters[SLUICE_DROP_COUNTER_MOST] = largest(a.drop_counters[SLUICE_DROP_COUNTER_MOST], top);
      if (first_bad != INT32_MAX) a.drop_counters[SLUICE_DROP_COUNTER_BAD] = (int64_t)first_bad + 1;
    }
  }
}

/* offsets[e] = rows of the slots before e; first_bad = the minimum over all tiles */
SLUICE_FN void route_scan_slots(const sluice_route_args_t& a, int64_t) {
  int32_t before = 0;
  for (int64_t base = 0; base < a.num_experts; base += 32) {
    per_lane<int32_t> count;
    SLUICE_LANES(lane) { count[lane] = base + lane < a.num_experts ? a.counts[base + lane] : 0; }
    const int32_t sum = warp_scan(count);
    SLUICE_LANES(lane) {
      if (base + lane >= a.num_experts) continue;
      a.offsets[base + lane] = a.capacity > 0 ? (int32_t)((base + lane) * a.capacity) : before + count[lane];
    }
    before += sum;
  }
  per_lane<int32_t> bad;
  SLUICE_LANES(lane) {
    bad[lane] = INT32_MAX;
    for (int64_t tile = lane; tile < tiles_of(a); tile += 32) {
      const int32_t found = a.tile_counts[tiles_of(a) * a.num_experts + tile];
      if (found < bad[lane]) bad[lane] = found;
    }
  }
  const int32_t first = warp_least(bad);
  SLUICE_LANES(lane) {
    if (lane == 0) a.offsets[a.num_experts] = a.capacity > 0 ? (int32_t)(a.num_experts * a.capacity) : before;
    if (lane == 0 && a.first_bad != NULL) *a.first_bad = first;
  }
  if (a.capacity > 0) count_drops(a, first);
}
SLUICE_KERNEL(route_scan_slots, sluice_route_args_t)

/* Writes position, token_of, route_of; tile_counts[tile, e] counts up while the tile is processed. */
SLUICE_FN void route_place(const sluice_route_args_t& a, int64_t tile) {
  int32_t* next = a.tile_counts + tile * a.num_experts;
  for (int64_t base = 0; base < SLUICE_CUDA_ROUTE_TILE; base += 32) {
    per_lane<int32_t> slot;
    SLUICE_LANES(lane) { slot[lane] = slot_of_route(a, tile * SLUICE_CUDA_ROUTE_TILE + base + lane); }
    per_lane<uint32_t> same = warp_match(slot);
    SLUICE_LANES(lane) {
      const int64_t r = tile * SLUICE_CUDA_ROUTE_TILE + base + lane;
      if (r < a.num_routes) {
        int32_t row = -1;
        if (slot[lane] >= 0) {
          const int32_t inside = next[slot[lane]] + rank_in(same[lane], lane);
          if (a.capacity == 0 || inside < a.capacity) row = a.offsets[slot[lane]] + inside;
        }
        if (row >= 0) {
          a.token_of[row] = (int32_t)(a.first_token + r / a.top_k);
          if (a.route_of != NULL) a.route_of[row] = (int32_t)(a.first_token * a.top_k + r);
        }
        a.position[r] = row;
      }
    }
    warp_fence();
    SLUICE_LANES(lane) {
      if (slot[lane] >= 0 && rank_in(same[lane], lane) == 0) next[slot[lane]] += bits_set(same[lane]);
    }
    warp_fence();
  }
}
SLUICE_KERNEL(route_place, sluice_route_args_t)

/* counts[block, :] = routes of this block by slot, and its first bad one */
SLUICE_FN void route_blocks(const sluice_block_args_t& a, int64_t block) {
  int32_t* counts = a.counts + block * (a.num_experts + 1);
  const int64_t first = a.num_tokens * block / a.units * a.top_k;
  const int64_t end = a.num_tokens * (block + 1) / a.units * a.top_k;
  SLUICE_LANES(lane) {
    for (int64_t e = lane; e < a.num_experts; e += 32) counts[e] = 0;
  }
  warp_fence();
  per_lane<int32_t> bad;
  SLUICE_LANES(lane) { bad[lane] = INT32_MAX; }
  for (int64_t base = first; base < end; base += 32) {
    per_lane<int32_t> slot;
    SLUICE_LANES(lane) {
      const int64_t r = base + lane;
      const int64_t id = r < end ? id_of_route(a, r) : -1;
      slot[lane] = slot_of_id(a, id);
      if ((id < -1 || id >= a.num_experts) && (int32_t)r < bad[lane]) bad[lane] = (int32_t)r;
    }
    per_lane<uint32_t> same = warp_match(slot);
    SLUICE_LANES(lane) {
      /* One lane per slot adds, so no two write the same count. */
      if (slot[lane] >= 0 && rank_in(same[lane], lane) == 0) counts[slot[lane]] += bits_set(same[lane]);
    }
    warp_fence();
  }
  const int32_t least = warp_least(bad);
  SLUICE_LANES(lane) {
    if (lane == 0) counts[a.num_experts] = least;
  }
}
SLUICE_KERNEL(route_blocks, sluice_block_args_t)
