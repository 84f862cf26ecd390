#include "backend/moe/ops/node_ops.h"

#include "backend/moe/ops/travel.h"

static sluice_status_t finish(sluice_pass_t* pass, const sluice_op_t* op, int32_t index, sluice_transfer_t* rows) {
  pass->times[index].bytes = rows->bytes;
  return sluice_finish(pass, op, rows);
}

sluice_status_t sluice_node_dispatch(sluice_pass_t* pass, const sluice_op_t* op, int32_t index,
                                     const sluice_tensor_t* tokens) {
  sluice_transfer_t rows = {0};
  SLUICE_TRY(pass->travel->pass_on_start(pass, op, tokens, &rows));
  return finish(pass, op, index, &rows);
}

sluice_status_t sluice_node_combine(sluice_pass_t* pass, const sluice_op_t* op, int32_t index, int32_t tensor) {
  sluice_transfer_t rows = {0};
  SLUICE_TRY(pass->travel->collect_start(pass, op, tensor, &rows));
  return finish(pass, op, index, &rows);
}
