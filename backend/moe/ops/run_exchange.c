// SPDX-License-Identifier: Apache-2.0
/* Runs the exchanges of ops: posts them, and waits for them. */
#include <stdio.h>

#include "backend/moe/ops/exchange_ops.h"
#include "backend/moe/ops/wire.h"

/* ---- one transfer ---- */

void sluice_transfer_rows(sluice_pass_t* pass, int to_experts, const int64_t* sent, const int64_t* received,
                          const char* out, char* in, uint64_t row_bytes) {
  const int32_t self = pass->context->rank;
  const int64_t left_out = to_experts ? sent[self + 1] - sent[self] : 0;
  for (int32_t r = 0; r < pass->binding.world_size; ++r) {
    const uint64_t at_tokens = (uint64_t)(sent[r] - (r > self ? left_out : 0)) * row_bytes;
    const uint64_t of_tokens = r == self ? 0 : (uint64_t)(sent[r + 1] - sent[r]) * row_bytes;
    const uint64_t at_experts = (uint64_t)received[r] * row_bytes;
    const uint64_t of_experts = (uint64_t)(received[r + 1] - received[r]) * row_bytes;
    pass->arrays.send[r] = out + (to_experts ? at_tokens : at_experts);
    pass->arrays.send_bytes[r] = to_experts ? of_tokens : of_experts;
    pass->arrays.recv[r] = in + (to_experts ? at_experts : at_tokens);
    pass->arrays.recv_bytes[r] = to_experts ? of_experts : of_tokens;
  }
}

sluice_status_t sluice_transfer_start(sluice_pass_t* pass, const sluice_op_t* op, sluice_transfer_t* out_transfer) {
  if (pass->wire != NULL) sluice_wire_write_sent(pass, pass->wire);
  const sluice_exchange_t exchange = sluice_exchange_of(&pass->arrays);
  out_transfer->bytes = 0;
  for (int32_t r = 0; r < pass->binding.world_size; ++r) out_transfer->bytes += pass->arrays.send_bytes[r];
  return pass->context->rows->exchange(pass->context, &exchange, sluice_pass_stream(pass, op), &out_transfer->request);
}

sluice_status_t sluice_finish(sluice_pass_t* pass, const sluice_op_t* op, sluice_transfer_t* transfer) {
  if (transfer->request == NULL) return SLUICE_OK; /* enqueued */
  char phase[96];
  snprintf(phase, sizeof phase, "%s of chunk %d, layer %d", sluice_op_name(op->kind), op->chunk,
           pass->moe->shape.config.layer_id);
  return sluice_comm_exchange_wait(pass->context->comm, transfer->request, phase);
}

/* ---- rows and scalars ---- */

static sluice_status_t start_rows(sluice_pass_t* pass, const sluice_op_t* op, sluice_transfer_t* out_transfer) {
  const sluice_travel_t* travel = pass->travel;
  switch (op->kind) {
    case SLUICE_OP_COMBINE: return travel->return_rows_start(pass, op, SLUICE_T_DO, out_transfer);
    case SLUICE_OP_COMBINE_GRAD: return travel->return_rows_start(pass, op, SLUICE_T_DDI, out_transfer);
    /* Sends the forward's rows again, from the tokens that the host passes to backward. */
    case SLUICE_OP_REDISPATCH: return travel->send_tokens_start(pass, op, pass->tokens, out_transfer);
    default: return travel->send_tokens_start(pass, op, pass->in_rows, out_transfer);
  }
}

/* An op without scalars posts nothing. */
static sluice_status_t start_scalars(sluice_pass_t* pass, const sluice_op_t* op, sluice_transfer_t* out_transfer) {
  switch (op->kind) {
    case SLUICE_OP_DISPATCH:
      if (pass->travel->send_weights_start == NULL) return SLUICE_OK;
      return pass->travel->send_weights_start(pass, op, out_transfer);
    case SLUICE_OP_DISPATCH_GRAD: return sluice_send_route_start(pass, op, out_transfer);
    case SLUICE_OP_COMBINE_GRAD: return sluice_return_gate_start(pass, op, out_transfer);
    default: return SLUICE_OK;
  }
}

/* On a device the rows and scalars of an op are one group of messages. */
static sluice_status_t run_alone(sluice_pass_t* pass, const sluice_op_t* op, int32_t index) {
  sluice_transfer_t rows = {0}, scalars = {0};
  const sluice_row_memory_t* memory = pass->context->rows;
  sluice_rows_begin_group(memory, pass->context);
  sluice_status_t status = start_rows(pass, op, &rows);
  if (status == SLUICE_OK) status = start_scalars(pass, op, &scalars);
  SLUICE_TRY(sluice_rows_end_group(memory, pass->context, sluice_pass_stream(pass, op), status));
  SLUICE_TRY(sluice_join_own(pass, op));
  pass->times[index].bytes = rows.bytes + scalars.bytes;
  SLUICE_TRY(sluice_finish(pass, op, &rows));
  return sluice_finish(pass, op, &scalars);
}

/* For coded rows. Scalars are posted after the rows have been read, because they would overwrite pass->arrays.recv. */
static sluice_status_t run_coded(sluice_pass_t* pass, const sluice_op_t* op, int32_t index) {
  sluice_transfer_t rows = {0}, scalars = {0};
  const sluice_wire_t* wire = sluice_wire_of(pass->moe);
  pass->wire = wire;
  sluice_status_t status = start_rows(pass, op, &rows);
  pass->wire = NULL;
  SLUICE_TRY(status);
  SLUICE_TRY(sluice_finish(pass, op, &rows));
  sluice_wire_read_received(pass, wire);
  SLUICE_TRY(start_scalars(pass, op, &scalars));
  pass->times[index].bytes = rows.bytes + scalars.bytes;
  return sluice_finish(pass, op, &scalars);
}

static sluice_status_t open_group(sluice_pass_t* pass, const sluice_op_t* op, int32_t index) {
  sluice_transfer_t rows = {0};
  SLUICE_TRY(start_rows(pass, op, &rows));
  pass->opened = rows.request;
  pass->times[index].bytes = rows.bytes;
  return SLUICE_OK;
}

static sluice_status_t close_group(sluice_pass_t* pass, const sluice_op_t* op, int32_t index) {
  const sluice_op_t* first = op - 1;
  sluice_transfer_t opened = {.request = pass->opened}, rows = {0}, scalars[2] = {{0}, {0}};
  pass->opened = NULL;
  const sluice_row_memory_t* memory = pass->context->rows;
  sluice_rows_begin_group(memory, pass->context);
  sluice_status_t status = start_rows(pass, op, &rows);
  if (status != SLUICE_OK) { /* the communicator is broken: finish the open request */
    (void)sluice_finish(pass, first, &opened);
    return sluice_rows_end_group(memory, pass->context, sluice_pass_stream(pass, op), status);
  }
  status = sluice_finish(pass, first, &opened);
  if (status == SLUICE_OK) status = sluice_finish(pass, op, &rows);
  if (status == SLUICE_OK) status = start_scalars(pass, first, &scalars[0]);
  if (status == SLUICE_OK) status = start_scalars(pass, op, &scalars[1]);
  SLUICE_TRY(sluice_rows_end_group(memory, pass->context, sluice_pass_stream(pass, op), status));
  pass->times[index - 1].bytes += scalars[0].bytes;
  pass->times[index].bytes = rows.bytes + scalars[1].bytes;
  SLUICE_TRY(sluice_finish(pass, first, &scalars[0]));
  return sluice_finish(pass, op, &scalars[1]);
}

sluice_status_t sluice_run_exchange(sluice_pass_t* pass, const sluice_op_t* op, int32_t index) {
  static sluice_status_t (*const forms[])(sluice_pass_t*, const sluice_op_t*, int32_t) = {
      [SLUICE_GROUP_NONE] = run_alone, [SLUICE_GROUP_OPENS] = open_group, [SLUICE_GROUP_CLOSES] = close_group};
  if (sluice_wire_of(pass->moe) != NULL) return run_coded(pass, op, index); /* never in a group (forward_call.c) */
  return forms[op->group](pass, op, index);
}

/* ---- within a node ---- */

/* status: of the `_start` function. */
static sluice_status_t finish_in_node(sluice_pass_t* pass, const sluice_op_t* op, int32_t index, sluice_status_t status,
                                      sluice_transfer_t* rows) {
  const sluice_wire_t* wire = pass->wire;
  pass->wire = NULL;
  SLUICE_TRY(status);
  pass->times[index].bytes = rows->bytes;
  SLUICE_TRY(sluice_finish(pass, op, rows));
  if (wire != NULL) sluice_wire_read_received(pass, wire);
  return SLUICE_OK;
}

sluice_status_t sluice_node_dispatch(sluice_pass_t* pass, const sluice_op_t* op, int32_t index,
                                     const sluice_tensor_t* tokens) {
  sluice_transfer_t rows = {0};
  pass->wire = sluice_wire_of(pass->moe);
  return finish_in_node(pass, op, index, pass->travel->pass_on_start(pass, op, tokens, &rows), &rows);
}

sluice_status_t sluice_node_combine(sluice_pass_t* pass, const sluice_op_t* op, int32_t index, int32_t tensor) {
  sluice_transfer_t rows = {0};
  pass->wire = sluice_wire_of(pass->moe);
  return finish_in_node(pass, op, index, pass->travel->collect_start(pass, op, tensor, &rows), &rows);
}
