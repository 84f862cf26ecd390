#include "backend/tune/tuner_plans.h"

#include <string.h>

#include "backend/base/hash.h"
#include "backend/base/log.h"
#include "backend/moe/layer/layer.h"
#include "backend/tune/tuner_decisions.h"
#include "backend/tune/tuner_reports.h"
#include "backend/tune/tuner_work.h"

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

int32_t sluice_tuner_is_pinned(sluice_policy_hook_t* policy_hook, const sluice_moe_t* moe,
                               const sluice_plan_data_t* plan) {
  const sluice_tuner_t* tuner = sluice_tuner_of_hook(policy_hook);
  const sluice_racing_plan_t wanted = racing_of(plan);
  for (int32_t i = 0; i < tuner->num_imports; ++i) {
    const sluice_import_t* import = &tuner->imports[i];
    if (import->layer == moe->kind && same_plan(&import->plan, &wanted)) return 1;
  }
  return 0;
}

static int has_import(const sluice_tuner_t* tuner, uint64_t layer) {
  for (int32_t i = 0; i < tuner->num_imports; ++i) {
    if (tuner->imports[i].layer == layer && tuner->imports[i].plan.num_chunks > 0) return 1;
  }
  return 0;
}

static int is_chosen_by_node(const sluice_moe_t* moe, const sluice_plan_data_t* plan) {
  return plan->two_levels && sluice_shape_levels_are_open(&moe->shape);
}

/* A machine that knows one kind of link says nothing of two levels that need not be. */
static int may_predict(const sluice_tuner_t* tuner, const sluice_moe_t* moe, const sluice_plan_data_t* plan) {
  const int knows_nodes = tuner->machine.ranks_per_node == moe->shape.ranks_per_node;
  return sluice_tuner_may_predict(tuner, moe) && (knows_nodes || !is_chosen_by_node(moe, plan));
}

/* Forward and backward of a plan on the tuner's machine, with so many tokens on each rank; negative: no machine. */
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

static void tell_plan(sluice_tuner_table_t* table, const sluice_moe_t* moe, const sluice_plan_race_t* race,
                      int32_t why) {
  const sluice_plan_data_t* plan = &moe->plans->plans[race->pick];
  int32_t second = sluice_plan_race_second(race);
  int64_t rows = race->rows > 0 ? race->rows : plan->inputs.max_tokens * table->work.top_k;
  const double predicted = plan_seconds(table->tuner, moe, plan, rows / table->work.top_k);
  sluice_decision_t d = {
      .layer = table->layer,
      .work = table->work,
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
  for (int32_t i = 0; i < moe->plans->count; ++i) {
    if (moe->plans->plans[i].bytes.total > d.total_bytes) d.total_bytes = moe->plans->plans[i].bytes.total;
  }
  if (second >= 0) d.second = race->plans[second];
  ++table->num_plan_decisions;
  sluice_tuner_record(table->tuner, &d);
}

/* A set that does not race is decided at once. */
static void decide_single(sluice_tuner_table_t* table, const sluice_moe_t* moe, const sluice_plan_race_t* race) {
  const sluice_tuner_t* tuner = table->tuner;
  int pinned = has_import(tuner, moe->kind);
  if (pinned && !sluice_tuner_is_pinned(&table->tuner->base, moe, &moe->plans->plans[0])) {
    sluice_log(SLUICE_LOG_WARN, "layer %d: the imported plan does not fit this budget: another is chosen",
               moe->shape.config.layer_id);
    pinned = 0;
  }
  if (race->count > 1) return;
  tell_plan(table, moe, race,
            pinned                                 ? SLUICE_WHY_IMPORTED
            : sluice_tuner_may_predict(tuner, moe) ? SLUICE_WHY_PREDICTED
                                                   : SLUICE_WHY_ONE_LEFT);
}

/* Layers with the same set share its race. */
static sluice_plan_race_t* race_of(sluice_tuner_table_t* table, const sluice_moe_t* moe) {
  sluice_racing_plan_t plans[SLUICE_RACE_PLANS];
  int32_t count = moe->plans->count;
  for (int32_t i = 0; i < count; ++i) plans[i] = racing_of(&moe->plans->plans[i]);
  uint64_t key = sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, plans, (size_t)count * sizeof *plans);
  key = sluice_hash_bytes(key, &moe->plan->two_levels, sizeof moe->plan->two_levels) | 1; /* all of a set are alike */
  for (int32_t i = 0; i < SLUICE_TUNER_RACES; ++i) {
    if (table->races[i].key == key) return &table->races[i].race;
  }
  sluice_tuner_race_t* place = &table->races[table->next_race++ % SLUICE_TUNER_RACES];
  place->key = key;
  sluice_plan_race_start(&place->race, plans, count);
  decide_single(table, moe, &place->race);
  return &place->race;
}

int32_t sluice_tuner_choose_plan(sluice_policy_hook_t* policy_hook, const sluice_moe_t* moe,
                                 sluice_decision_state_t* decision) {
  (void)policy_hook;
  sluice_tuner_table_t* table = decision->table;
  sluice_plan_race_t* race = race_of(table, moe);
  int32_t plan = sluice_plan_race_next(race);
  if (plan != decision->plan) sluice_tuner_note_switch(table, decision);
  decision->plan = plan;
  decision->is_settled = race->is_settled;
  return plan;
}

void sluice_tuner_agree_on_plan(const sluice_moe_t* moe, sluice_decision_state_t* decision,
                                const sluice_step_report_t* const* reports, int32_t world_size) {
  if (moe->plans == NULL || moe->plan_is_given) return;
  sluice_plan_race_t* race = race_of(decision->table, moe);
  for (int32_t direction = SLUICE_FORWARD; direction <= SLUICE_BACKWARD; ++direction) {
    sluice_lanes_t lanes;
    int64_t rows = 0;
    uint64_t ns = sluice_tuner_slowest(reports, world_size, direction, &rows, &lanes);
    int32_t plan = reports[0]->pass[direction].plan - 1;
    if (ns > 0 && sluice_tuner_is_first(decision, direction))
      sluice_plan_race_count_switch(race, direction, plan, rows, ns);
    if (sluice_plan_race_observe(race, direction, plan, rows, ns)) {
      tell_plan(decision->table, moe, race, SLUICE_WHY_RACED);
    }
  }
  if (sluice_tuner_has_trained(reports, world_size) && sluice_plan_race_wait(race, moe->shape.config.layer_id)) {
    tell_plan(decision->table, moe, race, SLUICE_WHY_RACED);
  }
}

/* Balanced routing at the plan's most tokens; a plan's slots are bounded. */
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
    table->is_rated =
        sluice_observed_rates_of(&sluice_tuner_of_hook(policy_hook)->observed, moe->shape.config.dtype, &table->rates);
  }
  *out_rates = table->rates;
  return table->is_rated;
}
