// SPDX-License-Identifier: Apache-2.0
/* Functions that token copies of a CPU (token_copies.c) and of a device with memory of its own
 * (token_copies_on_device.c) share. Private to moe. */
#pragma once

#include "backend/moe/routing/binding.h"

static inline int64_t sluice_routes_from(const sluice_binding_t* b, int32_t source, int32_t chunk) {
  int64_t count = 0;
  for (int32_t e = 0; e < b->num_local; ++e) count += sluice_recv_count(b, source, chunk, e);
  return count;
}

/* Entries of both tables. */
static inline int64_t sluice_token_copies_max_chunk_remote(const sluice_binding_t* b) {
  return b->token_copies.max_chunk_remote;
}
static inline int64_t sluice_token_copies_max_chunk_sent(const sluice_binding_t* b) {
  return b->token_copies.max_chunk_sent;
}
static inline int64_t sluice_token_copies_num_weighted(const sluice_binding_t* b, int32_t chunk) {
  return b->token_copies.first_arrived[chunk + 1] - b->token_copies.first_arrived[chunk];
}

/* Fails with MISMATCH naming the rank. */
sluice_status_t sluice_token_copies_refuse(const sluice_binding_t* b, int32_t source);
