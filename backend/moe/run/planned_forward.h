// SPDX-License-Identifier: Apache-2.0
/* A forward under a plan: from the handshake to a binding whose chunks fit. Private to moe. */
#ifndef SLUICE_BACKEND_MOE_RUN_PLANNED_FORWARD_H_
#define SLUICE_BACKEND_MOE_RUN_PLANNED_FORWARD_H_

#include "backend/moe/run/forward_call.h"
#include "backend/moe/run/active_plan.h"

/* What the context takes besides what its plan counts, with the layers that are still to come. Hosts may make a model's
 * layers one by one, each at its first forward, and say how many there will be: plans that have filled the budget would
 * leave them no room. With device memory layers lie in the host's memory, which has no budget. */
uint64_t sluice_planned_base_bytes(const sluice_moe_t* moe);

/* Whether one more forward may be kept under the plan in force, in its budgets, whatever its routing, beside the bytes
 * that outstanding forwards hold (and of those, in the host pool): the most of any rank, so that all ranks refuse alike
 * before any row is sent. In place of an allocator that would refuse in the middle of a pass. OVER_BUDGET. */
sluice_status_t sluice_planned_check_room(const sluice_moe_t* moe, uint64_t held, uint64_t held_pool);

/* Whether dgrad of a backward may leave its gradient rows for wgrad under the plan in force, on this
 * rank; measures the pass. Errors: UNSUPPORTED, where the plan does not count them; OVER_BUDGET. */
sluice_status_t sluice_planned_check_pass(sluice_pass_t* pass);
/* Of a backward whose forward may have run without a plan. */
int32_t sluice_planned_wgrad_mode(const sluice_moe_t* moe, const sluice_binding_t* binding);

/* What this rank has, for the header. */
void sluice_planned_propose(const sluice_forward_t* f, sluice_proposal_t* proposal);

/* A plan for batches as large as that of the rank with most tokens, made and installed if there is none of their size.
 * Fails alike on all ranks, but for NO_MEMORY. repeated: the one of that forward; NULL: whichever is chosen. */
sluice_status_t sluice_planned_take(sluice_forward_t* f, const sluice_handshake_t* handshake,
                                    const sluice_replay_forward_t* repeated);

/* Cuts by received rows (one all-reduce), orders the routes and exchanges counts. Collective. Fills the binding and its
 * restore policies; sluice_binding_finish is still to come. counts: of sluice_routes_t.look, on the pass's
 * `stream`. */
sluice_status_t sluice_planned_bind(sluice_moe_t* moe, sluice_stream_t stream, const sluice_tensor_t* expert_ids,
                                    const int32_t* counts, int keep, sluice_binding_t* out_binding);

/* Writes down in the binding under which plan the forward runs. */
void sluice_planned_note(const sluice_moe_t* moe, sluice_binding_t* binding);

#endif /* SLUICE_BACKEND_MOE_RUN_PLANNED_FORWARD_H_ */
