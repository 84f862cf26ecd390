// SPDX-License-Identifier: Apache-2.0
#include "backend/moe/ops/restore_ops.h"

#include "backend/moe/context/row_memory.h"

/* The tensor whose policy the copy carries out: T_DI or the pre-activation. */
static int32_t copied_tensor(const sluice_op_t* op, int32_t* out_host) {
  int32_t host = op->kind == SLUICE_OP_COPY_OUT ? op->writes[0].tensor : op->reads[0].tensor;
  *out_host = host;
  return host == SLUICE_T_HOST_DI ? SLUICE_T_DI : SLUICE_T_M;
}

sluice_status_t sluice_copy(sluice_pass_t* pass, const sluice_op_t* op, int32_t index) {
  const sluice_binding_t* b = &pass->binding;
  int32_t host = 0, tensor = copied_tensor(op, &host);
  sluice_context_t* context = pass->context;
  int out = op->kind == SLUICE_OP_COPY_OUT;
  uint64_t row_bytes = pass->slots[tensor].row_bytes;
  for (int32_t e = 0; e < b->num_local; ++e) {
    uint64_t bytes = (uint64_t)b->rows_of_expert[(int64_t)op->chunk * b->num_local + e] * row_bytes;
    if (bytes == 0) continue;
    void* slot = sluice_pass_rows(pass, tensor, op->chunk, e);
    void* pool = sluice_pass_rows(pass, host, op->chunk, e);
    SLUICE_TRY(context->rows->copy(context, sluice_pass_stream(pass, op), out ? pool : slot, out ? slot : pool, bytes));
    pass->times[index].bytes += bytes;
  }
  return SLUICE_OK;
}
