// SPDX-License-Identifier: Apache-2.0
#include "backend/moe/ops/node_ops.h"

#include "backend/moe/ops/travel.h"
#include "backend/moe/ops/wire.h"

/* status: of the `_start` function. */
static sluice_status_t finish(sluice_pass_t* pass, const sluice_op_t* op, int32_t index, sluice_status_t status,
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
  return finish(pass, op, index, pass->travel->pass_on_start(pass, op, tokens, &rows), &rows);
}

sluice_status_t sluice_node_combine(sluice_pass_t* pass, const sluice_op_t* op, int32_t index, int32_t tensor) {
  sluice_transfer_t rows = {0};
  pass->wire = sluice_wire_of(pass->moe);
  return finish(pass, op, index, pass->travel->collect_start(pass, op, tensor, &rows), &rows);
}
