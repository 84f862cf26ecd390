// SPDX-License-Identifier: Apache-2.0
/* Starts and finishes one exchange of an op, on the communication lane. Two exchanges of an op may be in flight: rows
 * and scalars. */
#pragma once

#include "backend/moe/pass/pass.h"

typedef struct sluice_transfer_s {
  sluice_comm_request_t* request;
  uint64_t bytes; /* payload that this rank sends */
} sluice_transfer_t;

/* Posts pass->send, ->recv and their bytes. With device memory the exchange is enqueued on the lane's stream, and
 * sluice_finish does not wait. */
sluice_status_t sluice_transfer_start(sluice_pass_t* pass, const sluice_op_t* op, sluice_transfer_t* out_transfer);
sluice_status_t sluice_finish(sluice_pass_t* pass, const sluice_op_t* op, sluice_transfer_t* transfer);
