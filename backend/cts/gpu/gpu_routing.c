// SPDX-License-Identifier: Apache-2.0
/* Compares the order of routes, counts by block and the order of arrivals with plain loops. */
#include "backend/cts/gpu/gpu_routing.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cts/gpu/gpu_array.h"
#include "backend/cts/gpu/gpu_parts.h"
#include "backend/cts/gpu/gpu_rig.h"
#include "backend/device/cuda/cuda_routing.h"

#define HOST(array) ((int32_t*)(array).host)
#define BACK(array) ((int32_t*)(array).back)

/* Kinds of ids: their type, their layout, most of them for one expert, some of no expert. */
enum { IDS_64 = 1, K_MAJOR = 2, PERMUTED = 4, HOT = 8, OUT_OF_RANGE = 16 };

typedef struct ids_s {
  gpu_array_t array;
  int32_t* id; /* of each element of the array */
  int64_t top_k, stride_t, stride_k;
} ids_t;

/* -1 drops a route. */
static ids_t draw_ids(int64_t tokens, int64_t top_k, int64_t experts, int kinds) {
  const int64_t routes = tokens * top_k;
  ids_t ids = {.array = gpu_array(routes * (kinds & IDS_64 ? 8 : 4)), .top_k = top_k};
  ids.id = calloc((size_t)routes + 1, sizeof *ids.id);
  if (ids.id == NULL) gpu_die("memory");
  ids.stride_t = kinds & K_MAJOR ? 1 : top_k, ids.stride_k = kinds & K_MAJOR ? tokens : 1;
  for (int64_t i = 0; i < routes; ++i) {
    ids.id[i] = (int32_t)(gpu_random_bits() % (uint32_t)(experts + 1)) - 1;
    if (kinds & HOT && gpu_random_bits() % 4 != 0) ids.id[i] = (int32_t)experts / 2;
    if (kinds & OUT_OF_RANGE && gpu_random_bits() % 50 == 0) ids.id[i] = (int32_t)experts + 3;
    if (kinds & IDS_64) ((int64_t*)ids.array.host)[i] = ids.id[i];
    if (!(kinds & IDS_64)) HOST(ids.array)[i] = ids.id[i];
  }
  gpu_send(&ids.array);
  return ids;
}

static int32_t id_of(const ids_t* ids, int64_t route) {
  return ids->id[route / ids->top_k * ids->stride_t + route % ids->top_k * ids->stride_k];
}

static void drop_ids(ids_t* ids) {
  gpu_drop(&ids->array);
  free(ids->id);
}

/* Ordered as by a stable sort. */
static const char* route(int64_t tokens, int64_t top_k, int64_t experts, int kinds) {
  const int64_t routes = tokens * top_k, first_token = 1000;
  const char* problem = NULL;
  int32_t row = 0;
  ids_t ids = draw_ids(tokens, top_k, experts, kinds);
  gpu_array_t counts = gpu_array(experts * 4), offsets = gpu_array((experts + 1) * 4), slots = gpu_array(experts * 4),
              token_of = gpu_zeros(routes * 4), route_of = gpu_zeros(routes * 4), position = gpu_array(routes * 4),
              first_bad = gpu_array(4), scratch = gpu_array((int64_t)sluice_cuda_route_scratch_bytes(routes, experts));
  for (int64_t e = 0; e < experts; ++e) HOST(slots)[e] = (int32_t)(kinds & PERMUTED ? (e * 7 + 3) % experts : e);
  gpu_send(&slots);
  const sluice_route_args_t args = {.ids = ids.array.there,
                                    .slot_of = kinds & PERMUTED ? slots.there : NULL,
                                    .tile_counts = scratch.there,
                                    .counts = counts.there,
                                    .offsets = offsets.there,
                                    .token_of = token_of.there,
                                    .route_of = route_of.there,
                                    .first_bad = first_bad.there,
                                    .position = position.there,
                                    .num_routes = routes,
                                    .top_k = top_k,
                                    .num_experts = experts,
                                    .ids_t = ids.stride_t,
                                    .ids_k = ids.stride_k,
                                    .ids_64 = kinds & IDS_64,
                                    .first_token = first_token};
  gpu_enter();
  sluice_cuda_route(NULL, &args);
  gpu_leave();
  gpu_fetch(&counts), gpu_fetch(&offsets), gpu_fetch(&token_of), gpu_fetch(&route_of), gpu_fetch(&position);
  gpu_fetch(&first_bad);
  for (int64_t slot = 0; slot < experts; ++slot) {
    if (BACK(offsets)[slot] != row) problem = "an offset";
    for (int64_t r = 0; r < routes; ++r) {
      const int32_t id = id_of(&ids, r);
      if (id < 0 || HOST(slots)[id] != slot) continue;
      if (BACK(position)[r] != row || BACK(token_of)[row] != first_token + r / top_k) problem = "a row";
      if (BACK(route_of)[row] != first_token * top_k + r) problem = "a route"; /* they count from first_token too */
      ++row;
    }
    if (BACK(counts)[slot] != row - BACK(offsets)[slot]) problem = "a count";
  }
  if (BACK(offsets)[experts] != row) problem = "the number of rows";
  if (BACK(first_bad)[0] != INT32_MAX) problem = "a bad id";
  for (int64_t r = 0; r < routes; ++r) {
    if (id_of(&ids, r) < 0 && BACK(position)[r] != -1) problem = "the position of a dropped route";
  }
  drop_ids(&ids);
  gpu_drop(&counts), gpu_drop(&offsets), gpu_drop(&slots), gpu_drop(&token_of), gpu_drop(&route_of);
  gpu_drop(&position), gpu_drop(&first_bad), gpu_drop(&scratch);
  return problem;
}

const char* gpu_route(int64_t tokens, int64_t top_k, int64_t experts) { return route(tokens, top_k, experts, 0); }

/* Slots of a fixed number of rows: their first routes take them in order, the rest is dropped and counted. */
static const char* route_under(int32_t capacity) {
  enum { TOKENS = 700, TOP_K = 3, EXPERTS = 33, ROUTES = TOKENS * TOP_K };
  const char* problem = NULL;
  int64_t dropped = 0, kept = 0, most = 0, next[EXPERTS] = {0};
  ids_t ids = draw_ids(TOKENS, TOP_K, EXPERTS, 0);
  gpu_array_t counts = gpu_array(EXPERTS * 4), offsets = gpu_array((EXPERTS + 1) * 4), position = gpu_array(ROUTES * 4),
              first_bad = gpu_array(4), token_of = gpu_array((int64_t)EXPERTS * capacity * 4),
              route_of = gpu_array((int64_t)EXPERTS * capacity * 4), drops = gpu_zeros(SLUICE_NUM_DROP_COUNTERS * 8),
              scratch = gpu_array((int64_t)sluice_cuda_route_scratch_bytes(ROUTES, EXPERTS));
  const int64_t* told = drops.back;
  memset(token_of.host, 0xff, (size_t)token_of.bytes), memset(route_of.host, 0xff, (size_t)route_of.bytes);
  gpu_send(&token_of), gpu_send(&route_of);
  sluice_route_args_t args = {.ids = ids.array.there,
                              .tile_counts = scratch.there,
                              .counts = counts.there,
                              .offsets = offsets.there,
                              .token_of = token_of.there,
                              .route_of = route_of.there,
                              .first_bad = first_bad.there,
                              .position = position.there,
                              .num_routes = ROUTES,
                              .top_k = TOP_K,
                              .num_experts = EXPERTS,
                              .ids_t = TOP_K,
                              .ids_k = 1,
                              .capacity = capacity,
                              .drop_counters = drops.there,
                              .begins = 1};
  gpu_enter();
  sluice_cuda_route(NULL, &args);
  gpu_leave();
  gpu_fetch(&counts), gpu_fetch(&position), gpu_fetch(&token_of), gpu_fetch(&route_of), gpu_fetch(&drops);
  for (int32_t r = 0; r < ROUTES; ++r) {
    const int32_t id = ids.id[r];
    int64_t row = -1;
    if (id >= 0) {
      const int64_t inside = next[id]++, key = (next[id] << 32) + id;
      if (inside < capacity) row = (int64_t)id * capacity + inside;
      dropped += inside >= capacity, ++kept;
      if (key > most) most = key;
    }
    if (BACK(position)[r] != row) problem = "a position";
    if (row >= 0 && (BACK(token_of)[row] != r / TOP_K || BACK(route_of)[row] != r)) problem = "a row";
  }
  for (int32_t e = 0; e < EXPERTS; ++e) {
    if (BACK(counts)[e] != next[e]) problem = "a count";
    for (int64_t i = next[e]; i < capacity; ++i) {
      if (BACK(route_of)[e * capacity + i] != -1) problem = "a place that is left over";
    }
  }
  if (told[SLUICE_DROP_COUNTER_FORWARDS] != 1 || told[SLUICE_DROP_COUNTER_ROUTES] != kept ||
      told[SLUICE_DROP_COUNTER_DROPPED] != dropped || told[SLUICE_DROP_COUNTER_MOST] != most ||
      told[SLUICE_DROP_COUNTER_BAD] != 0) {
    problem = "a counter";
  }
  HOST(ids.array)[5] = EXPERTS, args.begins = 0; /* a later chunk */
  gpu_send(&ids.array);
  gpu_enter();
  sluice_cuda_route(NULL, &args);
  gpu_leave();
  gpu_fetch(&drops);
  if (told[SLUICE_DROP_COUNTER_FORWARDS] != 1 || told[SLUICE_DROP_COUNTER_BAD] != 6 ||
      told[SLUICE_DROP_COUNTER_ROUTES] < 2 * kept - 1) {
    problem = "a counter after a later chunk";
  }
  drop_ids(&ids);
  gpu_drop(&counts), gpu_drop(&offsets), gpu_drop(&position), gpu_drop(&first_bad), gpu_drop(&token_of);
  gpu_drop(&route_of), gpu_drop(&drops), gpu_drop(&scratch);
  return problem;
}

/* Invalid ids are dropped, nothing is written outside the arrays (the address sanitizer checks that on fakes), and the
 * first one is found in any tile and lane. */
static const char* route_with_bad_id(int64_t routes, int64_t experts, int64_t at, int32_t bad) {
  const char* problem = NULL;
  gpu_array_t ids = gpu_array(routes * 4), counts = gpu_array(experts * 4), offsets = gpu_array((experts + 1) * 4),
              token_of = gpu_zeros(routes * 4), position = gpu_array(routes * 4), first_bad = gpu_array(4),
              scratch = gpu_array((int64_t)sluice_cuda_route_scratch_bytes(routes, experts));
  for (int64_t r = 0; r < routes; ++r) HOST(ids)[r] = (int32_t)(r % (experts + 1)) - 1;
  HOST(ids)[at] = bad;
  if (at + 700 < routes) HOST(ids)[at + 700] = 99;
  gpu_send(&ids);
  const sluice_route_args_t args = {.ids = ids.there,
                                    .tile_counts = scratch.there,
                                    .counts = counts.there,
                                    .offsets = offsets.there,
                                    .token_of = token_of.there,
                                    .first_bad = first_bad.there,
                                    .position = position.there,
                                    .num_routes = routes,
                                    .top_k = 2,
                                    .num_experts = experts,
                                    .ids_t = 2,
                                    .ids_k = 1,
                                    .first_token = 50};
  gpu_enter();
  sluice_cuda_route(NULL, &args);
  gpu_leave();
  gpu_fetch(&offsets), gpu_fetch(&token_of), gpu_fetch(&position), gpu_fetch(&first_bad);
  int32_t rows = 0;
  for (int64_t r = 0; r < routes; ++r) {
    const int is_kept = HOST(ids)[r] >= 0 && HOST(ids)[r] < experts;
    rows += is_kept;
    if ((BACK(position)[r] >= 0) != is_kept) problem = "a position";
    if (is_kept && BACK(token_of)[BACK(position)[r]] != 50 + r / 2) problem = "a row";
  }
  if (BACK(offsets)[experts] != rows) problem = "the number of rows";
  if (BACK(first_bad)[0] != 100 + at) problem = "the first bad id";
  gpu_drop(&ids), gpu_drop(&counts), gpu_drop(&offsets), gpu_drop(&token_of), gpu_drop(&position);
  gpu_drop(&first_bad), gpu_drop(&scratch);
  return problem;
}

/* Counts by block of tokens and slot, and the first invalid id of each block. */
static const char* blocks(int64_t tokens, int64_t top_k, int64_t experts, int64_t num_blocks, int kinds) {
  const int64_t columns = experts + 1;
  const char* problem = NULL;
  ids_t ids = draw_ids(tokens, top_k, experts, kinds);
  gpu_array_t counts = gpu_array(num_blocks * columns * 4), slots = gpu_array(experts * 4);
  int32_t* want = counts.host;
  for (int64_t e = 0; e < experts; ++e) HOST(slots)[e] = (int32_t)(experts - 1 - e);
  gpu_send(&slots);
  const sluice_block_args_t args = {.ids = ids.array.there,
                                    .slot_of = kinds & PERMUTED ? slots.there : NULL,
                                    .counts = counts.there,
                                    .units = num_blocks,
                                    .num_tokens = tokens,
                                    .top_k = top_k,
                                    .num_experts = experts,
                                    .ids_t = ids.stride_t,
                                    .ids_k = ids.stride_k,
                                    .ids_64 = kinds & IDS_64};
  gpu_enter();
  sluice_cuda_count_blocks(NULL, &args);
  gpu_leave();
  memset(want, 0, (size_t)counts.bytes);
  for (int64_t g = 0; g < num_blocks; ++g) {
    int32_t* bad = &want[g * columns + experts];
    *bad = INT32_MAX;
    for (int64_t r = tokens * g / num_blocks * top_k; r < tokens * (g + 1) / num_blocks * top_k; ++r) {
      const int32_t id = id_of(&ids, r);
      if (id >= 0 && id < experts) ++want[g * columns + (kinds & PERMUTED ? HOST(slots)[id] : id)];
      if (id >= experts && *bad == INT32_MAX) *bad = (int32_t)r;
    }
  }
  gpu_fetch(&counts);
  if (memcmp(counts.back, want, (size_t)counts.bytes) != 0) problem = "a count";
  drop_ids(&ids);
  gpu_drop(&counts), gpu_drop(&slots);
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
    if (BACK(offset)[e] != row) problem = "an offset";
    for (int64_t w = 0; w < ranks; ++w) {
      int32_t received = 0;
      for (int64_t i = 0; i < w * local + e; ++i) received += count[i];
      for (int32_t i = 0; i < count[w * local + e]; ++i) {
        if (BACK(index)[row++] != received + i) problem = "a row";
      }
    }
  }
  if (BACK(offset)[local] != total) problem = "the number of rows";
  gpu_drop(&counts), gpu_drop(&offset), gpu_drop(&index);
  return problem;
}

static void report(const char* what, const int64_t shape[3], int kinds, const char* problem) {
  char name[96];
  (void)snprintf(name, sizeof name, "%s T=%lld K=%lld E=%lld, kind %d", what, (long long)shape[0], (long long)shape[1],
                 (long long)shape[2], kinds);
  gpu_report(name, problem);
}

static void report_routes(void) {
  static const int64_t shapes[][3] = {{0, 2, 8},     {1, 1, 1},     {5, 1, 3},     {33, 2, 7},
                                      {700, 3, 33},  {1000, 2, 8},  {1030, 2, 8},  {1024, 1, 64},
                                      {4097, 1, 64}, {400, 8, 256}, {5000, 8, 256}};
  for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; ++s) {
    for (int kinds = 0; kinds < 2 * HOT; ++kinds) {
      if (kinds & PERMUTED && shapes[s][2] % 7 == 0) continue; /* that is no permutation */
      report("route", shapes[s], kinds, route(shapes[s][0], shapes[s][1], shapes[s][2], kinds));
    }
  }
  for (int32_t capacity = 1; capacity <= 80; capacity += 13) {
    char name[64];
    (void)snprintf(name, sizeof name, "route under a capacity of %d", capacity);
    gpu_report(name, route_under(capacity));
  }
  static const int64_t bad[] = {0, 31, 1023, 1024, 33333, 39999};
  for (size_t b = 0; b < sizeof bad / sizeof bad[0]; ++b) {
    char name[64];
    (void)snprintf(name, sizeof name, "route, id %lld is bad", (long long)bad[b]);
    gpu_report(name, route_with_bad_id(40000, 5, bad[b], b % 2 ? 5 : -2));
  }
  gpu_report("route, an id of four is bad", route_with_bad_id(4, 3, 0, 7));
}

void gpu_part_routing(void) {
  static const int64_t shapes[][4] = {{0, 2, 8, 64},    {1, 1, 1, 64},    {70, 3, 33, 64},
                                      {1030, 2, 8, 64}, {400, 8, 256, 7}, {5000, 8, 256, 64}};
  gpu_report_token_copies();
  for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; ++s) {
    for (int i = 0; i < 8; ++i) {
      const int kinds = (i & 1 ? IDS_64 : 0) | (i & 2 ? PERMUTED | K_MAJOR : 0) | (i & 4 ? OUT_OF_RANGE : 0);
      report("blocks", shapes[s], kinds, blocks(shapes[s][0], shapes[s][1], shapes[s][2], shapes[s][3], kinds));
    }
  }
  report_routes();
  for (int64_t ranks = 1; ranks <= 9; ranks += 2) {
    for (int64_t local = 1; local <= 41; local += 8) {
      char name[64];
      (void)snprintf(name, sizeof name, "arrivals W=%lld E=%lld", (long long)ranks, (long long)local);
      gpu_report(name, arrivals(ranks, local));
    }
  }
  gpu_report("arrivals W=8 E=32", arrivals(8, 32));
  gpu_report_gate();
}
