/* One exchange of an op: posted, then waited for. Two may be in flight (rows and scalars). On the communication
 * lane, one op at a time. */
#ifndef SLUICE_BACKEND_MOE_OPS_TRANSFER_H_
#define SLUICE_BACKEND_MOE_OPS_TRANSFER_H_

#include "backend/moe/pass/pass.h"

typedef struct sluice_transfer_s {
  sluice_comm_request_t* request;
  uint64_t bytes; /* payload this rank sends */
} sluice_transfer_t;

/* Posts pass->send, ->recv and their bytes. With device memory the exchange is in the lane's stream then, and there is
 * nothing to wait for. */
sluice_status_t sluice_transfer_start(sluice_pass_t* pass, const sluice_op_t* op, sluice_transfer_t* out_transfer);
sluice_status_t sluice_finish(sluice_pass_t* pass, const sluice_op_t* op, sluice_transfer_t* transfer);

#endif /* SLUICE_BACKEND_MOE_OPS_TRANSFER_H_ */
