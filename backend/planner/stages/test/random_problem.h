/* Problems drawn from a seed. */
#ifndef SLUICE_BACKEND_PLANNER_STAGES_TEST_RANDOM_PROBLEM_H_
#define SLUICE_BACKEND_PLANNER_STAGES_TEST_RANDOM_PROBLEM_H_

#include "backend/planner/stages/problem/model.h"

enum { RANDOM_OPTIONS = 5 };

typedef struct random_s {
  uint64_t state;
} random_t;

double random_between(random_t* random, double low, double high);
int32_t random_index(random_t* random, int32_t count);

/* A problem and its memory. */
typedef struct random_problem_s {
  sluice_stages_problem_t problem;
  sluice_stages_plan_t plan; /* room for one */
  sluice_stages_layer_t* layers;
  sluice_stages_option_t* options; /* [num_layers, RANDOM_OPTIONS] */
  sluice_stages_edge_t* edges;
  sluice_stages_link_t* links;
  uint64_t* budgets;
} random_problem_t;

/* A chain: {keep, recompute, offload} of every layer, and of about a fifth of them two options more, as a layer with
 * plans of its own has. Any schedule; budgets of one size or of several, between too little and plenty for keeping all.
 * Bytes are small numbers, so that ties happen. */
random_problem_t random_chain(random_t* random, int32_t num_layers, int32_t num_stages);
/* A backbone of short nests of 4 to 12 layers, with a few edges over long distances. */
random_problem_t random_nests(random_t* random, int32_t num_layers, int32_t num_stages);
/* Any edges that lead forward, as few as 1 and as many as 3 to a layer. */
random_problem_t random_graph(random_t* random, int32_t num_layers, int32_t num_stages);
void random_problem_free(random_problem_t* problem);

#endif /* SLUICE_BACKEND_PLANNER_STAGES_TEST_RANDOM_PROBLEM_H_ */
