// SPDX-License-Identifier: Apache-2.0
#include "backend/planner/stages/plan_stages.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "backend/base/math.h"
#include "backend/planner/stages/partition.h"

/* ---- the prediction: the formulas of sluice/stages.h, computed from the choices only ---- */

static void add_layer(const sluice_stages_tables_t* t, int32_t layer, int32_t choice, sluice_stages_stage_t* s,
                      uint64_t* copied) {
  const sluice_stages_layer_t* l = &t->problem->layers[layer];
  const sluice_stages_option_t* option = &l->options[choice];
  const uint64_t k = (uint64_t)s->in_flight;
  const double seconds = option->forward_seconds + option->backward_seconds;
  ++s->num_layers;
  s->compute_seconds += seconds, s->extra_seconds += seconds - t->items[t->first_item[layer]].seconds;
  s->parameter_bytes += l->parameter_bytes, s->state_bytes += l->state_bytes;
  s->resident_bytes += option->resident_bytes, s->held_bytes += k * option->held_bytes;
  s->working_bytes = sluice_max_u64(s->working_bytes, option->working_bytes);
  s->staging_bytes = sluice_max_u64(s->staging_bytes, option->copied_bytes);
  s->arena_bytes = sluice_max_u64(s->arena_bytes, option->arena_bytes);
  *copied += option->copied_bytes;
}

/* The layers after the running one hold nothing of its micro-batch: not yet, or no longer. */
static uint64_t most_at_a_time(const sluice_stages_tables_t* t, const int32_t* stage_of, int32_t stage,
                               const sluice_stages_plan_t* plan) {
  uint64_t held = 0, most = 0;
  for (int32_t i = 0; i < t->num_layers; ++i) {
    if (stage_of[i] != stage) continue;
    const sluice_stages_option_t* option = &t->problem->layers[i].options[plan->choices[i].option];
    held += option->held_bytes;
    most = sluice_max_u64(most, held + option->working_bytes);
  }
  return (uint64_t)(t->in_flight[stage] - 1) * held + most;
}

/* Computes a stage from the options of its layers: all of *s except peak_bytes and the reasons. */
static void predict_stage(const sluice_stages_tables_t* t, const int32_t* stage_of, int32_t stage,
                          const sluice_stages_choice_t* choices, sluice_stages_stage_t* s) {
  const sluice_stages_problem_t* p = t->problem;
  uint64_t copied = 0;
  memset(s, 0, sizeof *s);
  s->in_flight = t->in_flight[stage];
  for (int32_t i = 0; i < t->num_layers; ++i) {
    if (stage_of[i] == stage) add_layer(t, i, choices[i].option, s, &copied);
  }
  const uint64_t in = stage == 0 ? 0 : sluice_stages_boundary_bytes(t, stage_of, stage - 1);
  const uint64_t out = stage == p->num_stages - 1 ? 0 : sluice_stages_boundary_bytes(t, stage_of, stage);
  s->parameter_bytes *= (uint64_t)t->versions[stage];
  s->base_bytes = p->base_bytes, s->message_bytes = sluice_stages_message_bytes(t, stage, in, out);
  s->host_bytes = (uint64_t)s->in_flight * copied;
  s->budget_bytes = t->budget[stage] == UINT64_MAX ? 0 : t->budget[stage];
  s->bytes = s->base_bytes + s->parameter_bytes + s->state_bytes + s->message_bytes + s->resident_bytes +
             s->held_bytes + s->working_bytes + s->staging_bytes + s->arena_bytes;
  s->message_seconds = sluice_stages_message_seconds(p, stage, in, out);
  s->copy_seconds = sluice_stages_copy_seconds(p, copied);
  s->seconds = sluice_stages_turn_seconds(p, s->compute_seconds, s->message_seconds, s->copy_seconds);
}

/* The first micro-batch passes all stages and back; each further one adds a turn of the slowest stage. */
static double step_seconds(const sluice_stages_tables_t* t, const int32_t* stage_of, const sluice_stages_plan_t* plan) {
  const sluice_stages_problem_t* p = t->problem;
  double first = 0;
  for (int32_t s = 0; s < p->num_stages; ++s) {
    first += plan->stages[s].compute_seconds;
    const uint64_t bytes = s + 1 < p->num_stages ? sluice_stages_boundary_bytes(t, stage_of, s) : 0;
    const double link = sluice_stages_link_seconds(p, s, bytes);
    first += link > 0 && p->links[s].full_duplex ? 2 * link : link; /* forward and back, sequentially */
  }
  return first + (p->num_micro_batches - 1) * plan->slowest_seconds;
}

/* Computes from stage and option of plan->choices: all of plan->stages except the reasons, slowest_seconds,
 * slowest_stage and step_seconds. */
static void predict(const sluice_stages_tables_t* t, const int32_t* stage_of, sluice_stages_plan_t* plan) {
  plan->slowest_seconds = 0, plan->slowest_stage = 0;
  for (int32_t stage = 0; stage < t->num_stages; ++stage) {
    sluice_stages_stage_t* s = &plan->stages[stage];
    predict_stage(t, stage_of, stage, plan->choices, s);
    s->peak_bytes = s->bytes - s->held_bytes - s->working_bytes + most_at_a_time(t, stage_of, stage, plan);
    if (s->seconds > plan->slowest_seconds) plan->slowest_seconds = s->seconds, plan->slowest_stage = stage;
  }
  plan->step_seconds = step_seconds(t, stage_of, plan);
}

/* ---- reasons: the cost of the alternatives ---- */

/* Returns the least time from the end of a layer's forward to the start of its backward. */
static double gap_of(const sluice_partition_t* part, int32_t layer) {
  const sluice_stages_tables_t* t = part->tables;
  double all = 0, after = 0;
  for (int32_t i = 0; i < t->num_layers; ++i) {
    if (part->stage_of[i] != part->stage_of[layer]) continue;
    all += t->items[t->first_item[i]].seconds;
    if (i > layer) after += t->items[t->first_item[i]].seconds;
  }
  return after + (t->in_flight[part->stage_of[layer]] - 1) * all;
}

static void give_option_reason(const sluice_partition_t* part, int32_t layer, sluice_stages_plan_t* plan) {
  const sluice_stages_tables_t* t = part->tables;
  sluice_stages_choice_t* choice = &plan->choices[layer];
  const sluice_stages_stage_t* s = &plan->stages[choice->stage];
  const int32_t option = choice->option;
  choice->fastest = t->items[t->first_item[layer]].option;
  choice->reason = SLUICE_STAGES_FASTEST, choice->reason_bytes = 0, choice->reason_seconds = 0;
  if (option == choice->fastest) return;
  const uint64_t copied = t->problem->layers[layer].options[choice->fastest].copied_bytes;
  sluice_stages_stage_t other; /* with the fastest option */
  choice->option = choice->fastest;
  predict_stage(t, part->stage_of, choice->stage, plan->choices, &other);
  choice->option = option;
  const double costs = s->seconds - other.seconds;
  const int is_over = s->budget_bytes != 0 && other.bytes > s->budget_bytes;
  if (is_over) choice->reason_bytes = other.bytes - s->budget_bytes;
  if (s->budget_bytes != 0 && s->bytes > s->budget_bytes) {
    choice->reason = SLUICE_STAGES_OVER_BUDGET;
  } else if (copied > 0 && sluice_stages_copy_seconds(t->problem, copied) > gap_of(part, layer)) {
    choice->reason = SLUICE_STAGES_NO_TIME;
  } else if (is_over) {
    const int is_free = costs <= 1e-12 * s->seconds;
    choice->reason = is_free ? SLUICE_STAGES_FREE : SLUICE_STAGES_SAVES;
    choice->reason_seconds = is_free ? 0 : costs;
  } else {
    choice->reason = SLUICE_STAGES_UNBURDENS, choice->reason_seconds = fmax(-costs, 0);
  }
}

/* Returns the layer next to a cut that may cross it: the last of the stage before it, or the first of the stage after
 * it. */
static int32_t next_to_cut(const sluice_partition_t* part, int32_t stage, int32_t step) {
  const sluice_stages_tables_t* t = part->tables;
  const int32_t* first = step > 0 ? t->first_reader : t->first_source;
  const int32_t* list = step > 0 ? t->readers : t->sources;
  int32_t count = 0, found = -1;
  for (int32_t i = 0; i < t->num_layers; ++i) {
    const int32_t layer = step > 0 ? t->num_layers - 1 - i : i;
    if (part->stage_of[layer] != stage) continue;
    ++count;
    int may = found < 0;
    for (int32_t a = first[layer]; a < first[layer + 1]; ++a) may &= part->stage_of[list[a]] != stage;
    if (may) found = layer;
  }
  return count > 1 ? found : -1; /* no stage stays empty */
}

static sluice_stages_other_cut_t try_cut(sluice_partition_t* part, int32_t from, int32_t step) {
  sluice_stages_other_cut_t other = {.slowest_seconds = INFINITY, .layer = next_to_cut(part, from, step)};
  if (other.layer < 0) return other;
  part->stage_of[other.layer] += step;
  const sluice_stage_judgement_t here = sluice_partition_judge(part, from, 0);
  const sluice_stage_judgement_t there = sluice_partition_judge(part, from + step, 0);
  part->stage_of[other.layer] -= step;
  other.short_bytes = (uint64_t)fmax(here.short_bytes, there.short_bytes);
  if (other.short_bytes > 0) return other;
  other.slowest_seconds = fmax(here.turn, there.turn);
  for (int32_t s = 0; s < part->tables->num_stages; ++s) {
    if (s != from && s != from + step) other.slowest_seconds = fmax(other.slowest_seconds, part->judged[s].turn);
  }
  return other;
}

/* Fills the reasons of a predicted plan. part: settled, of the plan; it is changed temporarily and restored. */
static void give_reasons(sluice_partition_t* part, sluice_stages_plan_t* plan) {
  const sluice_stages_other_cut_t none = {.slowest_seconds = INFINITY, .layer = -1};
  for (int32_t i = 0; i < part->tables->num_layers; ++i) give_option_reason(part, i, plan);
  for (int32_t s = 0; s < part->tables->num_stages; ++s) {
    plan->stages[s].begins_earlier = s == 0 ? none : try_cut(part, s - 1, 1);
    plan->stages[s].begins_later = s == 0 ? none : try_cut(part, s, -1);
  }
}

/* ---- planning ---- */

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
  predict(&p->tables, p->part.stage_of, plan);
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
  give_reasons(&p->part, p->plan);
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
  give_reasons(&p->part, p->plan);
  return short_bytes(p) > 0 ? refuse(p) : SLUICE_OK;
}

/* ---- calls ---- */

static sluice_status_t with_room(const sluice_stages_problem_t* problem, sluice_allocator_t* allocator,
                                 sluice_status_t (*fill)(planning_t*), sluice_stages_plan_t* plan) {
  SLUICE_TRY(SLUICE_REQUIRE(problem != NULL && plan != NULL && plan->choices != NULL && plan->stages != NULL,
                            "problem, plan, plan->choices or plan->stages is NULL"));
  SLUICE_TRY(sluice_stages_check(problem));
  *plan = (sluice_stages_plan_t){.choices = plan->choices, .stages = plan->stages, .blocking_stage = -1};
  planning_t planning = {.plan = plan};
  SLUICE_TRY(sluice_stages_tables_make(problem, allocator, &planning.tables));
  sluice_status_t status = sluice_partition_make(&planning.tables, most_nodes(problem), &planning.part);
  if (status == SLUICE_OK) status = sluice_partition_make(&planning.tables, most_nodes(problem), &planning.scratch);
  if (status == SLUICE_OK) status = fill(&planning);
  plan->steps = planning.part.local.steps + planning.scratch.local.steps;
  sluice_partition_deinit(&planning.scratch);
  sluice_partition_deinit(&planning.part);
  sluice_stages_tables_deinit(&planning.tables);
  return status;
}

sluice_status_t sluice_stages_plan(const sluice_stages_problem_t* problem, sluice_allocator_t* allocator,
                                   sluice_stages_plan_t* plan) {
  return with_room(problem, allocator, make_plan, plan);
}

sluice_status_t sluice_stages_price(const sluice_stages_problem_t* problem, sluice_allocator_t* allocator,
                                    sluice_stages_plan_t* plan) {
  return with_room(problem, allocator, price_given, plan);
}
