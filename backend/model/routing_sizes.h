// SPDX-License-Identifier: Apache-2.0
/* Bytes of what routing takes, from a layer's shape and counts: orders and offsets of a pass, their saved form, token
 * copies of a deduplicated layer, and with device memory what lies in its memory. Who plans them and who lays arrays
 * into them (backend/moe) go by the same numbers. */
#ifndef SLUICE_BACKEND_MODEL_ROUTING_SIZES_H_
#define SLUICE_BACKEND_MODEL_ROUTING_SIZES_H_

#include "backend/model/shape.h"

/* G at most; always with device memory, which counts before ranks know their largest T. */
#define SLUICE_PLAN_BLOCKS 64

/* Of the header of a saved binding, which backend/moe defines and asserts. */
#define SLUICE_META_HEADER_BYTES 104u

/* ---- a pass, where the host keeps its arrays ---- */

/* Rows that the sent orders of a pass have room for: at most one per route, under a capacity always the same. */
int64_t sluice_binding_room(const sluice_shape_t* shape, int32_t num_chunks, int64_t num_tokens);
/* Offsets of n chunks. num_sent: rows of the sent order, places that no route takes included. with_orders: counts and
 * orders too, which a restored binding reads where the host keeps them. */
uint64_t sluice_binding_bytes_of(const sluice_shape_t* shape, int32_t num_chunks, int64_t num_sent, int64_t num_routes,
                                 int with_orders);
/* All of a forward. */
uint64_t sluice_binding_arena_bytes(const sluice_shape_t* shape, int32_t num_chunks, int64_t num_tokens);

/* The saved form (META): all of it, and what is there of token copies: slots, with device memory their numbers, sent
 * and received. */
uint64_t sluice_binding_meta_bytes_of(const sluice_shape_t* shape, int32_t num_chunks, int64_t num_tokens,
                                      int64_t num_sent, int64_t num_rows);
uint64_t sluice_binding_meta_token_copies_bytes(const sluice_shape_t* shape, int32_t num_chunks, int64_t num_rows);
/* Behind these: of node copies that arrived, own ones among them, numbers by node and chunk, and the ranks of each.
 * arrived -1: of a pass in one level, which has none. */
uint64_t sluice_binding_meta_node_copies_bytes(const sluice_shape_t* shape, int32_t num_chunks, int64_t arrived);

/* ---- a device with memory of its own ---- */

/* What its kernels need besides what is named here: known to the device alone. */
typedef struct sluice_device_scratch_s {
  uint64_t (*route_bytes)(int64_t num_routes, int32_t num_experts);
  uint64_t (*token_copy_bytes)(int64_t num_routes, int32_t num_experts, int32_t num_ranks);
} sluice_device_scratch_t;

/* Token copies of a token at most: min(K, W). */
int64_t sluice_most_token_copies_of_token(const sluice_shape_t* shape);
/* Of an order: it has room for all rows of the pass. Of the tokens of all token copies, and of where they are; 0 where
 * rows travel. */
uint64_t sluice_device_order_bytes(const sluice_shape_t* shape, int64_t num_tokens);
uint64_t sluice_device_token_copy_tokens_bytes(const sluice_shape_t* shape, int64_t num_tokens);
uint64_t sluice_device_token_copy_table_bytes(const sluice_shape_t* shape, int64_t num_tokens);
/* A step keeps orders and positions in front of its rows, and of the token copies that it sends who they are of and
 * where: the bytes of that block. 0 on a CPU, where they are in META. */
uint64_t sluice_binding_routes_bytes(const sluice_shape_t* shape, int64_t num_tokens);
/* Counts after the routes: [n][E + 1] of these, [n][W + 1] of token copies. */
uint64_t sluice_device_counts_bytes(const sluice_shape_t* shape, int32_t num_chunks);
/* What numbering token copies takes behind that: slots in sent order, and scratch. */
uint64_t sluice_device_route_index_bytes(const sluice_shape_t* shape, int64_t num_tokens);
uint64_t sluice_device_token_copy_scratch_bytes(const sluice_shape_t* shape, const sluice_device_scratch_t* scratch,
                                                int64_t num_tokens);
/* Counts by block: [G][E + 1] routes, behind them with token copies on the device [G][W + 1] of these. */
int64_t sluice_device_block_routes(const sluice_shape_t* shape, int32_t num_blocks);
uint64_t sluice_device_block_counts_bytes(const sluice_shape_t* shape, int32_t num_blocks);
/* What routing takes of the device's memory at most. */
uint64_t sluice_binding_device_bytes(const sluice_shape_t* shape, const sluice_device_scratch_t* scratch,
                                     int32_t num_chunks, int64_t num_tokens);

/* ---- token copies ---- */

/* What the arena of token copies has room for. */
typedef struct sluice_token_copies_size_s {
  int32_t num_chunks;
  int64_t tokens;   /* of this rank */
  int64_t sent;     /* its kept routes */
  int64_t rows;     /* received routes */
  int64_t arriving; /* token copies, own ones among them */
} sluice_token_copies_size_t;

/* What the arena of node copies has room for. */
typedef struct sluice_node_copies_size_s {
  int32_t num_chunks;
  int64_t tokens, sent; /* of this rank, and node copies of them at most */
  int64_t arriving;     /* node copies at most, own ones among them */
  int64_t message;      /* bytes of what a rank tells each other node; 0 in a restored binding */
} sluice_node_copies_size_t;

/* Bytes of that arena; a restored binding has no exchange. */
uint64_t sluice_token_copies_bytes(const sluice_shape_t* shape, const sluice_token_copies_size_t* size,
                                   int is_restored);
uint64_t sluice_node_copies_bytes(const sluice_shape_t* shape, const sluice_node_copies_size_t* size);
/* With device memory: of what its kernels read of node copies that leave and arrive, and of their forwards. */
uint64_t sluice_node_copies_on_device_bytes(const sluice_shape_t* shape, int64_t tokens, int64_t sent, int64_t arrived,
                                            int64_t forwards);
/* With device memory: what a step keeps of token copies that arrive, and rows; and the context's arena of token copies
 * on the device in a forward with so many tokens of this rank. */
uint64_t sluice_token_copies_kept_bytes_of(const sluice_shape_t* shape, int64_t arriving, int64_t rows);
uint64_t sluice_token_copies_on_device_bytes(const sluice_shape_t* shape, int64_t tokens, int64_t arriving,
                                             int64_t rows);

#endif /* SLUICE_BACKEND_MODEL_ROUTING_SIZES_H_ */
