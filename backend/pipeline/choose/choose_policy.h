// SPDX-License-Identifier: Apache-2.0
/* The policy of a pipeline that leaves it open: chosen by simulation with measured times, together with what is in
 * flight.
 *
 * No rule is best everywhere. Where one stage is slower than the others a rule that runs whatever is ready fills what
 * is in flight with forwards too early, and 1F1B as an order that binds is faster at equal L; where messages are slow
 * it is the other way round. */
#ifndef SLUICE_BACKEND_PIPELINE_CHOOSE_CHOOSE_POLICY_H_
#define SLUICE_BACKEND_PIPELINE_CHOOSE_CHOOSE_POLICY_H_

#include "backend/pipeline/simulate/simulate.h"

/* Sets inout_spec->policy, which may be SLUICE_POLICY_OPEN as it comes. times NULL: the first in the order of
 * preference that takes the spec, its limits are left alone. With times: the first whose batch takes at most (1 +
 * tolerance) times the best; limits that were all open are set to what was chosen for it (choose.h). Rules come before
 * orders: they lose less where times vary. Thread-safe. Errors: INVALID_ARGUMENT (a spec or times out of range),
 * OVER_BUDGET (no policy fits; the message is that of the first), NO_MEMORY. */
sluice_status_t sluice_pipeline_choose_policy(sluice_pipeline_spec_t* inout_spec, const sluice_pipeline_times_t* times,
                                              double tolerance, sluice_allocator_t* allocator);

#endif /* SLUICE_BACKEND_PIPELINE_CHOOSE_CHOOSE_POLICY_H_ */
