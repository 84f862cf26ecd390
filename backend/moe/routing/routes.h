// SPDX-License-Identifier: Apache-2.0
/* Where the routes of a layer are ordered and where they stay: in host memory, or in a device's, whose kernels order
 * them. One of the layer's strategies: everyone else takes its table and does not ask which it is. */
#ifndef SLUICE_BACKEND_MOE_ROUTING_ROUTES_H_
#define SLUICE_BACKEND_MOE_ROUTING_ROUTES_H_

#include "backend/moe/routing/binding.h"

/* The chunks that a plan cuts (chunks_by_tokens.h): first tokens [n + 1] and first blocks [n + 1]. */
typedef struct sluice_block_chunks_s {
  int32_t num_chunks;
  const int64_t* first_token;
  const int32_t* first_block;
} sluice_block_chunks_t;

typedef struct sluice_routes_s {
  /* Orders the routes of `expert_ids` [T, K] and counts them, in chunks of equal sizes; everything about received rows
   * is still open. On a device the counts come by the one read of a forward. Errors: INVALID_ARGUMENT naming the entry
   * that is out of range, NO_MEMORY. */
  sluice_status_t (*order)(sluice_moe_t* moe, sluice_stream_t stream, const sluice_tensor_t* expert_ids,
                           int32_t num_chunks, sluice_binding_t* out_binding);
  /* The same in two parts, for chunks that are cut by received rows. First ids are looked at, on a device with that one
   * read; *out_counts: what it brought, until the pass is prepared, or NULL. sum: this rank's rows by block of tokens
   * and destination rank, into table [num_blocks, W]. Then the chunks are known. */
  sluice_status_t (*look)(sluice_moe_t* moe, sluice_pass_memory_t* memory, sluice_stream_t stream,
                          const sluice_tensor_t* expert_ids, int32_t** out_counts);
  sluice_status_t (*sum)(const sluice_moe_t* moe, const sluice_tensor_t* expert_ids, const int32_t* counts,
                         int32_t num_blocks, int64_t* out_table);
  sluice_status_t (*order_blocks)(sluice_moe_t* moe, sluice_stream_t stream, const sluice_tensor_t* expert_ids,
                                  const sluice_block_chunks_t* chunks, const int32_t* counts,
                                  sluice_binding_t* out_binding);
  /* Under capacities (capacity_routes.h): nothing is read. check: ids before a plan is known; on a device the drop
   * counters tell. */
  sluice_status_t (*check)(const sluice_moe_t* moe, const sluice_tensor_t* expert_ids);
  sluice_status_t (*order_capacity)(sluice_moe_t* moe, sluice_stream_t stream, const sluice_tensor_t* expert_ids,
                                    int32_t num_chunks, int64_t* drop_counters, sluice_binding_t* out_binding);
  /* Tells the routing of two forwards of a rank apart; 0: nobody reads the ids for this. */
  uint64_t (*hash)(const sluice_moe_t* moe, const sluice_tensor_t* expert_ids);

  /* Arrays of a binding, out of an arena that has been reset for them: for any binding, and in a forward besides. */
  void (*take_offsets)(sluice_binding_t* binding, int64_t num_sent);
  void (*take_orders)(sluice_binding_t* binding, int64_t room, int64_t num_routes);
  /* Once orders are there. */
  void (*finish)(sluice_binding_t* binding);

  /* What a step keeps: in META, written at `at` and found there again, both return where the next begins; and in front
   * of its rows, a block of kept_bytes. */
  char* (*save)(const sluice_binding_t* binding, char* at);
  const int32_t* (*find)(sluice_binding_t* binding, const int32_t* at);
  uint64_t (*kept_bytes)(const sluice_binding_t* binding);
  sluice_status_t (*keep)(const sluice_binding_t* binding, sluice_stream_t stream, void* kept);
  /* Orders and positions lie in that block, of a binding whose chunks are known. */
  void (*place)(sluice_binding_t* binding, void* kept);
} sluice_routes_t;

extern const sluice_routes_t sluice_routes_in_host_memory;
extern const sluice_routes_t sluice_routes_in_device_memory;

#endif /* SLUICE_BACKEND_MOE_ROUTING_ROUTES_H_ */
