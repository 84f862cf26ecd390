// SPDX-License-Identifier: Apache-2.0
/* Compares the order of routes and counts by block with plain loops. */
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

static void set_id(ids_t* ids, int64_t at, int32_t id, int kinds) {
  ids->id[at] = id;
  if (kinds & IDS_64) ((int64_t*)ids->array.host)[at] = id;
  if (!(kinds & IDS_64)) HOST(ids->array)[at] = id;
  gpu_send(&ids->array);
}

/* The arrays of one routing, and its arguments. */
typedef struct routing_s {
  gpu_array_t counts, offsets, slots, token_of, route_of, position, first_bad, scratch, drops;
  sluice_route_args_t args;
} routing_t;

/* capacity 0: none. */
static routing_t open_routing(const ids_t* ids, int64_t routes, int64_t experts, int32_t capacity, int kinds) {
  const int64_t rows = capacity > 0 ? experts * capacity : routes;
  routing_t r = {.counts = gpu_array(experts * 4),
                 .offsets = gpu_array((experts + 1) * 4),
                 .slots = gpu_array(experts * 4),
                 .token_of = gpu_array(rows * 4),
                 .route_of = gpu_array(rows * 4),
                 .position = gpu_array(routes * 4),
                 .first_bad = gpu_array(4),
                 .scratch = gpu_array((int64_t)sluice_cuda_route_scratch_bytes(routes, experts)),
                 .drops = gpu_zeros(SLUICE_NUM_DROP_COUNTERS * 8)};
  for (int64_t e = 0; e < experts; ++e) HOST(r.slots)[e] = (int32_t)(kinds & PERMUTED ? (e * 7 + 3) % experts : e);
  memset(r.token_of.host, 0xff, (size_t)r.token_of.bytes), memset(r.route_of.host, 0xff, (size_t)r.route_of.bytes);
  gpu_send(&r.slots), gpu_send(&r.token_of), gpu_send(&r.route_of);
  r.args = (sluice_route_args_t){.ids = ids->array.there,
                                 .slot_of = kinds & PERMUTED ? r.slots.there : NULL,
                                 .tile_counts = r.scratch.there,
                                 .counts = r.counts.there,
                                 .offsets = r.offsets.there,
                                 .token_of = r.token_of.there,
                                 .route_of = r.route_of.there,
                                 .first_bad = r.first_bad.there,
                                 .position = r.position.there,
                                 .num_routes = routes,
                                 .top_k = ids->top_k,
                                 .num_experts = experts,
                                 .ids_t = ids->stride_t,
                                 .ids_k = ids->stride_k,
                                 .ids_64 = kinds & IDS_64,
                                 .capacity = capacity,
                                 .drop_counters = capacity > 0 ? r.drops.there : NULL,
                                 .begins = capacity > 0};
  return r;
}

static void run_routing(routing_t* r) {
  gpu_enter();
  sluice_cuda_route(NULL, &r->args);
  gpu_leave();
  gpu_fetch(&r->counts), gpu_fetch(&r->offsets), gpu_fetch(&r->token_of), gpu_fetch(&r->route_of);
  gpu_fetch(&r->position), gpu_fetch(&r->first_bad), gpu_fetch(&r->drops);
}

static void close_routing(routing_t* r, ids_t* ids) {
  drop_ids(ids);
  gpu_drop(&r->counts), gpu_drop(&r->offsets), gpu_drop(&r->slots), gpu_drop(&r->token_of), gpu_drop(&r->route_of);
  gpu_drop(&r->position), gpu_drop(&r->first_bad), gpu_drop(&r->scratch), gpu_drop(&r->drops);
}

/* Ordered as by a stable sort. Invalid ids are dropped, nothing is written outside the arrays (the address sanitizer
 * checks that on fakes), and the first one is found in any tile and lane. bad_at: its place, with another one after it;
 * -1: all ids are valid. */
static const char* route(int64_t tokens, int64_t top_k, int64_t experts, int kinds, int64_t bad_at, int32_t bad) {
  const int64_t routes = tokens * top_k, first_token = 1000;
  const char* problem = NULL;
  int32_t row = 0;
  ids_t ids = draw_ids(tokens, top_k, experts, kinds);
  if (bad_at >= 0) set_id(&ids, bad_at, bad, kinds);
  if (bad_at >= 0 && bad_at + 700 < routes) set_id(&ids, bad_at + 700, 99, kinds);
  routing_t r = open_routing(&ids, routes, experts, 0, kinds);
  r.args.first_token = first_token;
  run_routing(&r);
  for (int64_t slot = 0; slot < experts; ++slot) {
    if (BACK(r.offsets)[slot] != row) problem = "an offset";
    for (int64_t i = 0; i < routes; ++i) {
      const int32_t id = id_of(&ids, i);
      if (id < 0 || id >= experts || HOST(r.slots)[id] != slot) continue;
      if (BACK(r.position)[i] != row || BACK(r.token_of)[row] != first_token + i / top_k) problem = "a row";
      if (BACK(r.route_of)[row] != first_token * top_k + i) problem = "a route"; /* they count from first_token too */
      ++row;
    }
    if (BACK(r.counts)[slot] != row - BACK(r.offsets)[slot]) problem = "a count";
  }
  if (BACK(r.offsets)[experts] != row) problem = "the number of rows";
  if (BACK(r.first_bad)[0] != (bad_at < 0 ? INT32_MAX : first_token * top_k + bad_at)) problem = "the first bad id";
  for (int64_t i = 0; i < routes; ++i) {
    const int32_t id = id_of(&ids, i);
    if ((id < 0 || id >= experts) && BACK(r.position)[i] != -1) problem = "the position of a dropped route";
  }
  close_routing(&r, &ids);
  return problem;
}

const char* gpu_route(int64_t tokens, int64_t top_k, int64_t experts) {
  return route(tokens, top_k, experts, 0, -1, 0);
}

/* Slots of a fixed number of rows: their first routes take them in order, the rest is dropped and counted. */
static const char* route_under(int32_t capacity) {
  enum { TOKENS = 700, TOP_K = 3, EXPERTS = 33, ROUTES = TOKENS * TOP_K };
  const char* problem = NULL;
  int64_t dropped = 0, kept = 0, most = 0, next[EXPERTS] = {0};
  ids_t ids = draw_ids(TOKENS, TOP_K, EXPERTS, 0);
  routing_t under = open_routing(&ids, ROUTES, EXPERTS, capacity, 0);
  const int64_t* told = under.drops.back;
  run_routing(&under);
  for (int32_t r = 0; r < ROUTES; ++r) {
    const int32_t id = ids.id[r];
    int64_t row = -1;
    if (id >= 0) {
      const int64_t inside = next[id]++, key = (next[id] << 32) + id;
      if (inside < capacity) row = (int64_t)id * capacity + inside;
      dropped += inside >= capacity, ++kept;
      if (key > most) most = key;
    }
    if (BACK(under.position)[r] != row) problem = "a position";
    if (row >= 0 && (BACK(under.token_of)[row] != r / TOP_K || BACK(under.route_of)[row] != r)) problem = "a row";
  }
  for (int32_t e = 0; e < EXPERTS; ++e) {
    if (BACK(under.counts)[e] != next[e]) problem = "a count";
    for (int64_t i = next[e]; i < capacity; ++i) {
      if (BACK(under.route_of)[e * capacity + i] != -1) problem = "a place that is left over";
    }
  }
  if (told[SLUICE_DROP_COUNTER_FORWARDS] != 1 || told[SLUICE_DROP_COUNTER_ROUTES] != kept ||
      told[SLUICE_DROP_COUNTER_DROPPED] != dropped || told[SLUICE_DROP_COUNTER_MOST] != most ||
      told[SLUICE_DROP_COUNTER_BAD] != 0) {
    problem = "a counter";
  }
  set_id(&ids, 5, EXPERTS, 0);
  under.args.begins = 0; /* a later chunk */
  run_routing(&under);
  if (told[SLUICE_DROP_COUNTER_FORWARDS] != 1 || told[SLUICE_DROP_COUNTER_BAD] != 6 ||
      told[SLUICE_DROP_COUNTER_ROUTES] < 2 * kept - 1) {
    problem = "a counter after a later chunk";
  }
  close_routing(&under, &ids);
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
      report("route", shapes[s], kinds, route(shapes[s][0], shapes[s][1], shapes[s][2], kinds, -1, 0));
    }
  }
  for (int32_t capacity = 1; capacity <= 80; capacity += 13) {
    char name[64];
    (void)snprintf(name, sizeof name, "route under a capacity of %d", capacity);
    gpu_report(name, route_under(capacity));
  }
  static const int64_t bad[] = {0, 31, 255, 256, 1024, 33333, 39999};
  for (size_t b = 0; b < sizeof bad / sizeof bad[0]; ++b) {
    char name[64];
    (void)snprintf(name, sizeof name, "route, id %lld is bad", (long long)bad[b]);
    gpu_report(name, route(20000, 2, 5, 0, bad[b], b % 2 ? 5 : -2));
  }
  gpu_report("route, an id of four is bad", route(2, 2, 3, 0, 0, 7));
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
}
