// SPDX-License-Identifier: Apache-2.0
#include "backend/pipeline/run/state.h"

#include <string.h>

#include "backend/base/hash.h"
#include "backend/base/math.h"
#include "backend/pipeline/build.h"
#include "backend/pipeline/choose/choose.h"

/* The accepted loss of time, relative to the best, for fewer micro-batches in flight. */
#define TOLERANCE 0.01
/* The gain that another policy must have over the preferred one, because times are measured in only one batch. */
#define POLICY_TOLERANCE 0.02

static void limit_to(sluice_pipeline_spec_t* spec) {
  for (int32_t c = 0; c < sluice_pipeline_num_virtual_stages(spec); ++c) {
    spec->in_flight[c] = sluice_min_i32(spec->in_flight[c], spec->num_micro_batches);
    spec->held[c] = sluice_min_i32(spec->held[c], spec->num_micro_batches);
  }
}

static int has_byte_limit(const sluice_pipeline_spec_t* spec) {
  for (int32_t s = 0; s < spec->num_stages; ++s) {
    if (spec->byte_limit[s] > 0) return 1;
  }
  return 0;
}

void sluice_stage_fill_times(const sluice_pipeline_spec_t* spec, const sluice_stage_times_t* measured,
                             sluice_pipeline_times_t* out_times) {
  *out_times = (sluice_pipeline_times_t){.is_buffered = 1};
  for (int32_t c = 0; c < sluice_pipeline_num_virtual_stages(spec); ++c) {
    out_times->forward_s[c] = measured == NULL ? 1 : measured[c].forward_s;
    out_times->backward_s[c] = measured == NULL ? (spec->separate_wgrad ? 1 : 2) : measured[c].backward_s;
    out_times->weight_s[c] = measured == NULL ? (spec->separate_wgrad ? 1 : 0) : measured[c].weight_s;
    out_times->latency_s[c] = measured == NULL ? 0 : measured[c].link_s;
  }
}

static sluice_status_t choose_limits(sluice_pipeline_spec_t* spec, const sluice_pipeline_times_t* times) {
  sluice_pipeline_choice_t choice;
  SLUICE_TRY(sluice_pipeline_choose(spec, times, TOLERANCE, sluice_process_allocator(), &choice));
  memcpy(spec->in_flight, choice.in_flight, sizeof spec->in_flight);
  memcpy(spec->held, choice.held, sizeof spec->held);
  return SLUICE_OK;
}

static sluice_status_t choose_policy(sluice_pipeline_spec_t* spec, const sluice_pipeline_times_t* times) {
  return sluice_pipeline_choose_policy(spec, times, POLICY_TOLERANCE, sluice_process_allocator());
}

/* Calls one of the two choices with the measured times. */
static sluice_status_t choose_by(sluice_status_t (*choice)(sluice_pipeline_spec_t*, const sluice_pipeline_times_t*),
                                 sluice_pipeline_spec_t* spec, const sluice_stage_times_t* measured) {
  for (int32_t c = 0; measured != NULL && c < sluice_pipeline_num_virtual_stages(spec); ++c) {
    spec->message_bytes[c] = measured[c].message_bytes;
  }
  sluice_pipeline_times_t* times = sluice_alloc(sluice_process_allocator(), sizeof *times, "pipeline: times");
  if (times == NULL) return sluice_alloc_status();
  sluice_stage_fill_times(spec, measured, times);
  const sluice_status_t status = choice(spec, times);
  sluice_free(sluice_process_allocator(), times, sizeof *times);
  return status;
}

/* Chooses an open policy; *out_has_limits: its limits were chosen as well. */
static sluice_status_t close_policy(sluice_pipeline_spec_t* spec, const sluice_stage_times_t* measured,
                                    int32_t* out_has_limits) {
  *out_has_limits = 0;
  if (spec->policy != SLUICE_POLICY_OPEN) return SLUICE_OK;
  if (measured == NULL) return choose_policy(spec, NULL);
  *out_has_limits = 1;
  return choose_by(choose_policy, spec, measured);
}

static sluice_status_t spec_of(const sluice_pipeline_spec_t* agreed, int32_t num_micro_batches, int32_t forward_only,
                               const sluice_stage_times_t* times, sluice_pipeline_spec_t* out_spec,
                               int32_t* out_is_chosen) {
  *out_spec = *agreed;
  *out_is_chosen = 0;
  out_spec->num_micro_batches = num_micro_batches;
  if (forward_only) {
    out_spec->forward_only = 1;
    out_spec->policy = SLUICE_POLICY_FORWARD_ONLY;
    out_spec->separate_wgrad = 0;
    memset(out_spec->byte_limit, 0, sizeof out_spec->byte_limit); /* no op waits for a backward */
  }
  SLUICE_TRY(sluice_pipeline_spec_check(out_spec));
  const int was_open = sluice_pipeline_is_open(out_spec);
  int32_t has_limits;
  SLUICE_TRY(close_policy(out_spec, times, &has_limits));
  SLUICE_TRY(sluice_policy_check(out_spec));
  const int may_choose = !sluice_policy(out_spec->policy)->is_planned && !forward_only && was_open;
  *out_is_chosen = may_choose && times != NULL;
  if (may_choose && !has_limits && (times != NULL || has_byte_limit(out_spec))) {
    SLUICE_TRY(choose_by(choose_limits, out_spec, times));
  }
  limit_to(out_spec);
  return SLUICE_OK;
}

/* ---- memory ---- */

static sluice_status_t take_memory(sluice_stage_plan_t* plan, int32_t stage) {
  const sluice_pipeline_spec_t* spec = &plan->program->spec;
  plan->first_op = plan->program->first_op[stage];
  plan->num_ops = plan->program->first_op[stage + 1] - plan->first_op;
  const uint64_t ops = (uint64_t)plan->num_ops;
  const uint64_t values =
      (uint64_t)spec->num_virtual * SLUICE_STAGE_VALUE_COUNT * (uint64_t)spec->num_micro_batches * sizeof *plan->values;
  const uint64_t records = ops * sizeof *plan->records, tags = ops * sizeof *plan->tags;
  plan->memory_bytes = values + records + tags + ops * sizeof *plan->ends;
  char* memory = sluice_alloc_zeroed(sluice_process_allocator(), plan->memory_bytes, "pipeline: a batch");
  if (memory == NULL) return sluice_alloc_status();
  plan->memory = memory;
  plan->values = (sluice_stage_value_t*)(void*)memory;
  plan->records = (sluice_stage_record_t*)(void*)(memory + values);
  plan->tags = (uint64_t*)(void*)(memory + values + records);
  plan->ends = (int32_t*)(void*)(memory + values + records + tags);
  return SLUICE_OK;
}

void sluice_stage_plan_reset(sluice_stage_plan_t* plan) {
  memset(plan->records, 0, (size_t)plan->num_ops * sizeof *plan->records);
  plan->num_ends = 0;
}

void sluice_stage_plan_free(sluice_stage_plan_t* plan) {
  sluice_free(sluice_process_allocator(), plan->memory, plan->memory_bytes);
  sluice_pipeline_program_destroy(plan->program, sluice_process_allocator());
  *plan = (sluice_stage_plan_t){.program = NULL};
}

sluice_status_t sluice_stage_plan_make(sluice_stage_plan_t* plan, const sluice_pipeline_spec_t* agreed, int32_t stage,
                                       int32_t num_micro_batches, int32_t forward_only,
                                       const sluice_stage_times_t* times) {
  if (plan->program != NULL && plan->num_micro_batches == num_micro_batches && plan->had_times == (times != NULL)) {
    return SLUICE_OK;
  }
  sluice_stage_plan_free(plan);
  sluice_pipeline_spec_t spec;
  int32_t is_chosen;
  SLUICE_TRY(spec_of(agreed, num_micro_batches, forward_only, times, &spec, &is_chosen));
  SLUICE_TRY(sluice_pipeline_program_build(&spec, sluice_process_allocator(), &plan->program));
  sluice_status_t status = take_memory(plan, stage);
  if (status != SLUICE_OK) {
    sluice_stage_plan_free(plan);
    return status;
  }
  plan->num_micro_batches = num_micro_batches;
  plan->had_times = times != NULL;
  plan->is_chosen = is_chosen;
  plan->fingerprint = sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, &plan->program->spec, sizeof plan->program->spec);
  return SLUICE_OK;
}
