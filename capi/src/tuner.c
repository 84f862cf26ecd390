// SPDX-License-Identifier: Apache-2.0
/* The public calls of a context's tuner. */
#include "sluice/tuner.h"

#include <string.h>

#include "backend/base/structs.h"
#include "backend/tune/decisions_json.h"
#include "backend/tune/tuner.h"
#include "capi/src/planner.h"

SLUICE_DEFINE_INIT(sluice_tuner_config, 0)

sluice_status_t sluice_context_tune(sluice_context_t* context, const sluice_tuner_config_t* config) {
  SLUICE_TRY(SLUICE_REQUIRE(context != NULL, "sluice_context_tune: context is NULL"));
  SLUICE_READ_EXTENSIBLE(sluice_tuner_config, c, config, sizeof c);
  SLUICE_TRY(SLUICE_REQUIRE(c.mode >= SLUICE_TUNER_ADAPTIVE && c.mode <= SLUICE_TUNER_MODEL,
                            "tuner: mode is %d; known are adaptive (0), profile (1) and model (2)", c.mode));
  SLUICE_TRY(SLUICE_REQUIRE(c.mode != SLUICE_TUNER_MODEL || c.machine != NULL,
                            "tuner: mode model needs a machine: calibrate or give a profile, or use mode adaptive"));
  SLUICE_TRY(SLUICE_REQUIRE(c.reserved == 0, "tuner: reserved is %d; set it to 0", c.reserved));
  SLUICE_TRY(sluice_engine_enter(context, "sluice_context_tune"));
  sluice_tuner_t* tuner = sluice_tuner_of(context);
  sluice_status_t status = SLUICE_OK;
  if (tuner != NULL) {
    status = sluice_tuner_configure(tuner, c.mode, c.machine != NULL ? sluice_planner_machine(c.machine) : NULL);
  }
  sluice_engine_leave(context);
  return status;
}

static sluice_tuner_decision_t public_decision(const sluice_decision_t* d) {
  const sluice_search_decision_t* w = &d->what;
  return (sluice_tuner_decision_t){
      .model_width = d->work.model_width,
      .hidden_width = d->work.hidden_width,
      .num_experts = d->work.num_experts,
      .top_k = d->work.top_k,
      .dtype = d->work.dtype,
      .gated = d->work.gate_factor > 1,
      .rows = w->rows,
      .num_chunks = d->chosen.num_chunks,
      .wgrad_mode = d->chosen.wgrad_mode,
      .why = w->why,
      .num_raced = w->num_raced,
      .race_passes = w->race_passes,
      .seconds = w->seconds,
      .predicted_seconds = w->predicted_seconds,
      .runner_up_seconds = w->runner_up_seconds,
      .runner_up_chunks = d->second.num_chunks,
      .runner_up_wgrad_mode = d->second.wgrad_mode,
  };
}

/* Writes one decision. A call writes every decision that is kept: the newest SLUICE_TUNER_DECISIONS of all. */
typedef void (*tell_t)(const sluice_decision_t* d, void* out, int64_t at);

static sluice_status_t tell_decisions(sluice_context_t* context, const char* call, tell_t tell, void* out,
                                      int32_t capacity, int32_t* out_count) {
  SLUICE_TRY(SLUICE_REQUIRE(context != NULL && out_count != NULL, "%s: %s is NULL", call,
                            context == NULL ? "context" : "out_count"));
  SLUICE_TRY(SLUICE_REQUIRE(capacity >= 0 && (capacity == 0 || out != NULL), "%s: capacity is %d and the array %s",
                            call, capacity, out == NULL ? "NULL" : "given"));
  *out_count = 0;
  SLUICE_TRY(sluice_engine_enter(context, call));
  const sluice_tuner_t* tuner = sluice_tuner_of(context);
  const int64_t made = tuner == NULL ? 0 : tuner->num_decisions;
  const int64_t first = made > SLUICE_TUNER_DECISIONS ? made - SLUICE_TUNER_DECISIONS : 0;
  *out_count = (int32_t)(made - first);
  for (int64_t i = first; i < made && i - first < capacity; ++i) {
    tell(&tuner->decisions[i % SLUICE_TUNER_DECISIONS], out, i - first);
  }
  sluice_engine_leave(context);
  return SLUICE_OK;
}

static void tell_decision(const sluice_decision_t* d, void* out, int64_t at) {
  ((sluice_tuner_decision_t*)out)[at] = public_decision(d);
}

static void tell_policy(const sluice_decision_t* d, void* out, int64_t at) {
  int has_second = d->second.num_chunks > 0;
  ((sluice_tuner_policy_t*)out)[at] = (sluice_tuner_policy_t){
      .restore_input = d->chosen.restore_input,
      .restore_pre_activation = d->chosen.restore_pre_activation,
      .runner_up_restore_input = has_second ? d->second.restore_input : SLUICE_RESTORE_ADAPTIVE,
      .runner_up_restore_pre_activation = has_second ? d->second.restore_pre_activation : SLUICE_RESTORE_ADAPTIVE,
      .memory_budget = d->budget,
      .total_bytes = d->total_bytes,
  };
}

static void tell_part(const sluice_decision_t* d, void* out, int64_t at) { ((int32_t*)out)[at] = d->kept_chunks; }

static void tell_form(const sluice_decision_t* d, void* out, int64_t at) {
  const int has_second = d->second.num_chunks > 0;
  ((sluice_tuner_form_t*)out)[at] = (sluice_tuner_form_t){
      .chose_deduplication = d->chose_deduplication,
      .deduplicate = sluice_tuner_deduplication_of(&d->work, d->form),
      .grouped = d->form == SLUICE_FORM_GROUPED,
      .runner_up_deduplicate = has_second ? sluice_tuner_deduplication_of(&d->work, d->second_form) : 0,
      .runner_up_grouped = has_second && d->second_form == SLUICE_FORM_GROUPED,
      .runner_up_predicted_seconds = (double)d->second_predicted,
  };
}

sluice_status_t sluice_context_decisions(sluice_context_t* context, sluice_tuner_decision_t* out_decisions,
                                         int32_t capacity, int32_t* out_count) {
  return tell_decisions(context, "sluice_context_decisions", tell_decision, out_decisions, capacity, out_count);
}

sluice_status_t sluice_context_decided_policies(sluice_context_t* context, sluice_tuner_policy_t* out_policies,
                                                int32_t capacity, int32_t* out_count) {
  return tell_decisions(context, "sluice_context_decided_policies", tell_policy, out_policies, capacity, out_count);
}

sluice_status_t sluice_context_decided_parts(sluice_context_t* context, int32_t* out_kept_chunks, int32_t capacity,
                                             int32_t* out_count) {
  return tell_decisions(context, "sluice_context_decided_parts", tell_part, out_kept_chunks, capacity, out_count);
}

sluice_status_t sluice_context_decided_forms(sluice_context_t* context, sluice_tuner_form_t* out_forms,
                                             int32_t capacity, int32_t* out_count) {
  return tell_decisions(context, "sluice_context_decided_forms", tell_form, out_forms, capacity, out_count);
}

sluice_status_t sluice_context_write_decisions(sluice_context_t* context, char* text, uint64_t* inout_bytes) {
  SLUICE_TRY(SLUICE_REQUIRE(context != NULL && inout_bytes != NULL, "sluice_context_write_decisions: %s is NULL",
                            context == NULL ? "context" : "inout_bytes"));
  SLUICE_TRY(sluice_engine_enter(context, "sluice_context_write_decisions"));
  const sluice_tuner_t* tuner = sluice_tuner_of(context);
  uint64_t room = *inout_bytes, needed = sluice_tuner_write(tuner, NULL, 0) + 1;
  *inout_bytes = needed;
  if (text != NULL && room >= needed) sluice_tuner_write(tuner, text, room);
  sluice_engine_leave(context);
  return SLUICE_REQUIRE(text == NULL || room >= needed,
                        "sluice_context_write_decisions: room for %llu bytes, the text has %llu",
                        (unsigned long long)room, (unsigned long long)needed);
}

sluice_status_t sluice_context_read_decisions(sluice_context_t* context, const char* text, uint64_t length) {
  SLUICE_TRY(SLUICE_REQUIRE(context != NULL && text != NULL, "sluice_context_read_decisions: %s is NULL",
                            context == NULL ? "context" : "text"));
  SLUICE_TRY(SLUICE_REQUIRE(length <= 1 << 24, "sluice_context_read_decisions: %llu bytes; at most 16 MiB",
                            (unsigned long long)length));
  SLUICE_TRY(sluice_engine_enter(context, "sluice_context_read_decisions"));
  sluice_tuner_t* tuner = sluice_tuner_of(context);
  sluice_status_t status =
      tuner != NULL ? sluice_tuner_read(tuner, text, length)
                    : SLUICE_FAIL(SLUICE_E_UNSUPPORTED, "sluice_context_read_decisions: this context has no tuner");
  sluice_engine_leave(context);
  return status;
}

static sluice_status_t refined_machine(const sluice_tuner_t* tuner, sluice_machine_t* out_machine) {
  if (tuner == NULL || !tuner->has_machine) {
    return SLUICE_FAIL(
        SLUICE_E_STATE,
        "sluice_context_write_machine: the context's tuner has no machine; pass one to sluice_context_tune");
  }
  return sluice_machine_refine(tuner->timed_passes, &tuner->machine, out_machine);
}

sluice_status_t sluice_context_write_machine(sluice_context_t* context, char* text, uint64_t* inout_bytes) {
  SLUICE_TRY(SLUICE_REQUIRE(context != NULL && inout_bytes != NULL, "sluice_context_write_machine: %s is NULL",
                            context == NULL ? "context" : "inout_bytes"));
  SLUICE_TRY(sluice_engine_enter(context, "sluice_context_write_machine"));
  sluice_machine_t machine;
  sluice_status_t status = refined_machine(sluice_tuner_of(context), &machine);
  sluice_engine_leave(context);
  SLUICE_TRY(status);
  uint64_t room = *inout_bytes, needed = sluice_machine_write(&machine, NULL, 0) + 1;
  *inout_bytes = needed;
  if (text == NULL) return SLUICE_OK;
  SLUICE_TRY(SLUICE_REQUIRE(room >= needed, "sluice_context_write_machine: room for %llu bytes, the machine has %llu",
                            (unsigned long long)room, (unsigned long long)needed));
  sluice_machine_write(&machine, text, room);
  return SLUICE_OK;
}

static void add_stats(const sluice_tuner_table_t* table, sluice_tuner_stats_t* sum) {
  const sluice_search_stats_t* s = &table->search.stats;
  sum->timed_passes += s->timed_passes;
  sum->race_passes += s->race_passes;
  sum->num_decisions += s->num_decisions;
  sum->num_switches += table->num_switches;
  sum->num_questioned += s->num_questioned;
  sum->num_changed += s->num_changed;
  sum->monotonic += s->monotonic;
  sum->not_monotonic += s->not_monotonic;
  sum->one_valley += s->one_valley;
  sum->not_one_valley += s->not_one_valley;
  sum->total_seconds += s->total_seconds;
  sum->excess_seconds += s->excess_seconds;
  sum->switch_seconds += s->switch_seconds;
  sum->num_decisions += table->num_plan_decisions;
  for (int32_t i = 0; i < SLUICE_TUNER_RACES; ++i) {
    const sluice_plan_race_t* race = &table->races[i].race;
    sum->timed_passes += race->timed;
    sum->race_passes += race->passes;
    sum->total_seconds += race->total_ns * 1e-9;
    sum->excess_seconds += race->excess_ns * 1e-9;
    sum->switch_seconds += race->switch_ns * 1e-9;
  }
}

sluice_status_t sluice_context_tuner_stats(sluice_context_t* context, sluice_tuner_stats_t* out_stats) {
  SLUICE_TRY(SLUICE_REQUIRE(context != NULL && out_stats != NULL, "sluice_context_tuner_stats: %s is NULL",
                            context == NULL ? "context" : "out_stats"));
  SLUICE_TRY(sluice_struct_check_size(out_stats, "sluice_tuner_stats_t"));
  SLUICE_TRY(sluice_engine_enter(context, "sluice_context_tuner_stats"));
  sluice_tuner_stats_t stats;
  memset(&stats, 0, sizeof stats);
  const sluice_tuner_t* tuner = sluice_tuner_of(context);
  for (const sluice_tuner_table_t* t = tuner == NULL ? NULL : tuner->tables; t != NULL; t = t->next) {
    add_stats(t, &stats);
  }
  sluice_engine_leave(context);
  sluice_struct_give(out_stats, &stats, sizeof stats);
  return SLUICE_OK;
}
