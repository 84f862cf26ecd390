// SPDX-License-Identifier: Apache-2.0
/* The data of one pass that depends on counts: boundaries, row orders, offsets. Bound once per call; a template never
 * sees it.
 *
 * Three row orders of a chunk:
 *   sent      by place (destination rank, local expert), then token, then k: rows this rank sends and gets back
 *   received  by source rank, then local expert, then the sender's order: rows as they arrive
 *   expert    by local expert, then source rank, then the sender's order: rows as experts see them
 * Tensors in expert order over the whole pass are sorted by (local expert, chunk), so that one GEMM can run over all
 * chunks. */
#pragma once

#include "backend/model/routing_sizes.h"
#include "backend/moe/layer/layer.h"

/* ---- the tables of a deduplicated pass; token_copies.h defines token copies and route indices ---- */

/* With device memory, kernels number the token copies while they order routes, and the one read of a forward includes
 * their numbers; ranks exchange these in the header, and route indices between devices (token_copies_on_device.c). The
 * tables below that are not of i64 are then in device memory, and a step keeps them before its rows. */
typedef struct sluice_token_copies_s {
  int32_t* route_index; /* [R] of received routes, own ones too: by source, then chunk, then in the sender's order */
  /* Of token copies that this rank sends, own ones too, in sent order of their chunk: by destination, then token. */
  int64_t* sent_of_rank;      /* [n][W + 1] by destination */
  int64_t* first_sent;        /* [n + 1] first entry of a chunk in token */
  int32_t* token;             /* of each token copy */
  int32_t* position_of_token; /* [T][W] row of (t, r) in its chunk's order; -1: nothing of t goes to r */
  /* Of token copies that arrive, by source, then in the sender's order. */
  int64_t* recv_of_rank;  /* [n][W + 1] by source; own token copies are empty */
  int64_t* first_arrived; /* [n + 1] token copies of the chunks before, own ones included */
  int32_t* position;      /* [token copies][K] row in the chunk's expert order; -1: no such route */
  int64_t max_arriving;   /* capacity of position in token copies */
  int32_t* origin; /* [R] by (chunk, row in expert order): the received token copy; for own rows the token, with device
                      memory -2 - the token */
  int64_t max_chunk_remote, max_chunk_sent; /* as in the binding, for token copies */
  /* With device memory only. */
  int32_t* send_counts;      /* host [n][W] token copies by destination */
  int32_t* recv_counts;      /* host [W][n] by source */
  int32_t* sent_route_index; /* [T * K] route indices in sent order of each chunk, from first_order; forward */
  int32_t* weight; /* [token copies][K] index of the received route weight, own ones t * K + k; -1: none; forward */
  uint64_t exchanged_bytes; /* of route indices, to other ranks */
} sluice_token_copies_t;

/* ---- the additional tables of a pass in two levels ---- */

/* A *node copy* is sent between nodes for one token of one chunk: its row once, from its rank to the rank with the same
 * local index on a node that owns experts of its routes, and one row back. That rank forwards the row to each rank of
 * its node that owns some (a *forward*); for own tokens only this step is needed. The forwards that arrive at a rank
 * are the token copies of one level, in another order: by the forwarding rank, then by the node of the source.
 *
 *   y[t] = sum over nodes v of q[t, v],   q[t, v] = sum over ranks r of v of p[t, r]   (p: token_copies.h)
 *
 * q is summed in rank order in f32 by the rank that forwarded, and sent in the layer's dtype. */
typedef struct sluice_node_copies_s {
  int32_t ranks_per_node, num_nodes;
  int32_t node, local; /* of this rank */
  /* Of this rank's tokens: by node, then token, including this node. */
  int64_t* sent_of_node;      /* [n][nodes + 1] */
  int64_t* first_sent;        /* [n + 1] first entry of a chunk in token and ranks_sent */
  int32_t* token;             /* of each node copy */
  uint64_t* ranks_sent;       /* of each: bits of the local ranks there that own experts of it */
  int32_t* position_of_token; /* [T][nodes] row of (t, v) in its chunk's order; -1: nothing of t goes to v */
  /* Node copies that this rank forwards: by node of the source, then in its order, including own tokens. */
  int64_t num_arrived;      /* of all chunks */
  int64_t* arrived_of_node; /* [n][nodes + 1] */
  int64_t* first_arrived;   /* [n + 1] */
  uint64_t* ranks;          /* of each */
  int32_t* part; /* [node copies][ranks_per_node] row in T_NODE of the sum that each rank returns; -1: none */
  /* Forwards: by local rank, then node of the source, then node copy, including those to this rank. */
  int64_t* forwards;      /* [n][W + 1] at local rank * nodes + node */
  int64_t* first_forward; /* [n + 1] */
  int32_t* origin;        /* of each: row in T_NODE; of own tokens the token */
  /* Token copies as they arrive: by forwarding local rank, then node; this rank's own are empty. */
  int64_t* recv_of_source;                                  /* [n][W + 1] at local rank * nodes + node */
  int64_t max_chunk_remote, max_chunk_sent, max_chunk_node; /* rows of T_SEND, T_RECV and T_NODE */
} sluice_node_copies_t;

/* ---- the binding ---- */

typedef struct sluice_binding_s {
  const sluice_moe_t* moe;
  const struct sluice_routes_s* routes; /* the layer's strategies */
  const struct sluice_copies_s* copies;
  sluice_pass_memory_t* memory; /* holds its arrays; set before routing or restoring */
  int32_t num_chunks;
  int32_t chunks_by_experts; /* chunks are cut out of rows (chunks_by_experts.h), else out of tokens, with all routes of
                                a token in one chunk */
  int32_t world_size;
  int32_t num_local;
  int32_t top_k;
  int64_t num_tokens;                       /* T */
  int64_t max_tokens;                       /* largest T of any rank; of a forward, after the handshake */
  int64_t num_sent;                         /* kept routes */
  int64_t num_rows;                         /* R, all chunks */
  int64_t max_chunk_rows;                   /* largest chunk of R */
  int64_t max_chunk_sent;                   /* most kept routes of a chunk */
  int64_t max_chunk_remote;                 /* most rows of a chunk to, or from, other ranks */
  uint8_t restore_input[SLUICE_MAX_CHUNKS]; /* SLUICE_RESTORE_* by chunk, as the forward left the rows */
  uint8_t restore_pre_activation[SLUICE_MAX_CHUNKS];
  uint8_t plan;        /* number in the layer's set, from 1, of the forward's plan; 0: no plan */
  uint8_t wgrad_mode;  /* of its backward, fixed by the forward */
  uint8_t shares_act;  /* of its passes: T_ACT and dT_ACT lie in T_M's slots, see sluice_template_spec_t */
  uint8_t grouped;     /* of its passes: exchanges are grouped */
  uint8_t deduplicate; /* of its passes: SLUICE_DEDUPLICATE_*; set before routing or restoring */
  uint8_t two_levels;  /* of its passes: tokens are sent by node */
  uint64_t adapters;   /* sluice_low_signature of the forward */

  int32_t* send_counts; /* [n][E] by place */
  int32_t* recv_counts; /* [W][n][E_local] */
  int32_t* counts_out; /* [W][n][E_local(r)] send_counts by destination, for the header; with token copies on the device
                          after their numbers [n]; not set in a restored binding, nor is counts_in */
  int32_t* counts_in;  /* received counts: recv_counts, with token copies on the device [W][n + n E_local] */
  /* For kernels, in the memory of the device. */
  int32_t* order;       /* flat routes t*K+k in sent order, chunk i from first_order[i] */
  int32_t* order_token; /* their tokens */
  int32_t* position;    /* [T*K] row of each route in its chunk's sent order (chunks_by_experts: of all chunks, see
                           first_returned); -1: dropped */

  int64_t* first_token;    /* [n + 1]; chunks_by_experts: 0, .., 0, T */
  int64_t* first_sent;     /* [n + 1] kept routes of the chunks before */
  int64_t* first_order;    /* [n + 1] index into order: first_sent, or first_token * K if the device made it */
  int64_t* first_returned; /* [n + 1] first returned row of a chunk, counted over all chunks, if returned rows of all
                              chunks are kept (chunks_by_experts); else 0 */
  int64_t* sent_of_rank;   /* [n][W + 1] offsets in the chunk's sent order, by destination */
  int64_t* recv_of_rank;   /* [n][W + 1] offsets in the chunk's received order, by source; own rows are empty */
  int64_t* rows_of_expert; /* [n][E_local] */
  int64_t* first_in_chunk; /* [n][E_local] first row in the chunk's expert order */
  int64_t* first_in_pass;  /* [n][E_local] first row in the whole pass, by (expert, chunk) */
  int64_t* first_of_chunk; /* [n + 1] first row in the whole pass, by (chunk, expert) */

  sluice_token_copies_t token_copies; /* of a deduplicated layer */
  sluice_node_copies_t node_copies;   /* of a pass with two_levels */
} sluice_binding_t;

/* The shape of the layer with the deduplication of this binding's passes. */
static inline sluice_shape_t sluice_binding_shape(const sluice_binding_t* b) {
  sluice_shape_t shape = b->moe->shape;
  sluice_shape_take_deduplication(&shape, b->deduplicate);
  return shape;
}

/* The tokens that an op of `chunk` sums, and the chunk in which their rows begin. chunk -1: all tokens. */
typedef struct sluice_token_span_s {
  int64_t first, count;
  int32_t chunk;
} sluice_token_span_t;
static inline sluice_token_span_t sluice_tokens_of(const sluice_binding_t* b, int32_t chunk) {
  if (chunk < 0) return (sluice_token_span_t){0, b->num_tokens, 0};
  return (sluice_token_span_t){b->first_token[chunk], b->first_token[chunk + 1] - b->first_token[chunk], chunk};
}
static inline int32_t sluice_recv_count(const sluice_binding_t* b, int32_t source, int32_t chunk, int32_t local) {
  return b->recv_counts[((int64_t)source * b->num_chunks + chunk) * b->num_local + local];
}
static inline int32_t sluice_send_count(const sluice_binding_t* b, int32_t chunk, int32_t place) {
  return b->send_counts[(int64_t)chunk * b->moe->shape.config.num_experts + place];
}
