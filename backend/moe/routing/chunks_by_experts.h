// SPDX-License-Identifier: Apache-2.0
/* Chunks cut out of rows [own]: what this rank sends to one other, by local expert and then token, is cut into n pieces
 * of about as many rows, half as many in the first and the last (backend/schedule/uneven_chunks.h).
 *
 * Chunks of tokens bring every expert a few rows in each chunk, so that each chunk reads all weights again; of a chunk
 * of rows most experts have all or nothing. The price: a token's rows come back in several chunks, wait there, and are
 * summed once all are back, in k order as ever. So results do not depend on n here either.
 */
#ifndef SLUICE_BACKEND_MOE_ROUTING_CHUNKS_BY_EXPERTS_H_
#define SLUICE_BACKEND_MOE_ROUTING_CHUNKS_BY_EXPERTS_H_

#include "backend/moe/routing/binding.h"

/* Whether a forward of n chunks is cut so: without a plan, where the layer's shape allows it. */
int sluice_chunks_by_experts(const sluice_moe_t* moe, int32_t num_chunks);

/* Of a binding whose `position` holds the place of each route and whose `cursor` [E] the routes of each place: fills in
 * send_counts, first_sent, order and num_sent. Leaves positions open, see below. */
void sluice_chunks_by_experts_order(sluice_binding_t* binding, int64_t* cursor);

/* With offsets known: positions count the rows of all chunks, as they lie in sequence where they return. */
void sluice_chunks_by_experts_place(sluice_binding_t* binding);

#endif /* SLUICE_BACKEND_MOE_ROUTING_CHUNKS_BY_EXPERTS_H_ */
