/* A plan in sentences: a line for each stage, with why it begins where it does, and one for each layer, with why it has
 * its option. */
#ifndef SLUICE_BACKEND_PLANNER_STAGES_EXPLAIN_H_
#define SLUICE_BACKEND_PLANNER_STAGES_EXPLAIN_H_

#include "backend/base/text.h"
#include "backend/planner/stages/problem/model.h"

/* "keep", "recompute", "offload", "mixed"; "?" of anything else. Immutable. */
const char* sluice_stages_kind_name(int32_t kind);

/* What an option of a layer is called in a sentence. */
typedef struct sluice_stages_names_s {
  void (*add)(void* user, int32_t layer, int32_t option, sluice_text_t* text);
  void* user;
} sluice_stages_names_t;

/* plan: what sluice_stages_plan made of problem, OVER_BUDGET too. names NULL: options by kind and number. Any thread;
 * no errors. */
void sluice_stages_explain(const sluice_stages_problem_t* problem, const sluice_stages_plan_t* plan,
                           const sluice_stages_names_t* names, sluice_text_t* text);

#endif /* SLUICE_BACKEND_PLANNER_STAGES_EXPLAIN_H_ */
