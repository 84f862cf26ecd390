// SPDX-License-Identifier: Apache-2.0
/* Deduplication: routes of a token share rows. A *token copy* is sent between ranks for one token of one chunk: its row
 * once, however many of its routes end at the destination, and one row back.
 *
 *   y[t] = sum over ranks r of p[t, r],   p[t, r] = sum over k with an expert on r of w[t, k] T_DO(t, k)
 *
 * p is summed on rank r in k order in f32 and sent in the layer's dtype; the sum over ranks is in rank order, in f32,
 * and rounded once. Gradients work the same way: dY[t] is sent once to each rank, and sum over k of dT_DI(t, k)
 * returns. The rank's own token copies are summed the same way without being sent.
 *
 * A *route index* is the place of a route in its token copy: token copy * K + k, token copies counted from 0 for each
 * (chunk, destination). The ranks exchange route indices, 4 bytes for each route, once per forward after the counts; a
 * step keeps the received ones.
 *
 * Source: DeepSeek-V3 (arXiv 2412.19437) section 3.2.2 sends a token once to each node and fans it out there; here to
 * each rank, and sums are taken before the way back. */
#pragma once

#include "backend/moe/routing/binding.h"

/* The tables that copies.h declares do this. In forward, for a binding just finished, they order the token copies,
 * exchange route indices and derive the rest; arrays lie in the arena of token copies. Errors: NO_MEMORY; MISMATCH
 * naming the rank whose route indices are invalid; what the communicator reports. On a device the header has already
 * carried the numbers of token copies; route indices and tables follow on the stream without a wait. The host does not
 * read them, so kernels skip invalid route indices: their rows are zeros. */

/* Restores the tables from the route indices that a step kept. Borrows them. */
sluice_status_t sluice_token_copies_restore(sluice_binding_t* binding, int32_t* route_index);
/* The same on a device, from the kept numbers and the block after its routes, for a binding whose counts are known. */
sluice_status_t sluice_token_copies_restore_on_device(sluice_binding_t* binding, void* kept);

/* ---- functions that token copies in host memory (token_copies.c) and device memory (token_copies_on_device.c) share
 * ---- */

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

/* Entries of both tables in device memory. */
void sluice_device_token_copies_take_counts(sluice_binding_t* binding);
int32_t* sluice_device_token_copies_pack(const sluice_binding_t* binding, int32_t r, int32_t* out);
void sluice_device_token_copies_unpack(sluice_binding_t* binding);
uint64_t sluice_device_token_copies_kept_bytes(const sluice_binding_t* binding);
sluice_status_t sluice_device_token_copies_keep(const sluice_binding_t* binding, sluice_stream_t stream, void* kept);

/* Fails with MISMATCH naming the rank. */
sluice_status_t sluice_token_copies_refuse(const sluice_binding_t* b, int32_t source);
