/* The order of routes, counts by block and the order of arrivals against plain loops. */
#include "backend/cts/gpu/gpu_routing.h"

#include <stdint.h>
#include <string.h>

#include "backend/cts/gpu/gpu_array.h"
#include "backend/cts/gpu/gpu_parts.h"
#include "backend/cts/gpu/gpu_rig.h"
#include "backend/device/cuda/cuda_routing.h"

const char* gpu_route(int64_t tokens, int64_t top_k, int64_t experts) {
  int64_t routes = tokens * top_k, row = 0;
  const char* problem = NULL;
  gpu_array_t ids = gpu_array(routes * 4), counts = gpu_array(experts * 4), offsets = gpu_array((experts + 1) * 4),
              token_of = gpu_zeros(routes * 4), position = gpu_array(routes * 4),
              scratch = gpu_array((int64_t)sluice_cuda_route_scratch_bytes(routes, experts));
  int32_t* id = ids.host;
  for (int64_t r = 0; r < routes; ++r) id[r] = (int32_t)(gpu_random_bits() % (uint32_t)(experts + 1)) - 1;
  gpu_send(&ids);
  const sluice_route_args_t args = {.ids = ids.there,
                                    .tile_counts = scratch.there,
                                    .counts = counts.there,
                                    .offsets = offsets.there,
                                    .token_of = token_of.there,
                                    .position = position.there,
                                    .num_routes = routes,
                                    .top_k = top_k,
                                    .num_experts = experts,
                                    .ids_t = top_k,
                                    .ids_k = 1};
  gpu_enter();
  sluice_cuda_route(NULL, &args);
  gpu_leave();
  gpu_fetch(&offsets), gpu_fetch(&token_of), gpu_fetch(&position);
  for (int64_t e = 0; e < experts; ++e) {
    if (((int32_t*)offsets.back)[e] != row) problem = "an offset";
    for (int64_t r = 0; r < routes; ++r) {
      if (id[r] != e) continue;
      if (((int32_t*)position.back)[r] != row || ((int32_t*)token_of.back)[row] != r / top_k) problem = "a row";
      ++row;
    }
  }
  if (((int32_t*)offsets.back)[experts] != row) problem = "the number of rows";
  gpu_drop(&ids), gpu_drop(&counts), gpu_drop(&offsets), gpu_drop(&token_of), gpu_drop(&position), gpu_drop(&scratch);
  return problem;
}

static const char* blocks(int64_t tokens, int64_t top_k, int64_t experts) {
  enum { BLOCKS = 64 };
  int64_t routes = tokens * top_k, columns = experts + 1;
  const char* problem = NULL;
  gpu_array_t ids = gpu_array(routes * 4), counts = gpu_array(BLOCKS * columns * 4);
  int32_t *id = ids.host, *want = counts.host;
  for (int64_t r = 0; r < routes; ++r) id[r] = (int32_t)(gpu_random_bits() % (uint32_t)(experts + 1)) - 1;
  gpu_send(&ids);
  const sluice_block_args_t args = {.ids = ids.there,
                                    .counts = counts.there,
                                    .units = BLOCKS,
                                    .num_tokens = tokens,
                                    .top_k = top_k,
                                    .num_experts = experts,
                                    .ids_t = top_k,
                                    .ids_k = 1};
  gpu_enter();
  sluice_cuda_count_blocks(NULL, &args);
  gpu_leave();
  memset(want, 0, (size_t)counts.bytes);
  for (int64_t g = 0; g < BLOCKS; ++g) {
    want[g * columns + experts] = INT32_MAX;
    for (int64_t r = tokens * g / BLOCKS * top_k; r < tokens * (g + 1) / BLOCKS * top_k; ++r) {
      if (id[r] >= 0) ++want[g * columns + id[r]];
    }
  }
  gpu_fetch(&counts);
  if (memcmp(counts.back, want, (size_t)counts.bytes) != 0) problem = "a count";
  gpu_drop(&ids), gpu_drop(&counts);
  return problem;
}

/* From arrival order, by (rank, expert), to (expert, rank). */
static const char* arrivals(int64_t ranks, int64_t local) {
  gpu_array_t counts = gpu_array(ranks * local * 4), offset = gpu_array((local + 1) * 4);
  int32_t *count = counts.host, total = 0, row = 0;
  const char* problem = NULL;
  for (int64_t i = 0; i < ranks * local; ++i) total += count[i] = (int32_t)(gpu_random_bits() % 70) * (i % 3 != 1);
  gpu_array_t index = gpu_array((int64_t)total * 4);
  gpu_send(&counts);
  const sluice_arrival_args_t args = {.counts = counts.there,
                                      .index = index.there,
                                      .expert_offset = offset.there,
                                      .num_ranks = ranks,
                                      .num_local = local};
  gpu_enter();
  sluice_cuda_arrivals(NULL, &args);
  gpu_leave();
  gpu_fetch(&offset), gpu_fetch(&index);
  for (int64_t e = 0; e < local; ++e) {
    if (((int32_t*)offset.back)[e] != row) problem = "an offset";
    for (int64_t w = 0; w < ranks; ++w) {
      int32_t received = 0;
      for (int64_t i = 0; i < w * local + e; ++i) received += count[i];
      for (int32_t i = 0; i < count[w * local + e]; ++i) {
        if (((int32_t*)index.back)[row++] != received + i) problem = "a row";
      }
    }
  }
  if (((int32_t*)offset.back)[local] != total) problem = "the number of rows";
  gpu_drop(&counts), gpu_drop(&offset), gpu_drop(&index);
  return problem;
}

void gpu_part_routing(void) {
  gpu_report_token_copies();
  gpu_report("blocks T=1 K=1 E=1", blocks(1, 1, 1));
  gpu_report("blocks T=5000 K=8 E=256", blocks(5000, 8, 256));
  gpu_report("route T=1 K=1 E=1", gpu_route(1, 1, 1));
  gpu_report("route T=1000 K=2 E=8", gpu_route(1000, 2, 8));
  gpu_report("route T=5000 K=8 E=256", gpu_route(5000, 8, 256));
  gpu_report("route T=4097 K=1 E=64", gpu_route(4097, 1, 64));
  gpu_report("arrivals W=1 E=1", arrivals(1, 1));
  gpu_report("arrivals W=8 E=32", arrivals(8, 32));
  gpu_report("arrivals W=9 E=41", arrivals(9, 41));
  gpu_report_gate();
}
