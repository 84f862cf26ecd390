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
#include "backend/moe/routing/node_copy_tables.h"
#include "backend/moe/routing/token_copy_tables.h"

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
