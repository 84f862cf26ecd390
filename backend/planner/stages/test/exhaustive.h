// SPDX-License-Identifier: Apache-2.0
/* The reference: every partition of a short chain with every choice of options, with the formulas of model.h
 * implemented a second time. It is slow, and simple enough not to share the solvers' errors. */
#pragma once

#include "backend/planner/stages/model.h"

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
