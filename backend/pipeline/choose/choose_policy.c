// SPDX-License-Identifier: Apache-2.0
#include "backend/pipeline/choose/choose_policy.h"

#include <string.h>

#include "backend/pipeline/build.h"
#include "backend/pipeline/choose/choose.h"

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

static sluice_status_t simulate(trial_t* trial, const sluice_pipeline_times_t* times, sluice_allocator_t* allocator) {
  sluice_pipeline_program_t* program;
  SLUICE_TRY(sluice_pipeline_program_build(&trial->spec, allocator, &program));
  const sluice_status_t status = sluice_pipeline_simulate(program, times, allocator, &trial->result, NULL, NULL);
  sluice_pipeline_program_destroy(program, allocator);
  return status;
}

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
  return simulate(trial, times, allocator);
}

/* Returns whether only this candidate is refused. */
static int is_refusal(sluice_status_t status) {
  return status == SLUICE_E_INVALID_ARGUMENT || status == SLUICE_E_OVER_BUDGET;
}

static sluice_status_t try_all(sluice_pipeline_spec_t* spec, const sluice_pipeline_times_t* times, double tolerance,
                               sluice_allocator_t* allocator, trial_t* trial) {
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
  const sluice_status_t status = try_all(inout_spec, times, tolerance, allocator, trial);
  sluice_free(allocator, trial, sizeof *trial);
  return status;
}
