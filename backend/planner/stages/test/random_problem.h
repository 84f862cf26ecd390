// SPDX-License-Identifier: Apache-2.0
/* Random problems from a seed. */
#pragma once

#include "backend/planner/stages/model.h"

enum { RANDOM_OPTIONS = 5 };

typedef struct random_s {
  uint64_t state;
} random_t;

double random_between(random_t* random, double low, double high);
int32_t random_index(random_t* random, int32_t count);

/* A problem and its memory. */
typedef struct random_problem_s {
  sluice_stages_problem_t problem;
  sluice_stages_plan_t plan; /* space for one */
  sluice_stages_layer_t* layers;
  sluice_stages_option_t* options; /* [num_layers, RANDOM_OPTIONS] */
  sluice_stages_edge_t* edges;
  sluice_stages_link_t* links;
  uint64_t* budgets;
} random_problem_t;

/* A chain: {keep, recompute, offload} for every layer, and two more options for about a fifth of them, as for a layer
 * with its own plans. Any schedule; equal or different budgets, from too little to enough for keeping everything. Bytes
 * are small numbers, so that ties occur. */
random_problem_t random_chain(random_t* random, int32_t num_layers, int32_t num_stages);
/* A backbone of short nests of 4 to 12 layers, with a few edges over long distances. */
random_problem_t random_nests(random_t* random, int32_t num_layers, int32_t num_stages);
/* Any forward edges, 1 to 3 per layer. */
random_problem_t random_graph(random_t* random, int32_t num_layers, int32_t num_stages);
void random_problem_free(random_problem_t* problem);
