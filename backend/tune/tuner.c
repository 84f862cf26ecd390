#include "backend/tune/tuner.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/log.h"
#include "backend/moe/layer.h"
#include "backend/moe/plan.h"

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
  const sluice_choice_t choice = {num_chunks, SLUICE_RESTORE_KEEP, SLUICE_RESTORE_KEEP, wgrad_mode, 0};
  double seconds = 0;
  if (sluice_predict_pass(&table->tuner->machine, &work, &choice, direction, &seconds) != SLUICE_OK) return 0;
  return seconds;
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
      .skew = 1,
  };
}

/* ---- decisions ---- */

static void print_decision(const sluice_tuner_t* tuner, const sluice_decision_t* d) {
  static const char* const modes[] = {"deferred", "per chunk"};
  const sluice_search_decision_t* w = &d->what;
  char text[320], next[96] = "";
  if (w->runner_up >= 0) {
    snprintf(next, sizeof next, "; next n %d, %s: %.3f ms", sluice_pick_chunks(w->runner_up),
             modes[sluice_pick_wgrad(w->runner_up)], 1e3 * w->runner_up_seconds);
  }
  snprintf(text, sizeof text,
           "sluice: decision: M %lld, H %lld, E %d, K %d, on %d ranks, %lld rows: n %d, weight gradients %s (%s; %d "
           "candidates in %lld passes; measured %.3f ms, predicted %.3f ms%s)",
           (long long)d->work.model_width, (long long)d->work.hidden_width, d->work.num_experts, d->work.top_k,
           d->work.world_size, (long long)w->rows, sluice_pick_chunks(w->pick), modes[sluice_pick_wgrad(w->pick)],
           sluice_tuner_why_name(w->why), w->num_raced, (long long)w->race_passes, 1e3 * w->seconds,
           1e3 * w->predicted_seconds, next);
  sluice_log(SLUICE_LOG_INFO, "%s", text);
  if (tuner->is_loud && tuner->rank == 0) fprintf(stderr, "%s\n", text);
}

static void decided(void* user, const sluice_search_decision_t* decision) {
  const sluice_tuner_table_t* table = user;
  sluice_tuner_t* tuner = table->tuner;
  sluice_decision_t* d = &tuner->decisions[tuner->num_decisions++ % SLUICE_TUNER_DECISIONS];
  *d = (sluice_decision_t){table->layer, table->work, *decision};
  print_decision(tuner, d);
}

/* ---- the chooser ---- */

static void destroy(sluice_chooser_t* chooser) {
  sluice_tuner_t* tuner = tuner_of(chooser);
  for (sluice_tuner_table_t *t = tuner->tables, *next; t != NULL; t = next) {
    next = t->next;
    sluice_free(tuner->allocator, t, sizeof *t);
  }
  sluice_free(tuner->allocator, tuner->imports, (uint64_t)tuner->max_imports * sizeof *tuner->imports);
  sluice_free(tuner->allocator, tuner, sizeof *tuner);
}

static int may_predict(const sluice_tuner_t* tuner, const sluice_moe_t* moe) {
  if (!tuner->has_machine || moe->config.callback_experts) return 0; /* what a host's expert takes is unknown */
  return sluice_machine_check_for(&tuner->machine, moe->config.dtype, moe->context->world_size) == SLUICE_OK;
}

static sluice_status_t new_table(sluice_tuner_t* tuner, const sluice_moe_t* moe, sluice_tuner_table_t** out_table) {
  sluice_tuner_table_t* table = sluice_alloc_zeroed(tuner->allocator, sizeof *table, "tuner's table");
  if (table == NULL) return sluice_alloc_status();
  table->layer = moe->fingerprint;
  table->tuner = tuner;
  table->work = work_of(moe);
  const sluice_search_config_t config = {
      .mode = tuner->mode,
      .max_size = SLUICE_SEARCH_SIZES - 1,
      /* Steps alone do not look at weight gradients: deferred is rarely beaten where memory is no concern. */
      .open_wgrad = moe->config.wgrad_mode == SLUICE_WGRAD_ADAPTIVE && may_predict(tuner, moe),
      .wgrad_mode = moe->config.wgrad_mode,
      .num_local = /* not this rank's own number: all ranks sketch alike */
      (moe->config.num_experts + moe->context->world_size - 1) / moe->context->world_size,
      .predict = may_predict(tuner, moe) ? predict : NULL,
      .user = table,
      .decided = decided,
  };
  sluice_search_init(&table->search, &config);
  for (int32_t i = 0; i < tuner->num_imports; ++i) {
    const sluice_import_t* import = &tuner->imports[i];
    if (import->layer == table->layer) sluice_search_answer(&table->search, import->rows, import->pick);
  }
  table->next = tuner->tables;
  tuner->tables = table;
  *out_table = table;
  return SLUICE_OK;
}

static void take(sluice_tuner_table_t* table, sluice_seat_t* seat, int64_t rows) {
  int32_t why = 0, pick = sluice_search_next(&table->search, rows, &why);
  table->num_switches += seat->num_chunks != sluice_pick_chunks(pick) || seat->wgrad_mode != sluice_pick_wgrad(pick);
  seat->num_chunks = sluice_pick_chunks(pick);
  seat->wgrad_mode = sluice_pick_wgrad(pick);
  seat->is_settled = why != SLUICE_WHY_ON_TRIAL && why != SLUICE_WHY_NOTHING_YET;
}

static sluice_status_t attach(sluice_chooser_t* chooser, const sluice_moe_t* moe, sluice_seat_t* seat) {
  sluice_tuner_t* tuner = tuner_of(chooser);
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
    if (p->pass_ns == 0 || p->num_chunks != first->num_chunks || p->wgrad_mode != first->wgrad_mode) return 0;
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

static void agree(sluice_chooser_t* chooser, const sluice_moe_t* moe, sluice_seat_t* seat,
                  const sluice_step_report_t* const* reports, int32_t world_size) {
  (void)chooser, (void)moe;
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
    int32_t size = ns == 0 ? 0 : sluice_search_size_of(p->num_chunks);
    if (ns == 0 || sluice_search_sizes[size] != p->num_chunks) continue;
    /* A forward knows no mode: it counts for whatever its backward will be. */
    int32_t mode = direction == SLUICE_FORWARD ? seat->wgrad_mode : p->wgrad_mode;
    sluice_search_observe(&table->search, direction, size + SLUICE_SEARCH_SIZES * mode, pass_rows, ns, &lanes);
  }
  take(table, seat, rows);
}

/* Balanced routing at the plan's most tokens; a plan's slots are bounded. */
static double price(sluice_chooser_t* chooser, const sluice_moe_t* moe, const sluice_plan_data_t* plan) {
  const sluice_tuner_t* tuner = tuner_of(chooser);
  if (!may_predict(tuner, moe)) return -1;
  sluice_workload_t work = work_of(moe);
  work.num_tokens = plan->inputs.max_tokens;
  const sluice_choice_t choice = {plan->num_chunks, plan->restore_di, plan->restore_m, plan->wgrad_mode, 1};
  sluice_step_prediction_t p;
  if (sluice_predict_step(&tuner->machine, &work, &choice, &p) != SLUICE_OK) return -1;
  return p.seconds[SLUICE_FORWARD] + p.seconds[SLUICE_BACKWARD];
}

static const sluice_chooser_vtable_t vtable = {.destroy = destroy, .attach = attach, .price = price, .agree = agree};

/* ---- installing ---- */

static int is_asked_for_decisions(void) {
  const char* log = getenv("SLUICE_LOG");
  return log != NULL && strstr(log, "decision") != NULL;
}

static uint64_t state_of(const sluice_tuner_t* tuner) {
  uint64_t hash = fnv1a(0xcbf29ce484222325u, &tuner->mode, sizeof tuner->mode);
  if (tuner->num_imports > 0) hash = fnv1a(hash, tuner->imports, (size_t)tuner->num_imports * sizeof *tuner->imports);
  return tuner->has_machine ? fnv1a(hash, &tuner->machine, sizeof tuner->machine) : hash;
}

void sluice_tuner_update_state(sluice_tuner_t* tuner) { tuner->base.state = state_of(tuner); }

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
