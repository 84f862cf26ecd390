// SPDX-License-Identifier: Apache-2.0
#include "backend/moe/layer/placement.h"

#include <string.h>

/* Slots checked in one walk over the experts of a rank, one bit each, on the stack. */
enum { WINDOW = 4096 };

int32_t sluice_placement_rank(const sluice_expert_placement_t* placement, int32_t num_experts, int32_t world_size,
                              int32_t expert) {
  return placement->expert_rank != NULL ? placement->expert_rank[expert] : expert / (num_experts / world_size);
}

typedef struct table_s {
  const sluice_expert_placement_t* placement;
  int32_t layer_id, num_experts, world_size;
} table_t;

static int32_t rank_of(const table_t* t, int32_t expert) {
  return sluice_placement_rank(t->placement, t->num_experts, t->world_size, expert);
}

static int32_t experts_of(const table_t* t, int32_t rank) {
  int32_t count = 0;
  for (int32_t e = 0; e < t->num_experts; ++e) count += rank_of(t, e) == rank;
  return count;
}

static sluice_status_t refuse_shared_slot(const table_t* t, int32_t rank, int32_t expert) {
  const int32_t* slot = t->placement->expert_slot;
  int32_t first = 0;
  while (rank_of(t, first) != rank || slot[first] != slot[expert]) ++first;
  return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                     "layer %d: expert_slot puts experts %d and %d into slot %d of rank %d: give each its own",
                     t->layer_id, first, expert, slot[expert], rank);
}

/* Checks slots [first, first + WINDOW) of a rank with `count` experts. If as many experts as slots have distinct slots,
 * no slot is empty. */
static sluice_status_t check_window(const table_t* t, int32_t rank, int32_t count, int32_t first) {
  uint64_t taken[WINDOW / 64] = {0};
  const int32_t* slot = t->placement->expert_slot;
  for (int32_t e = 0; e < t->num_experts; ++e) {
    if (rank_of(t, e) != rank) continue;
    SLUICE_TRY(SLUICE_REQUIRE(
        slot[e] >= 0 && slot[e] < count,
        "layer %d: expert_slot[%d] is %d, and rank %d owns %d experts: its slots are 0 to %d, without gaps",
        t->layer_id, e, slot[e], rank, count, count - 1));
    if (slot[e] < first || slot[e] - first >= WINDOW) continue;
    const uint64_t bit = UINT64_C(1) << (slot[e] % 64);
    uint64_t* word = &taken[(slot[e] - first) / 64];
    if (*word & bit) return refuse_shared_slot(t, rank, e);
    *word |= bit;
  }
  return SLUICE_OK;
}

sluice_status_t sluice_placement_check(const sluice_expert_placement_t* placement, int32_t layer_id,
                                       int32_t num_experts, int32_t world_size) {
  const table_t t = {placement, layer_id, num_experts, world_size};
  if (placement->expert_rank == NULL) {
    SLUICE_TRY(SLUICE_REQUIRE(
        num_experts % world_size == 0,
        "layer %d: %d experts do not divide over %d ranks; give expert_rank, the table of owners, or another group "
        "size",
        layer_id, num_experts, world_size));
  }
  for (int32_t e = 0; e < num_experts; ++e) {
    SLUICE_TRY(SLUICE_REQUIRE(rank_of(&t, e) >= 0 && rank_of(&t, e) < world_size,
                              "layer %d: expert_rank[%d] is %d; the group has %d ranks", layer_id, e, rank_of(&t, e),
                              world_size));
  }
  for (int32_t r = 0; r < world_size && placement->expert_slot != NULL; ++r) {
    const int32_t count = experts_of(&t, r);
    for (int32_t first = 0; first < count; first += WINDOW) SLUICE_TRY(check_window(&t, r, count, first));
  }
  return SLUICE_OK;
}

/* Sorts experts by rank (counting sort). */
void sluice_placement_fill(const sluice_expert_placement_t* placement, int32_t num_experts, int32_t world_size,
                           int32_t* out_expert_position, int32_t* out_first_position) {
  const table_t t = {placement, 0, num_experts, world_size};
  int32_t* first = out_first_position;
  memset(first, 0, (size_t)(world_size + 1) * sizeof *first);
  for (int32_t e = 0; e < num_experts; ++e) ++first[rank_of(&t, e) + 1];
  for (int32_t r = 0; r < world_size; ++r) first[r + 1] += first[r];
  if (placement->expert_slot != NULL) {
    for (int32_t e = 0; e < num_experts; ++e)
      out_expert_position[e] = first[rank_of(&t, e)] + placement->expert_slot[e];
    return;
  }
  /* first[r] advances to the first position of rank r + 1; then all entries move back by one. */
  for (int32_t e = 0; e < num_experts; ++e) out_expert_position[e] = first[rank_of(&t, e)]++;
  for (int32_t r = world_size; r > 0; --r) first[r] = first[r - 1];
  first[0] = 0;
}

int sluice_placement_has_numbers(const sluice_expert_placement_t* placement, int32_t num_experts, int32_t world_size,
                                 const int32_t* first_position) {
  const table_t t = {placement, 0, num_experts, world_size};
  for (int32_t r = 0; r < world_size; ++r) {
    if (experts_of(&t, r) != first_position[r + 1] - first_position[r]) return 0;
  }
  return 1;
}

int32_t sluice_rank_of_position(const int32_t* first_position, int32_t world_size, int32_t position) {
  int32_t low = 0, high = world_size - 1;
  while (low < high) {
    const int32_t middle = (low + high + 1) / 2;
    if (first_position[middle] <= position) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}
