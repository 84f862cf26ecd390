// SPDX-License-Identifier: Apache-2.0
#include "backend/schedule/template/two_levels.h"

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
