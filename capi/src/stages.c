// SPDX-License-Identifier: Apache-2.0
/* The public call of the planner over layers: reads the problem, then calls backend/planner/stages. */
#include "sluice/stages.h"

#include "backend/base/alloc.h"
#include "backend/base/structs.h"
#include "backend/planner/stages/plan_stages.h"
#include "capi/src/stage_layers.h"

enum { MOST_LAYERS = 65536 }; /* as in backend/planner/stages */

/* ---- structs ---- */

SLUICE_DEFINE_INIT(sluice_planner_layer, .may_recompute = 1, .may_offload = 1)
SLUICE_DEFINE_INIT(sluice_planner_problem, .num_stages = 1, .num_micro_batches = 1)
SLUICE_DEFINE_INIT(sluice_planner_result, 0)

static sluice_status_t read_problem(const sluice_planner_problem_t* given, sluice_planner_problem_t* p) {
  SLUICE_READ_INTO(sluice_planner_problem, p, given, sizeof *p);
  SLUICE_TRY(SLUICE_REQUIRE(p->reserved == 0, "problem: reserved is %d; set it to 0", p->reserved));
  return SLUICE_REQUIRE(p->num_layers >= 1 && p->num_layers <= MOST_LAYERS && p->layers != NULL,
                        "problem: num_layers is %d with layers %s; it has to be in [1, %d], with layers", p->num_layers,
                        p->layers == NULL ? "NULL" : "set", MOST_LAYERS);
}

static sluice_status_t read_result(const sluice_planner_result_t* given, sluice_planner_result_t* r) {
  SLUICE_READ_INTO(sluice_planner_result, r, given, sizeof *r);
  return SLUICE_REQUIRE(r->choices != NULL && r->stages != NULL,
                        "result: %s is NULL; give room for as many as there are %s",
                        r->choices == NULL ? "choices" : "stages", r->choices == NULL ? "layers" : "stages");
}

/* ---- the result ---- */

/* Returns what a layer alone would use on such ranks. */
static uint64_t share_of(const sluice_stages_option_t* option, int32_t in_flight) {
  return option->resident_bytes + option->arena_bytes + (uint64_t)in_flight * option->held_bytes;
}

static sluice_planner_candidate_t moe_choice(const sluice_moe_options_t* moe, const sluice_stages_choice_t* choice,
                                             int32_t in_flight) {
  const sluice_stages_option_t *chosen = &moe->list[choice->option], *fastest = &moe->list[choice->fastest];
  const double seconds = chosen->forward_seconds + chosen->backward_seconds;
  return (sluice_planner_candidate_t){
      .choice = moe->choices[choice->option],
      .verdict = SLUICE_PLANNER_CHOSEN,
      .kept_chunks = moe->choices[choice->option].num_chunks,
      .forward_seconds = chosen->forward_seconds,
      .backward_seconds = chosen->backward_seconds,
      .slower_by = seconds / (fastest->forward_seconds + fastest->backward_seconds) - 1,
      .total_bytes = share_of(chosen, in_flight),
      .bytes_over = choice->reason_bytes,
  };
}

static void fill_choices(const sluice_stage_layers_t* layers, sluice_planner_result_t* r) {
  static const sluice_planner_candidate_t none;
  for (int32_t i = 0; i < layers->count; ++i) {
    sluice_stages_choice_t* choice = &r->choices[i];
    const sluice_moe_options_t* moe = layers->of[i].moe;
    if (r->moe != NULL) r->moe[i] = moe == NULL ? none : moe_choice(moe, choice, r->stages[choice->stage].in_flight);
    choice->option = sluice_stage_layer_option(layers, i, choice->option);
    choice->fastest = sluice_stage_layer_option(layers, i, choice->fastest);
  }
}

static void fill_result(const sluice_stages_problem_t* problem, sluice_stage_layers_t* layers,
                        const sluice_stages_plan_t* plan, sluice_planner_result_t* r) {
  const sluice_stages_names_t names = {sluice_stage_layers_name, layers};
  sluice_text_t text = sluice_text(r->text, r->text_room);
  sluice_stages_explain(problem, plan, &names, &text);
  r->text_bytes = text.used + 1;
  r->slowest_seconds = plan->slowest_seconds, r->step_seconds = plan->step_seconds;
  r->smallest_budget_bytes = plan->smallest_budget_bytes, r->short_bytes = plan->short_bytes;
  r->slowest_stage = plan->slowest_stage, r->blocking_stage = plan->blocking_stage;
  r->is_optimal = plan->is_optimal, r->num_rounds = plan->num_rounds;
  fill_choices(layers, r); /* after the text, which uses the solver's numbers */
}

/* ---- planning ---- */

static sluice_stages_problem_t problem_of(const sluice_planner_problem_t* p, const sluice_stages_layer_t* layers) {
  return (sluice_stages_problem_t){
      .layers = layers,
      .edges = p->edges,
      .links = p->links,
      .budget_bytes = p->budget_bytes,
      .in_flight = p->in_flight,
      .base_bytes = p->base_bytes,
      .copy_bytes_per_second = p->copy_bytes_per_second,
      .num_layers = p->num_layers,
      .num_edges = p->num_edges,
      .num_stages = p->num_stages,
      .num_micro_batches = p->num_micro_batches,
      .schedule = p->schedule,
      .in_flight_limit = p->in_flight_limit,
      .weight_versions = p->weight_versions,
      .copies_share_links = p->copies_share_links,
      .method = p->method,
  };
}

/* Converts the caller's numbers of options to the solver's. */
static sluice_status_t read_given(const sluice_stage_layers_t* layers, sluice_stages_choice_t* choices) {
  for (int32_t i = 0; i < layers->count; ++i) {
    const int32_t count = layers->list[i].num_options, option = choices[i].option;
    SLUICE_TRY(SLUICE_REQUIRE(option == -1 || sluice_stage_layer_place(layers, i, option) < count,
                              "layer %d: option is %d, which is not one of the layer's %d options", i, option, count));
  }
  for (int32_t i = 0; i < layers->count; ++i) {
    if (choices[i].option >= 0) choices[i].option = sluice_stage_layer_place(layers, i, choices[i].option);
  }
  return SLUICE_OK;
}

/* Restores the caller's input after a refused call. */
static void give_back(const sluice_stage_layers_t* layers, sluice_stages_choice_t* choices) {
  for (int32_t i = 0; i < layers->count; ++i) {
    if (choices[i].option >= 0) choices[i].option = sluice_stage_layer_option(layers, i, choices[i].option);
  }
}

typedef sluice_status_t (*plan_fn)(const sluice_stages_problem_t* problem, sluice_allocator_t* allocator,
                                   sluice_stages_plan_t* plan);

static sluice_status_t answer(const sluice_planner_problem_t* problem, plan_fn fill, int is_given,
                              sluice_planner_result_t* inout_result) {
  sluice_planner_problem_t p;
  sluice_planner_result_t r;
  SLUICE_TRY(read_problem(problem, &p));
  SLUICE_TRY(read_result(inout_result, &r));
  sluice_stage_layers_t layers;
  SLUICE_TRY(sluice_stage_layers_make(&p, &layers));
  const sluice_stages_problem_t checked = problem_of(&p, layers.list);
  sluice_stages_plan_t plan = {.choices = r.choices, .stages = r.stages};
  const sluice_status_t refused = is_given ? read_given(&layers, r.choices) : SLUICE_OK;
  const sluice_status_t status = refused != SLUICE_OK ? refused : fill(&checked, sluice_process_allocator(), &plan);
  if (status == SLUICE_OK || status == SLUICE_E_OVER_BUDGET) {
    fill_result(&checked, &layers, &plan, &r);
    sluice_struct_give(inout_result, &r, sizeof r);
  } else if (is_given && refused == SLUICE_OK) {
    give_back(&layers, r.choices);
  }
  sluice_stage_layers_deinit(&layers);
  return status;
}

sluice_status_t sluice_planner_stages(const sluice_planner_problem_t* problem, sluice_planner_result_t* inout_result) {
  return answer(problem, sluice_stages_plan, 0, inout_result);
}

sluice_status_t sluice_planner_price_stages(const sluice_planner_problem_t* problem,
                                            sluice_planner_result_t* inout_result) {
  return answer(problem, sluice_stages_price, 1, inout_result);
}
