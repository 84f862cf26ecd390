// SPDX-License-Identifier: Apache-2.0
/* Chooses what a pipeline leaves open, by simulation with measured times: the number of micro-batches in flight on each
 * stage under a byte budget, and the policy.
 *
 * AxoNN takes L = p. That suffices while messages are fast: a micro-batch comes back after p(f + b) + 2(p - 1)c, and L
 * of them keep a stage busy if that is at most L(f + b), so slow links need more and bytes allow less. */
#pragma once

#include "backend/pipeline/simulate/simulate.h"

typedef struct sluice_pipeline_choice_s {
  int32_t limit; /* the chosen L, before stages were reduced to fit their bytes */
  int32_t in_flight[SLUICE_PIPELINE_MAX_VIRTUAL_STAGES]; /* for the spec */
  int32_t held[SLUICE_PIPELINE_MAX_VIRTUAL_STAGES];
  uint64_t bytes[SLUICE_PIPELINE_MAX_STAGES]; /* of all slots, by stage; at most byte_limit */
  double makespan_s;                          /* with these limits */
  double best_s;                              /* with the best of the tried limits */
  int32_t num_tried;
} sluice_pipeline_choice_t;

/* Chooses the smallest L whose batch takes at most (1 + tolerance) times the best, reduced on each stage to what its
 * byte_limit allows and to what the stage uses. in_flight of the spec is ignored; held, if given, is a maximum. Every L
 * up to 16 is tried, then steps of a quarter, up to m. Thread-safe. Errors: INVALID_ARGUMENT (a spec or times out of
 * range, a tolerance below 0, a policy whose order fixes what is in flight), OVER_BUDGET (not one micro-batch fits; the
 * message names the stage), NO_MEMORY. */
sluice_status_t sluice_pipeline_choose(const sluice_pipeline_spec_t* spec, const sluice_pipeline_times_t* times,
                                       double tolerance, sluice_allocator_t* allocator,
                                       sluice_pipeline_choice_t* out_choice);

/* Sets inout_spec->policy, which may be SLUICE_POLICY_OPEN on entry. times NULL: takes the first policy in order of
 * preference that supports the spec, and leaves its limits alone. With times: takes the first whose batch takes at most
 * (1 + tolerance) times the best; if all limits were open, they are set to those chosen for it. Rules come
 * before orders, because they lose less when times vary. Thread-safe. Errors: INVALID_ARGUMENT (a spec or times out of
 * range), OVER_BUDGET (no policy fits; the message is that of the first), NO_MEMORY. */
sluice_status_t sluice_pipeline_choose_policy(sluice_pipeline_spec_t* inout_spec, const sluice_pipeline_times_t* times,
                                              double tolerance, sluice_allocator_t* allocator);
