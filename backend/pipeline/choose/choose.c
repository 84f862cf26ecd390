// SPDX-License-Identifier: Apache-2.0
#include "backend/pipeline/choose/choose.h"

#include <string.h>

#include "backend/base/math.h"
#include "backend/pipeline/build.h"

/* ---- micro-batches in flight ---- */

#define EVERY_LIMIT_UP_TO 16

/* held_of: the host's maximum of held micro-batches, by virtual stage; 0: no limit. */
static void set_stage(sluice_pipeline_spec_t* spec, const int32_t* held_of, int32_t stage, int32_t limit) {
  for (int32_t k = 0; k < spec->num_virtual; ++k) {
    int32_t c = sluice_pipeline_virtual_stage(spec, stage, k);
    spec->in_flight[c] = limit;
    spec->held[c] = held_of[c] > 0 ? sluice_min_i32(limit, held_of[c]) : limit;
  }
}

static int fits(const sluice_pipeline_spec_t* spec, int32_t stage) {
  return spec->byte_limit[stage] == 0 || sluice_pipeline_stage_bytes(spec, stage) <= spec->byte_limit[stage];
}

/* Sets L on every stage, less if its bytes require that, and at least 1: the builder refuses a 1 that does not fit. */
static void set_limits(sluice_pipeline_spec_t* spec, const int32_t* held_of, int32_t limit) {
  for (int32_t s = 0; s < spec->num_stages; ++s) {
    int32_t most = limit;
    for (set_stage(spec, held_of, s, most); most > 1 && !fits(spec, s); set_stage(spec, held_of, s, most)) --most;
  }
}

static sluice_status_t try_limits(const sluice_pipeline_spec_t* spec, const sluice_pipeline_times_t* times,
                                  sluice_allocator_t* allocator, sluice_pipeline_result_t* out_result) {
  sluice_pipeline_program_t* program;
  SLUICE_TRY(sluice_pipeline_program_build(spec, allocator, &program));
  sluice_status_t status = sluice_pipeline_simulate(program, times, allocator, out_result, NULL, NULL);
  sluice_pipeline_program_destroy(program, allocator);
  return status;
}

static int32_t next_limit(int32_t limit, int32_t num_micro_batches) {
  if (limit == num_micro_batches) return limit + 1;
  int32_t step = limit < EVERY_LIMIT_UP_TO ? 1 : limit / 4;
  return (int32_t)sluice_min(limit + step, num_micro_batches);
}

/* Returns whether two specs have different limits. */
static int differs(const sluice_pipeline_spec_t* a, const sluice_pipeline_spec_t* b) {
  return memcmp(a->in_flight, b->in_flight, sizeof a->in_flight) != 0;
}

/* Reduces limits to what was used, if the batch then takes no longer: fewer slots hold fewer inputs too. */
static sluice_status_t trim(sluice_pipeline_spec_t* spec, const sluice_pipeline_times_t* times,
                            sluice_allocator_t* allocator, sluice_pipeline_result_t* result) {
  sluice_pipeline_spec_t less = *spec;
  for (int32_t c = 0; c < sluice_pipeline_num_virtual_stages(spec); ++c) {
    less.in_flight[c] = (int32_t)sluice_max(1, result->most_in_flight[c]);
    int32_t most_held = result->stages[sluice_pipeline_stage_of(spec, c)].most_held;
    less.held[c] = (int32_t)sluice_max(1, sluice_min(spec->held[c], most_held));
  }
  sluice_pipeline_result_t trimmed;
  SLUICE_TRY(try_limits(&less, times, allocator, &trimmed));
  if (trimmed.makespan_s > result->makespan_s) return SLUICE_OK;
  *spec = less;
  *result = trimmed;
  return SLUICE_OK;
}

static sluice_status_t try_all(const sluice_pipeline_spec_t* spec, const sluice_pipeline_times_t* times,
                               sluice_allocator_t* allocator, sluice_pipeline_choice_t* choice, double wanted_s) {
  sluice_pipeline_spec_t now = *spec, last = *spec;
  sluice_pipeline_result_t result;
  for (int32_t limit = 1; limit <= spec->num_micro_batches; limit = next_limit(limit, spec->num_micro_batches)) {
    set_limits(&now, spec->held, limit);
    if (limit > 1 && !differs(&now, &last)) return SLUICE_OK; /* no stage has bytes for more */
    last = now;
    SLUICE_TRY(try_limits(&now, times, allocator, &result));
    ++choice->num_tried;
    if (limit == 1 || result.makespan_s < choice->best_s) choice->best_s = result.makespan_s;
    if (result.makespan_s > wanted_s) continue;
    choice->limit = limit;
    SLUICE_TRY(trim(&now, times, allocator, &result));
    choice->makespan_s = result.makespan_s;
    memcpy(choice->in_flight, now.in_flight, sizeof choice->in_flight);
    memcpy(choice->held, now.held, sizeof choice->held);
    for (int32_t s = 0; s < spec->num_stages; ++s) choice->bytes[s] = sluice_pipeline_stage_bytes(&now, s);
    return SLUICE_OK;
  }
  return SLUICE_OK;
}

sluice_status_t sluice_pipeline_choose(const sluice_pipeline_spec_t* spec, const sluice_pipeline_times_t* times,
                                       double tolerance, sluice_allocator_t* allocator,
                                       sluice_pipeline_choice_t* out_choice) {
  *out_choice = (sluice_pipeline_choice_t){.limit = 0};
  SLUICE_TRY(sluice_pipeline_spec_check(spec));
  SLUICE_TRY(sluice_policy_check(spec));
  SLUICE_TRY(SLUICE_REQUIRE(tolerance >= 0, "pipeline: tolerance is %g; give at least 0", tolerance));
  const sluice_policy_t* policy = sluice_policy(spec->policy);
  SLUICE_TRY(SLUICE_REQUIRE(!policy->is_planned,
                            "pipeline: policy %s has a fixed number of micro-batches in flight; choose a policy that "
                            "runs ops as they become ready",
                            policy->name));
  sluice_pipeline_spec_t open = *spec;
  memset(open.in_flight, 0, sizeof open.in_flight);
  /* The first pass finds the best time, the second one stops at the first limit that is close to it. */
  SLUICE_TRY(try_all(&open, times, allocator, out_choice, -1));
  double best_s = out_choice->best_s;
  int32_t num_tried = out_choice->num_tried;
  SLUICE_TRY(try_all(&open, times, allocator, out_choice, best_s * (1 + tolerance)));
  out_choice->best_s = best_s;
  out_choice->num_tried = num_tried;
  return SLUICE_OK;
}

/* ---- the policy ---- */

/* No rule is always best. If one stage is slower than the others, a rule that runs whatever is ready uses the slots too
 * early for forwards, and 1F1B as a binding order is faster at equal L; if messages are slow it is the other way
 * round. */

/* In order of preference. GPipe is omitted: it is never faster than 1F1B, and takes more bytes. */
static const int32_t candidates[] = {
    SLUICE_POLICY_1F1B_HINT, SLUICE_POLICY_BACKWARD_FIRST, SLUICE_POLICY_MESSAGE_DRIVEN,
    SLUICE_POLICY_1F1B,      SLUICE_POLICY_ZERO_BUBBLE,    SLUICE_POLICY_LOOPED,
    SLUICE_POLICY_V};
#define NUM_CANDIDATES (int32_t)(sizeof candidates / sizeof candidates[0])

/* The accepted loss of time, relative to the best, for fewer micro-batches in flight. */
#define LIMIT_TOLERANCE 0.01

/* A candidate with its limits. Too large for the stack. */
typedef struct trial_s {
  sluice_pipeline_spec_t spec;
  sluice_pipeline_choice_t choice;
  sluice_pipeline_result_t result;
} trial_t;

static sluice_status_t try_policy(const sluice_pipeline_spec_t* spec, int32_t policy,
                                  const sluice_pipeline_times_t* times, sluice_allocator_t* allocator, trial_t* trial) {
  trial->spec = *spec;
  trial->spec.policy = policy;
  SLUICE_TRY(sluice_policy_check(&trial->spec));
  if (sluice_pipeline_is_open(spec) && !sluice_policy(policy)->is_planned) {
    SLUICE_TRY(sluice_pipeline_choose(&trial->spec, times, LIMIT_TOLERANCE, allocator, &trial->choice));
    memcpy(trial->spec.in_flight, trial->choice.in_flight, sizeof trial->spec.in_flight);
    memcpy(trial->spec.held, trial->choice.held, sizeof trial->spec.held);
  }
  return try_limits(&trial->spec, times, allocator, &trial->result);
}

/* Returns whether only this candidate is refused. */
static int is_refusal(sluice_status_t status) {
  return status == SLUICE_E_INVALID_ARGUMENT || status == SLUICE_E_OVER_BUDGET;
}

static sluice_status_t try_policies(sluice_pipeline_spec_t* spec, const sluice_pipeline_times_t* times,
                                    double tolerance, sluice_allocator_t* allocator, trial_t* trial) {
  double seconds[NUM_CANDIDATES], best = -1;
  int32_t told =
      0; /* index of the refusal that is returned if all are refused: one for bytes is preferred to one for the shape */
  sluice_status_t status_of[NUM_CANDIDATES];
  for (int32_t i = 0; i < NUM_CANDIDATES; ++i) {
    const sluice_status_t status = try_policy(spec, candidates[i], times, allocator, trial);
    if (status != SLUICE_OK && !is_refusal(status)) return status;
    status_of[i] = status;
    if (status == SLUICE_E_OVER_BUDGET && status_of[told] != SLUICE_E_OVER_BUDGET) told = i;
    seconds[i] = status == SLUICE_OK ? trial->result.makespan_s : -1;
    if (seconds[i] >= 0 && (best < 0 || seconds[i] < best)) best = seconds[i];
  }
  if (best < 0) return try_policy(spec, candidates[told], times, allocator, trial);
  int32_t taken = 0;
  while (seconds[taken] < 0 || seconds[taken] > best * (1 + tolerance)) ++taken;
  SLUICE_TRY(try_policy(spec, candidates[taken], times, allocator, trial));
  *spec = trial->spec;
  return SLUICE_OK;
}

static sluice_status_t take_first(sluice_pipeline_spec_t* spec) {
  sluice_status_t status = SLUICE_OK;
  for (int32_t i = 0; i < NUM_CANDIDATES; ++i) {
    spec->policy = candidates[i];
    status = sluice_policy_check(spec);
    if (status == SLUICE_OK) break;
  }
  return status;
}

sluice_status_t sluice_pipeline_choose_policy(sluice_pipeline_spec_t* inout_spec, const sluice_pipeline_times_t* times,
                                              double tolerance, sluice_allocator_t* allocator) {
  SLUICE_TRY(sluice_pipeline_spec_check(inout_spec));
  SLUICE_TRY(SLUICE_REQUIRE(tolerance >= 0, "pipeline: tolerance is %g; give at least 0", tolerance));
  if (times == NULL) return take_first(inout_spec);
  trial_t* trial = sluice_alloc(allocator, sizeof *trial, "pipeline: the choice of a policy");
  if (trial == NULL) return sluice_alloc_status();
  const sluice_status_t status = try_policies(inout_spec, times, tolerance, allocator, trial);
  sluice_free(allocator, trial, sizeof *trial);
  return status;
}
