// SPDX-License-Identifier: Apache-2.0
/* Chooses the policy of a pipeline that leaves it open, by simulation with measured times, together with the number of
 * micro-batches in flight.
 *
 * No rule is always best. If one stage is slower than the others, a rule that runs whatever is ready uses the slots too
 * early for forwards, and 1F1B as a binding order is faster at equal L; if messages are slow it is the other way
 * round. */
#pragma once

#include "backend/pipeline/simulate/simulate.h"

/* Sets inout_spec->policy, which may be SLUICE_POLICY_OPEN on entry. times NULL: takes the first policy in order of
 * preference that supports the spec, and leaves its limits alone. With times: takes the first whose batch takes at most
 * (1 + tolerance) times the best; if all limits were open, they are set to those chosen for it (choose.h). Rules come
 * before orders, because they lose less when times vary. Thread-safe. Errors: INVALID_ARGUMENT (a spec or times out of
 * range), OVER_BUDGET (no policy fits; the message is that of the first), NO_MEMORY. */
sluice_status_t sluice_pipeline_choose_policy(sluice_pipeline_spec_t* inout_spec, const sluice_pipeline_times_t* times,
                                              double tolerance, sluice_allocator_t* allocator);
