// SPDX-License-Identifier: Apache-2.0
/* What the files of a binding share: its arrays, and steps of routing that more than one of them takes. Private to moe.
 */
#ifndef SLUICE_BACKEND_MOE_ROUTING_BINDING_ARRAYS_H_
#define SLUICE_BACKEND_MOE_ROUTING_BINDING_ARRAYS_H_

#include "backend/moe/routing/binding.h"

void sluice_binding_init(sluice_binding_t* binding, const sluice_moe_t* moe, int32_t num_chunks, int64_t num_tokens);

/* The strategies of passes with this SLUICE_DEDUPLICATE_*, or of all passes where the layer leaves nothing open. */
const sluice_strategies_t* sluice_strategies_of(const sluice_moe_t* moe, int32_t deduplicate);
/* Sets what the passes of the binding send; `deduplicate` counts only if the layer leaves it open. Call it before any
 * function of `copies`, except for the words of headers, which do not depend on it. The binding may be empty. */
void sluice_binding_take_deduplication(sluice_binding_t* binding, const sluice_moe_t* moe, int32_t deduplicate);

/* The offsets, out of an arena that has been reset for them. */
void sluice_binding_take_offsets(sluice_binding_t* binding, int64_t num_sent);
/* All arrays of a forward, and where its chunks begin (NULL: equal numbers of tokens). out_cursor: [E]. Errors:
 * INVALID_ARGUMENT (too many routes), NO_MEMORY. */
sluice_status_t sluice_binding_take_arrays(sluice_moe_t* moe, int64_t num_tokens, int32_t num_chunks,
                                           const int64_t* first_token, sluice_binding_t* out_binding,
                                           int64_t** out_cursor);
/* INVALID_ARGUMENT where routes of so many tokens have no numbers of 32 bits. */
sluice_status_t sluice_binding_check_routes(const sluice_moe_t* moe, int64_t num_tokens);

/* What this rank sends to itself is known already. */
void sluice_binding_receive_own(sluice_binding_t* binding);
#endif /* SLUICE_BACKEND_MOE_ROUTING_BINDING_ARRAYS_H_ */
