// SPDX-License-Identifier: Apache-2.0
/* What travels between ranks: each route's row, or, where a layer is deduplicated, one copy of a token's row for each
 * rank and one sum back; or for each node, and within it for each rank. Chosen once for a pass; the exchange ops of
 * both directions go through it.
 *
 * Each `_start` packs and posts one exchange; the op waits with sluice_finish. All of this runs on the communication
 * lane, one op at a time, so its scratch is shared without locks. */
#ifndef SLUICE_BACKEND_MOE_OPS_TRAVEL_H_
#define SLUICE_BACKEND_MOE_OPS_TRAVEL_H_

#include "backend/moe/ops/transfer.h"

typedef struct sluice_travel_s {
  /* Rows of `tokens` to the ranks of their experts: gathered into T_SEND, arriving in T_RECV by source. */
  sluice_status_t (*send_tokens_start)(sluice_pass_t* pass, const sluice_op_t* op, const sluice_tensor_t* tokens,
                                       sluice_transfer_t* out_transfer);
  /* Received rows and this rank's own rows of `tokens`, into `tensor` in expert order. */
  void (*unpack_tokens)(sluice_pass_t* pass, const sluice_op_t* op, const sluice_tensor_t* tokens, int32_t tensor);
  /* Forward: the route weights go along where the experts' rank sums rows, and are unpacked there; NULL: they stay. */
  sluice_status_t (*send_weights_start)(sluice_pass_t* pass, const sluice_op_t* op, sluice_transfer_t* out_transfer);
  void (*unpack_weights)(sluice_pass_t* pass, const sluice_op_t* op);
  /* Rows of `tensor` back to the ranks of their tokens, arriving in T_RECV; own rows are copied or summed there while
   * the wire is busy. */
  sluice_status_t (*return_rows_start)(sluice_pass_t* pass, const sluice_op_t* op, int32_t tensor,
                                       sluice_transfer_t* out_transfer);
  /* In two levels alone; there send_tokens_start ends in T_NODE, and return_rows_start begins there. Rows of T_NODE and
   * of `tokens` to the ranks of this node that own their experts, arriving in T_RECV. */
  sluice_status_t (*pass_on_start)(sluice_pass_t* pass, const sluice_op_t* op, const sluice_tensor_t* tokens,
                                   sluice_transfer_t* out_transfer);
  /* Sums over the rows of `tensor` to the ranks of this node that passed their tokens on, arriving in T_NODE. */
  sluice_status_t (*collect_start)(sluice_pass_t* pass, const sluice_op_t* op, int32_t tensor,
                                   sluice_transfer_t* out_transfer);
  /* Into the pass's out_rows: the returned rows of each token, weighted by the route weights (forward) or as they are.
   * tensor: where they lie with one rank, which returns none. */
  void (*reduce)(sluice_pass_t* pass, const sluice_op_t* op, int32_t tensor);
} sluice_travel_t;

extern const sluice_travel_t sluice_travel_of_rows;
extern const sluice_travel_t sluice_travel_of_token_copies;        /* tables in host memory */
extern const sluice_travel_t sluice_travel_of_device_token_copies; /* in the device's */
extern const sluice_travel_t sluice_travel_of_node_copies;         /* in two levels, tables in host memory */
extern const sluice_travel_t sluice_travel_of_device_node_copies;  /* in the device's */

/* What token copies and node copies have in common (token_copy_ops.c). */
void sluice_unpack_token_copies(sluice_pass_t* pass, const sluice_op_t* op, const sluice_tensor_t* tokens,
                                int32_t tensor);
void sluice_unpack_copy_weights(sluice_pass_t* pass, const sluice_op_t* op);
void sluice_gather_copy_weights(sluice_pass_t* pass, const sluice_op_t* op);

#endif /* SLUICE_BACKEND_MOE_OPS_TRAVEL_H_ */
