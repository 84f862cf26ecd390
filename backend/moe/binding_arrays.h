/* What the files of a binding share: its arrays, and steps of routing that more than one of them takes. Private to moe.
 */
#ifndef SLUICE_BACKEND_MOE_BINDING_ARRAYS_H_
#define SLUICE_BACKEND_MOE_BINDING_ARRAYS_H_

#include "backend/moe/binding.h"

void sluice_binding_init(sluice_binding_t* binding, const sluice_moe_t* moe, int32_t num_chunks, int64_t num_tokens);

/* Rows that the sent orders of a pass have room for: at most one per route, under ceilings always the same. */
int64_t sluice_binding_room(const sluice_moe_t* moe, int32_t num_chunks, int64_t num_tokens);

/* Bytes of the arena. num_sent: rows of the sent order, places that no route takes included. with_orders: counts and
 * orders too, which a restored binding reads where the host keeps them. */
uint64_t sluice_binding_bytes_of(const sluice_binding_t* binding, int64_t num_sent, int64_t num_routes,
                                 int with_orders);
/* The offsets, out of an arena that has been reset for them. */
void sluice_binding_take_offsets(sluice_binding_t* binding, int64_t num_sent);
/* All arrays of a forward, and where its chunks begin (NULL: equal numbers of tokens). out_cursor: [E]. Errors:
 * INVALID_ARGUMENT (too many routes), NO_MEMORY. */
sluice_status_t sluice_binding_take_arrays(sluice_moe_t* moe, int64_t num_tokens, int32_t num_chunks,
                                           const int64_t* first_token, sluice_binding_t* out_binding,
                                           int64_t** out_cursor);
/* INVALID_ARGUMENT where routes of so many tokens have no numbers of 32 bits. */
sluice_status_t sluice_binding_check_routes(const sluice_moe_t* moe, int64_t num_tokens);

/* Counts per chunk and place; leaves each route's place in `position`. */
sluice_status_t sluice_binding_count_routes(sluice_binding_t* binding, const sluice_tensor_t* expert_ids);
/* What this rank sends to itself is known already. */
void sluice_binding_receive_own(sluice_binding_t* binding);
/* Under ceilings: the same counts for all places, chunks and ranks. */
void sluice_binding_fill_counts(sluice_binding_t* binding);
/* On a far device: orders and positions lie in `routes`. */
void sluice_binding_place_routes(sluice_binding_t* binding, void* routes);

#endif /* SLUICE_BACKEND_MOE_BINDING_ARRAYS_H_ */
