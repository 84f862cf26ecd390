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

/* ---- exchanges in two levels ---- */

void sluice_add_node_dispatch(sluice_builder_t* b, const sluice_template_spec_t* spec, int32_t kind, int32_t chunk) {
  if (!sluice_has_two_levels(spec)) return;
  sluice_op_t* s = sluice_builder_add(b, kind, chunk);
  sluice_op_read(b, s, SLUICE_T_NODE);
  sluice_op_write(b, s, SLUICE_T_SEND);
  sluice_op_write(b, s, SLUICE_T_RECV);
}

void sluice_add_node_combine(sluice_builder_t* b, int32_t kind, int32_t chunk) {
  sluice_op_t* r = sluice_builder_add(b, kind, chunk);
  if (kind == SLUICE_OP_NODE_COMBINE) {
    sluice_op_read(b, r, SLUICE_T_DO);
    sluice_op_read(b, r, SLUICE_T_COPY_WEIGHTS);
  } else {
    sluice_op_read(b, r, SLUICE_T_DDI);
  }
  sluice_op_write(b, r, SLUICE_T_SEND);
  sluice_op_write(b, r, SLUICE_T_NODE);
}
