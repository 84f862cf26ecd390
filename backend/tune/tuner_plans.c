// SPDX-License-Identifier: Apache-2.0
/* Plans of a tuner under a budget: their prices, the choice from a layer's set, and their race. Implements entries of
 * sluice_policy_hook_vtable_t. */
#include <math.h>

#include "backend/base/hash.h"
#include "backend/base/log.h"
#include "backend/moe/context/row_memory.h"
#include "backend/moe/layer/layer.h"
#include "backend/plan/plans_by_size.h"
#include "backend/tune/tuner_state.h"

#define JUST_NEAR 0.99 /* in powers of two: sizes of plans differ by 1 */

static sluice_racing_plan_t racing_of(const sluice_plan_data_t* plan) {
  return (sluice_racing_plan_t){plan->num_chunks, plan->restore_input, plan->restore_pre_activation, plan->wgrad_mode};
}

static int same_plan(const sluice_racing_plan_t* a, const sluice_racing_plan_t* b) {
  return a->num_chunks == b->num_chunks && a->restore_input == b->restore_input &&
         a->restore_pre_activation == b->restore_pre_activation && a->wgrad_mode == b->wgrad_mode;
}

int32_t sluice_tuner_num_candidates(sluice_policy_hook_t* policy_hook, const sluice_moe_t* moe) {
  (void)moe;
  return sluice_tuner_of_hook(policy_hook)->mode == SLUICE_TUNER_MODEL ? 1 : SLUICE_PLAN_CANDIDATES;
}

/* ---- answers from files ---- */

/* The distance of an answer's size from that of plans for this many tokens, up or down; rows 1 means unknown. */
static double distance_of(const sluice_import_t* import, int64_t rows) {
  return import->rows > 1 ? fabs(log2((double)import->rows / (double)rows)) : JUST_NEAR;
}

/* The answer for plans of this many rows: of this size, or else one without a size. */
static const sluice_import_t* import_for(const sluice_tuner_t* tuner, uint64_t layer, int64_t rows) {
  const sluice_import_t* found = NULL;
  for (int32_t i = 0; i < tuner->num_imports; ++i) {
    const sluice_import_t* import = &tuner->imports[i];
    if (import->layer != layer || import->plan.num_chunks == 0 || distance_of(import, rows) > JUST_NEAR) continue;
    if (found == NULL || distance_of(import, rows) < distance_of(found, rows)) found = import;
  }
  return found;
}

static int64_t rows_of(const sluice_moe_t* moe, const sluice_plan_data_t* plan) {
  return plan->inputs.max_tokens * moe->shape.config.top_k;
}

int32_t sluice_tuner_is_pinned(sluice_policy_hook_t* policy_hook, const sluice_moe_t* moe,
                               const sluice_plan_data_t* plan) {
  const sluice_import_t* import = import_for(sluice_tuner_of_hook(policy_hook), moe->kind, rows_of(moe, plan));
  const sluice_racing_plan_t wanted = racing_of(plan);
  return import != NULL && same_plan(&import->plan, &wanted);
}

static int is_chosen_by_node(const sluice_moe_t* moe, const sluice_plan_data_t* plan) {
  return plan->two_levels && sluice_shape_levels_are_open(&moe->shape);
}

/* A machine with one kind of link cannot predict optional two levels. */
static int may_predict(const sluice_tuner_t* tuner, const sluice_moe_t* moe, const sluice_plan_data_t* plan) {
  const int knows_nodes = tuner->machine.ranks_per_node == moe->shape.ranks_per_node;
  return sluice_tuner_may_predict(tuner, moe) && (knows_nodes || !is_chosen_by_node(moe, plan));
}

/* Predicted forward plus backward of a plan on the tuner's machine, with this many tokens per rank; negative: no
 * machine. */
static double plan_seconds(const sluice_tuner_t* tuner, const sluice_moe_t* moe, const sluice_plan_data_t* plan,
                           int64_t num_tokens) {
  if (!may_predict(tuner, moe, plan)) return -1;
  sluice_workload_t work = sluice_tuner_work_of(moe);
  work.num_tokens = num_tokens < 1 ? 1 : num_tokens;
  if (plan->two_levels) work.deduplicate = SLUICE_DEDUPLICATE_NODES;
  const sluice_choice_t choice = {
      plan->num_chunks,  plan->restore_input, plan->restore_pre_activation, plan->wgrad_mode, 1, &plan->inputs.policies,
      plan->kept_chunks, plan->shares_act};
  sluice_step_prediction_t p;
  if (sluice_predict_step(&tuner->machine, &work, &choice, &p) != SLUICE_OK) return -1;
  return p.seconds[SLUICE_FORWARD] + p.seconds[SLUICE_BACKWARD];
}

static void tell_plan(sluice_tuner_table_t* table, const sluice_moe_t* moe, const sluice_plan_set_t* set,
                      const sluice_plan_race_t* race, int32_t why) {
  const sluice_plan_data_t* plan = &set->plans[race->pick];
  int32_t second = sluice_plan_race_second(race);
  int64_t rows = race->rows > 0 ? race->rows : rows_of(moe, plan);
  const double predicted = plan_seconds(table->tuner, moe, plan, rows / table->work.top_k);
  sluice_decision_t d = {
      .layer = table->layer,
      .work = table->work,
      .chose_deduplication = sluice_shape_levels_are_open(&moe->shape),
      .form = is_chosen_by_node(moe, plan) ? SLUICE_FORM_TWO_LEVELS : SLUICE_FORM_PLAIN,
      .what = {.rows = rows,
               .why = why,
               .seconds = sluice_plan_race_seconds(race, race->pick),
               .predicted_seconds = predicted > 0 ? predicted : 0,
               .runner_up = -1,
               .runner_up_seconds = sluice_plan_race_seconds(race, second),
               .num_raced = race->count > 1 ? race->count : 0,
               .race_passes = race->passes},
      .chosen = race->plans[race->pick],
      .budget = plan->inputs.budget,
      .kept_chunks = plan->kept_chunks,
  };
  for (int32_t i = 0; i < set->count; ++i) {
    if (set->plans[i].bytes.total > d.total_bytes) d.total_bytes = set->plans[i].bytes.total;
  }
  if (second >= 0) d.second = race->plans[second];
  ++table->num_plan_decisions;
  sluice_tuner_record(table->tuner, &d);
}

/* Decides a set with a single plan at once. */
static void decide_single(sluice_tuner_table_t* table, const sluice_moe_t* moe, const sluice_plan_set_t* set,
                          const sluice_plan_race_t* race) {
  const sluice_tuner_t* tuner = table->tuner;
  const sluice_plan_data_t* plan = &set->plans[0];
  int pinned = import_for(tuner, moe->kind, rows_of(moe, plan)) != NULL;
  if (pinned && !sluice_tuner_is_pinned(&table->tuner->base, moe, plan)) {
    sluice_log(SLUICE_LOG_WARN, "layer %d: the imported plan does not fit this budget: another plan is chosen",
               moe->shape.config.layer_id);
    pinned = 0;
  }
  if (race->count > 1) return;
  tell_plan(table, moe, set, race,
            pinned                                 ? SLUICE_WHY_IMPORTED
            : sluice_tuner_may_predict(tuner, moe) ? SLUICE_WHY_PREDICTED
                                                   : SLUICE_WHY_ONE_LEFT);
}

/* Layers with the same plans for batches of about the same size share a race. */
static sluice_plan_race_t* race_of(sluice_tuner_table_t* table, const sluice_moe_t* moe, const sluice_plan_set_t* set) {
  sluice_racing_plan_t plans[SLUICE_RACE_PLANS];
  for (int32_t i = 0; i < set->count; ++i) plans[i] = racing_of(&set->plans[i]);
  const int64_t tokens = set->plans[0].inputs.max_tokens, size = lround(log2((double)tokens));
  uint64_t key = sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, plans, (size_t)set->count * sizeof *plans);
  key = sluice_hash_bytes(key, &size, sizeof size);
  /* two_levels is the same for all plans of a set */
  key = sluice_hash_bytes(key, &set->plans[0].two_levels, sizeof set->plans[0].two_levels) | 1;
  for (int32_t i = 0; i < SLUICE_TUNER_RACES; ++i) {
    if (table->races[i].key == key) return &table->races[i].race;
  }
  sluice_tuner_race_t* place = &table->races[table->next_race++ % SLUICE_TUNER_RACES];
  place->key = key;
  place->size_rows = rows_of(moe, &set->plans[0]);
  sluice_plan_race_start(&place->race, plans, set->count);
  decide_single(table, moe, set, &place->race);
  return &place->race;
}

int32_t sluice_tuner_choose_plan(sluice_policy_hook_t* policy_hook, const sluice_moe_t* moe, int32_t size,
                                 sluice_decision_state_t* decision) {
  (void)policy_hook;
  sluice_tuner_table_t* table = decision->table;
  sluice_plan_race_t* race = race_of(table, moe, moe->plans->of[size]);
  const int32_t plan = sluice_plan_race_next(race), number = sluice_plan_number(size, plan);
  if (number != decision->plan) sluice_tuner_note_switch(table, decision);
  decision->plan = number;
  decision->is_settled = race->is_settled;
  return plan;
}

/* The set of the plan's size; NULL: the plans have been replaced since. */
static const sluice_plan_set_t* set_of(const sluice_moe_t* moe, int32_t number) {
  const sluice_plan_set_t* set = moe->plans->of[sluice_plan_number_size(number)];
  return set != NULL && set->count > 0 ? set : NULL;
}

void sluice_tuner_agree_on_plan(const sluice_moe_t* moe, sluice_decision_state_t* decision,
                                const sluice_step_report_t* const* reports, int32_t world_size) {
  if (moe->plans == NULL || moe->plan_is_given) return;
  const sluice_plan_set_t* trained = set_of(moe, decision->plan);
  for (int32_t direction = SLUICE_FORWARD; direction <= SLUICE_BACKWARD; ++direction) {
    const int32_t number = reports[0]->pass[direction].plan - 1;
    const sluice_plan_set_t* set = number < 0 ? NULL : set_of(moe, number);
    if (set == NULL) continue;
    sluice_lanes_t lanes;
    int64_t rows = 0;
    uint64_t ns = sluice_tuner_slowest(reports, world_size, direction, &rows, &lanes);
    sluice_plan_race_t* race = race_of(decision->table, moe, set);
    const int32_t plan = sluice_plan_number_plan(number);
    if (ns > 0 && sluice_tuner_is_first(decision, direction))
      sluice_plan_race_count_switch(race, direction, plan, rows, ns);
    if (sluice_plan_race_observe(race, direction, plan, rows, ns)) {
      tell_plan(decision->table, moe, set, race, SLUICE_WHY_RACED);
    }
    trained = set;
  }
  if (trained == NULL || !sluice_tuner_has_trained(reports, world_size)) return;
  sluice_plan_race_t* race = race_of(decision->table, moe, trained);
  if (sluice_plan_race_wait(race, moe->shape.config.layer_id)) {
    tell_plan(decision->table, moe, trained, race, SLUICE_WHY_RACED);
  }
}

/* Priced with balanced routing at the most tokens of the plan; the slots of a plan are bounded. */
double sluice_tuner_price(sluice_policy_hook_t* policy_hook, const sluice_moe_t* moe, const sluice_plan_data_t* plan) {
  const int32_t top_k = moe->shape.config.top_k;
  const int is_padded = sluice_shape_capacity(&moe->shape) > 0;
  const int64_t tokens = is_padded ? (plan->worst_rows + top_k - 1) / top_k : plan->inputs.max_tokens;
  return plan_seconds(sluice_tuner_of_hook(policy_hook), moe, plan, tokens);
}

int32_t sluice_tuner_rates(sluice_policy_hook_t* policy_hook, const sluice_moe_t* moe, int64_t max_tokens,
                           sluice_plan_rates_t* out_rates) {
  sluice_tuner_table_t* table = moe->decision.table;
  if (moe->shape.config.callback_experts) return 0;
  if (table->rated_tokens != max_tokens) {
    table->rated_tokens = max_tokens;
    table->is_rated = sluice_observed_rates_of(&sluice_tuner_of_hook(policy_hook)->observed, moe->shape.config.dtype,
                                               moe->context->rows->is_device, &table->rates);
  }
  *out_rates = table->rates;
  return table->is_rated;
}
