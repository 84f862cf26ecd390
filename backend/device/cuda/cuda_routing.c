#include "backend/device/cuda/cuda_routing.h"

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

void sluice_cuda_arrivals(sluice_stream_t stream, const sluice_arrival_args_t* arrivals) {
  sluice_arrival_args_t args = *arrivals;
  args.units = args.num_ranks * args.num_local;
  sluice_cuda_launch(SLUICE_CUDA_route_arrivals, stream, &args, args.units);
}

void sluice_cuda_gate(sluice_stream_t stream, const sluice_gate_kernel_args_t* args) {
  sluice_cuda_launch(SLUICE_CUDA_gate_top_k, stream, args, args->units);
}
