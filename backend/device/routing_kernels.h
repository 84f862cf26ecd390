// SPDX-License-Identifier: Apache-2.0
/* Kernels that order the routes of a layer, and number and place its token copies (moe/routing/token_copies.h), in the
 * memory of a device that the host cannot access. Work is enqueued on `stream` and is stream-complete. */
#pragma once

#include "backend/base/status.h"
#include "backend/device/kernels.h"
#include "sluice/context.h"

struct sluice_device_s; /* device.h */

/* The routes of a forward, ordered on the device. Rows of chunk i start at first_token[i] * K in the three orders, with
 * a capacity at i * E * capacity in order and order_token. */
typedef struct sluice_device_routes_s {
  const void* ids;      /* device: expert of route (t, k) at t * ids_t + k * ids_k; -1: dropped */
  int64_t ids_t, ids_k; /* elements */
  int32_t ids_64;       /* 1: i64 ids, 0: i32 */
  int32_t num_chunks;
  const int64_t* first_token;     /* host [n + 1] */
  const int32_t* expert_position; /* host [E] */
  int32_t top_k, num_experts;
  int32_t* counts; /* device, out [n][E + 1] by slot; the last entry of a chunk: its first route with an invalid id, t *
                      K + k, or INT32_MAX */
  int32_t* order;  /* device, out: flat routes t * K + k in sent order */
  int32_t* order_token; /* device, out: their tokens */
  int32_t* position;    /* device, out [T * K]: row of each route in its chunk's sent order, -1 if dropped */
  void* scratch;        /* device, scratch_bytes() */
  /* Nonzero: every slot has this many rows in each chunk. Its first routes take them, and the others are dropped; rows
   * without a route are -1 in order and order_token. */
  int64_t capacity;
  int64_t* drop_counters; /* device, with a capacity: [SLUICE_NUM_DROP_COUNTERS], added to */
} sluice_device_routes_t;

/* Routes per block of tokens and slot: block g of G has the tokens [T g / G, T (g + 1) / G). */
typedef struct sluice_device_blocks_s {
  const void* ids; /* as sluice_device_routes_t */
  int64_t ids_t, ids_k;
  int32_t ids_64;
  int32_t num_blocks; /* G */
  int64_t num_tokens;
  const int32_t* expert_position; /* host [E] */
  int32_t top_k, num_experts;
  int32_t* counts; /* device, out [G][E + 1]; the last entry of a block: its first route with an invalid id, t * K + k,
                      or INT32_MAX */
  void* scratch;   /* device, route_scratch_bytes(0, E) */
  /* Counts token copies too; num_ranks 0: does not. */
  int32_t num_ranks;
  const int32_t* rank_of_expert; /* host [E] */
  int32_t* token_copies;         /* device, out [G][W + 1] by rank, and an unused word */
  void* token_copy_scratch;      /* device, token_copy_scratch_bytes(T K, E, W) */
} sluice_device_blocks_t;

/* The token copies of a forward (moe/routing/token_copies.h), for routes that were ordered before. Those of chunk i
 * start at first_token[i] * most in token; rows of its routes at first_token[i] * K in route_index. */
typedef struct sluice_device_token_copies_s {
  const void* ids; /* as sluice_device_routes_t */
  int64_t ids_t, ids_k;
  int32_t ids_64;
  int32_t num_chunks;
  const int64_t* first_token;    /* host [n + 1] */
  const int32_t* rank_of_expert; /* host [E] */
  int32_t top_k, num_experts, num_ranks;
  int32_t most;               /* maximum number of token copies of a token: min(K, W) */
  const int32_t* position;    /* device [T * K] of the routes */
  int32_t* counts;            /* device, out [n][W + 1] token copies by rank, and an unused word */
  int32_t* token;             /* device, out: of each token copy, by (rank, token) in each chunk */
  int32_t* position_of_token; /* device, out [T][W] its row in that order, -1: none */
  int32_t* route_index;       /* device, out: of each route, in sent order */
  void* scratch;              /* device, token_copy_scratch_bytes() */
} sluice_device_token_copies_t;

/* Received routes of one source and one expert in a chunk, in the sender's order: the position of their route indices,
 * the token copies of the source in this chunk and the first of them among all, the routes' first row in expert order
 * and in origin. from: the source's first token copy among those received by exchange; weight: the position of the
 * routes among the received weights. For this rank's own routes: the first token copy in token, and -1. */
typedef struct sluice_device_token_copy_run_s {
  int32_t rows, route_index, token_copies, token_copy, row, origin, from, weight;
} sluice_device_token_copy_run_t;

typedef struct sluice_device_arrivals_s {
  const sluice_device_token_copy_run_t* runs; /* host */
  int64_t num_runs;
  int32_t top_k;
  int64_t token_copies;       /* received */
  const int32_t* route_index; /* device, as are the following */
  const int32_t* token;
  int32_t* position; /* out [token copies][K] row in expert order, -1: no such route */
  int32_t*
      weight; /* out [token copies][K] position of the received route weight, for own ones t * K + k; -1 as above */
  int32_t*
      origin; /* out by row: the received token copy, for own ones -2 - the token; -1: its route index was invalid */
} sluice_device_arrivals_t;

typedef struct sluice_routing_kernels_s {
  uint64_t (*route_scratch_bytes)(int64_t num_routes, int32_t num_experts);
  sluice_status_t (*route)(struct sluice_device_s* device, sluice_stream_t stream,
                           const sluice_device_routes_t* routes);
  sluice_status_t (*count_blocks)(struct sluice_device_s* device, sluice_stream_t stream,
                                  const sluice_device_blocks_t* blocks);
  /* Number the token copies of a forward; move words by runs; convert received route indices to tables. */
  uint64_t (*token_copy_scratch_bytes)(int64_t num_routes, int32_t num_experts, int32_t num_ranks);
  sluice_status_t (*number_token_copies)(struct sluice_device_s* device, sluice_stream_t stream,
                                         const sluice_device_token_copies_t* token_copies);
  sluice_status_t (*move_words)(struct sluice_device_s* device, sluice_stream_t stream, const sluice_row_run_t* runs,
                                int64_t num_runs, const int32_t* src, int32_t* dst);
  sluice_status_t (*place_token_copies)(struct sluice_device_s* device, sluice_stream_t stream,
                                        const sluice_device_arrivals_t* arrivals);
} sluice_routing_kernels_t;
