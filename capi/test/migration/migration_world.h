// SPDX-License-Identifier: Apache-2.0
/* A toy host whose experts move: each rank has slots for experts, with all state of a real one, and an update that
 * depends on every part. */
#ifndef SLUICE_CAPI_TEST_MIGRATION_MIGRATION_WORLD_H_
#define SLUICE_CAPI_TEST_MIGRATION_MIGRATION_WORLD_H_

#include "sluice/migration.h"

enum { TOY_MAX_RANKS = 4, TOY_SLOTS = 2, TOY_MAX_EXPERTS = TOY_MAX_RANKS * TOY_SLOTS, TOY_ELEMENTS = 3000 };

enum { TOY_WEIGHT = 0, TOY_MASTER, TOY_FIRST, TOY_SECOND, TOY_GRADIENT, TOY_NUM_PARTS };

/* The contents of one slot. */
typedef struct toy_expert_s {
  float part[TOY_NUM_PARTS][TOY_ELEMENTS];
  int64_t steps;
} toy_expert_t;

typedef struct toy_placement_s {
  int32_t rank[TOY_MAX_EXPERTS], slot[TOY_MAX_EXPERTS];
} toy_placement_t;

typedef struct toy_rank_s {
  int32_t rank, world;
  toy_placement_t placement;
  toy_expert_t slots[TOY_SLOTS];
} toy_rank_t;

/* Experts 0, 1, ... by rank, in their initial state. */
void toy_init(toy_rank_t* toy, int32_t rank, int32_t world);
/* The gradients of step `step` of the local experts. */
void toy_backward(toy_rank_t* toy, int32_t step);
void toy_update(toy_rank_t* toy);
/* The same on all ranks: expert a of one rank and b of another are swapped, chosen by the number of the move. */
void toy_plan(const toy_rank_t* toy, uint32_t seed, toy_placement_t* out_next);
/* Of everything that moves. spans_of: of one expert's slot, TOY_NUM_PARTS + 1 each. Returns the number of items. */
int32_t toy_items(toy_rank_t* toy, const toy_placement_t* next, sluice_migration_item_t items[2 * TOY_SLOTS],
                  sluice_migration_span_t spans[2 * TOY_SLOTS][TOY_NUM_PARTS + 1]);
/* An expert that never moved, after this many steps. */
void toy_reference(int32_t expert, int32_t steps, toy_expert_t* out_expert);
/* 1: every local expert has the bits of one that never moved. */
int toy_is_right(const toy_rank_t* toy, int32_t steps);

#endif /* SLUICE_CAPI_TEST_MIGRATION_MIGRATION_WORLD_H_ */
