// SPDX-License-Identifier: Apache-2.0
/* Explains a plan in sentences: one line per stage with the reason for its first layer, and one per layer with the
 * reason for its option. */
#pragma once

#include "backend/base/text.h"
#include "backend/planner/stages/problem/model.h"

/* Returns "keep", "recompute", "offload", "mixed"; "?" for other numbers. Immutable. */
const char* sluice_stages_kind_name(int32_t kind);

/* Writes the name of an option for a sentence. */
typedef struct sluice_stages_names_s {
  void (*add)(void* user, int32_t layer, int32_t option, sluice_text_t* text);
  void* user;
} sluice_stages_names_t;

/* Writes the explanation. plan: the result of sluice_stages_plan for problem, also after OVER_BUDGET. names NULL:
 * options by kind and number. Any thread; no errors. */
void sluice_stages_explain(const sluice_stages_problem_t* problem, const sluice_stages_plan_t* plan,
                           const sluice_stages_names_t* names, sluice_text_t* text);
