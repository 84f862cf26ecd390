// SPDX-License-Identifier: Apache-2.0
/* Tables of node copies (node_copy_tables.h), made on the host from what is known of token copies, wherever rows lie.
 * Private to moe.
 *
 * token_rows: host [T][W], as position_of_token of token copies; borrowed for the call. */
#ifndef SLUICE_BACKEND_MOE_ROUTING_NODE_COPIES_H_
#define SLUICE_BACKEND_MOE_ROUTING_NODE_COPIES_H_

#include "backend/moe/routing/binding.h"

/* In forward, of a binding whose token copies are known: orders the node copies, tells their ranks to the ranks that
 * pass them on, and derives the rest. Collective. Errors: NO_MEMORY; MISMATCH naming the rank whose numbers do not fit;
 * what the communicator reports. */
sluice_status_t sluice_node_copies_exchange(sluice_binding_t* binding, const int32_t* token_rows);
/* What a step keeps of them in META, written at `at`, which is behind what it keeps of token copies; returns where the
 * next begins. */
char* sluice_node_copies_save(const sluice_binding_t* binding, char* at);
/* The same tables from that. saved: where the part of token copies begins. */
sluice_status_t sluice_node_copies_restore(sluice_binding_t* binding, const int32_t* saved, const int32_t* token_rows);

/* For the tables of functions in either memory. */
static inline int64_t sluice_node_copies_max_chunk_remote(const sluice_binding_t* b) {
  return b->node_copies.max_chunk_remote;
}
static inline int64_t sluice_node_copies_max_chunk_sent(const sluice_binding_t* b) {
  return b->node_copies.max_chunk_sent;
}
static inline int64_t sluice_node_copies_max_chunk_node(const sluice_binding_t* b) {
  return b->node_copies.max_chunk_node;
}

#endif /* SLUICE_BACKEND_MOE_ROUTING_NODE_COPIES_H_ */
