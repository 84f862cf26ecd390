// SPDX-License-Identifier: Apache-2.0
#include "backend/moe/ops/transfer.h"

#include <stdio.h>

#include "backend/moe/context/row_memory.h"
#include "backend/moe/ops/wire.h"

sluice_status_t sluice_transfer_start(sluice_pass_t* pass, const sluice_op_t* op, sluice_transfer_t* out_transfer) {
  if (pass->wire != NULL) sluice_wire_write_sent(pass, pass->wire);
  const sluice_exchange_t exchange = {pass->send, pass->send_bytes, pass->recv, pass->recv_bytes};
  out_transfer->bytes = 0;
  for (int32_t r = 0; r < pass->binding.world_size; ++r) out_transfer->bytes += pass->send_bytes[r];
  return pass->context->rows->exchange(pass->context, &exchange, sluice_pass_stream(pass, op), &out_transfer->request);
}

sluice_status_t sluice_finish(sluice_pass_t* pass, const sluice_op_t* op, sluice_transfer_t* transfer) {
  if (transfer->request == NULL) return SLUICE_OK; /* enqueued */
  char phase[96];
  snprintf(phase, sizeof phase, "%s of chunk %d, layer %d", sluice_op_name(op->kind), op->chunk,
           pass->moe->shape.config.layer_id);
  return sluice_comm_exchange_wait(pass->context->comm, transfer->request, phase);
}
