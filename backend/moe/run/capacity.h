// SPDX-License-Identifier: Apache-2.0
/* Passes of layers under a capacity (SLUICE_EXCHANGE_CAPACITY). Counts are the same in every pass, so nothing is read
 * from the device, and no header is needed once the ranks have made a call of a kind together. Such passes may be
 * captured into a graph. Private to moe. */
#pragma once

#include "backend/moe/handshake/handshake.h"
#include "backend/moe/pass/pass.h"

/* In a capture, once the schedule is known: STATE unless this rank has made such a call outside of a capture,
 * UNSUPPORTED if the communicator cannot be captured. From here on the memory that the graph uses does not move. */
sluice_status_t sluice_capacity_check_capture(const sluice_pass_t* pass);
/* Ends a call that was opened. */
void sluice_capacity_close(const sluice_pass_t* pass, sluice_status_t status);

/* Binds routes and counts of a forward. */
sluice_status_t sluice_capacity_bind(sluice_pass_t* pass, const sluice_tensor_t* expert_ids, int32_t num_chunks);

/* Whether this call needs no header. schedule NULL: this rank refuses; then any agreed call counts, since a refusal has
 * no effect, and the others wait until this rank makes the call. */
int sluice_capacity_is_agreed(const sluice_moe_t* moe, const sluice_template_t* schedule);
/* Exchanges a header without counts. If the ranks have agreed on such calls, the call is only counted, unless it is
 * refused. */
sluice_status_t sluice_capacity_agree(sluice_pass_t* pass, const sluice_proposal_t* proposal,
                                      sluice_handshake_t* out_handshake);
void sluice_capacity_note_agreed(const sluice_pass_t* pass);

/* For calls without a header: aborts the communicator if rows may have been sent. Returns `status` with its record. */
sluice_status_t sluice_capacity_fail(const sluice_pass_t* pass, sluice_status_t status);
/* Aborts the communicator if an earlier pass, of a layer with headers, failed without a report, and this layer's calls
 * may have no header that could report it. */
sluice_status_t sluice_capacity_tell_failure(const sluice_moe_t* moe);

/* Reads the drop counters since the last take from the device, and resets them. */
sluice_status_t sluice_capacity_take_drop_counters(sluice_moe_t* moe, sluice_stream_t stream,
                                                   int64_t* out_drop_counters);
