// SPDX-License-Identifier: Apache-2.0
/* The additional tables of a pass in two levels; the others are in token_copy_tables.h.
 *
 * A *node copy* is sent between nodes for one token of one chunk: its row once, from its rank to the rank with the same
 * local index on a node that owns experts of its routes, and one row back. That rank forwards the row to each rank of
 * its node that owns some (a *forward*); for own tokens only this step is needed. The forwards that arrive at a rank
 * are the token copies of one level, in another order: by the forwarding rank, then by the node of the source.
 *
 *   y[t] = sum over nodes v of q[t, v],   q[t, v] = sum over ranks r of v of p[t, r]   (p: token_copies.h)
 *
 * q is summed in rank order in f32 by the rank that forwarded, and sent in the layer's dtype. */
#pragma once

#include <stdint.h>

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
