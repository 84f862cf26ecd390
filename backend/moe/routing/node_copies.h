// SPDX-License-Identifier: Apache-2.0
/* Builds the tables of node copies (binding.h) on the host, from those of token copies, wherever rows lie.
 * Private to moe.
 *
 * token_rows: host [T][W], as position_of_token of token copies; borrowed for the call. */
#pragma once

#include "backend/moe/routing/binding.h"

/* Forward, for a binding whose token copies are known: orders the node copies, tells the forwarding ranks which ranks
 * each copy is for, and derives the rest. Collective. Errors: NO_MEMORY; MISMATCH naming the rank whose numbers do not
 * fit; what the communicator reports. */
sluice_status_t sluice_node_copies_exchange(sluice_binding_t* binding, const int32_t* token_rows);
/* Writes the data that a step keeps of them in META at `at`, after that of token copies; returns the next address. */
char* sluice_node_copies_save(const sluice_binding_t* binding, char* at);
/* Restores the tables from that data. saved: begin of the data of token copies. */
sluice_status_t sluice_node_copies_restore(sluice_binding_t* binding, const int32_t* saved, const int32_t* token_rows);

/* For the tables of functions in host and device memory. */
static inline int64_t sluice_node_copies_max_chunk_remote(const sluice_binding_t* b) {
  return b->node_copies.max_chunk_remote;
}
static inline int64_t sluice_node_copies_max_chunk_sent(const sluice_binding_t* b) {
  return b->node_copies.max_chunk_sent;
}
static inline int64_t sluice_node_copies_max_chunk_node(const sluice_binding_t* b) {
  return b->node_copies.max_chunk_node;
}
