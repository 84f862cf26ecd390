// SPDX-License-Identifier: Apache-2.0
#include "backend/schedule/template/shared_ops.h"

void sluice_add_copy(sluice_builder_t* b, int32_t kind, int32_t tensor, int32_t host, int32_t i) {
  int out = kind == SLUICE_OP_COPY_OUT;
  sluice_op_t* copy = sluice_builder_add(b, kind, i);
  sluice_op_read(b, copy, out ? tensor : host);
  sluice_op_write(b, copy, out ? host : tensor);
}

void sluice_add_host_expert(sluice_builder_t* b, int32_t i) {
  sluice_op_t* e = sluice_builder_add(b, SLUICE_OP_EXPERT, i);
  sluice_op_read(b, e, SLUICE_T_DI);
  sluice_op_write(b, e, SLUICE_T_DO);
}

void sluice_op_write_low(sluice_builder_t* b, const sluice_template_spec_t* spec, sluice_op_t* op) {
  if (spec->low_rank) sluice_op_write(b, op, SLUICE_T_LOW);
}
