// SPDX-License-Identifier: Apache-2.0
#include "backend/device/cuda/cuda_routing.h"

#include <string.h>

#include "backend/base/math.h"
#include "backend/device/cuda/cuda_launch.h"

static int64_t tiles_of(int64_t num_routes) { return sluice_ceil_div(num_routes, SLUICE_CUDA_ROUTE_TILE); }

uint64_t sluice_cuda_route_scratch_bytes(int64_t num_routes, int64_t num_experts) {
  return (uint64_t)tiles_of(num_routes) * ((uint64_t)num_experts + 1) * sizeof(int32_t);
}

void sluice_cuda_route(sluice_stream_t stream, const sluice_route_args_t* routes) {
  sluice_route_args_t args = *routes;
  int64_t tiles = tiles_of(args.num_routes);
  args.units = tiles;
  sluice_cuda_launch(SLUICE_CUDA_route_count, stream, &args, args.units);
  args.units = sluice_ceil_div(args.num_experts, SLUICE_CUDA_WARP);
  sluice_cuda_launch(SLUICE_CUDA_route_scan_tiles, stream, &args, args.units);
  args.units = 1;
  sluice_cuda_launch(SLUICE_CUDA_route_scan_slots, stream, &args, args.units);
  args.units = tiles;
  sluice_cuda_launch(SLUICE_CUDA_route_place, stream, &args, args.units);
}

void sluice_cuda_count_blocks(sluice_stream_t stream, const sluice_block_args_t* args) {
  sluice_cuda_launch(SLUICE_CUDA_route_blocks, stream, args, args->units);
}

uint64_t sluice_cuda_table_bytes(int32_t num_experts) {
  return sluice_align_up((uint64_t)num_experts * sizeof(int32_t));
}

static int is_identity(const int32_t* places, int32_t count) {
  for (int32_t e = 0; e < count; ++e) {
    if (places[e] != e) return 0;
  }
  return 1;
}

sluice_status_t sluice_cuda_write_table(sluice_stream_t stream, const int32_t* places, int32_t num_experts,
                                        void* scratch, int32_t** out_table) {
  uint64_t words[64];
  const int32_t step = 2 * (int32_t)(sizeof words / sizeof words[0]);
  int32_t* table = scratch;
  *out_table = NULL;
  if (is_identity(places, num_experts)) return SLUICE_OK;
  for (int32_t first = 0; first < num_experts; first += step) {
    int32_t count = num_experts - first < step ? num_experts - first : step;
    memset(words, 0, sizeof words);
    memcpy(words, places + first, (size_t)count * sizeof(int32_t));
    SLUICE_TRY(sluice_cuda_write_words(stream, table + first, words, (count + 1) / 2));
  }
  *out_table = table;
  return SLUICE_OK;
}
