// SPDX-License-Identifier: Apache-2.0
/* Layers of several shapes under one budget: the plan of each layer leaves space for the others.
 *
 * Memory that is only needed during a pass (slots, routing, schedules, GEMMs) is shared by all layers of a context,
 * with the size that the largest plan needs; the memory of outstanding steps is bounded by the plan with the largest
 * steps. A plan counts both in addition to its own. For a layer that has no plan yet, or only one for smaller batches,
 * it counts the leanest plan, so that the layer can get one when it runs.
 *
 * The same on all ranks, as the layers of a context are. A shape is kept as long as the context. */
#pragma once

#include "backend/plan/plan.h"

typedef struct sluice_neighbour_s {
  uint64_t kind; /* equal for layers that can use the same plan; computed by the caller */
  sluice_shape_t shape;
  int64_t max_tokens;          /* the batch size of its plans; 0: it has none */
  sluice_plan_bytes_t planned; /* the maximum of these plans: slots, routing, schedules, gemms, step */
} sluice_neighbour_t;

typedef struct sluice_neighbours_s {
  sluice_neighbour_t* items; /* allocated by the process's allocator, so no budget counts them */
  int32_t count, capacity;
} sluice_neighbours_t;

void sluice_neighbours_deinit(sluice_neighbours_t* neighbours);

/* Call when a layer is made. Errors: NO_MEMORY. */
sluice_status_t sluice_neighbours_add(sluice_neighbours_t* neighbours, uint64_t kind, const sluice_shape_t* shape);

/* Call when a layer of this kind has plans, for batches with the tokens in their inputs or, in addition to those, for
 * smaller ones. Unknown kinds are ignored. */
void sluice_neighbours_note(sluice_neighbours_t* neighbours, uint64_t kind, const sluice_shape_t* shape,
                            const sluice_plan_set_t* plans);

/* Computes what the layers of other kinds use, or need at least, with batches of inputs->max_tokens, for the problem's
 * `beside`. Everything in `problem` except the shape applies to those layers too. All zero without a budget. Errors:
 * NO_MEMORY. */
sluice_status_t sluice_neighbours_bytes(const sluice_neighbours_t* neighbours, uint64_t kind,
                                        const sluice_plan_problem_t* problem, const sluice_plan_inputs_t* inputs,
                                        sluice_plan_bytes_t* out_bytes);
