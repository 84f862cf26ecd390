// SPDX-License-Identifier: Apache-2.0
/* What travels between ranks for a token with several routes: a row for each route, or, where a layer is deduplicated,
 * a copy for each rank (token_copies.h). One of the layer's strategies: everyone else takes its table and does not ask.
 */
#ifndef SLUICE_BACKEND_MOE_ROUTING_COPIES_H_
#define SLUICE_BACKEND_MOE_ROUTING_COPIES_H_

#include "backend/moe/routing/routes.h"

typedef struct sluice_copies_s {
  /* Numbers of copies that the header carries to each rank for each chunk, in front of its counts of rows. */
  int32_t header_words;
  /* Of a forward, arrays of a binding beside the counts; counts_in among them. */
  void (*take_counts)(sluice_binding_t* binding);
  /* Writes those numbers for rank r at `out`, returns where its counts begin; reads what came back. */
  int32_t* (*pack)(const sluice_binding_t* binding, int32_t r, int32_t* out);
  void (*unpack)(sluice_binding_t* binding);
  /* Of a binding just finished, in forward: what ranks tell each other about their copies; collective. NULL: nothing.
   */
  sluice_status_t (*exchange)(sluice_binding_t* binding, sluice_stream_t stream);
  /* Rows of a chunk at most: to or from other ranks, and those that return, own ones among them; of `chunk`, those
   * whose route weights travel too. */
  int64_t (*max_chunk_remote)(const sluice_binding_t* binding);
  int64_t (*max_chunk_sent)(const sluice_binding_t* binding);
  /* Of a chunk at most in T_NODE; NULL where nothing lies there. */
  int64_t (*max_chunk_node)(const sluice_binding_t* binding);
  int64_t (*num_weighted)(const sluice_binding_t* binding, int32_t chunk);
  /* What a step keeps: in META (written at `at`, returns where the next begins; its bytes are
   * meta_token_copies_bytes()) and in front of its rows, kept_bytes after those of routes, once counts are known.
   * kept: where that block of both begins. restore: of a binding just finished; on a device its work goes to `stream`.
   */
  char* (*save)(const sluice_binding_t* binding, char* at);
  uint64_t (*kept_bytes)(const sluice_binding_t* binding);
  sluice_status_t (*keep)(const sluice_binding_t* binding, sluice_stream_t stream, void* kept);
  sluice_status_t (*restore)(sluice_binding_t* binding, sluice_stream_t stream, int32_t* saved, void* kept);
} sluice_copies_t;

extern const sluice_copies_t sluice_no_copies; /* each route's row travels */
extern const sluice_copies_t sluice_copies_in_host_memory;
extern const sluice_copies_t sluice_copies_in_device_memory;
extern const sluice_copies_t sluice_copies_by_node;           /* in two levels, in host memory */
extern const sluice_copies_t sluice_copies_by_node_on_device; /* in the device's, made on the host */

/* The block that a step keeps in front of its rows, once counts are known. */
static inline uint64_t sluice_binding_kept_bytes(const sluice_binding_t* b) {
  return b->routes->kept_bytes(b) + b->copies->kept_bytes(b);
}
static inline sluice_status_t sluice_binding_keep(const sluice_binding_t* b, sluice_stream_t stream, void* kept) {
  SLUICE_TRY(b->routes->keep(b, stream, kept));
  return b->copies->keep(b, stream, kept);
}

#endif /* SLUICE_BACKEND_MOE_ROUTING_COPIES_H_ */
