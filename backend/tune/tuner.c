// SPDX-License-Identifier: Apache-2.0
#include "backend/tune/tuner.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/dtype.h"
#include "backend/model/shape.h"
#include "backend/model/tensors.h"
#include "backend/moe/layer/layer.h"
#include "backend/moe/routing/chunks_by_experts.h"
#include "backend/tune/decisions_json.h"
#include "backend/tune/search/search.h"
#include "backend/tune/tuner_sizes.h"
#include "backend/tune/tuner_strategy.h"

/* ---- predictions ---- */

static double predict_of(const sluice_tuner_table_t* table, int64_t rows, int32_t num_chunks, int32_t wgrad_mode,
                         int32_t direction, int32_t form) {
  const int32_t grouped = form == SLUICE_FORM_GROUPED || (table->groups_always && form != SLUICE_FORM_TWO_LEVELS);
  sluice_workload_t work = table->work;
  if (form == SLUICE_FORM_TWO_LEVELS) work.deduplicate = SLUICE_DEDUPLICATE_NODES;
  if (form == SLUICE_FORM_COPIES) work.deduplicate = SLUICE_DEDUPLICATE_RANKS;
  double tokens = (double)rows / (work.skew * work.top_k);
  work.num_tokens = tokens < 1 ? 1 : (int64_t)tokens;
  const sluice_restore_set_t* set = &sluice_restore_sets[table->restore_set]; /* 0: as for layers without a plan */
  const int is_lean = table->restore_set != 0;
  const sluice_choice_t choice = {
      num_chunks, set->restore_input, set->restore_pre_activation, wgrad_mode, is_lean, NULL, 0, is_lean, grouped};
  double seconds = 0;
  if (sluice_predict_pass(&table->tuner->machine, &work, &choice, direction, &seconds) != SLUICE_OK) return 0;
  return seconds;
}

static double predict(void* user, int64_t rows, int32_t num_chunks, int32_t wgrad_mode, int32_t direction) {
  return predict_of(user, rows, num_chunks, wgrad_mode, direction, SLUICE_FORM_PLAIN);
}

/* A machine with one kind of link cannot predict two levels. */
static int may_predict_levels(const sluice_tuner_t* tuner, int32_t ranks_per_node) {
  return tuner->machine.ranks_per_node == ranks_per_node;
}

static double predict_other(void* user, int64_t rows, int32_t num_chunks, int32_t wgrad_mode, int32_t direction,
                            int32_t form) {
  const sluice_tuner_table_t* table = user;
  if (form == SLUICE_FORM_TWO_LEVELS && !may_predict_levels(table->tuner, table->work.ranks_per_node)) return 0;
  return predict_of(table, rows, num_chunks, wgrad_mode, direction, form);
}

/* The experts that receive rows of a chunk, on the average rank, so that all ranks predict the same. Chunks of rows use
 * few experts each. */
static int32_t experts_of_chunks(const sluice_moe_t* moe) {
  const sluice_moe_config_t* c = &moe->shape.config;
  if (sluice_chunks_by_experts(moe, 2)) return 1;
  return (c->num_experts + moe->context->world_size - 1) / moe->context->world_size;
}

/* ---- decisions ---- */

/* The choice without a plan; empty if there is no such pick. */
static sluice_racing_plan_t plan_of_pick(const sluice_search_t* search, int32_t pick) {
  if (pick < 0) return (sluice_racing_plan_t){0, -1, -1, 0};
  return (sluice_racing_plan_t){sluice_search_chunks(search, pick), -1, -1, sluice_pick_wgrad(pick)};
}

static void decided(void* user, const sluice_search_decision_t* decision) {
  const sluice_tuner_table_t* table = user;
  sluice_tuner_record(table->tuner, &(sluice_decision_t){
                                        .layer = table->layer,
                                        .work = table->work,
                                        .what = *decision,
                                        .chosen = plan_of_pick(&table->search, decision->pick),
                                        .second = plan_of_pick(&table->search, decision->runner_up),
                                    });
}

static void decided_form(void* user, const sluice_grouping_decision_t* d) {
  sluice_tuner_table_t* table = user;
  const sluice_search_decision_t what = {
      .rows = d->rows,
      .pick = d->pick,
      .why = d->why,
      .seconds = d->seconds,
      .predicted_seconds = d->predicted_seconds,
      .runner_up = d->other_pick,
      .runner_up_seconds = d->other_seconds,
      .num_raced = d->num_raced,
  };
  sluice_tuner_record(table->tuner,
                      &(sluice_decision_t){.layer = table->layer,
                                           .work = table->work,
                                           .what = what,
                                           .chosen = plan_of_pick(&table->search, d->pick),
                                           .second = plan_of_pick(&table->search, d->other_pick),
                                           .chose_deduplication = (uint8_t)table->grouping.config.tells_plain,
                                           .form = (uint8_t)d->form,
                                           .second_form = (uint8_t)d->other_form,
                                           .second_predicted = (float)d->other_predicted_seconds});
}

/* ---- the policy hook ---- */

static void destroy(sluice_policy_hook_t* policy_hook) {
  sluice_tuner_t* tuner = sluice_tuner_of_hook(policy_hook);
  for (sluice_tuner_table_t *t = tuner->tables, *next; t != NULL; t = next) {
    next = t->next;
    if (t->joint != NULL) sluice_free(tuner->allocator, t->joint, sizeof *t->joint);
    sluice_free(tuner->allocator, t, sizeof *t);
  }
  sluice_free(tuner->allocator, tuner->imports, (uint64_t)tuner->max_imports * sizeof *tuner->imports);
  if (tuner->timed_passes != NULL)
    sluice_free(sluice_process_allocator(), tuner->timed_passes, sizeof *tuner->timed_passes);
  sluice_free(tuner->allocator, tuner, sizeof *tuner);
}

/* A search without a model also tries per-chunk weight gradients, at the n that won, except if that would need a
 * temporary as large as all gradients in f32 (sums of 16-bit gradients), which the user did not request; a model or a
 * budget may choose it. */
static int may_try_modes(const sluice_tuner_t* tuner, const sluice_moe_t* moe) {
  return sluice_tuner_may_predict(tuner, moe) ||
         (!moe->shape.config.callback_experts && moe->shape.config.dtype == SLUICE_DTYPE_F32);
}

/* A configured n still leaves the mode and the form of exchanges open. */
static int has_fixed_chunks(const sluice_moe_t* moe) { return moe->shape.config.num_chunks > 0; }

/* A layer that restores rows takes the mode that holds the fewest bytes, even if the other is faster. With one chunk
 * both are the same.
 */
static int is_mode_open(const sluice_tuner_t* tuner, const sluice_moe_t* moe) {
  return moe->shape.config.num_chunks != 1 && moe->shape.config.wgrad_mode == SLUICE_WGRAD_ADAPTIVE &&
         may_try_modes(tuner, moe) && !sluice_shape_is_lean(&moe->shape);
}

static int may_predict_form(const sluice_tuner_t* tuner, const sluice_moe_t* moe, int32_t form) {
  return sluice_tuner_may_predict(tuner, moe) &&
         (form != SLUICE_FORM_TWO_LEVELS || may_predict_levels(tuner, moe->shape.ranks_per_node));
}

/* Copies run only if they are predicted to be faster, since they save time of the link and cost time for tables and
 * sums, or if an imported answer has them. Mode PROFILE predicts nothing. */
static int32_t chooses_copies(sluice_policy_hook_t* policy_hook, const sluice_moe_t* moe) {
  const sluice_tuner_t* tuner = sluice_tuner_of_hook(policy_hook);
  for (int32_t i = 0; i < tuner->num_imports; ++i) {
    if (tuner->imports[i].layer == moe->kind && tuner->imports[i].deduplicate >= 0) return 1;
  }
  return tuner->mode != SLUICE_TUNER_PROFILE && sluice_tuner_may_predict(tuner, moe);
}

static int may_group(const sluice_moe_t* moe) {
  return !sluice_shape_has_two_levels(&moe->shape) && !sluice_shape_levels_are_open(&moe->shape) &&
         sluice_layer_wire(moe) == SLUICE_WIRE_LAYER_DTYPE;
}

static void add_form(sluice_grouping_config_t* config, sluice_grouping_form_t form) {
  config->forms[config->num_forms++] = form;
}

/* The alternative forms of exchanges. A layer that chooses between levels alone does not group. */
static void open_forms(const sluice_tuner_t* tuner, const sluice_moe_t* moe, sluice_tuner_table_t* table) {
  enum { UNEVEN = 115 }; /* skew in hundredths from which the two directions of a link differ enough to try */
  const sluice_shape_t* shape = &moe->shape;
  const int has_forms = moe->context->world_size > 1 && !shape->config.reuse && !sluice_makes_plans(moe);
  const int groups = has_forms && may_group(moe), copies = has_forms && sluice_shape_copies_are_open(shape);
  table->groups_always = groups && shape->config.grouping == SLUICE_GROUPING_ON;
  sluice_grouping_config_t config = {
      .mode = tuner->mode, .tells_plain = sluice_shape_travel_is_open(shape), .user = table, .decided = decided_form};
  if (groups && shape->config.grouping == SLUICE_GROUPING_ADAPTIVE)
    add_form(&config, (sluice_grouping_form_t){SLUICE_FORM_GROUPED, SLUICE_GROUPED_CHUNKS + 1, UNEVEN / 100.0, 0});
  if (copies) add_form(&config, (sluice_grouping_form_t){SLUICE_FORM_COPIES, 1, 0, 1});
  if (copies ? shape->ranks_per_node > 0 : has_forms && sluice_shape_levels_are_open(shape))
    add_form(&config, (sluice_grouping_form_t){SLUICE_FORM_TWO_LEVELS, 1, 0, copies});
  if (config.num_forms > 0 && may_predict_form(tuner, moe, config.forms[0].form)) config.predict = predict_other;
  sluice_grouping_init(&table->grouping, &config);
}

static sluice_status_t new_table(sluice_tuner_t* tuner, const sluice_moe_t* moe, int32_t restore_set,
                                 sluice_tuner_table_t** out_table) {
  sluice_tuner_table_t* table = sluice_alloc_zeroed(tuner->allocator, sizeof *table, "tuner's table");
  if (table == NULL) return sluice_alloc_status();
  table->layer = moe->kind;
  table->tuner = tuner;
  table->work = sluice_tuner_work_of(moe);
  table->restore_set = restore_set;
  const int fixed = has_fixed_chunks(moe);
  const int32_t size = sluice_search_size_of(moe->shape.config.num_chunks); /* stands for any fixed n */
  const sluice_search_config_t config = {
      .mode = tuner->mode,
      .min_size = fixed ? size : restore_set != 0, /* a single chunk cannot share buffers */
      .max_size = fixed ? size : SLUICE_SEARCH_SIZES - 1,
      .fixed_chunks = fixed ? moe->shape.config.num_chunks : 0,
      .open_wgrad = is_mode_open(tuner, moe),
      .wgrad_mode = sluice_shape_is_lean(&moe->shape) ? SLUICE_WGRAD_PER_CHUNK : moe->shape.config.wgrad_mode,
      .num_local = experts_of_chunks(moe),
      .uneven_chunks = sluice_chunks_by_experts(moe, 2),
      .predict = sluice_tuner_may_predict(tuner, moe) ? predict : NULL,
      .user = table,
      .decided = restore_set == 0 ? decided : NULL, /* a single strategy is not a decision: the best of all is */
  };
  sluice_search_init(&table->search, &config);
  open_forms(tuner, moe, table);
  for (int32_t i = 0; i < tuner->num_imports; ++i) {
    if (restore_set == 0 && tuner->imports[i].layer == table->layer)
      sluice_tuner_take_import(table, &tuner->imports[i]);
  }
  table->next = tuner->tables;
  tuner->tables = table;
  *out_table = table;
  return SLUICE_OK;
}

/* The first table of a layer that reuses buffers: one table per strategy, in order of decreasing storage. */
static sluice_status_t new_joint(sluice_tuner_t* tuner, const sluice_moe_t* moe, sluice_tuner_table_t** out_table) {
  sluice_tuner_strategy_t* joint = sluice_alloc_zeroed(tuner->allocator, sizeof *joint, "tuner's strategies");
  if (joint == NULL) return sluice_alloc_status();
  sluice_status_t status = SLUICE_OK;
  for (int32_t set = 1; set < SLUICE_NUM_RESTORE_SETS && status == SLUICE_OK; ++set) {
    if (sluice_tuner_allows(moe, set)) status = new_table(tuner, moe, set, &joint->tables[joint->count]);
    joint->count += status == SLUICE_OK && sluice_tuner_allows(moe, set);
  }
  if (joint->count == 0 || status != SLUICE_OK) { /* tables that were created stay with the tuner */
    sluice_free(tuner->allocator, joint, sizeof *joint);
    return status;
  }
  joint->tables[0]->joint = joint;
  *out_table = joint->tables[0];
  return SLUICE_OK;
}

/* The table of the next strategy, and its candidate. */
static sluice_tuner_table_t* next_of(sluice_tuner_table_t* table, int64_t rows, int32_t* out_pick, int32_t* out_why) {
  if (table->joint != NULL) return sluice_tuner_strategy_next(table->joint, rows, out_pick, out_why);
  *out_pick = sluice_search_next(&table->search, rows, out_why);
  return table;
}

static void take(sluice_tuner_table_t* first, sluice_decision_state_t* decision, int64_t rows) {
  int32_t why = 0, pick = 0, form = SLUICE_FORM_PLAIN;
  sluice_tuner_table_t* table = next_of(first, rows, &pick, &why);
  pick = sluice_grouping_next(&table->grouping, &table->search, rows, table->work.skew, pick, &why, &form);
  const sluice_pass_choice_t choice = sluice_tuner_choice_of(table, pick, form);
  if (!sluice_pass_choice_is(&choice, &decision->choice)) sluice_tuner_note_switch(first, decision);
  decision->choice = choice;
  decision->bucket = (uint8_t)(rows < 1 ? 0 : sluice_search_bucket(rows));
  decision->is_settled = why != SLUICE_WHY_ON_TRIAL && why != SLUICE_WHY_NOTHING_YET;
}

/* A layer chooses between plans under a budget, and between strategies with reuse. Otherwise it may leave open n, the
 * deduplication, or the mode at a configured n. */
static int has_choice(const sluice_tuner_t* tuner, const sluice_moe_t* moe) {
  if (sluice_makes_plans(moe) || moe->shape.config.reuse || moe->shape.config.num_chunks == 0) return 1;
  return sluice_shape_travel_is_open(&moe->shape) || is_mode_open(tuner, moe);
}

static sluice_status_t attach(sluice_policy_hook_t* policy_hook, const sluice_moe_t* moe,
                              sluice_decision_state_t* decision) {
  sluice_tuner_t* tuner = sluice_tuner_of_hook(policy_hook);
  if (!has_choice(tuner, moe)) return SLUICE_OK;
  sluice_tuner_table_t* table = tuner->tables;
  const int is_joint = sluice_tuner_is_joint(moe);
  while (table != NULL && (table->layer != moe->kind || (is_joint && table->joint == NULL))) table = table->next;
  if (table == NULL && is_joint) SLUICE_TRY(new_joint(tuner, moe, &table));
  if (table == NULL) SLUICE_TRY(new_table(tuner, moe, 0, &table));
  decision->table = table;
  take(table, decision, 0);
  return SLUICE_OK;
}

/* Two exchanges of rows per chunk: dispatch and combine. */
static void note_forward(sluice_tuner_t* tuner, const sluice_moe_t* moe, int32_t num_chunks, int64_t rows,
                         const sluice_lanes_t* lanes) {
  const sluice_moe_config_t* c = &moe->shape.config;
  if (c->callback_experts) return;                      /* the work of callbacks is unknown */
  if (sluice_shape_has_two_levels(&moe->shape)) return; /* two links, but one measured number */
  double w = moe->context->world_size,
         row_bytes = sluice_wire_row_bytes(&(sluice_workload_t){
             .model_width = c->model_width, .dtype = c->dtype, .wire_dtype = sluice_layer_wire(moe)});
  double share =
      sluice_shape_is_deduplicated(&moe->shape) ? sluice_token_copies_share(c->num_experts, (int32_t)w, c->top_k) : 1;
  const sluice_observed_forward_t pass = {
      .flops = 2.0 * (double)rows * (double)c->model_width * (double)c->hidden_width * (moe->shape.gate_factor + 1),
      .compute_seconds = lanes->compute * 1e-9,
      .bytes = 2 * (double)rows * row_bytes * share * (w - 1) / w,
      .comm_seconds = lanes->comm * 1e-9,
      .num_exchanges = 2 * num_chunks,
      .startup_seconds = lanes->startup * 1e-9,
  };
  sluice_observed_rates_add(&tuner->observed, c->dtype, &pass);
}

static void note_bytes(sluice_tuner_t* tuner, const sluice_step_report_t* const* reports, int32_t world_size) {
  double memory = 0, copies = 0;
  sluice_tuner_slowest_bytes(reports, world_size, &memory, &copies);
  sluice_observed_rates_add_bytes(&tuner->observed, memory, copies);
}

/* Records only passes that keep all rows, as in searches without a budget. */
static void note_for_refining(const sluice_tuner_table_t* table, int32_t direction, const sluice_pass_report_t* p,
                              int64_t rows, uint64_t ns, const sluice_lanes_t* lanes) {
  sluice_timed_pass_t pass = {.work = table->work,
                              .num_chunks = p->choice.num_chunks,
                              .wgrad_mode = p->choice.wgrad_mode,
                              .direction = direction,
                              .seconds = (double)ns * 1e-9,
                              .compute = lanes->compute * 1e-9,
                              .comm = lanes->comm * 1e-9};
  double tokens = (double)rows / (pass.work.skew * pass.work.top_k);
  pass.work.num_tokens = tokens < 1 ? 1 : (int64_t)tokens;
  sluice_timed_passes_t** passes = &table->tuner->timed_passes;
  if (*passes == NULL)
    *passes = sluice_alloc_zeroed(sluice_process_allocator(), sizeof **passes, "passes of a refined machine");
  /* without memory there is nothing to export, but training continues */
  if (*passes != NULL) sluice_timed_passes_add(*passes, &pass);
}

/* The table of passes with this strategy; NULL: the pass ran before the layer chose, or the layer does not choose
 * strategies. */
static sluice_tuner_table_t* table_of(sluice_tuner_table_t* first, int32_t restore_set) {
  if (first->joint != NULL) return sluice_tuner_strategy_table(first->joint, restore_set);
  return restore_set == 0 ? first : NULL;
}

static void note_work(sluice_tuner_table_t* first, int64_t tokens, double skew) {
  const int32_t count = first->joint != NULL ? first->joint->count : 1;
  for (int32_t k = 0; k < count; ++k) {
    sluice_tuner_table_t* table = first->joint != NULL ? first->joint->tables[k] : first;
    table->work.num_tokens = tokens, table->work.skew = skew;
  }
}

static int32_t form_of(const sluice_moe_t* moe, const sluice_pass_choice_t* choice) {
  if (sluice_shape_travel_is_open(&moe->shape) && choice->deduplicate != sluice_shape_deduplication(&moe->shape))
    return choice->deduplicate == SLUICE_DEDUPLICATE_NODES ? SLUICE_FORM_TWO_LEVELS : SLUICE_FORM_COPIES;
  return choice->grouped && !sluice_shape_levels_are_open(&moe->shape) ? SLUICE_FORM_GROUPED : SLUICE_FORM_PLAIN;
}

static void agree(sluice_policy_hook_t* policy_hook, const sluice_moe_t* moe, sluice_decision_state_t* decision,
                  const sluice_step_report_t* const* reports, int32_t world_size) {
  sluice_tuner_table_t* first = decision->table;
  int64_t rows = 0, tokens = 0;
  for (int32_t r = 0; r < world_size; ++r) {
    if (reports[r]->rows > rows) rows = reports[r]->rows;
    if (reports[r]->num_tokens > tokens) tokens = reports[r]->num_tokens;
  }
  note_bytes(sluice_tuner_of_hook(policy_hook), reports, world_size);
  note_work(first, tokens, sluice_tuner_note_rows(first, tokens, rows));
  const int64_t sized = rows < 1 ? rows : sluice_tuner_rows_of(first, tokens);
  for (int32_t direction = SLUICE_FORWARD; direction <= SLUICE_BACKWARD; ++direction) {
    int64_t pass_rows = 0;
    sluice_lanes_t lanes;
    uint64_t ns = sluice_tuner_slowest(reports, world_size, direction, &pass_rows, &lanes);
    const sluice_pass_report_t* p = &reports[0]->pass[direction];
    const int32_t form = form_of(moe, &p->choice);
    if (ns > 0 && direction == SLUICE_FORWARD && form == SLUICE_FORM_PLAIN)
      note_forward(sluice_tuner_of_hook(policy_hook), moe, p->choice.num_chunks, pass_rows, &lanes);
    sluice_tuner_table_t* table = table_of(first, p->choice.restore_set);
    if (table == NULL) continue;
    int32_t size = ns == 0 ? 0 : sluice_search_size_of(p->choice.num_chunks);
    if (p->plan > 0 || ns == 0 || sluice_search_chunks(&table->search, size) != p->choice.num_chunks) continue;
    /* If the mode is not open, one mode stands for both: a single chunk, or few rows, may run the other. */
    const sluice_search_config_t* config = &table->search.config;
    int32_t pick = size + SLUICE_SEARCH_SIZES * (config->open_wgrad ? p->choice.wgrad_mode : config->wgrad_mode);
    const int is_first = sluice_tuner_is_first(decision, direction);
    if (pass_rows == rows) { /* of the last forward: use the usual number of rows of its size */
      ns = (uint64_t)llround((double)ns * (double)sized / (double)rows);
      pass_rows = sized;
    }
    sluice_grouping_observe(&table->grouping, direction, pick, form, pass_rows, ns);
    const int is_plain = form == SLUICE_FORM_PLAIN || (form == SLUICE_FORM_GROUPED && table->groups_always);
    if (!is_plain) { /* the search compares only the plain form */
      sluice_search_count_pass(&table->search, (double)ns * 1e-9);
      continue;
    }
    if (is_first) {
      sluice_search_count_switch(&table->search, direction, pick, pass_rows, (double)ns * 1e-9);
    } else if (p->choice.restore_set == 0 && !p->choice.grouped && lanes.compute > 0 &&
               sluice_tuner_may_predict(sluice_tuner_of_hook(policy_hook), moe)) {
      note_for_refining(table, direction, p, pass_rows, ns, &lanes);
    }
    if (first->joint != NULL)
      sluice_tuner_strategy_observe(first->joint, p->choice.restore_set, direction, pick, pass_rows, ns);
    sluice_search_observe(&table->search, direction, pick, pass_rows, ns, &lanes);
  }
  if (sluice_is_planned(moe)) {
    sluice_tuner_agree_on_plan(moe, decision, reports, world_size);
  } else {
    sluice_tuner_table_t* waiting = table_of(first, decision->choice.restore_set);
    if (sluice_tuner_has_trained(reports, world_size) && waiting != NULL)
      sluice_search_wait(&waiting->search, sized, moe->shape.config.layer_id);
    take(first, decision, sized);
  }
}

static const sluice_policy_hook_vtable_t vtable = {.destroy = destroy,
                                                   .attach = attach,
                                                   .price = sluice_tuner_price,
                                                   .rates = sluice_tuner_rates,
                                                   .agree = agree,
                                                   .of_size = sluice_tuner_of_size,
                                                   .chooses_copies = chooses_copies,
                                                   .num_candidates = sluice_tuner_num_candidates,
                                                   .is_pinned = sluice_tuner_is_pinned,
                                                   .choose_plan = sluice_tuner_choose_plan};

/* ---- installing ---- */

static int is_asked_for_decisions(void) {
  const char* log = getenv("SLUICE_LOG");
  return log != NULL && strstr(log, "decision") != NULL;
}

sluice_status_t sluice_tuner_install(sluice_context_t* context) {
  sluice_tuner_t* tuner = sluice_alloc_zeroed(&context->allocator, sizeof *tuner, "tuner");
  if (tuner == NULL) return sluice_alloc_status();
  tuner->base.vtable = &vtable;
  tuner->allocator = &context->allocator;
  tuner->rank = context->rank;
  tuner->is_loud = is_asked_for_decisions();
  sluice_tuner_update_state(tuner);
  context->policy_hook = &tuner->base;
  return SLUICE_OK;
}

sluice_tuner_t* sluice_tuner_of(const sluice_context_t* context) {
  sluice_policy_hook_t* policy_hook = context->policy_hook;
  return policy_hook != NULL && policy_hook->vtable == &vtable ? sluice_tuner_of_hook(policy_hook) : NULL;
}

sluice_status_t sluice_tuner_configure(sluice_tuner_t* tuner, int32_t mode, const sluice_machine_t* machine) {
  if (tuner->tables != NULL) {
    return SLUICE_FAIL(SLUICE_E_STATE,
                       "tuner: layers have already used the tuner; configure it before creating layers");
  }
  tuner->mode = mode;
  tuner->has_machine = machine != NULL;
  if (machine != NULL) tuner->machine = *machine;
  sluice_tuner_update_state(tuner);
  return SLUICE_OK;
}
