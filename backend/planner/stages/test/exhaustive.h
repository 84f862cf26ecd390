/* The reference: every partition of a short chain with every choice of options, by the formulas of model.h written out
 * once more. Slow, and too simple to be wrong in the same way as what it judges. */
#ifndef SLUICE_BACKEND_PLANNER_STAGES_TEST_EXHAUSTIVE_H_
#define SLUICE_BACKEND_PLANNER_STAGES_TEST_EXHAUSTIVE_H_

#include "backend/planner/stages/problem/model.h"

enum { EXHAUSTIVE_LAYERS = 12, EXHAUSTIVE_STAGES = 4 };

typedef struct exhaustive_s {
  double slowest;       /* of the best partition; INFINITY: none fits */
  uint64_t short_bytes; /* 0: one fits; else what the best one lacks on its worst stage */
} exhaustive_t;

/* problem: a chain of at most EXHAUSTIVE_LAYERS on at most EXHAUSTIVE_STAGES. */
exhaustive_t exhaustive_search(const sluice_stages_problem_t* problem);

/* What a run of a chain comes to with these options; out_bytes may be NULL. INFINITY: an option that copies where there
 * is no time for it. */
double exhaustive_turn(const sluice_stages_problem_t* problem, int32_t stage, int32_t first, int32_t end,
                       const int32_t* options, uint64_t* out_bytes);

/* What one stage holds at most; UINT64_MAX: anything. */
uint64_t exhaustive_budget(const sluice_stages_problem_t* problem, int32_t stage);

#endif /* SLUICE_BACKEND_PLANNER_STAGES_TEST_EXHAUSTIVE_H_ */
