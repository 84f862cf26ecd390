// SPDX-License-Identifier: Apache-2.0
/* Random problems from a seed, and the reference that their plans are compared with. */
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

/* The reference: every partition of a short chain with every choice of options, with the formulas of model.h
 * implemented a second time. It is slow, and simple enough not to share the solvers' errors. */
enum { EXHAUSTIVE_LAYERS = 12, EXHAUSTIVE_STAGES = 4 };

typedef struct exhaustive_s {
  double slowest;       /* of the best partition; INFINITY: none fits */
  uint64_t short_bytes; /* 0: one fits; else what the best partition lacks on its worst stage */
} exhaustive_t;

/* problem: a chain of at most EXHAUSTIVE_LAYERS on at most EXHAUSTIVE_STAGES. */
exhaustive_t exhaustive_search(const sluice_stages_problem_t* problem);

/* The turn of a run of a chain with these options; out_bytes may be NULL. INFINITY: an option copies, but the problem
 * has no copy rate. */
double exhaustive_turn(const sluice_stages_problem_t* problem, int32_t stage, int32_t first, int32_t end,
                       const int32_t* options, uint64_t* out_bytes);

/* The budget of one stage; UINT64_MAX: none. */
uint64_t exhaustive_budget(const sluice_stages_problem_t* problem, int32_t stage);
