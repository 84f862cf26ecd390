/* The rows of the op's chunk, out to the experts and back: what the exchange ops of both directions share. Private to
 * moe.
 *
 * Each `_start` packs and posts one exchange; the op waits with sluice_finish. Two may be in flight (rows and scalars).
 * All of this runs on the communication lane, one op at a time, so its scratch is shared without locks. */
#ifndef SLUICE_BACKEND_MOE_EXCHANGE_OPS_H_
#define SLUICE_BACKEND_MOE_EXCHANGE_OPS_H_

#include "backend/moe/pass.h"

typedef struct sluice_transfer_s {
  sluice_comm_request_t* request;
  uint64_t bytes; /* payload this rank sends */
} sluice_transfer_t;

/* Posts pass->send, ->recv and their bytes. On a far device the exchange is in the lane's stream then, and there is
 * nothing to wait for. */
sluice_status_t sluice_transfer_start(sluice_pass_t* pass, const sluice_op_t* op, sluice_transfer_t* out_transfer);
sluice_status_t sluice_finish(sluice_pass_t* pass, const sluice_op_t* op, sluice_transfer_t* transfer);

/* Rows of `tokens` to the ranks of their experts: gathered into T_SEND, arriving in T_RECV in received order. */
sluice_status_t sluice_send_tokens_start(sluice_pass_t* pass, const sluice_op_t* op, const sluice_tensor_t* tokens,
                                         sluice_transfer_t* out_transfer);
/* Received rows and this rank's own rows of `tokens`, into `tensor` in expert order. */
void sluice_unpack_tokens(sluice_pass_t* pass, const sluice_op_t* op, const sluice_tensor_t* tokens, int32_t tensor);

/* Rows of `tensor` back to the ranks of their tokens, arriving in T_RECV in sent order; own rows are copied there while
 * the wire is busy. */
sluice_status_t sluice_return_rows_start(sluice_pass_t* pass, const sluice_op_t* op, int32_t tensor,
                                         sluice_transfer_t* out_transfer);

/* The route weights that go with the tokens; sluice_unpack_route puts them into T_ROUTE. */
sluice_status_t sluice_send_route_start(sluice_pass_t* pass, const sluice_op_t* op, sluice_transfer_t* out_transfer);
void sluice_unpack_route(sluice_pass_t* pass, const sluice_op_t* op);

/* The gate's scalars (T_DGATE) back, into pass->gate_recv in sent order. */
sluice_status_t sluice_return_gate_start(sluice_pass_t* pass, const sluice_op_t* op, sluice_transfer_t* out_transfer);

#endif /* SLUICE_BACKEND_MOE_EXCHANGE_OPS_H_ */
