// SPDX-License-Identifier: Apache-2.0
#include "capi/test/migration/migration_world.h"

#include <math.h>
#include <string.h>

static uint32_t mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ x >> 16;
}

static float draw(uint32_t a, uint32_t b, uint32_t c) {
  return (float)(mix(a * 0x9e3779b9u + mix(b + mix(c))) & 0xffff) / 65536.0f - 0.5f;
}

static void init_expert(int32_t expert, toy_expert_t* out_expert) {
  memset(out_expert, 0, sizeof *out_expert);
  for (int32_t i = 0; i < TOY_ELEMENTS; ++i) {
    out_expert->part[TOY_WEIGHT][i] = out_expert->part[TOY_MASTER][i] = draw((uint32_t)expert, 77, (uint32_t)i);
  }
}

static void differentiate(int32_t expert, int32_t step, toy_expert_t* e) {
  for (int32_t i = 0; i < TOY_ELEMENTS; ++i)
    e->part[TOY_GRADIENT][i] = e->part[TOY_WEIGHT][i] * draw((uint32_t)expert, (uint32_t)step + 1, (uint32_t)i);
}

static void update(toy_expert_t* e) {
  ++e->steps;
  const float rate = 0.01f / (float)e->steps;
  for (int32_t i = 0; i < TOY_ELEMENTS; ++i) {
    const float g = e->part[TOY_GRADIENT][i];
    float* first = &e->part[TOY_FIRST][i];
    float* second = &e->part[TOY_SECOND][i];
    *first = 0.9f * *first + 0.1f * g;
    *second = 0.99f * *second + 0.01f * g * g;
    e->part[TOY_MASTER][i] -= rate * *first / (sqrtf(*second) + 1e-6f);
    e->part[TOY_WEIGHT][i] = rintf(e->part[TOY_MASTER][i] * 4096.0f) / 4096.0f; /* fewer bits than the master */
  }
}

void toy_init(toy_rank_t* toy, int32_t rank, int32_t world) {
  memset(toy, 0, sizeof *toy);
  toy->rank = rank;
  toy->world = world;
  for (int32_t e = 0; e < world * TOY_SLOTS; ++e) {
    toy->placement.rank[e] = e / TOY_SLOTS;
    toy->placement.slot[e] = e % TOY_SLOTS;
    if (e / TOY_SLOTS == rank) init_expert(e, &toy->slots[e % TOY_SLOTS]);
  }
}

void toy_backward(toy_rank_t* toy, int32_t step) {
  for (int32_t e = 0; e < toy->world * TOY_SLOTS; ++e) {
    if (toy->placement.rank[e] == toy->rank) differentiate(e, step, &toy->slots[toy->placement.slot[e]]);
  }
}

void toy_update(toy_rank_t* toy) {
  for (int32_t s = 0; s < TOY_SLOTS; ++s) update(&toy->slots[s]);
}

void toy_plan(const toy_rank_t* toy, uint32_t seed, toy_placement_t* out_next) {
  *out_next = toy->placement;
  const uint32_t experts = (uint32_t)(toy->world * TOY_SLOTS);
  for (uint32_t i = 0; i < 2; ++i) { /* one or two swaps */
    const uint32_t a = mix(seed * 4 + i) % experts, b = mix(seed * 4 + i + 100) % experts;
    if (i == 1 && seed % 3 == 0) break;
    const int32_t rank = out_next->rank[a], slot = out_next->slot[a];
    out_next->rank[a] = out_next->rank[b], out_next->slot[a] = out_next->slot[b];
    out_next->rank[b] = rank, out_next->slot[b] = slot;
  }
  /* An expert may not change its slot without changing its rank. */
  for (uint32_t e = 0; e < experts; ++e) {
    if (out_next->rank[e] != toy->placement.rank[e] || out_next->slot[e] == toy->placement.slot[e]) continue;
    *out_next = toy->placement;
    return;
  }
}

static void list_spans(toy_expert_t* e, sluice_migration_span_t* spans) {
  memset(spans, 0, (TOY_NUM_PARTS + 1) * sizeof *spans);
  for (int32_t p = 0; p < TOY_NUM_PARTS; ++p) {
    spans[p] = (sluice_migration_span_t){e->part[p], sizeof e->part[p],
                                         p == TOY_GRADIENT ? SLUICE_MIGRATION_AT_COMMIT : SLUICE_MIGRATION_STILL, 0};
  }
  spans[TOY_NUM_PARTS] = (sluice_migration_span_t){&e->steps, sizeof e->steps, SLUICE_MIGRATION_STILL, 0};
}

int32_t toy_items(toy_rank_t* toy, const toy_placement_t* next, sluice_migration_item_t items[2 * TOY_SLOTS],
                  sluice_migration_span_t spans[2 * TOY_SLOTS][TOY_NUM_PARTS + 1]) {
  int32_t count = 0;
  for (int32_t e = 0; e < toy->world * TOY_SLOTS; ++e) {
    const int32_t from = toy->placement.rank[e], to = next->rank[e];
    if (from == to || (from != toy->rank && to != toy->rank)) continue;
    const int leaves = from == toy->rank;
    list_spans(&toy->slots[leaves ? toy->placement.slot[e] : next->slot[e]], spans[count]);
    items[count] = (sluice_migration_item_t){
        (uint64_t)e,  leaves ? to : from, leaves ? SLUICE_MIGRATION_LEAVES : SLUICE_MIGRATION_ARRIVES,
        spans[count], TOY_NUM_PARTS + 1,  0};
    ++count;
  }
  return count;
}

int toy_is_right(const toy_rank_t* toy, int32_t steps) {
  static _Thread_local toy_expert_t wanted;
  for (int32_t e = 0; e < toy->world * TOY_SLOTS; ++e) {
    if (toy->placement.rank[e] != toy->rank) continue;
    const toy_expert_t* have = &toy->slots[toy->placement.slot[e]];
    init_expert(e, &wanted);
    for (int32_t s = 0; s < steps; ++s) differentiate(e, s, &wanted), update(&wanted);
    if (memcmp(have, &wanted, sizeof wanted) != 0) return 0;
  }
  return 1;
}
