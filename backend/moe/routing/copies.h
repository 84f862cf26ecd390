// SPDX-License-Identifier: Apache-2.0
/* What ranks send for a token with several routes: a row for each route, or, in a deduplicated layer, a copy for each
 * rank (token_copies.h). One of the layer's strategies: other code calls its table without testing which one it is.
 * Entries that may be NULL say what NULL means; call these by the functions below the table. */
#pragma once

#include "backend/moe/routing/routes.h"

typedef struct sluice_copies_s {
  /* Number of words in a header, per rank and chunk, that hold numbers of copies; they precede the counts of rows. 0:
   * the next three entries are NULL, since headers hold nothing but these counts. */
  int32_t header_words;
  /* Forward: takes the arrays besides the counts; also sets counts_in, which are recv_counts without this entry. */
  void (*take_counts)(sluice_binding_t* binding);
  /* Writes those words for rank r at `out`, returns where its counts begin; reads the received words. */
  int32_t* (*pack)(const sluice_binding_t* binding, int32_t r, int32_t* out);
  void (*unpack)(sluice_binding_t* binding);
  /* Forward, after the binding is finished: exchanges data about copies; collective. NULL: nothing is exchanged. */
  sluice_status_t (*exchange)(sluice_binding_t* binding, sluice_stream_t stream);
  /* The most rows of a chunk to or from other ranks; and that return, own rows included. NULL: a row for each route. */
  int64_t (*max_chunk_remote)(const sluice_binding_t* binding);
  int64_t (*max_chunk_sent)(const sluice_binding_t* binding);
  /* The most rows of a chunk in T_NODE; NULL: T_NODE is not used. */
  int64_t (*max_chunk_node)(const sluice_binding_t* binding);
  /* The rows of `chunk` that are sent with their route weights. NULL: none. */
  int64_t (*num_weighted)(const sluice_binding_t* binding, int32_t chunk);
  /* The data that a step keeps: in META (written at `at`, returns the next address; meta_token_copies_bytes() bytes)
   * and before its rows, kept_bytes after the data of routes, once counts are known. kept: the begin of the block of
   * both. restore: for a binding just finished; on a device it enqueues work on `stream`. NULL: nothing is kept in
   * META (save), in the block (kept_bytes and keep), or in either (restore). */
  char* (*save)(const sluice_binding_t* binding, char* at);
  uint64_t (*kept_bytes)(const sluice_binding_t* binding);
  sluice_status_t (*keep)(const sluice_binding_t* binding, sluice_stream_t stream, void* kept);
  sluice_status_t (*restore)(sluice_binding_t* binding, sluice_stream_t stream, int32_t* saved, void* kept);
} sluice_copies_t;

extern const sluice_copies_t sluice_copies_in_host_memory;
extern const sluice_copies_t sluice_copies_in_device_memory;
extern const sluice_copies_t sluice_copies_by_node;           /* two levels, in host memory */
extern const sluice_copies_t sluice_copies_by_node_on_device; /* two levels, in device memory, made on the host */

static inline void sluice_copies_take_counts(sluice_binding_t* b) {
  b->counts_in = b->recv_counts;
  if (b->copies->take_counts != NULL) b->copies->take_counts(b);
}
static inline int32_t* sluice_copies_pack(const sluice_binding_t* b, int32_t r, int32_t* out) {
  return b->copies->pack == NULL ? out : b->copies->pack(b, r, out);
}
static inline void sluice_copies_unpack(sluice_binding_t* b) {
  if (b->copies->unpack != NULL) b->copies->unpack(b);
}
static inline int64_t sluice_copies_max_chunk_remote(const sluice_binding_t* b) {
  return b->copies->max_chunk_remote == NULL ? b->max_chunk_remote : b->copies->max_chunk_remote(b);
}
static inline int64_t sluice_copies_max_chunk_sent(const sluice_binding_t* b) {
  return b->copies->max_chunk_sent == NULL ? b->max_chunk_sent : b->copies->max_chunk_sent(b);
}
static inline int64_t sluice_copies_max_chunk_node(const sluice_binding_t* b) {
  return b->copies->max_chunk_node == NULL ? 0 : b->copies->max_chunk_node(b);
}
static inline int64_t sluice_copies_num_weighted(const sluice_binding_t* b, int32_t chunk) {
  return b->copies->num_weighted == NULL ? 0 : b->copies->num_weighted(b, chunk);
}
static inline char* sluice_copies_save(const sluice_binding_t* b, char* at) {
  return b->copies->save == NULL ? at : b->copies->save(b, at);
}
static inline sluice_status_t sluice_copies_restore(sluice_binding_t* b, sluice_stream_t stream, int32_t* saved,
                                                    void* kept) {
  return b->copies->restore == NULL ? SLUICE_OK : b->copies->restore(b, stream, saved, kept);
}

/* The block that a step keeps before its rows, once counts are known. */
static inline uint64_t sluice_binding_kept_bytes(const sluice_binding_t* b) {
  return sluice_routes_kept_bytes(b) + (b->copies->kept_bytes == NULL ? 0 : b->copies->kept_bytes(b));
}
static inline sluice_status_t sluice_binding_keep(const sluice_binding_t* b, sluice_stream_t stream, void* kept) {
  SLUICE_TRY(sluice_routes_keep(b, stream, kept));
  return b->copies->keep == NULL ? SLUICE_OK : b->copies->keep(b, stream, kept);
}
