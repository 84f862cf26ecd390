// SPDX-License-Identifier: Apache-2.0
#include "backend/planner/stages/plan_stages.h"

#include <inttypes.h>

#include "backend/base/math.h"
#include "backend/planner/stages/problem/check_problem.h"
#include "backend/planner/stages/partition/cut_order.h"
#include "backend/planner/stages/partition/heuristic.h"
#include "backend/planner/stages/predict_stages.h"
#include "backend/planner/stages/reasons.h"
#include "backend/planner/stages/partition/refine.h"

/* Nodes of branch and bound for one stage, fewer if there are many runs. Nearly all stages need far fewer; otherwise
 * the answer of greedy stands. */
enum { MOST_NODES = 4000, LEAST_NODES = 200, NODES_BY_LAYERS = 200000 };

static uint64_t most_nodes(const sluice_stages_problem_t* problem) {
  if (problem->method == SLUICE_STAGES_EXACT) return UINT64_MAX;
  return (uint64_t)sluice_min(MOST_NODES, sluice_max(LEAST_NODES, NODES_BY_LAYERS / problem->num_layers));
}

typedef struct planning_s {
  sluice_stages_tables_t tables;
  sluice_partition_t part;
  sluice_partition_t scratch;
  sluice_stages_plan_t* plan;
  int32_t is_given; /* the caller gives the partition */
} planning_t;

static double short_bytes(const planning_t* p) {
  return sluice_partition_score(p->part.judged, p->tables.num_stages).short_bytes;
}

/* ---- methods ---- */

static sluice_status_t plan_chain(planning_t* p) {
  int32_t fits = 0;
  SLUICE_TRY(sluice_cut_order_fits(&p->part, &fits));
  if (!fits) return SLUICE_OK; /* a search for the fastest would take long and find nothing */
  SLUICE_TRY(sluice_cut_order_fastest(&p->part, &fits, &p->plan->is_optimal));
  return sluice_partition_refine(&p->part); /* evens out the stages faster than the slowest */
}

static sluice_status_t search(planning_t* p, int32_t coarsen) {
  SLUICE_TRY(sluice_stages_search(&p->part, &p->scratch, coarsen, &p->plan->num_rounds));
  if (short_bytes(p) == 0) return SLUICE_OK;
  /* Refinement may end where no single move saves bytes. */
  SLUICE_TRY(sluice_cut_order_leanest(&p->part));
  return sluice_partition_refine(&p->part);
}

static sluice_status_t plan_graph(planning_t* p) {
  int32_t exists = 0, is_optimal = 0;
  SLUICE_TRY(search(p, 1));
  SLUICE_TRY(sluice_cut_order_fastest(&p->scratch, &exists, &is_optimal));
  if (!exists) return SLUICE_OK;
  SLUICE_TRY(sluice_partition_refine(&p->scratch));
  const sluice_partition_score_t searched = sluice_partition_score(p->part.judged, p->tables.num_stages);
  const sluice_partition_score_t cut = sluice_partition_score(p->scratch.judged, p->tables.num_stages);
  if (sluice_partition_is_better(&cut, &searched)) sluice_partition_copy(&p->part, &p->scratch);
  return SLUICE_OK;
}

static sluice_status_t plan_by_method(planning_t* p) {
  switch (p->tables.problem->method) {
    case SLUICE_STAGES_HEURISTIC: return search(p, 1);
    case SLUICE_STAGES_UNCOARSENED: return search(p, 0);
    case SLUICE_STAGES_EXACT:
      SLUICE_TRY(SLUICE_REQUIRE(
          p->tables.is_chain,
          "method is SLUICE_STAGES_EXACT, which supports only chains of layers: use SLUICE_STAGES_AUTO"));
      return plan_chain(p);
    default: return p->tables.is_chain ? plan_chain(p) : plan_graph(p);
  }
}

/* ---- the result ---- */

static void choose_settled(planning_t* p) {
  sluice_stages_plan_t* plan = p->plan;
  for (int32_t i = 0; i < p->tables.num_layers; ++i) {
    const int32_t option = p->part.option_of[i];
    plan->choices[i] = (sluice_stages_choice_t){
        .stage = p->part.stage_of[i], .option = option, .kind = p->tables.problem->layers[i].options[option].kind};
  }
  sluice_stages_predict(&p->tables, p->part.stage_of, plan);
}

static sluice_status_t refuse(planning_t* p) {
  sluice_stages_plan_t* plan = p->plan;
  const int32_t blocking = sluice_partition_worst_stage(&p->part);
  const sluice_stages_stage_t* stage = &plan->stages[blocking];
  int32_t first = -1, last = -1;
  for (int32_t i = 0; i < p->tables.num_layers; ++i) {
    if (p->part.stage_of[i] != blocking) continue;
    if (first < 0) first = i;
    last = i;
  }
  plan->blocking_stage = blocking, plan->is_optimal = 0;
  plan->smallest_budget_bytes = stage->bytes, plan->short_bytes = stage->bytes - stage->budget_bytes;
  return SLUICE_FAIL(SLUICE_E_OVER_BUDGET,
                     "%s partition of %d layers over %d stages %s: stage %d, with layers %d to %d and %d micro-batches "
                     "outstanding, takes at least %" PRIu64 " bytes of its budget of %" PRIu64
                     "; raise every budget by %" PRIu64 " bytes, or let fewer micro-batches be outstanding",
                     p->is_given ? "this" : "no", p->tables.num_layers, p->tables.num_stages,
                     p->is_given ? "does not fit" : "that was found fits", blocking, first, last, stage->in_flight,
                     stage->bytes, stage->budget_bytes, plan->short_bytes);
}

static sluice_status_t make_plan(planning_t* p) {
  SLUICE_TRY(plan_by_method(p));
  choose_settled(p);
  sluice_stages_give_reasons(&p->part, p->plan);
  return short_bytes(p) > 0 ? refuse(p) : SLUICE_OK;
}

/* ---- given stages ---- */

static sluice_status_t check_given(const sluice_stages_tables_t* t, const sluice_stages_plan_t* plan) {
  const sluice_stages_choice_t* choices = plan->choices;
  const int is_open = choices[0].option == -1;
  for (int32_t s = 0; s < t->num_stages; ++s) plan->stages[s].num_layers = 0;
  for (int32_t i = 0; i < t->num_layers; ++i) {
    const int32_t stage = choices[i].stage, option = choices[i].option, count = t->problem->layers[i].num_options;
    SLUICE_TRY(SLUICE_REQUIRE(stage >= 0 && stage < t->num_stages, "layer %d is on stage %d, but there are %d stages",
                              i, stage, t->num_stages));
    SLUICE_TRY(SLUICE_REQUIRE(is_open ? option == -1 : option >= 0 && option < count,
                              "layer %d has option %d of %d: give one of each layer, or -1 in all", i, option, count));
    for (int32_t a = t->first_source[i]; a < t->first_source[i + 1]; ++a) {
      const int32_t source = t->sources[a];
      SLUICE_TRY(SLUICE_REQUIRE(choices[source].stage <= stage,
                                "layer %d on stage %d reads layer %d, which is on the later stage %d", i, stage, source,
                                choices[source].stage));
    }
    ++plan->stages[stage].num_layers;
  }
  for (int32_t s = 0; s < t->num_stages; ++s) {
    SLUICE_TRY(
        SLUICE_REQUIRE(plan->stages[s].num_layers > 0, "stage %d has no layer; give each stage at least one", s));
  }
  return SLUICE_OK;
}

static sluice_status_t price_given(planning_t* p) {
  SLUICE_TRY(check_given(&p->tables, p->plan));
  p->is_given = 1;
  const int is_open = p->plan->choices[0].option == -1;
  for (int32_t i = 0; i < p->tables.num_layers; ++i) {
    p->part.stage_of[i] = p->plan->choices[i].stage, p->part.option_of[i] = p->plan->choices[i].option;
  }
  if (is_open) sluice_partition_settle(&p->part);
  choose_settled(p);
  for (int32_t s = 0; s < p->tables.num_stages && !is_open; ++s) {
    const sluice_stages_stage_t* stage = &p->plan->stages[s];
    const uint64_t budget = p->tables.budget[s];
    p->part.judged[s] = (sluice_stage_judgement_t){
        .turn = stage->seconds, .short_bytes = stage->bytes > budget ? (double)(stage->bytes - budget) : 0};
  }
  sluice_stages_give_reasons(&p->part, p->plan);
  return short_bytes(p) > 0 ? refuse(p) : SLUICE_OK;
}

/* ---- calls ---- */

static sluice_status_t with_room(const sluice_stages_problem_t* problem, sluice_allocator_t* allocator,
                                 sluice_status_t (*fill)(planning_t*), sluice_stages_plan_t* plan,
                                 uint64_t* out_steps) {
  SLUICE_TRY(SLUICE_REQUIRE(problem != NULL && plan != NULL && plan->choices != NULL && plan->stages != NULL,
                            "problem, plan, plan->choices or plan->stages is NULL"));
  SLUICE_TRY(sluice_stages_check(problem));
  *plan = (sluice_stages_plan_t){.choices = plan->choices, .stages = plan->stages, .blocking_stage = -1};
  planning_t planning = {.plan = plan};
  SLUICE_TRY(sluice_stages_tables_make(problem, allocator, &planning.tables));
  sluice_status_t status = sluice_partition_make(&planning.tables, most_nodes(problem), &planning.part);
  if (status == SLUICE_OK) status = sluice_partition_make(&planning.tables, most_nodes(problem), &planning.scratch);
  if (status == SLUICE_OK) status = fill(&planning);
  *out_steps = planning.part.local.steps + planning.scratch.local.steps;
  sluice_partition_deinit(&planning.scratch);
  sluice_partition_deinit(&planning.part);
  sluice_stages_tables_deinit(&planning.tables);
  return status;
}

sluice_status_t sluice_stages_plan_counted(const sluice_stages_problem_t* problem, sluice_allocator_t* allocator,
                                           sluice_stages_plan_t* plan, uint64_t* out_steps) {
  return with_room(problem, allocator, make_plan, plan, out_steps);
}

sluice_status_t sluice_stages_plan(const sluice_stages_problem_t* problem, sluice_allocator_t* allocator,
                                   sluice_stages_plan_t* plan) {
  uint64_t steps;
  return with_room(problem, allocator, make_plan, plan, &steps);
}

sluice_status_t sluice_stages_price(const sluice_stages_problem_t* problem, sluice_allocator_t* allocator,
                                    sluice_stages_plan_t* plan) {
  uint64_t steps;
  return with_room(problem, allocator, price_given, plan, &steps);
}
