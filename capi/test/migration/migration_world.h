// SPDX-License-Identifier: Apache-2.0
/* A toy host with experts that move. Each rank has slots with all state of a real expert; updates depend on all of it.
 * */
#pragma once

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

/* Gives each rank its initial experts: 0, 1, ... in order of ranks. */
void toy_init(toy_rank_t* toy, int32_t rank, int32_t world);
/* Computes the gradients of step `step` for the local experts. */
void toy_backward(toy_rank_t* toy, int32_t step);
void toy_update(toy_rank_t* toy);
/* Chooses swaps of two experts by the number of the move; all ranks choose the same. */
void toy_plan(const toy_rank_t* toy, uint32_t seed, toy_placement_t* out_next);
/* Lists all items that leave or arrive here, with TOY_NUM_PARTS + 1 spans each. Returns the number of items. */
int32_t toy_items(toy_rank_t* toy, const toy_placement_t* next, sluice_migration_item_t items[2 * TOY_SLOTS],
                  sluice_migration_span_t spans[2 * TOY_SLOTS][TOY_NUM_PARTS + 1]);
/* Returns 1 if every local expert has the bits of an expert that never moved. */
int toy_is_right(const toy_rank_t* toy, int32_t steps);
