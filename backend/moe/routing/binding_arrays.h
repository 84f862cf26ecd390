// SPDX-License-Identifier: Apache-2.0
/* The arrays of a binding, its offsets, and common steps of routing. Private to moe. */
#pragma once

#include "backend/moe/routing/binding.h"

void sluice_binding_init(sluice_binding_t* binding, const sluice_moe_t* moe, int32_t num_chunks, int64_t num_tokens);

/* The strategies of passes with this SLUICE_DEDUPLICATE_*, or of all passes if the layer leaves it fixed. */
const sluice_strategies_t* sluice_strategies_of(const sluice_moe_t* moe, int32_t deduplicate);
/* Sets the deduplication of the binding's passes; `deduplicate` is used only if the layer leaves it open. Call it
 * before any function of `copies`, except for the words of headers, which do not depend on it. The binding may be
 * empty. */
void sluice_binding_take_deduplication(sluice_binding_t* binding, const sluice_moe_t* moe, int32_t deduplicate);

/* Takes the offsets from an arena that has been reset for them. */
void sluice_binding_take_offsets(sluice_binding_t* binding, int64_t num_sent);
/* Takes all arrays of a forward. first_token: first tokens of chunks, or NULL: equal chunks. out_cursor: [E]. Errors:
 * INVALID_ARGUMENT (too many routes), NO_MEMORY. */
sluice_status_t sluice_binding_take_arrays(sluice_moe_t* moe, int64_t num_tokens, int32_t num_chunks,
                                           const int64_t* first_token, sluice_binding_t* out_binding,
                                           int64_t** out_cursor);
/* INVALID_ARGUMENT if the routes of this number of tokens cannot be numbered with 32 bits. */
sluice_status_t sluice_binding_check_routes(const sluice_moe_t* moe, int64_t num_tokens);

/* Fills in the received counts of this rank's own rows. */
void sluice_binding_receive_own(sluice_binding_t* binding);
/* Under a capacity: fills in the counts, which are the same for all positions, chunks and ranks. */
void sluice_binding_fill_counts(sluice_binding_t* binding);

/* Binds rows that are already sorted by local expert, for the experts alone: one chunk, no tokens. */
sluice_status_t sluice_binding_of_rows(sluice_moe_t* moe, const int64_t* rows_per_expert,
                                       sluice_binding_t* out_binding);
/* Derives all offsets once recv_counts are filled in. */
sluice_status_t sluice_binding_finish(sluice_binding_t* binding);
