#include "backend/tune/tuner.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/dtype.h"
#include "backend/base/log.h"
#include "backend/moe/cut_rows.h"
#include "backend/moe/layer.h"
#include "backend/moe/parcels.h"
#include "backend/moe/plan.h"

#define FNV_BASIS 0xcbf29ce484222325u

static uint64_t fnv1a(uint64_t hash, const void* data, size_t bytes) {
  const unsigned char* p = data;
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ p[i]) * 0x100000001b3u;
  return hash;
}

static sluice_tuner_t* tuner_of(sluice_chooser_t* chooser) { return (sluice_tuner_t*)chooser; }

/* ---- predictions ---- */

static double predict(void* user, int64_t rows, int32_t num_chunks, int32_t wgrad_mode, int32_t direction) {
  const sluice_tuner_table_t* table = user;
  sluice_workload_t work = table->work;
  double tokens = (double)rows / (work.skew * work.top_k);
  work.num_tokens = tokens < 1 ? 1 : (int64_t)tokens;
  const sluice_choice_t choice = {num_chunks, SLUICE_RESTORE_KEEP, SLUICE_RESTORE_KEEP, wgrad_mode, 0, NULL, 0};
  double seconds = 0;
  if (sluice_predict_pass(&table->tuner->machine, &work, &choice, direction, &seconds) != SLUICE_OK) return 0;
  return seconds;
}

/* Experts that more chunks take rows from: of a rank, and not this one's own number, since all ranks sketch alike.
 * Chunks of rows take each from few. */
static int32_t experts_of_chunks(const sluice_moe_t* moe) {
  const sluice_moe_config_t* c = &moe->config;
  if (sluice_cuts_rows(moe, 2)) return 1;
  return (c->num_experts + moe->context->world_size - 1) / moe->context->world_size;
}

static sluice_workload_t work_of(const sluice_moe_t* moe) {
  const sluice_moe_config_t* c = &moe->config;
  return (sluice_workload_t){
      .model_width = c->model_width,
      .hidden_width = c->callback_experts ? 4 * c->model_width : c->hidden_width,
      .num_experts = c->num_experts,
      .top_k = c->top_k,
      .gate_factor = moe->gate_factor,
      .dtype = c->dtype,
      .world_size = moe->context->world_size,
      .callback = c->callback_experts,
      .chunk_cut = c->chunk_cut,
      .skew = 1,
      .deduplicate = sluice_layer_is_deduplicated(moe),
      .activation = c->callback_experts ? SLUICE_ACTIVATION_GELU : c->activation, /* of the host's nothing is known */
  };
}

/* ---- decisions ---- */

static void print_decision(const sluice_tuner_t* tuner, const sluice_decision_t* d) {
  static const char* const modes[] = {"deferred", "per chunk"};
  const sluice_search_decision_t* w = &d->what;
  char text[512], next[128] = "", policy[128] = "", other[64] = "", part[32] = "";
  if (d->kept_chunks < d->chosen.num_chunks) snprintf(part, sizeof part, " in the first %d", d->kept_chunks);
  if (d->chosen.restore_di >= 0) {
    snprintf(policy, sizeof policy, ", T_DI %s, T_M %s%s under %llu bytes", sluice_restore_name(d->chosen.restore_di),
             sluice_restore_name(d->chosen.restore_m), part, (unsigned long long)d->budget);
  }
  if (d->second.num_chunks > 0) {
    if (d->second.restore_di >= 0) {
      snprintf(other, sizeof other, ", T_DI %s, T_M %s", sluice_restore_name(d->second.restore_di),
               sluice_restore_name(d->second.restore_m));
    }
    snprintf(next, sizeof next, "; next n %d%s, %s: %.3f ms", d->second.num_chunks, other, modes[d->second.wgrad_mode],
             1e3 * w->runner_up_seconds);
  }
  snprintf(text, sizeof text,
           "sluice: decision: M %lld, H %lld, E %d, K %d, on %d ranks, %lld rows: n %d%s, weight gradients %s (%s; "
           "%d "
           "candidates in %lld passes; measured %.3f ms, predicted %.3f ms%s)",
           (long long)d->work.model_width, (long long)d->work.hidden_width, d->work.num_experts, d->work.top_k,
           d->work.world_size, (long long)w->rows, d->chosen.num_chunks, policy, modes[d->chosen.wgrad_mode],
           sluice_tuner_why_name(w->why), w->num_raced, (long long)w->race_passes, 1e3 * w->seconds,
           1e3 * w->predicted_seconds, next);
  sluice_log(SLUICE_LOG_INFO, "%s", text);
  if (tuner->is_loud && tuner->rank == 0) fprintf(stderr, "%s\n", text);
}

static void record(sluice_tuner_t* tuner, const sluice_decision_t* decision) {
  sluice_decision_t* d = &tuner->decisions[tuner->num_decisions++ % SLUICE_TUNER_DECISIONS];
  *d = *decision;
  print_decision(tuner, d);
}

/* Without a plan; nothing for a pick that there is not. */
static sluice_racing_plan_t plan_of_pick(const sluice_search_t* search, int32_t pick) {
  if (pick < 0) return (sluice_racing_plan_t){0, -1, -1, 0};
  return (sluice_racing_plan_t){sluice_search_chunks(search, pick), -1, -1, sluice_pick_wgrad(pick)};
}

static void decided(void* user, const sluice_search_decision_t* decision) {
  const sluice_tuner_table_t* table = user;
  record(table->tuner, &(sluice_decision_t){
                           .layer = table->layer,
                           .work = table->work,
                           .what = *decision,
                           .chosen = plan_of_pick(&table->search, decision->pick),
                           .second = plan_of_pick(&table->search, decision->runner_up),
                       });
}

/* ---- the chooser ---- */

static void destroy(sluice_chooser_t* chooser) {
  sluice_tuner_t* tuner = tuner_of(chooser);
  for (sluice_tuner_table_t *t = tuner->tables, *next; t != NULL; t = next) {
    next = t->next;
    sluice_free(tuner->allocator, t, sizeof *t);
  }
  sluice_free(tuner->allocator, tuner->imports, (uint64_t)tuner->max_imports * sizeof *tuner->imports);
  if (tuner->fitted != NULL) sluice_free(sluice_process_allocator(), tuner->fitted, sizeof *tuner->fitted);
  sluice_free(tuner->allocator, tuner, sizeof *tuner);
}

static int may_predict(const sluice_tuner_t* tuner, const sluice_moe_t* moe) {
  if (!tuner->has_machine || moe->config.callback_experts) return 0; /* what a host's expert takes is unknown */
  return sluice_machine_check_for(&tuner->machine, moe->config.dtype, moe->context->world_size) == SLUICE_OK;
}

/* Steps alone try weight gradients chunk by chunk as well, at the n that won; not where that would leave a temporary as
 * large as all gradients in f32 behind (sums of 16-bit gradients), which nobody asked for: a model or a budget may. */
static int may_try_modes(const sluice_tuner_t* tuner, const sluice_moe_t* moe) {
  return may_predict(tuner, moe) || (!moe->config.callback_experts && moe->config.dtype == SLUICE_DTYPE_F32);
}

/* A configured n leaves the mode alone open, and with one chunk both modes are the same. */
static int has_fixed_chunks(const sluice_moe_t* moe) { return moe->config.num_chunks > 1; }

static int is_mode_open(const sluice_tuner_t* tuner, const sluice_moe_t* moe) {
  return moe->config.wgrad_mode == SLUICE_WGRAD_ADAPTIVE && may_try_modes(tuner, moe);
}

static sluice_status_t new_table(sluice_tuner_t* tuner, const sluice_moe_t* moe, sluice_tuner_table_t** out_table) {
  sluice_tuner_table_t* table = sluice_alloc_zeroed(tuner->allocator, sizeof *table, "tuner's table");
  if (table == NULL) return sluice_alloc_status();
  table->layer = moe->fingerprint;
  table->tuner = tuner;
  table->work = work_of(moe);
  const int fixed = has_fixed_chunks(moe);
  const int32_t size = sluice_search_size_of(moe->config.num_chunks); /* that stands for any fixed n */
  const sluice_search_config_t config = {
      .mode = tuner->mode,
      .min_size = fixed ? size : 0,
      .max_size = fixed ? size : SLUICE_SEARCH_SIZES - 1,
      .fixed_chunks = fixed ? moe->config.num_chunks : 0,
      .open_wgrad = is_mode_open(tuner, moe),
      .wgrad_mode = moe->config.wgrad_mode,
      .num_local = experts_of_chunks(moe),
      .tapers = sluice_cuts_rows(moe, 2),
      .predict = may_predict(tuner, moe) ? predict : NULL,
      .user = table,
      .decided = decided,
  };
  sluice_search_init(&table->search, &config);
  for (int32_t i = 0; i < tuner->num_imports; ++i) {
    if (tuner->imports[i].layer == table->layer) sluice_tuner_take_import(table, &tuner->imports[i]);
  }
  table->next = tuner->tables;
  tuner->tables = table;
  *out_table = table;
  return SLUICE_OK;
}

static void note_switch(sluice_tuner_table_t* table, sluice_seat_t* seat) {
  ++table->num_switches;
  seat->switched = 1u << SLUICE_FORWARD | 1u << SLUICE_BACKWARD;
}

/* Whether the report that has come is of a first pass after a switch; true once. */
static int is_first(sluice_seat_t* seat, int32_t direction) {
  int first = (int)(seat->switched >> direction & 1);
  seat->switched &= ~(1u << direction);
  return first;
}

static void take(sluice_tuner_table_t* table, sluice_seat_t* seat, int64_t rows) {
  int32_t why = 0, pick = sluice_search_next(&table->search, rows, &why);
  int32_t num_chunks = sluice_search_chunks(&table->search, pick);
  if (seat->num_chunks != num_chunks || seat->wgrad_mode != sluice_pick_wgrad(pick)) note_switch(table, seat);
  seat->num_chunks = num_chunks;
  seat->wgrad_mode = sluice_pick_wgrad(pick);
  seat->is_settled = why != SLUICE_WHY_ON_TRIAL && why != SLUICE_WHY_NOTHING_YET;
}

/* Under a budget there are plans; else n, or the mode at a configured n. */
static int has_choice(const sluice_tuner_t* tuner, const sluice_moe_t* moe) {
  if (moe->context->memory_budget > 0 || moe->context->host_memory_budget > 0 || moe->config.num_chunks == 0) return 1;
  return has_fixed_chunks(moe) && is_mode_open(tuner, moe);
}

static sluice_status_t attach(sluice_chooser_t* chooser, const sluice_moe_t* moe, sluice_seat_t* seat) {
  sluice_tuner_t* tuner = tuner_of(chooser);
  if (!has_choice(tuner, moe)) return SLUICE_OK;
  sluice_tuner_table_t* table = tuner->tables;
  while (table != NULL && table->layer != moe->fingerprint) table = table->next;
  if (table == NULL) SLUICE_TRY(new_table(tuner, moe, &table));
  seat->table = table;
  take(table, seat, 0);
  return SLUICE_OK;
}

/* The pass that all ranks ran alike, if they did: ns of the slowest and rows of the fullest. Lanes: a rank that waits
 * for another counts the wait as communication, so the rank that communicates least shows what exchanges take. */
static uint64_t slowest(const sluice_step_report_t* const* reports, int32_t world_size, int32_t direction,
                        int64_t* out_rows, sluice_lanes_t* out_lanes) {
  const sluice_pass_report_t* first = &reports[0]->pass[direction];
  uint64_t ns = 0;
  *out_rows = 0;
  *out_lanes = (sluice_lanes_t){(double)first->compute_ns, (double)first->comm_ns, (double)first->comm_cpu_ns,
                                (double)first->header_ns};
  for (int32_t r = 0; r < world_size; ++r) {
    const sluice_pass_report_t* p = &reports[r]->pass[direction];
    if (p->pass_ns == 0 || p->num_chunks != first->num_chunks || p->wgrad_mode != first->wgrad_mode ||
        p->plan != first->plan) {
      return 0;
    }
    if (p->pass_ns > ns) ns = p->pass_ns;
    if (p->rows > *out_rows) *out_rows = p->rows;
    if ((double)p->compute_ns > out_lanes->compute) out_lanes->compute = (double)p->compute_ns;
    if ((double)p->header_ns < out_lanes->startup) out_lanes->startup = (double)p->header_ns;
    if ((double)p->comm_ns < out_lanes->comm) {
      out_lanes->comm = (double)p->comm_ns, out_lanes->comm_cpu = (double)p->comm_cpu_ns;
    }
  }
  return ns;
}

/* Whether any rank ran a training pass since the last forward. */
static int has_trained(const sluice_step_report_t* const* reports, int32_t world_size) {
  for (int32_t r = 0; r < world_size; ++r) {
    if (reports[r]->pass[SLUICE_FORWARD].pass_ns > 0 || reports[r]->pass[SLUICE_BACKWARD].pass_ns > 0) return 1;
  }
  return 0;
}

/* ---- plans under a budget ---- */

static sluice_racing_plan_t racing_of(const sluice_plan_data_t* plan) {
  return (sluice_racing_plan_t){plan->num_chunks, plan->restore_di, plan->restore_m, plan->wgrad_mode};
}

static int same_plan(const sluice_racing_plan_t* a, const sluice_racing_plan_t* b) {
  return a->num_chunks == b->num_chunks && a->restore_di == b->restore_di && a->restore_m == b->restore_m &&
         a->wgrad_mode == b->wgrad_mode;
}

static int32_t num_rivals(sluice_chooser_t* chooser, const sluice_moe_t* moe) {
  (void)moe;
  return tuner_of(chooser)->mode == SLUICE_TUNER_MODEL ? 1 : SLUICE_PLAN_RIVALS;
}

static int32_t is_pinned(sluice_chooser_t* chooser, const sluice_moe_t* moe, const sluice_plan_data_t* plan) {
  const sluice_tuner_t* tuner = tuner_of(chooser);
  const sluice_racing_plan_t wanted = racing_of(plan);
  for (int32_t i = 0; i < tuner->num_imports; ++i) {
    const sluice_import_t* import = &tuner->imports[i];
    if (import->layer == moe->fingerprint && same_plan(&import->plan, &wanted)) return 1;
  }
  return 0;
}

static int has_import(const sluice_tuner_t* tuner, uint64_t layer) {
  for (int32_t i = 0; i < tuner->num_imports; ++i) {
    if (tuner->imports[i].layer == layer && tuner->imports[i].plan.num_chunks > 0) return 1;
  }
  return 0;
}

/* Forward and backward of a plan on the tuner's machine, at `rows` received rows; 0: no machine. */
static double plan_seconds(const sluice_tuner_t* tuner, const sluice_moe_t* moe, const sluice_plan_data_t* plan,
                           int64_t rows) {
  if (!may_predict(tuner, moe)) return 0;
  sluice_workload_t work = work_of(moe);
  int64_t tokens = rows / work.top_k;
  work.num_tokens = tokens < 1 ? 1 : tokens;
  const sluice_choice_t choice = {plan->num_chunks,       plan->restore_di, plan->restore_m, plan->wgrad_mode, 1,
                                  &plan->inputs.policies, plan->kept_chunks};
  sluice_step_prediction_t p;
  if (sluice_predict_step(&tuner->machine, &work, &choice, &p) != SLUICE_OK) return 0;
  return p.seconds[SLUICE_FORWARD] + p.seconds[SLUICE_BACKWARD];
}

static void tell_plan(sluice_tuner_table_t* table, const sluice_moe_t* moe, const sluice_plan_race_t* race,
                      int32_t why) {
  const sluice_plan_data_t* plan = &moe->plans->plans[race->pick];
  int32_t second = sluice_plan_race_second(race);
  int64_t rows = race->rows > 0 ? race->rows : plan->inputs.max_tokens * table->work.top_k;
  sluice_decision_t d = {
      .layer = table->layer,
      .work = table->work,
      .what = {.rows = rows,
               .why = why,
               .seconds = sluice_plan_race_seconds(race, race->pick),
               .predicted_seconds = plan_seconds(table->tuner, moe, plan, rows),
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
  record(table->tuner, &d);
}

/* A set that does not race is decided at once. */
static void decide_single(sluice_tuner_table_t* table, const sluice_moe_t* moe, const sluice_plan_race_t* race) {
  const sluice_tuner_t* tuner = table->tuner;
  int pinned = has_import(tuner, moe->fingerprint);
  if (pinned && !is_pinned(&table->tuner->base, moe, &moe->plans->plans[0])) {
    sluice_log(SLUICE_LOG_WARN, "layer %d: the imported plan does not fit this budget: another is chosen",
               moe->config.layer_id);
    pinned = 0;
  }
  if (race->count > 1) return;
  tell_plan(table, moe, race,
            pinned                    ? SLUICE_WHY_IMPORTED
            : may_predict(tuner, moe) ? SLUICE_WHY_PREDICTED
                                      : SLUICE_WHY_ONE_LEFT);
}

/* Layers with the same set share its race. */
static sluice_plan_race_t* race_of(sluice_tuner_table_t* table, const sluice_moe_t* moe) {
  sluice_racing_plan_t plans[SLUICE_RACE_PLANS];
  int32_t count = moe->plans->count;
  for (int32_t i = 0; i < count; ++i) plans[i] = racing_of(&moe->plans->plans[i]);
  uint64_t key = fnv1a(0xcbf29ce484222325u, plans, (size_t)count * sizeof *plans) | 1;
  for (int32_t i = 0; i < SLUICE_TUNER_RACES; ++i) {
    if (table->races[i].key == key) return &table->races[i].race;
  }
  sluice_tuner_race_t* place = &table->races[table->next_race++ % SLUICE_TUNER_RACES];
  place->key = key;
  sluice_plan_race_start(&place->race, plans, count);
  decide_single(table, moe, &place->race);
  return &place->race;
}

static int32_t choose_plan(sluice_chooser_t* chooser, const sluice_moe_t* moe, sluice_seat_t* seat) {
  (void)chooser;
  sluice_tuner_table_t* table = seat->table;
  sluice_plan_race_t* race = race_of(table, moe);
  int32_t plan = sluice_plan_race_next(race);
  if (plan != seat->plan) note_switch(table, seat);
  seat->plan = plan;
  seat->is_settled = race->is_settled;
  return plan;
}

/* Two exchanges of rows a chunk: there and back. */
static void note_forward(sluice_tuner_t* tuner, const sluice_moe_t* moe, int32_t num_chunks, int64_t rows,
                         const sluice_lanes_t* lanes) {
  const sluice_moe_config_t* c = &moe->config;
  if (c->callback_experts) return; /* their work is unknown */
  double w = moe->context->world_size, row_bytes = (double)c->model_width * (double)sluice_dtype_bytes(c->dtype);
  double share = sluice_layer_is_deduplicated(moe) ? sluice_parcels_share(c->num_experts, (int32_t)w, c->top_k) : 1;
  const sluice_seen_pass_t pass = {
      .flops = 2.0 * (double)rows * (double)c->model_width * (double)c->hidden_width * (moe->gate_factor + 1),
      .compute_seconds = lanes->compute * 1e-9,
      .bytes = 2 * (double)rows * row_bytes * share * (w - 1) / w,
      .comm_seconds = lanes->comm * 1e-9,
      .num_exchanges = 2 * num_chunks,
      .startup_seconds = lanes->startup * 1e-9,
  };
  sluice_seen_add(&tuner->seen, c->dtype, &pass);
}

/* Of passes with everything kept, as searches without a budget run them. */
static void note_for_fit(const sluice_tuner_table_t* table, int32_t direction, const sluice_pass_report_t* p,
                         int64_t rows, uint64_t ns, const sluice_lanes_t* lanes) {
  sluice_fitted_pass_t pass = {.work = table->work,
                               .num_chunks = p->num_chunks,
                               .wgrad_mode = p->wgrad_mode,
                               .direction = direction,
                               .seconds = (double)ns * 1e-9,
                               .compute = lanes->compute * 1e-9,
                               .comm = lanes->comm * 1e-9};
  double tokens = (double)rows / (pass.work.skew * pass.work.top_k);
  pass.work.num_tokens = tokens < 1 ? 1 : (int64_t)tokens;
  sluice_fitted_t** fitted = &table->tuner->fitted;
  if (*fitted == NULL) *fitted = sluice_alloc_zeroed(sluice_process_allocator(), sizeof **fitted, "passes of a fit");
  if (*fitted != NULL) sluice_fitted_add(*fitted, &pass); /* without memory nothing can be exported, no more */
}

static void agree_on_plan(const sluice_moe_t* moe, sluice_seat_t* seat, const sluice_step_report_t* const* reports,
                          int32_t world_size) {
  if (moe->plans == NULL || moe->plan_is_given) return;
  sluice_plan_race_t* race = race_of(seat->table, moe);
  for (int32_t direction = SLUICE_FORWARD; direction <= SLUICE_BACKWARD; ++direction) {
    sluice_lanes_t lanes;
    int64_t rows = 0;
    uint64_t ns = slowest(reports, world_size, direction, &rows, &lanes);
    int32_t plan = reports[0]->pass[direction].plan - 1;
    if (ns > 0 && is_first(seat, direction)) sluice_plan_race_count_switch(race, direction, plan, rows, ns);
    if (sluice_plan_race_observe(race, direction, plan, rows, ns)) {
      tell_plan(seat->table, moe, race, SLUICE_WHY_RACED);
    }
  }
  if (has_trained(reports, world_size) && sluice_plan_race_wait(race)) {
    tell_plan(seat->table, moe, race, SLUICE_WHY_RACED);
  }
}

static void agree(sluice_chooser_t* chooser, const sluice_moe_t* moe, sluice_seat_t* seat,
                  const sluice_step_report_t* const* reports, int32_t world_size) {
  sluice_tuner_table_t* table = seat->table;
  int64_t rows = 0, tokens = 0;
  for (int32_t r = 0; r < world_size; ++r) {
    if (reports[r]->rows > rows) rows = reports[r]->rows;
    if (reports[r]->num_tokens > tokens) tokens = reports[r]->num_tokens;
  }
  table->work.num_tokens = tokens;
  double balanced = (double)tokens * table->work.top_k;
  table->work.skew = balanced > 0 && (double)rows > balanced ? (double)rows / balanced : 1;
  for (int32_t direction = SLUICE_FORWARD; direction <= SLUICE_BACKWARD; ++direction) {
    int64_t pass_rows = 0;
    sluice_lanes_t lanes;
    uint64_t ns = slowest(reports, world_size, direction, &pass_rows, &lanes);
    const sluice_pass_report_t* p = &reports[0]->pass[direction];
    if (ns > 0 && direction == SLUICE_FORWARD) note_forward(tuner_of(chooser), moe, p->num_chunks, pass_rows, &lanes);
    int32_t size = ns == 0 ? 0 : sluice_search_size_of(p->num_chunks);
    if (p->plan > 0 || ns == 0 || sluice_search_chunks(&table->search, size) != p->num_chunks) continue;
    int32_t pick = size + SLUICE_SEARCH_SIZES * p->wgrad_mode;
    if (is_first(seat, direction)) {
      sluice_search_count_switch(&table->search, direction, pick, pass_rows, (double)ns * 1e-9);
    } else if (may_predict(tuner_of(chooser), moe)) {
      note_for_fit(table, direction, p, pass_rows, ns, &lanes);
    }
    sluice_search_observe(&table->search, direction, pick, pass_rows, ns, &lanes);
  }
  if (sluice_is_planned(moe)) {
    agree_on_plan(moe, seat, reports, world_size);
  } else {
    if (has_trained(reports, world_size)) sluice_search_wait(&table->search, rows);
    take(table, seat, rows);
  }
}

/* Balanced routing at the plan's most tokens; a plan's slots are bounded. */
static double price(sluice_chooser_t* chooser, const sluice_moe_t* moe, const sluice_plan_data_t* plan) {
  const sluice_tuner_t* tuner = tuner_of(chooser);
  if (!may_predict(tuner, moe)) return -1;
  sluice_workload_t work = work_of(moe);
  work.num_tokens = plan->inputs.max_tokens;
  if (sluice_layer_ceiling(moe) > 0) work.num_tokens = (plan->worst_rows + work.top_k - 1) / work.top_k; /* padding */
  const sluice_choice_t choice = {plan->num_chunks,       plan->restore_di, plan->restore_m, plan->wgrad_mode, 1,
                                  &plan->inputs.policies, plan->kept_chunks};
  sluice_step_prediction_t p;
  if (sluice_predict_step(&tuner->machine, &work, &choice, &p) != SLUICE_OK) return -1;
  return p.seconds[SLUICE_FORWARD] + p.seconds[SLUICE_BACKWARD];
}

static int32_t rates(sluice_chooser_t* chooser, const sluice_moe_t* moe, int64_t max_tokens,
                     sluice_plan_rates_t* out_rates) {
  sluice_tuner_table_t* table = moe->seat.table;
  if (moe->config.callback_experts) return 0;
  if (table->rated_tokens != max_tokens) {
    table->rated_tokens = max_tokens;
    table->is_rated = sluice_seen_rates(&tuner_of(chooser)->seen, moe->config.dtype, &table->rates);
  }
  *out_rates = table->rates;
  return table->is_rated;
}

static const sluice_chooser_vtable_t vtable = {.destroy = destroy,
                                               .attach = attach,
                                               .price = price,
                                               .rates = rates,
                                               .agree = agree,
                                               .num_rivals = num_rivals,
                                               .is_pinned = is_pinned,
                                               .choose_plan = choose_plan};

/* ---- installing ---- */

static int is_asked_for_decisions(void) {
  const char* log = getenv("SLUICE_LOG");
  return log != NULL && strstr(log, "decision") != NULL;
}

static uint64_t hash_of_imports(const sluice_tuner_t* tuner, uint64_t hash) {
  return tuner->num_imports > 0 ? fnv1a(hash, tuner->imports, (size_t)tuner->num_imports * sizeof *tuner->imports)
                                : hash;
}

static uint64_t state_of(const sluice_tuner_t* tuner) {
  uint64_t hash = hash_of_imports(tuner, fnv1a(FNV_BASIS, &tuner->mode, sizeof tuner->mode));
  return tuner->has_machine ? fnv1a(hash, &tuner->machine, sizeof tuner->machine) : hash;
}

static void describe(const sluice_tuner_t* tuner, char* text, size_t room) {
  static const char* const modes[] = {"adaptive", "profile", "model"};
  char machine[64] = "no machine", imports[48] = "no imported decisions";
  if (tuner->has_machine) {
    snprintf(machine, sizeof machine, "machine %.32s (%08x)", tuner->machine.name,
             (unsigned)fnv1a(FNV_BASIS, &tuner->machine, sizeof tuner->machine));
  }
  if (tuner->num_imports > 0) {
    snprintf(imports, sizeof imports, "%d imported decisions (%08x)", tuner->num_imports,
             (unsigned)hash_of_imports(tuner, FNV_BASIS));
  }
  snprintf(text, room, "mode %s, %s, %s", modes[tuner->mode], machine, imports);
}

void sluice_tuner_update_state(sluice_tuner_t* tuner) {
  tuner->base.state = state_of(tuner);
  describe(tuner, tuner->base.words, sizeof tuner->base.words);
}

sluice_status_t sluice_tuner_install(sluice_context_t* context) {
  sluice_tuner_t* tuner = sluice_alloc_zeroed(&context->allocator, sizeof *tuner, "tuner");
  if (tuner == NULL) return sluice_alloc_status();
  tuner->base.vtable = &vtable;
  tuner->allocator = &context->allocator;
  tuner->rank = context->rank;
  tuner->is_loud = is_asked_for_decisions();
  sluice_tuner_update_state(tuner);
  context->chooser = &tuner->base;
  return SLUICE_OK;
}

sluice_tuner_t* sluice_tuner_of(const sluice_context_t* context) {
  sluice_chooser_t* chooser = context->chooser;
  return chooser != NULL && chooser->vtable == &vtable ? tuner_of(chooser) : NULL;
}

sluice_status_t sluice_tuner_configure(sluice_tuner_t* tuner, int32_t mode, const sluice_machine_t* machine) {
  if (tuner->tables != NULL) {
    return SLUICE_FAIL(SLUICE_E_STATE, "tuner: layers have begun to choose; configure the tuner before making layers");
  }
  tuner->mode = mode;
  tuner->has_machine = machine != NULL;
  if (machine != NULL) tuner->machine = *machine;
  sluice_tuner_update_state(tuner);
  return SLUICE_OK;
}
