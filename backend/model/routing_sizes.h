// SPDX-License-Identifier: Apache-2.0
/* Bytes of routing, from a layer's shape and counts: orders and offsets of a pass, their saved form, token copies of a
 * deduplicated layer, and with device memory the part in its memory. Plans and the allocations of backend/moe use the
 * same functions. */
#pragma once

#include "backend/model/shape.h"

#define SLUICE_EXCHANGE_ARRAYS_BYTES 32u /* of sluice_exchange_arrays_bytes, for each rank */

/* The most G; with device memory always G, because it counts before ranks know their largest T. */
#define SLUICE_PLAN_BLOCKS 64

/* Bytes of the header of a saved binding, which backend/moe defines and asserts. */
#define SLUICE_META_HEADER_BYTES 104u

/* ---- arrays of a pass in host memory ---- */

/* Capacity of a pass's sent orders in rows: at most one per route; under a capacity always the same. */
int64_t sluice_binding_room(const sluice_shape_t* shape, int32_t num_chunks, int64_t num_tokens);
/* Bytes of the offsets of n chunks. num_sent: rows of the sent order, including places without a route. with_orders:
 * counts and orders too, which a restored binding reads in META. */
uint64_t sluice_binding_bytes_of(const sluice_shape_t* shape, int32_t num_chunks, int64_t num_sent, int64_t num_routes,
                                 int with_orders);
/* Bytes of all arrays of a forward. */
uint64_t sluice_binding_arena_bytes(const sluice_shape_t* shape, int32_t num_chunks, int64_t num_tokens);

/* Bytes of the saved form (META), and of its part about token copies: route indices, or with device memory their
 * numbers, sent and received. */
uint64_t sluice_binding_meta_bytes_of(const sluice_shape_t* shape, int32_t num_chunks, int64_t num_tokens,
                                      int64_t num_sent, int64_t num_rows);
uint64_t sluice_binding_meta_token_copies_bytes(const sluice_shape_t* shape, int32_t num_chunks, int64_t num_rows);
/* Bytes of the following part about arrived node copies, own ones included: numbers by node and chunk, and the ranks of
 * each. arrived -1: a pass in one level, which has none. */
uint64_t sluice_binding_meta_node_copies_bytes(const sluice_shape_t* shape, int32_t num_chunks, int64_t arrived);

/* ---- a device with memory of its own ---- */

/* Additional scratch of its kernels, which only the device knows. */
typedef struct sluice_device_scratch_s {
  uint64_t (*route_bytes)(int64_t num_routes, int32_t num_experts);
  uint64_t (*token_copy_bytes)(int64_t num_routes, int32_t num_experts, int32_t num_ranks);
} sluice_device_scratch_t;

/* The most token copies of a token: min(K, W). */
int64_t sluice_most_token_copies_of_token(const sluice_shape_t* shape);
/* Bytes of an order, with room for all rows of the pass; of the tokens of all token copies; and of their positions. The
 * last two are 0 without deduplication. */
uint64_t sluice_device_order_bytes(const sluice_shape_t* shape, int64_t num_tokens);
uint64_t sluice_device_token_copy_tokens_bytes(const sluice_shape_t* shape, int64_t num_tokens);
uint64_t sluice_device_token_copy_table_bytes(const sluice_shape_t* shape, int64_t num_tokens);
/* Bytes of the block that a step keeps before its rows: orders and positions, and the tokens and positions of the token
 * copies that it sends. 0 on a CPU, where META has them. */
uint64_t sluice_binding_routes_bytes(const sluice_shape_t* shape, int64_t num_tokens);
/* Bytes of counts after the routes: [n][E + 1] of routes, [n][W + 1] of token copies. */
uint64_t sluice_device_counts_bytes(const sluice_shape_t* shape, int32_t num_chunks);
/* Bytes after these for numbering token copies: route indices in sent order, and scratch. */
uint64_t sluice_device_route_index_bytes(const sluice_shape_t* shape, int64_t num_tokens);
uint64_t sluice_device_token_copy_scratch_bytes(const sluice_shape_t* shape, const sluice_device_scratch_t* scratch,
                                                int64_t num_tokens);
/* Counts by block: [G][E + 1] of routes, then with token copies on the device [G][W + 1] of these. */
int64_t sluice_device_block_routes(const sluice_shape_t* shape, int32_t num_blocks);
uint64_t sluice_device_block_counts_bytes(const sluice_shape_t* shape, int32_t num_blocks);
/* The most bytes of device memory that routing takes. */
uint64_t sluice_binding_device_bytes(const sluice_shape_t* shape, const sluice_device_scratch_t* scratch,
                                     int32_t num_chunks, int64_t num_tokens);

/* ---- token copies ---- */

/* Capacity of the arena of token copies. */
typedef struct sluice_token_copies_size_s {
  int32_t num_chunks;
  int64_t tokens;   /* of this rank */
  int64_t sent;     /* its kept routes */
  int64_t rows;     /* received routes */
  int64_t arriving; /* token copies, own ones included */
} sluice_token_copies_size_t;

/* Capacity of the arena of node copies. */
typedef struct sluice_node_copies_size_s {
  int32_t num_chunks;
  int64_t tokens, sent; /* of this rank, and most node copies of them */
  int64_t arriving;     /* most node copies, own ones included */
  int64_t message;      /* bytes of a rank's message to each other node; 0 in a restored binding */
} sluice_node_copies_size_t;

/* Bytes of that arena; a restored binding has no exchange. */
uint64_t sluice_token_copies_bytes(const sluice_shape_t* shape, const sluice_token_copies_size_t* size,
                                   int is_restored);
uint64_t sluice_node_copies_bytes(const sluice_shape_t* shape, const sluice_node_copies_size_t* size);
/* With device memory: bytes that kernels read of sent and received node copies, and of their forwards. */
uint64_t sluice_node_copies_on_device_bytes(const sluice_shape_t* shape, int64_t tokens, int64_t sent, int64_t arrived,
                                            int64_t forwards);
/* With device memory: bytes that a step keeps of received token copies and rows; and of the arena of token copies on
 * the device in a forward with this number of tokens of this rank. */
uint64_t sluice_token_copies_kept_bytes_of(const sluice_shape_t* shape, int64_t arriving, int64_t rows);
uint64_t sluice_token_copies_on_device_bytes(const sluice_shape_t* shape, int64_t tokens, int64_t arriving,
                                             int64_t rows);
