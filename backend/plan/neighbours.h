// SPDX-License-Identifier: Apache-2.0
/* Layers of several shapes under one budget: each layer's plan leaves the others their room.
 *
 * What a pass needs for its time (slots, routing, schedules, GEMMs) lies in memory that all layers of a context share,
 * as large as the largest plan wants it; what outstanding steps hold is bounded by the plan whose steps are largest. A
 * plan counts both beside its own. Of a layer that has no plan yet, or one for smaller batches alone, it counts the
 * leanest, so that one stands when its turn comes.
 *
 * Alike on all ranks, as the layers of a context are: a shape stays for as long as the context.
 */
#ifndef SLUICE_BACKEND_PLAN_NEIGHBOURS_H_
#define SLUICE_BACKEND_PLAN_NEIGHBOURS_H_

#include "backend/plan/plan.h"

typedef struct sluice_neighbour_s {
  uint64_t kind; /* the same for layers that one plan fits; who calls finds it */
  sluice_shape_t shape;
  int64_t max_tokens;          /* that its plans are for; 0: it has none */
  sluice_plan_bytes_t planned; /* the most of these plans: slots, routing, schedules, gemms, step */
} sluice_neighbour_t;

typedef struct sluice_neighbours_s {
  sluice_neighbour_t* items; /* of the process's allocator: no budget counts them */
  int32_t count, capacity;
} sluice_neighbours_t;

void sluice_neighbours_deinit(sluice_neighbours_t* neighbours);

/* A layer is made. Errors: NO_MEMORY. */
sluice_status_t sluice_neighbours_add(sluice_neighbours_t* neighbours, uint64_t kind, const sluice_shape_t* shape);

/* Plans of a layer of this kind stand, for batches of as many tokens as their inputs say or, beside those, for smaller
 * ones. A kind that was not added is none. */
void sluice_neighbours_note(sluice_neighbours_t* neighbours, uint64_t kind, const sluice_shape_t* shape,
                            const sluice_plan_set_t* plans);

/* What the layers of kinds other than this take, or take at least, in batches of inputs->max_tokens: for the problem's
 * `beside`, of which all but the shape is theirs too. All zero without a budget. Errors: NO_MEMORY. */
sluice_status_t sluice_neighbours_bytes(const sluice_neighbours_t* neighbours, uint64_t kind,
                                        const sluice_plan_problem_t* problem, const sluice_plan_inputs_t* inputs,
                                        sluice_plan_bytes_t* out_bytes);

#endif /* SLUICE_BACKEND_PLAN_NEIGHBOURS_H_ */
