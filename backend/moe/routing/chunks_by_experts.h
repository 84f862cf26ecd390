// SPDX-License-Identifier: Apache-2.0
/* Chunks cut out of rows [own]: the rows that this rank sends to one other rank, sorted by local expert and token, are
 * cut into n pieces of about equal size, with half that size for the first and the last
 * (backend/schedule/uneven_chunks.h).
 *
 * With chunks of tokens every expert has a few rows in each chunk, so each chunk reads all weights again. With chunks
 * of rows most experts have all their rows in one chunk. The cost: a token's rows return in several chunks, stay in
 * memory, and are summed when all have returned, in k order as always. So results do not depend on n here either. */
#pragma once

#include "backend/moe/routing/binding.h"

/* Whether a forward of n chunks is cut this way: without a plan, if the layer's shape allows it. */
int sluice_chunks_by_experts(const sluice_moe_t* moe, int32_t num_chunks);

/* For a binding whose `position` holds the place of each route and whose `cursor` [E] the routes of each place: fills
 * in send_counts, first_sent, order and num_sent. Positions are set by sluice_chunks_by_experts_place. */
void sluice_chunks_by_experts_order(sluice_binding_t* binding, int64_t* cursor);

/* Called once offsets are known: sets positions, which count the rows of all chunks in the order of their return. */
void sluice_chunks_by_experts_place(sluice_binding_t* binding);
