// SPDX-License-Identifier: Apache-2.0
/* Layers under a capacity (SLUICE_EXCHANGE_CAPACITY): counts are the same in every pass, so that nothing is read from
 * the device and nothing agreed on once the ranks have made a call of a kind together. Their passes may be captured
 * into a graph. Private to moe. */
#ifndef SLUICE_BACKEND_MOE_RUN_CAPACITY_H_
#define SLUICE_BACKEND_MOE_RUN_CAPACITY_H_

#include "backend/moe/handshake/handshake.h"
#include "backend/moe/layer/capacity_state.h"
#include "backend/moe/pass/pass.h"

/* Once the schedule is known, in a capture: STATE unless this rank has made such a call outside one, UNSUPPORTED where
 * the communicator is not for it. From here on the memory that the graph will use stays where it is. */
sluice_status_t sluice_capacity_check_capture(const sluice_pass_t* pass);
/* The end of a call that was opened. */
void sluice_capacity_close(const sluice_pass_t* pass, sluice_status_t status);

/* Routes and counts of a forward. */
sluice_status_t sluice_capacity_bind(sluice_pass_t* pass, const sluice_tensor_t* expert_ids, int32_t num_chunks);

/* Whether this call needs no header. schedule NULL: of a rank that refuses; then any call agreed on counts, since a
 * refusal has no effect, and the others wait until this rank makes the call. */
int sluice_capacity_is_agreed(const sluice_moe_t* moe, const sluice_template_t* schedule);
/* The header without counts; or, where the ranks have agreed on such calls, in its place the call is counted, unless it
 * is refused. */
sluice_status_t sluice_capacity_agree(sluice_pass_t* pass, const sluice_proposal_t* proposal,
                                      sluice_handshake_t* out_handshake);
void sluice_capacity_note_agreed(const sluice_pass_t* pass);

/* Where no header will tell the other ranks: aborts the communicator once rows may be on their way. Returns `status`
 * with its record. */
sluice_status_t sluice_capacity_fail(const sluice_pass_t* pass, sluice_status_t status);
/* A failure of an earlier pass, of a layer with headers, that the others have not been told yet: told by an abort, if
 * this layer's calls may have no header. */
sluice_status_t sluice_capacity_tell_failure(const sluice_moe_t* moe);

/* The drop counters since the last take, read from the device; then it starts anew. */
sluice_status_t sluice_capacity_take_drop_counters(sluice_moe_t* moe, sluice_stream_t stream,
                                                   int64_t* out_drop_counters);

#endif /* SLUICE_BACKEND_MOE_RUN_CAPACITY_H_ */
