/* Token copies against plain loops: their numbers, and the tables of received route indices. */
#include <stdint.h>
#include <stdlib.h>

#include "backend/cts/gpu/gpu_array.h"
#include "backend/cts/gpu/gpu_rig.h"
#include "backend/cts/gpu/gpu_routing.h"
#include "backend/device/device.h"

/* Routes of a token to one rank share a row; expert e belongs to rank e % W. */
static const char* token_copies(int64_t tokens, int64_t top_k, int64_t experts, int64_t ranks) {
  int64_t routes = tokens * top_k, most = top_k < ranks ? top_k : ranks, row = 0;
  const int64_t first_token[] = {0, tokens};
  const char* problem = NULL;
  gpu_array_t ids = gpu_array(routes * 4), position = gpu_array(routes * 4), counts = gpu_array((ranks + 1) * 4),
              token = gpu_zeros(tokens * most * 4), table = gpu_array(tokens * ranks * 4),
              route_index = gpu_zeros(routes * 4), owner = gpu_array(experts * 4);
  const sluice_routing_kernels_t* kernels = gpu_rig.device->memory->routing;
  gpu_array_t scratch = gpu_array((int64_t)kernels->token_copy_scratch_bytes(routes, (int32_t)experts, (int32_t)ranks));
  int32_t *id = ids.host, *at = position.host, *rank = owner.host;
  for (int64_t e = 0; e < experts; ++e) rank[e] = (int32_t)(e % ranks);
  for (int64_t r = 0; r < routes; ++r) id[r] = (int32_t)(gpu_random_bits() % (uint32_t)(experts + 1)) - 1;
  for (int64_t r = 0; r < routes; ++r) at[r] = id[r] < 0 ? -1 : (int32_t)r; /* any distinct positions will do */
  gpu_send(&ids), gpu_send(&position);
  const sluice_device_token_copies_t args = {.ids = ids.there,
                                             .ids_t = top_k,
                                             .ids_k = 1,
                                             .num_chunks = 1,
                                             .first_token = first_token,
                                             .rank_of_expert = rank,
                                             .top_k = (int32_t)top_k,
                                             .num_experts = (int32_t)experts,
                                             .num_ranks = (int32_t)ranks,
                                             .most = (int32_t)most,
                                             .position = position.there,
                                             .counts = counts.there,
                                             .token = token.there,
                                             .position_of_token = table.there,
                                             .route_index = route_index.there,
                                             .scratch = scratch.there};
  if (kernels->number_token_copies(gpu_rig.device, NULL, &args) != SLUICE_OK) problem = last_message();
  gpu_fetch(&counts), gpu_fetch(&token), gpu_fetch(&table), gpu_fetch(&route_index);
  for (int64_t w = 0; w < ranks; ++w) {
    int64_t first = row;
    for (int64_t t = 0; t < tokens; ++t) {
      int any = 0;
      for (int64_t r = t * top_k; r < (t + 1) * top_k; ++r) {
        if (id[r] < 0 || rank[id[r]] != w) continue;
        any = 1;
        if (((int32_t*)route_index.back)[r] != (row - first) * top_k + r % top_k) problem = "a route index";
      }
      if (((int32_t*)table.back)[t * ranks + w] != (any ? row : -1)) problem = "a place";
      if (any && ((int32_t*)token.back)[row++] != t) problem = "a token";
    }
    if (((int32_t*)counts.back)[w] != row - first) problem = "a count";
  }
  gpu_drop(&ids), gpu_drop(&position), gpu_drop(&counts), gpu_drop(&token);
  gpu_drop(&table), gpu_drop(&route_index), gpu_drop(&owner), gpu_drop(&scratch);
  return problem;
}

/* A run for each source and expert, own routes among them; every seventh index is out of range if they are spoilt. */
static const char* places(int64_t num_runs, int32_t top_k, int32_t rows, int spoilt) {
  int64_t routes = num_runs * rows;
  const char* problem = NULL;
  gpu_array_t route_index = gpu_array(routes * 4), token = gpu_array(routes * 4),
              position = gpu_array(routes * top_k * 4), weight = gpu_array(routes * top_k * 4),
              origin = gpu_array(routes * 4);
  sluice_device_token_copy_run_t* runs = calloc((size_t)num_runs, sizeof *runs);
  int32_t *index = route_index.host, *tokens = token.host;
  for (int64_t i = 0; i < routes; ++i) {
    tokens[i] = (int32_t)(1000 + i);
    index[i] = (int32_t)(i % rows) * top_k + (int32_t)(i * 5 % top_k); /* a token copy for each route of a run */
    if (spoilt && i % 7 == 0) index[i] = i % 2 == 0 ? -1 - (int32_t)i : rows * top_k + (int32_t)i;
  }
  for (int32_t i = 0; i < num_runs; ++i) {
    int is_own = i % 3 == 1;
    runs[i] = (sluice_device_token_copy_run_t){
        rows, i * rows, rows, i * rows, 3 * i, i * rows, is_own ? i * rows : 7 * i, is_own ? -1 : 11 * i};
  }
  gpu_send(&route_index), gpu_send(&token);
  const sluice_device_arrivals_t arrivals = {runs,        num_runs,       top_k,        routes,      route_index.there,
                                             token.there, position.there, weight.there, origin.there};
  if (gpu_rig.device->memory->routing->place_token_copies(gpu_rig.device, NULL, &arrivals) != SLUICE_OK)
    problem = last_message();
  gpu_fetch(&position), gpu_fetch(&weight), gpu_fetch(&origin);
  for (int64_t i = 0; i < routes; ++i) {
    int64_t run = i / rows, inside = i % rows;
    int32_t k = (int32_t)(i * 5 % top_k), is_own = run % 3 == 1, is_bad = spoilt && i % 7 == 0;
    int32_t from = is_own ? tokens[i] : (int32_t)(7 * run + inside);
    if (((int32_t*)origin.back)[i] != (is_bad ? -1 : from)) problem = "an origin";
    for (int32_t j = 0; j < top_k; ++j) {
      int is_there = j == k && !is_bad;
      int32_t at = is_own ? from * top_k + k : (int32_t)(11 * run + inside);
      if (((int32_t*)position.back)[i * top_k + j] != (is_there ? (int32_t)(3 * run + inside) : -1)) problem = "a row";
      if (((int32_t*)weight.back)[i * top_k + j] != (is_there ? at : -1)) problem = "the place of a weight";
    }
  }
  free(runs);
  gpu_drop(&route_index), gpu_drop(&token), gpu_drop(&position), gpu_drop(&weight), gpu_drop(&origin);
  return problem;
}

void gpu_report_token_copies(void) {
  gpu_report("token copies T=1 K=1 E=1 W=1", token_copies(1, 1, 1, 1));
  gpu_report("token copies T=1000 K=2 E=8 W=4", token_copies(1000, 2, 8, 4));
  gpu_report("token copies T=5000 K=8 E=256 W=8", token_copies(5000, 8, 256, 8));
  gpu_report("token copies that arrive, 3 runs", places(3, 4, 50, 0));
  gpu_report("token copies that arrive, 500 runs", places(500, 8, 5, 0)); /* of several launches */
  gpu_report("token copies that arrive, route indices outside", places(300, 2, 3, 1));
}
