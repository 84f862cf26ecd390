// SPDX-License-Identifier: Apache-2.0
#include "backend/schedule/template/directions.h"

/* ---- homes of chunks ---- */

int32_t sluice_count_moving(const uint8_t* restore, int32_t n) {
  int32_t count = 0;
  for (int32_t i = 0; i < n; ++i) count += !sluice_restore_is_kept(restore[i]);
  return count;
}

void sluice_place_restored(sluice_builder_t* b, int32_t tensor, int32_t kept, const uint8_t* restore) {
  int32_t turn = 0;
  for (int32_t i = 0; i < b->num_chunks; ++i) {
    if (sluice_restore_is_kept(restore[i])) {
      sluice_builder_set_home(b, tensor, i, kept, i);
    } else {
      sluice_builder_set_home(b, tensor, i, tensor, turn++ % b->ring[tensor]);
    }
  }
}

int32_t sluice_ring_of(const sluice_template_spec_t* spec, const uint8_t* restore, int32_t moving,
                       sluice_overlap_fn_t overlap) {
  if (moving == 0) return 0;
  int has_policies = spec->keep || spec->direction == SLUICE_BACKWARD; /* otherwise all chunks share the ring */
  int32_t last = -1;
  for (int32_t i = 0; i < spec->num_chunks; ++i) {
    if (has_policies && sluice_restore_is_kept(restore[i])) continue;
    if (last >= 0 && overlap(spec, restore, last, i)) return RING_BETWEEN_LANES;
    last = i;
  }
  return RING_WITHIN_LANE;
}

int sluice_shares_act(const sluice_template_spec_t* spec) { return spec->shares_act && sluice_spec_offloads_m(spec); }

void sluice_place_shared_act(sluice_builder_t* b, const sluice_template_spec_t* spec, int32_t tensor) {
  int32_t turn = 0;
  for (int32_t i = 0; i < b->num_chunks; ++i) {
    turn += !sluice_restore_is_kept(spec->restore_pre_activation[i]);
    sluice_builder_set_home(b, tensor, i, SLUICE_T_M, turn % RING_BETWEEN_LANES);
  }
}

void sluice_place_tokens(sluice_builder_t* b, const sluice_template_spec_t* spec) {
  b->ring[SLUICE_T_OUT] = spec->chunks_by_experts ? 1 : spec->num_chunks; /* chunks of tokens are disjoint */
  if (spec->single_rank) return;
  const int32_t under_way = spec->grouped ? RING_OF_GROUP : RING_WITHIN_LANE;
  b->ring[SLUICE_T_SEND] = under_way;
  if (spec->dedup == SLUICE_DEDUPLICATE_NODES) b->ring[SLUICE_T_NODE] = RING_WITHIN_LANE;
  b->ring[SLUICE_T_RECV] = spec->chunks_by_experts ? spec->num_chunks : under_way;
}

void sluice_place_groups(sluice_builder_t* b, const sluice_template_spec_t* spec) {
  for (int32_t i = 0; i < b->num_chunks && spec->grouped; ++i) {
    const int32_t slot = i / RING_BETWEEN_LANES % RING_OF_GROUP;
    sluice_builder_set_home(b, SLUICE_T_SEND, i, SLUICE_T_SEND, slot);
    if (!spec->chunks_by_experts) sluice_builder_set_home(b, SLUICE_T_RECV, i, SLUICE_T_RECV, slot);
  }
}

/* ---- ops that both directions add ---- */

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
