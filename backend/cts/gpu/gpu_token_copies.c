// SPDX-License-Identifier: Apache-2.0
/* Compares token copies with plain loops: their numbers, and the tables of received route indices. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "backend/cts/gpu/gpu_array.h"
#include "backend/cts/gpu/gpu_parts.h"
#include "backend/cts/gpu/gpu_rig.h"
#include "backend/device/device.h"

enum { CHUNKS = 3 };

typedef struct shape_s {
  int64_t tokens;
  int32_t top_k, experts, ranks;
} shape_t;
static const shape_t SHAPES[] = {{0, 2, 4, 2},    {1, 1, 1, 1},  {7, 4, 8, 2},    {33, 6, 5, 5},
                                 {401, 8, 40, 4}, {64, 3, 3, 3}, {1000, 2, 8, 4}, {5000, 8, 256, 8}};

/* Kinds of ids: 64 bits; some out of range, with owners in another order. */
enum { IDS_64 = 1, ODD = 2 };

/* Routes in the order of the device's routing, whose positions are computed here: by rank of the expert, then token. */
typedef struct problem_s {
  const shape_t* s;
  int kinds;
  int64_t first_token[CHUNKS + 1], routes;
  gpu_array_t ids, position;
  int32_t *id, *owner, most;
} problem_t;

static int32_t rank_of(const problem_t* p, int64_t route) {
  return p->id[route] < 0 || p->id[route] >= p->s->experts ? -1 : p->owner[p->id[route]];
}

static problem_t make(const shape_t* s, int kinds) {
  const int odd = (kinds & ODD) != 0;
  problem_t p = {.s = s, .kinds = kinds, .routes = s->tokens * s->top_k};
  p.most = s->top_k < s->ranks ? s->top_k : s->ranks;
  p.ids = gpu_array(p.routes * (kinds & IDS_64 ? 8 : 4)), p.position = gpu_array(p.routes * 4);
  p.id = calloc((size_t)p.routes + 1, sizeof *p.id), p.owner = calloc((size_t)s->experts, sizeof *p.owner);
  if (p.id == NULL || p.owner == NULL) gpu_die("memory");
  for (int32_t e = 0; e < s->experts; ++e) p.owner[e] = odd ? (e * 3 + 1) % s->ranks : e * s->ranks / s->experts;
  for (int64_t r = 0; r < p.routes; ++r) {
    p.id[r] = (int32_t)(gpu_random_bits() % (uint32_t)(s->experts + odd)) - odd; /* some dropped, some twice */
    if (odd && gpu_random_bits() % 40 == 0) p.id[r] = s->experts + 2;
    if (kinds & IDS_64) ((int64_t*)p.ids.host)[r] = p.id[r];
    if (!(kinds & IDS_64)) ((int32_t*)p.ids.host)[r] = p.id[r];
  }
  for (int i = 0; i <= CHUNKS; ++i) p.first_token[i] = s->tokens * i * i / (CHUNKS * CHUNKS);
  for (int i = 0; i < CHUNKS; ++i) {
    int32_t row = 0;
    for (int32_t w = 0; w < s->ranks; ++w) {
      for (int64_t r = p.first_token[i] * s->top_k; r < p.first_token[i + 1] * s->top_k; ++r) {
        if (rank_of(&p, r) == w) ((int32_t*)p.position.host)[r] = row++;
      }
    }
  }
  gpu_send(&p.ids), gpu_send(&p.position);
  return p;
}

static void drop(problem_t* p) {
  gpu_drop(&p->ids), gpu_drop(&p->position);
  free(p->id), free(p->owner);
}

/* Routes of a token to one rank share a row. */
static const char* numbers(const problem_t* p) {
  const shape_t* s = p->s;
  const int64_t w = s->ranks;
  const char* problem = NULL;
  gpu_array_t counts = gpu_array(CHUNKS * (w + 1) * 4), token = gpu_zeros(s->tokens * p->most * 4),
              table = gpu_array(s->tokens * w * 4), route_index = gpu_zeros(p->routes * 4);
  const sluice_routing_kernels_t* kernels = gpu_rig.device->memory->routing;
  gpu_array_t scratch = gpu_array((int64_t)kernels->token_copy_scratch_bytes(p->routes, s->experts, s->ranks));
  const sluice_device_token_copies_t args = {.ids = p->ids.there,
                                             .ids_t = s->top_k,
                                             .ids_k = 1,
                                             .ids_64 = p->kinds & IDS_64,
                                             .num_chunks = CHUNKS,
                                             .first_token = p->first_token,
                                             .rank_of_expert = p->owner,
                                             .top_k = s->top_k,
                                             .num_experts = s->experts,
                                             .num_ranks = s->ranks,
                                             .most = p->most,
                                             .position = p->position.there,
                                             .counts = counts.there,
                                             .token = token.there,
                                             .position_of_token = table.there,
                                             .route_index = route_index.there,
                                             .scratch = scratch.there};
  if (kernels->number_token_copies(gpu_rig.device, NULL, &args) != SLUICE_OK) problem = last_message();
  gpu_fetch(&counts), gpu_fetch(&token), gpu_fetch(&table), gpu_fetch(&route_index);
  for (int i = 0; i < CHUNKS; ++i) {
    const int64_t begin = p->first_token[i], end = p->first_token[i + 1];
    int32_t row = 0;
    for (int32_t r = 0; r < w; ++r) {
      const int32_t first = row;
      for (int64_t t = begin; t < end; ++t) {
        int any = 0;
        for (int32_t k = 0; k < s->top_k; ++k) {
          if (rank_of(p, t * s->top_k + k) != r) continue;
          any = 1;
          const int64_t at = begin * s->top_k + ((int32_t*)p->position.host)[t * s->top_k + k];
          if (((int32_t*)route_index.back)[at] != (row - first) * s->top_k + k) problem = "a route index";
        }
        if (((int32_t*)table.back)[t * w + r] != (any ? row : -1)) problem = "a place";
        if (any && ((int32_t*)token.back)[begin * p->most + row++] != t) problem = "a token";
      }
      if (((int32_t*)counts.back)[i * (w + 1) + r] != row - first) problem = "a count";
    }
  }
  gpu_drop(&counts), gpu_drop(&token), gpu_drop(&table), gpu_drop(&route_index), gpu_drop(&scratch);
  return problem;
}

/* Token copies by block of tokens: those of chunks that consist of whole blocks are their sums. */
static const char* blocks(const problem_t* p, int32_t num_blocks) {
  const shape_t* s = p->s;
  const int64_t w = s->ranks;
  const char* problem = NULL;
  const sluice_routing_kernels_t* kernels = gpu_rig.device->memory->routing;
  gpu_array_t counts = gpu_array(num_blocks * (int64_t)(s->experts + 1) * 4),
              places = gpu_array((int64_t)s->experts * 4), token_copies = gpu_array(num_blocks * (w + 1) * 4),
              scratch = gpu_array((int64_t)kernels->route_scratch_bytes(0, s->experts)),
              copy_scratch = gpu_array((int64_t)kernels->token_copy_scratch_bytes(p->routes, s->experts, s->ranks));
  int32_t* place = places.host;
  for (int32_t e = 0; e < s->experts; ++e) place[e] = s->experts - 1 - e;
  const sluice_device_blocks_t args = {.ids = p->ids.there,
                                       .ids_t = s->top_k,
                                       .ids_k = 1,
                                       .ids_64 = p->kinds & IDS_64,
                                       .num_blocks = num_blocks,
                                       .num_tokens = s->tokens,
                                       .expert_position = place,
                                       .top_k = s->top_k,
                                       .num_experts = s->experts,
                                       .counts = counts.there,
                                       .scratch = scratch.there,
                                       .num_ranks = s->ranks,
                                       .rank_of_expert = p->owner,
                                       .token_copies = token_copies.there,
                                       .token_copy_scratch = copy_scratch.there};
  if (kernels->count_blocks(gpu_rig.device, NULL, &args) != SLUICE_OK) problem = last_message();
  gpu_fetch(&counts), gpu_fetch(&token_copies);
  for (int32_t g = 0; g < num_blocks; ++g) {
    const int64_t begin = s->tokens * g / num_blocks, end = s->tokens * (g + 1) / num_blocks;
    for (int32_t r = 0; r < w; ++r) {
      int32_t want = 0;
      for (int64_t t = begin; t < end; ++t) {
        int any = 0;
        for (int32_t k = 0; k < s->top_k; ++k) any |= rank_of(p, t * s->top_k + k) == r;
        want += any;
      }
      if (((int32_t*)token_copies.back)[g * (w + 1) + r] != want) problem = "a count of token copies";
    }
    for (int32_t e = 0; e < s->experts; ++e) {
      int32_t want = 0;
      for (int64_t r = begin * s->top_k; r < end * s->top_k; ++r) want += p->id[r] == e;
      if (((int32_t*)counts.back)[g * (s->experts + 1) + place[e]] != want) problem = "a count of routes";
    }
  }
  gpu_drop(&counts), gpu_drop(&places), gpu_drop(&token_copies), gpu_drop(&scratch), gpu_drop(&copy_scratch);
  return problem;
}

/* One run for each source and expert, including own routes; if `spoilt`, every seventh index is out of range. */
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
    if (((int32_t*)origin.back)[i] != (is_bad ? -1 : is_own ? -2 - from : from)) problem = "an origin";
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

static void report(const char* what, const problem_t* p, const char* problem) {
  char name[96];
  (void)snprintf(name, sizeof name, "token copies, %s T=%lld K=%d E=%d W=%d, kind %d", what, (long long)p->s->tokens,
                 p->s->top_k, p->s->experts, p->s->ranks, p->kinds);
  gpu_report(name, problem);
}

void gpu_report_token_copies(void) {
  static const struct {
    int64_t num_runs; /* a launch holds 112 */
    int32_t top_k, rows, spoilt;
  } arrived[] = {{0, 2, 1, 0},   {1, 1, 1, 0},   {3, 4, 50, 0}, {112, 2, 3, 0},
                 {113, 3, 2, 0}, {500, 8, 5, 0}, {5, 4, 20, 1}, {300, 2, 3, 1}};
  for (size_t i = 0; i < sizeof SHAPES / sizeof SHAPES[0]; ++i) {
    for (int kinds = 0; kinds < 2 * ODD; ++kinds) {
      problem_t p = make(&SHAPES[i], kinds);
      report("numbers", &p, numbers(&p));
      report("64 blocks", &p, blocks(&p, 64));
      report("3 blocks", &p, blocks(&p, 3));
      drop(&p);
    }
  }
  for (size_t i = 0; i < sizeof arrived / sizeof arrived[0]; ++i) {
    char name[64];
    (void)snprintf(name, sizeof name, "token copies that arrive, %lld runs%s", (long long)arrived[i].num_runs,
                   arrived[i].spoilt ? ", some outside" : "");
    gpu_report(name, places(arrived[i].num_runs, arrived[i].top_k, arrived[i].rows, arrived[i].spoilt));
  }
}
