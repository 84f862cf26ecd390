// SPDX-License-Identifier: Apache-2.0
/* Orders and keeps the routes of a layer: in host memory, or in a device's memory by its kernels. One of the layer's
 * strategies: other code calls its table without testing which one it is. Entries that may be NULL say what NULL means;
 * call these by the functions below the table. */
#pragma once

#include "backend/moe/routing/binding.h"

/* The chunks that a plan cuts (chunks_by_tokens.h): first tokens [n + 1] and first blocks [n + 1]. */
typedef struct sluice_block_chunks_s {
  int32_t num_chunks;
  const int64_t* first_token;
  const int32_t* first_block;
} sluice_block_chunks_t;

typedef struct sluice_routes_s {
  /* Orders the routes of `expert_ids` [T, K] and counts them, in equal chunks; received rows are not known yet. A
   * device reads the counts back once per forward. Errors: INVALID_ARGUMENT naming the entry that is out of range,
   * NO_MEMORY. */
  sluice_status_t (*order)(sluice_moe_t* moe, sluice_stream_t stream, const sluice_tensor_t* expert_ids,
                           int32_t num_chunks, sluice_binding_t* out_binding);
  /* The same in two steps, for chunks that are cut by received rows. `look` reads the ids, on a device with the one
   * read of a forward; *out_counts: the counts, valid until the pass is prepared, or NULL. `sum` adds this rank's rows
   * by block of tokens and destination rank to table [num_blocks, W]. Then chunks are known, and `order_blocks` orders
   * the routes. */
  sluice_status_t (*look)(sluice_moe_t* moe, sluice_pass_memory_t* memory, sluice_stream_t stream,
                          const sluice_tensor_t* expert_ids, int32_t** out_counts);
  sluice_status_t (*sum)(const sluice_moe_t* moe, const sluice_tensor_t* expert_ids, const int32_t* counts,
                         int32_t num_blocks, int64_t* out_table);
  sluice_status_t (*order_blocks)(sluice_moe_t* moe, sluice_stream_t stream, const sluice_tensor_t* expert_ids,
                                  const sluice_block_chunks_t* chunks, const int32_t* counts,
                                  sluice_binding_t* out_binding);
  /* Under capacities every position of a chunk has the same number of rows on all ranks: nothing is read. check: ids
   * before a plan is known; NULL: the host cannot read them, and the drop counters count bad ids. */
  sluice_status_t (*check)(const sluice_moe_t* moe, const sluice_tensor_t* expert_ids);
  sluice_status_t (*order_capacity)(sluice_moe_t* moe, sluice_stream_t stream, const sluice_tensor_t* expert_ids,
                                    int32_t num_chunks, int64_t* drop_counters, sluice_binding_t* out_binding);
  /* A hash that distinguishes the routing of two forwards of a rank. NULL: 0, the ids are not read for this. */
  uint64_t (*hash)(const sluice_moe_t* moe, const sluice_tensor_t* expert_ids);

  /* Takes arrays of a binding from an arena that has been reset: offsets for any binding, orders in a forward (NULL:
   * they lie elsewhere). */
  void (*take_offsets)(sluice_binding_t* binding, int64_t num_sent);
  void (*take_orders)(sluice_binding_t* binding, int64_t room, int64_t num_routes);
  /* Called when orders are complete. NULL: there is nothing to derive from them. */
  void (*finish)(sluice_binding_t* binding);

  /* The data that a step keeps: in META, written at `at` and found there again (both return the next address; both
   * NULL: META holds nothing), and before its rows, a block of kept_bytes (all three NULL: there is no block). */
  char* (*save)(const sluice_binding_t* binding, char* at);
  const int32_t* (*find)(sluice_binding_t* binding, const int32_t* at);
  uint64_t (*kept_bytes)(const sluice_binding_t* binding);
  sluice_status_t (*keep)(const sluice_binding_t* binding, sluice_stream_t stream, void* kept);
  /* Points orders and positions into that block, for a binding whose chunks are known. */
  void (*place)(sluice_binding_t* binding, void* kept);
} sluice_routes_t;

static inline sluice_status_t sluice_routes_check(const sluice_routes_t* routes, const sluice_moe_t* moe,
                                                  const sluice_tensor_t* expert_ids) {
  return routes->check == NULL ? SLUICE_OK : routes->check(moe, expert_ids);
}
static inline uint64_t sluice_routes_hash(const sluice_routes_t* routes, const sluice_moe_t* moe,
                                          const sluice_tensor_t* expert_ids) {
  return routes->hash == NULL ? 0 : routes->hash(moe, expert_ids);
}
static inline void sluice_routes_take_orders(sluice_binding_t* b, int64_t room, int64_t num_routes) {
  if (b->routes->take_orders != NULL) b->routes->take_orders(b, room, num_routes);
}
static inline void sluice_routes_finish(sluice_binding_t* b) {
  if (b->routes->finish != NULL) b->routes->finish(b);
}
static inline char* sluice_routes_save(const sluice_binding_t* b, char* at) {
  return b->routes->save == NULL ? at : b->routes->save(b, at);
}
static inline const int32_t* sluice_routes_find(sluice_binding_t* b, const int32_t* at) {
  return b->routes->find == NULL ? at : b->routes->find(b, at);
}
static inline uint64_t sluice_routes_kept_bytes(const sluice_binding_t* b) {
  return b->routes->kept_bytes == NULL ? 0 : b->routes->kept_bytes(b);
}
static inline sluice_status_t sluice_routes_keep(const sluice_binding_t* b, sluice_stream_t stream, void* kept) {
  return b->routes->keep == NULL ? SLUICE_OK : b->routes->keep(b, stream, kept);
}
static inline void sluice_routes_place(sluice_binding_t* b, void* kept) {
  if (b->routes->place != NULL) b->routes->place(b, kept);
}

extern const sluice_routes_t sluice_routes_in_host_memory;
extern const sluice_routes_t sluice_routes_in_device_memory;

/* Orders routes in host memory, also for calls without these tables. expert_ids: [T, K]; received rows are not known
 * yet. Chunks start at first_token [n + 1], or NULL: equal numbers of tokens. The arrays lie in the context's binding
 * arena. Errors: INVALID_ARGUMENT naming the entry that is out of range, NO_MEMORY. */
sluice_status_t sluice_binding_route(sluice_moe_t* moe, const sluice_tensor_t* expert_ids, int32_t num_chunks,
                                     const int64_t* first_token, sluice_binding_t* out_binding);
