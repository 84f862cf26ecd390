// SPDX-License-Identifier: Apache-2.0
#include "backend/plan/neighbours.h"

#include <string.h>

#include "backend/base/alloc.h"
#include "backend/plan/plan_search.h"

void sluice_neighbours_deinit(sluice_neighbours_t* neighbours) {
  sluice_free(sluice_process_allocator(), neighbours->items,
              (uint64_t)neighbours->capacity * sizeof *neighbours->items);
  memset(neighbours, 0, sizeof *neighbours);
}

static sluice_neighbour_t* find(const sluice_neighbours_t* neighbours, uint64_t kind) {
  for (int32_t i = 0; i < neighbours->count; ++i) {
    if (neighbours->items[i].kind == kind) return &neighbours->items[i];
  }
  return NULL;
}

static sluice_status_t grow(sluice_neighbours_t* neighbours) {
  const int32_t capacity = neighbours->capacity == 0 ? 4 : 2 * neighbours->capacity;
  sluice_neighbour_t* items =
      sluice_alloc_zeroed(sluice_process_allocator(), (uint64_t)capacity * sizeof *items, "shapes of layers");
  if (items == NULL) return sluice_alloc_status();
  const sluice_neighbours_t before = *neighbours;
  if (before.count > 0) memcpy(items, before.items, (size_t)before.count * sizeof *items);
  sluice_neighbours_deinit(neighbours);
  *neighbours = (sluice_neighbours_t){items, before.count, capacity};
  return SLUICE_OK;
}

sluice_status_t sluice_neighbours_add(sluice_neighbours_t* neighbours, uint64_t kind, const sluice_shape_t* shape) {
  if (find(neighbours, kind) != NULL) return SLUICE_OK;
  if (neighbours->count == neighbours->capacity) SLUICE_TRY(grow(neighbours));
  neighbours->items[neighbours->count++] = (sluice_neighbour_t){.kind = kind, .shape = *shape};
  return SLUICE_OK;
}

/* Takes the maximum. Excludes base, headers and total, which are the same for all or follow from the rest, and
 * deferred, which is not shared between layers. */
static void take_most(sluice_plan_bytes_t* most, const sluice_plan_bytes_t* bytes) {
  const uint64_t step = sluice_max_u64(most->step, bytes->step);
  *most = sluice_plan_bytes_shared(most, bytes);
  memset(most->deferred, 0, sizeof most->deferred);
  most->step = step;
}

void sluice_neighbours_note(sluice_neighbours_t* neighbours, uint64_t kind, const sluice_shape_t* shape,
                            const sluice_plan_set_t* plans) {
  sluice_neighbour_t* neighbour = find(neighbours, kind);
  if (neighbour == NULL || plans->count == 0) return;
  neighbour->shape = *shape; /* a placement may have changed the number of experts of ranks */
  const int64_t max_tokens = plans->plans[0].inputs.max_tokens;
  if (max_tokens > neighbour->max_tokens) {
    neighbour->max_tokens = max_tokens;
    memset(&neighbour->planned, 0, sizeof neighbour->planned); /* drops plans for smaller batches */
  }
  for (int32_t i = 0; i < plans->count; ++i) take_most(&neighbour->planned, &plans->plans[i].bytes);
}

/* Adds what the leanest plan of the layer would need. If there is none, the layer reports that itself when it runs. */
static sluice_status_t add_leanest(const sluice_neighbour_t* neighbour, const sluice_plan_problem_t* of_another,
                                   const sluice_plan_inputs_t* inputs, sluice_plan_bytes_t* most) {
  sluice_plan_problem_t problem = *of_another;
  problem.shape = neighbour->shape;
  sluice_shape_take_deduplication(&problem.shape, sluice_shape_deduplication(&problem.shape));
  problem.price = NULL, problem.is_pinned = NULL, problem.user = NULL, problem.room = NULL, problem.beside = NULL;
  sluice_plan_inputs_t lean = *inputs;
  sluice_plan_inputs_take_shape(&lean, &problem.shape);
  lean.budget = 1; /* nothing to spare, so that no candidate keeps more rows than necessary */
  sluice_plan_search_t found;
  SLUICE_TRY(sluice_plan_search(&problem, &lean, NULL, NULL, NULL, &found));
  if (found.num_seen > 0) take_most(most, &found.leanest.bytes);
  return SLUICE_OK;
}

sluice_status_t sluice_neighbours_bytes(const sluice_neighbours_t* neighbours, uint64_t kind,
                                        const sluice_plan_problem_t* problem, const sluice_plan_inputs_t* inputs,
                                        sluice_plan_bytes_t* out_bytes) {
  memset(out_bytes, 0, sizeof *out_bytes);
  if (inputs->budget == 0) return SLUICE_OK;
  for (int32_t i = 0; i < neighbours->count; ++i) {
    const sluice_neighbour_t* neighbour = &neighbours->items[i];
    if (neighbour->kind == kind) continue;
    if (neighbour->max_tokens >= inputs->max_tokens) {
      take_most(out_bytes, &neighbour->planned);
    } else {
      SLUICE_TRY(add_leanest(neighbour, problem, inputs, out_bytes));
    }
  }
  return SLUICE_OK;
}
