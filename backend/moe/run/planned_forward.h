// SPDX-License-Identifier: Apache-2.0
/* A forward under a plan: from the handshake to a binding whose chunks fit. Private to moe. */
#pragma once

#include "backend/moe/run/forward_call.h"
#include "backend/moe/run/active_plan.h"

/* Bytes that the context takes besides those its plan counts, including layers still to be made: hosts may make layers
 * one by one, each at its first forward, and announce their number; a plan that fills the budget would leave them no
 * room. With device memory, layers lie in host memory, which has no budget. */
uint64_t sluice_planned_base_bytes(const sluice_moe_t* moe);

/* Whether one more forward fits into the budgets of the plan in force, whatever its routing, besides the bytes that
 * outstanding forwards hold (held_pool: of these, in the host pool). Both are the most of any rank, so that all ranks
 * refuse before any row is sent, instead of one allocator in the middle of a pass. OVER_BUDGET. */
sluice_status_t sluice_planned_check_room(const sluice_moe_t* moe, uint64_t held, uint64_t held_pool);

/* Whether dgrad of a backward may leave its gradient rows for wgrad under the plan in force, on this rank; measures the
 * pass. Errors: UNSUPPORTED if the plan does not count them; OVER_BUDGET. */
sluice_status_t sluice_planned_check_pass(sluice_pass_t* pass);
/* The wgrad mode of a backward whose forward may have run without a plan. */
int32_t sluice_planned_wgrad_mode(const sluice_moe_t* moe, const sluice_binding_t* binding);

/* Fills in what this rank holds, for the header. */
void sluice_planned_propose(const sluice_forward_t* f, sluice_proposal_t* proposal);

/* Takes a plan for the largest number of tokens of any rank; makes and installs one if there is none of this size.
 * Fails on all ranks or none, except for NO_MEMORY. repeated: take the plan of that forward; NULL: the chosen plan. */
sluice_status_t sluice_planned_take(sluice_forward_t* f, const sluice_handshake_t* handshake,
                                    const sluice_replay_forward_t* repeated);

/* Cuts chunks by received rows (one all-reduce), orders the routes and exchanges counts. Collective. Fills the binding
 * and its restore policies, except for sluice_binding_finish. counts: from sluice_routes_t.look, on the pass's
 * `stream`. */
sluice_status_t sluice_planned_bind(sluice_moe_t* moe, sluice_stream_t stream, const sluice_tensor_t* expert_ids,
                                    const int32_t* counts, int keep, sluice_binding_t* out_binding);

/* Records in the binding the plan of the forward. */
void sluice_planned_note(const sluice_moe_t* moe, sluice_binding_t* binding);
