// SPDX-License-Identifier: Apache-2.0
/* Without deduplication each route's row is sent: there is nothing to number, to exchange or to keep. */
#include "backend/moe/routing/copies.h"

static void take_counts(sluice_binding_t* b) { b->counts_in = b->recv_counts; }

static int32_t* pack(const sluice_binding_t* b, int32_t r, int32_t* out) {
  (void)b, (void)r;
  return out;
}

static void unpack(sluice_binding_t* b) { (void)b; }

static int64_t max_chunk_remote(const sluice_binding_t* b) { return b->max_chunk_remote; }
static int64_t max_chunk_sent(const sluice_binding_t* b) { return b->max_chunk_sent; }

static int64_t num_weighted(const sluice_binding_t* b, int32_t chunk) {
  (void)b, (void)chunk;
  return 0;
}

static char* save(const sluice_binding_t* b, char* at) {
  (void)b;
  return at;
}

static uint64_t kept_bytes(const sluice_binding_t* b) {
  (void)b;
  return 0;
}

static sluice_status_t keep(const sluice_binding_t* b, sluice_stream_t stream, void* kept) {
  (void)b, (void)stream, (void)kept;
  return SLUICE_OK;
}

static sluice_status_t restore(sluice_binding_t* b, sluice_stream_t stream, int32_t* saved, void* kept) {
  (void)b, (void)stream, (void)saved, (void)kept;
  return SLUICE_OK;
}

const sluice_copies_t sluice_no_copies = {.take_counts = take_counts,
                                          .pack = pack,
                                          .unpack = unpack,
                                          .max_chunk_remote = max_chunk_remote,
                                          .max_chunk_sent = max_chunk_sent,
                                          .num_weighted = num_weighted,
                                          .save = save,
                                          .kept_bytes = kept_bytes,
                                          .keep = keep,
                                          .restore = restore};
