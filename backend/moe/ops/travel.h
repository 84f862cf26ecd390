// SPDX-License-Identifier: Apache-2.0
/* What ranks send each other: a row for each route, or, for a deduplicated layer, one copy of a token's row for each
 * rank and one sum back; or the same for each node, and within it for each rank. Chosen once for a pass. */
#pragma once

#include "backend/moe/pass/pass.h"

/* One exchange of an op, on the communication lane. Two exchanges of an op may be in flight: rows and scalars. */
typedef struct sluice_transfer_s {
  sluice_comm_request_t* request;
  uint64_t bytes; /* payload that this rank sends */
} sluice_transfer_t;

/* Sets pass->arrays for rows of which `sent` and `received` are the offsets by rank; only `sent` counts own rows.
 * To experts: `out` is packed without own rows, `in` in received order. To tokens: `out` is in received order, `in` in
 * sent order. */
void sluice_transfer_rows(sluice_pass_t* pass, int to_experts, const int64_t* sent, const int64_t* received,
                          const char* out, char* in, uint64_t row_bytes);
/* Posts pass->arrays. With device memory the exchange is enqueued on the lane's stream, and sluice_finish does not wait
 * (run_exchange.c). */
sluice_status_t sluice_transfer_start(sluice_pass_t* pass, const sluice_op_t* op, sluice_transfer_t* out_transfer);
sluice_status_t sluice_finish(sluice_pass_t* pass, const sluice_op_t* op, sluice_transfer_t* transfer);

typedef struct sluice_travel_s {
  /* Sends rows of `tokens` to the ranks of their experts: gathered into T_SEND, received in T_RECV by source. */
  sluice_status_t (*send_tokens_start)(sluice_pass_t* pass, const sluice_op_t* op, const sluice_tensor_t* tokens,
                                       sluice_transfer_t* out_transfer);
  /* Copies received rows and this rank's own rows of `tokens` to `tensor`, in expert order. */
  void (*unpack_tokens)(sluice_pass_t* pass, const sluice_op_t* op, const sluice_tensor_t* tokens, int32_t tensor);
  /* Forward: sends the route weights if the experts' rank sums rows, and unpacks them there; NULL: not sent. */
  sluice_status_t (*send_weights_start)(sluice_pass_t* pass, const sluice_op_t* op, sluice_transfer_t* out_transfer);
  void (*unpack_weights)(sluice_pass_t* pass, const sluice_op_t* op);
  /* Returns rows of `tensor` to the ranks of their tokens, into T_RECV; own rows are copied or summed there while the
   * exchange is in flight. */
  sluice_status_t (*return_rows_start)(sluice_pass_t* pass, const sluice_op_t* op, int32_t tensor,
                                       sluice_transfer_t* out_transfer);
  /* Only in two levels, where send_tokens_start ends in T_NODE and return_rows_start begins there. Forwards rows of
   * T_NODE and `tokens` to the ranks of this node that own their experts, into T_RECV. */
  sluice_status_t (*pass_on_start)(sluice_pass_t* pass, const sluice_op_t* op, const sluice_tensor_t* tokens,
                                   sluice_transfer_t* out_transfer);
  /* Returns sums over rows of `tensor` to the ranks of this node that forwarded the tokens, into T_NODE. */
  sluice_status_t (*collect_start)(sluice_pass_t* pass, const sluice_op_t* op, int32_t tensor,
                                   sluice_transfer_t* out_transfer);
  /* Writes out_rows: sums of each token's returned rows, weighted by route weights (forward) or not. tensor: holds the
   * rows with one rank, which returns none. */
  void (*reduce)(sluice_pass_t* pass, const sluice_op_t* op, int32_t tensor);
} sluice_travel_t;

extern const sluice_travel_t sluice_travel_of_rows;
extern const sluice_travel_t sluice_travel_of_token_copies;
extern const sluice_travel_t sluice_travel_of_node_copies; /* in two levels */

/* Functions that token copies and node copies share (token_copy_ops.c). */
void sluice_unpack_token_copies(sluice_pass_t* pass, const sluice_op_t* op, const sluice_tensor_t* tokens,
                                int32_t tensor);
void sluice_unpack_copy_weights(sluice_pass_t* pass, const sluice_op_t* op);
