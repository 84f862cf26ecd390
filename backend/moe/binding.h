/* What depends on counts in one pass: boundaries, row orders, offsets. Bound once per call; a template never sees it.
 *
 * Three row orders of a chunk:
 *   sent      by place (destination rank, local expert), then token, then k: rows this rank sends and gets back
 *   received  by source rank, then local expert, then the sender's order: rows as they arrive
 *   expert    by local expert, then source rank, then the sender's order: rows as experts see them
 * Tensors in expert order over the whole pass lie by (local expert, chunk), so that one product may run over all
 * chunks.
 */
#ifndef SLUICE_BACKEND_MOE_BINDING_H_
#define SLUICE_BACKEND_MOE_BINDING_H_

#include "backend/moe/layer.h"
#include "backend/model/routing_sizes.h"
#include "backend/moe/parcels.h"

typedef struct sluice_binding_s {
  const sluice_moe_t* moe;
  int32_t num_chunks;
  int32_t cut_rows; /* chunks are cut out of rows, see cut_rows.h; else out of tokens, all routes of one in one chunk */
  int32_t world_size;
  int32_t num_local;
  int32_t top_k;
  int64_t num_tokens;                    /* T */
  int64_t num_sent;                      /* kept routes */
  int64_t num_rows;                      /* R, all chunks */
  int64_t max_chunk_rows;                /* of R */
  int64_t max_chunk_sent;                /* kept routes of a chunk */
  int64_t max_chunk_remote;              /* of either direction: rows to or from other ranks, whichever is more */
  uint8_t restore_di[SLUICE_MAX_CHUNKS]; /* SLUICE_RESTORE_* by chunk, as forward left the rows */
  uint8_t restore_m[SLUICE_MAX_CHUNKS];
  uint8_t plan;       /* of the layer's set, from 1, under which the forward ran; 0: without one */
  uint8_t wgrad_mode; /* of its backward, whatever is chosen or in force by then */

  int32_t* send_counts; /* [n][E] by place */
  int32_t* recv_counts; /* [W][n][E_local] */
  int32_t* counts_out;  /* [W][n][E_local(r)] send_counts by destination, for the header, with far parcels behind their
                         * numbers [n]; not in a restored binding, and neither is */
  int32_t* counts_in;   /* what comes back: recv_counts, with far parcels [W][n + n E_local] */
  /* For kernels: in the memory of the device. */
  int32_t* order;       /* flat routes t*K+k in sent order, chunk i from first_order[i] */
  int32_t* order_token; /* their tokens */
  int32_t* position;    /* [T*K] row of each route in its chunk's sent order (cut_rows: of all chunks, see
                         * first_returned); -1 dropped */

  int64_t* first_token;    /* [n + 1]; cut_rows: 0, .., 0, T */
  int64_t* first_sent;     /* [n + 1] kept routes of the chunks before */
  int64_t* first_order;    /* [n + 1] into order: first_sent, or first_token * K where the device made it */
  int64_t* first_returned; /* [n + 1] cut_rows: where a chunk's rows return, counted from the first chunk's */
  int64_t* sent_of_rank;   /* [n][W + 1] rows of the chunk's sent order, by destination */
  int64_t* recv_of_rank;   /* [n][W + 1] rows of the chunk's received order, by source; own rows take no place */
  int64_t* rows_of_expert; /* [n][E_local] */
  int64_t* first_in_chunk; /* [n][E_local] first row in the chunk's expert order */
  int64_t* first_in_pass;  /* [n][E_local] first row in the whole pass, by (expert, chunk) */
  int64_t* first_of_chunk; /* [n + 1] first row in the whole pass, by (chunk, expert) */

  sluice_parcels_t parcels; /* where the layer is deduplicated */
} sluice_binding_t;

/* Orders the routes of `expert_ids` [T, K] and counts them; everything about received rows is still open. Chunks start
 * at first_token [n + 1], or NULL: equal numbers of tokens. The arrays lie in the context's binding arena. Errors:
 * INVALID_ARGUMENT naming the entry that is out of range, NO_MEMORY. */
sluice_status_t sluice_binding_route(sluice_moe_t* moe, const sluice_tensor_t* expert_ids, int32_t num_chunks,
                                     const int64_t* first_token, sluice_binding_t* out_binding);
/* The same with chunks cut out of rows (cut_rows.h). */
sluice_status_t sluice_binding_route_rows(sluice_moe_t* moe, const sluice_tensor_t* expert_ids, int32_t num_chunks,
                                          sluice_binding_t* out_binding);
/* The same on a far device, by its kernels: counts come to the host by the one read of a forward. On `stream`. */
sluice_status_t sluice_binding_route_far(sluice_moe_t* moe, sluice_stream_t stream, const sluice_tensor_t* expert_ids,
                                         int32_t num_chunks, sluice_binding_t* out_binding);
/* The same in two parts, for chunks that are cut by received rows. First counts are read, once, by block of tokens and
 * place: out_counts [SLUICE_PLAN_BLOCKS, E], with what this file puts behind them, in the context's scratch until the
 * pass is prepared. Then the chunks are known, each of whole blocks, and routes are ordered without another read. */
sluice_status_t sluice_binding_count_far(sluice_moe_t* moe, sluice_stream_t stream, const sluice_tensor_t* expert_ids,
                                         int32_t** out_counts);
sluice_status_t sluice_binding_route_far_blocks(sluice_moe_t* moe, sluice_stream_t stream,
                                                const sluice_tensor_t* expert_ids, int32_t num_chunks,
                                                const int64_t* first_token, const int32_t* first_block,
                                                const int32_t* counts, sluice_binding_t* out_binding);
/* The same under ceilings: what a place of a chunk gets is always the layer's ceiling, so that nothing is read and
 * nothing exchanged. Routes beyond it are dropped (position -1) and added to the tally (device/tally.h), which lies
 * with the rows; rows that no route takes are -1 in the orders. */
sluice_status_t sluice_binding_route_under_ceiling(sluice_moe_t* moe, const sluice_tensor_t* expert_ids,
                                                   int32_t num_chunks, int64_t* tally, sluice_binding_t* out_binding);
sluice_status_t sluice_binding_route_far_under_ceiling(sluice_moe_t* moe, sluice_stream_t stream,
                                                       const sluice_tensor_t* expert_ids, int32_t num_chunks,
                                                       int64_t* tally, sluice_binding_t* out_binding);
/* On a far device: the block that a step keeps in front of its rows (routes, and parcels that arrived), once counts
 * are known, and the routes of a binding just made. */
static inline uint64_t sluice_binding_kept_bytes(const sluice_binding_t* b) {
  return sluice_binding_routes_bytes(&b->moe->shape, b->num_tokens) + sluice_parcels_kept_bytes(b);
}
static inline void* sluice_binding_routes(const sluice_binding_t* b) { return b->order; }
/* Binds rows that lie by local expert already, for the experts alone: one chunk, no tokens. */
sluice_status_t sluice_binding_of_rows(sluice_moe_t* moe, const int64_t* rows_per_expert,
                                       sluice_binding_t* out_binding);
/* Derives all offsets once recv_counts are filled in. */
sluice_status_t sluice_binding_finish(sluice_binding_t* binding);

/* The saved form, from which a backward is bound without ids and without an exchange. */
uint64_t sluice_binding_meta_bytes(const sluice_binding_t* binding);
/* saved_bytes: [SLUICE_SAVED_COUNT], written down so that a restored step can be checked. */
void sluice_binding_save(const sluice_binding_t* binding, const uint64_t* saved_bytes, void* meta);
/* From now on the saved buffers behind `meta` may hold gradients: no other backward can start from them. */
void sluice_binding_use_up(void* meta);
int sluice_binding_is_used_up(const void* meta);
/* INVALID_ARGUMENT when the bytes are not of this layer, or damaged. `meta` is borrowed by the binding, and so is
 * `routes`, the block of a far device (NULL on a CPU). */
sluice_status_t sluice_binding_restore(sluice_moe_t* moe, const void* meta, uint64_t meta_bytes, void* routes,
                                       sluice_binding_t* out_binding);
/* What sluice_step_info needs, without binding. */
sluice_status_t sluice_binding_peek(const sluice_moe_t* moe, const void* meta, uint64_t meta_bytes,
                                    int32_t* out_num_chunks, uint64_t* out_saved_bytes, int64_t* out_rows_per_expert);

/* The tokens that an op of `chunk` sums, and the chunk where their rows begin. chunk -1: all tokens. */
typedef struct sluice_token_span_s {
  int64_t first, count;
  int32_t chunk;
} sluice_token_span_t;
static inline sluice_token_span_t sluice_tokens_of(const sluice_binding_t* b, int32_t chunk) {
  if (chunk < 0) return (sluice_token_span_t){0, b->num_tokens, 0};
  return (sluice_token_span_t){b->first_token[chunk], b->first_token[chunk + 1] - b->first_token[chunk], chunk};
}
static inline int64_t sluice_chunk_sent(const sluice_binding_t* b, int32_t chunk) {
  return b->first_sent[chunk + 1] - b->first_sent[chunk];
}
static inline int32_t sluice_recv_count(const sluice_binding_t* b, int32_t source, int32_t chunk, int32_t local) {
  return b->recv_counts[((int64_t)source * b->num_chunks + chunk) * b->num_local + local];
}
static inline int32_t sluice_send_count(const sluice_binding_t* b, int32_t chunk, int32_t place) {
  return b->send_counts[(int64_t)chunk * b->moe->shape.config.num_experts + place];
}

#endif /* SLUICE_BACKEND_MOE_BINDING_H_ */
