/* Bytes of what routing takes, from a layer's shape and counts: orders and offsets of a pass, their saved form, parcels
 * of a deduplicated layer, and on a far device what lies in its memory. Who plans them and who lays arrays into them
 * (backend/moe) go by the same numbers. */
#ifndef SLUICE_BACKEND_MODEL_ROUTING_SIZES_H_
#define SLUICE_BACKEND_MODEL_ROUTING_SIZES_H_

#include "backend/model/shape.h"

#define SLUICE_PLAN_BLOCKS 64 /* G at most; always on a far device, which counts before ranks know their largest T */

/* Of the header of a saved binding, which backend/moe defines and asserts. */
#define SLUICE_META_HEADER_BYTES 96u

/* ---- a pass, where the host keeps its arrays ---- */

/* Rows that the sent orders of a pass have room for: at most one per route, under ceilings always the same. */
int64_t sluice_binding_room(const sluice_shape_t* shape, int32_t num_chunks, int64_t num_tokens);
/* Offsets of n chunks. num_sent: rows of the sent order, places that no route takes included. with_orders: counts and
 * orders too, which a restored binding reads where the host keeps them. */
uint64_t sluice_binding_bytes_of(const sluice_shape_t* shape, int32_t num_chunks, int64_t num_sent, int64_t num_routes,
                                 int with_orders);
/* All of a forward. */
uint64_t sluice_binding_arena_bytes(const sluice_shape_t* shape, int32_t num_chunks, int64_t num_tokens);

/* The saved form (META): all of it, and what is there of parcels: slots, on a far device their numbers, sent and
 * received. */
uint64_t sluice_binding_meta_bytes_of(const sluice_shape_t* shape, int32_t num_chunks, int64_t num_tokens,
                                      int64_t num_sent, int64_t num_rows);
uint64_t sluice_binding_meta_parcels_bytes(const sluice_shape_t* shape, int32_t num_chunks, int64_t num_rows);

/* ---- a far device ---- */

/* What its kernels need besides what is named here: known to the device alone. */
typedef struct sluice_far_scratch_s {
  uint64_t (*route_bytes)(int64_t num_routes, int32_t num_experts);
  uint64_t (*parcel_bytes)(int64_t num_routes, int32_t num_experts, int32_t num_ranks);
} sluice_far_scratch_t;

/* Parcels of a token at most: min(K, W). */
int64_t sluice_most_parcels_of_token(const sluice_shape_t* shape);
/* Of an order: it has room for all rows of the pass. Of the tokens of all parcels, and of where they are; 0 where rows
 * travel. */
uint64_t sluice_far_order_bytes(const sluice_shape_t* shape, int64_t num_tokens);
uint64_t sluice_far_parcel_tokens_bytes(const sluice_shape_t* shape, int64_t num_tokens);
uint64_t sluice_far_parcel_table_bytes(const sluice_shape_t* shape, int64_t num_tokens);
/* A step keeps orders and positions in front of its rows, and of the parcels that it sends who they are of and where:
 * the bytes of that block. 0 on a CPU, where they are in META. */
uint64_t sluice_binding_routes_bytes(const sluice_shape_t* shape, int64_t num_tokens);
/* Counts behind the routes: [n][E + 1] of these, [n][W + 1] of parcels. */
uint64_t sluice_far_counts_bytes(const sluice_shape_t* shape, int32_t num_chunks);
/* What numbering parcels takes behind that: slots in sent order, and scratch. */
uint64_t sluice_far_slots_bytes(const sluice_shape_t* shape, int64_t num_tokens);
uint64_t sluice_far_parcel_scratch_bytes(const sluice_shape_t* shape, const sluice_far_scratch_t* scratch,
                                         int64_t num_tokens);
/* Counts by block: [G][E + 1] routes, behind them with far parcels [G][W + 1] of these. */
int64_t sluice_far_block_routes(const sluice_shape_t* shape, int32_t num_blocks);
uint64_t sluice_far_block_counts_bytes(const sluice_shape_t* shape, int32_t num_blocks);
/* What routing takes of the device's memory at most. */
uint64_t sluice_binding_far_bytes(const sluice_shape_t* shape, const sluice_far_scratch_t* scratch, int32_t num_chunks,
                                  int64_t num_tokens);

/* ---- parcels ---- */

/* What the arena of parcels has room for. */
typedef struct sluice_parcels_size_s {
  int32_t num_chunks;
  int64_t tokens;   /* of this rank */
  int64_t sent;     /* its kept routes */
  int64_t rows;     /* received routes */
  int64_t arriving; /* parcels, own ones among them */
} sluice_parcels_size_t;

/* Bytes of that arena; a restored binding has no exchange. */
uint64_t sluice_parcels_bytes(const sluice_shape_t* shape, const sluice_parcels_size_t* size, int is_restored);
/* On a far device: what a step keeps of parcels that arrive, and rows; and the context's arena of far parcels in a
 * forward with so many tokens of this rank. */
uint64_t sluice_parcels_kept_bytes_of(const sluice_shape_t* shape, int64_t arriving, int64_t rows);
uint64_t sluice_parcels_far_bytes(const sluice_shape_t* shape, int64_t tokens, int64_t arriving, int64_t rows);

#endif /* SLUICE_BACKEND_MODEL_ROUTING_SIZES_H_ */
