// SPDX-License-Identifier: Apache-2.0
#include "backend/schedule/template/directions.h"

#include "backend/base/math.h"

/* A weight gradient reads T_DI after its chunk's rows have been sent. */
static int backward_di_overlaps(const sluice_template_spec_t* spec, const uint8_t* restore, int32_t earlier,
                                int32_t later) {
  if (sluice_restore_is_offloaded(restore[later])) return 1;
  if (spec->single_rank) return 0;
  int weights = spec->wgrad != SLUICE_WGRAD_CALL_NONE && !spec->callback;
  return later - earlier == 1 || (later - earlier == 2 && weights);
}

static int backward_m_overlaps(const sluice_template_spec_t* spec, const uint8_t* restore, int32_t earlier,
                               int32_t later) {
  (void)spec, (void)earlier;
  return sluice_restore_is_offloaded(restore[later]);
}

/* Returns whether gradient rows of all chunks are kept until every input gradient is done. */
static int is_deferred(const sluice_template_spec_t* spec) {
  if (spec->callback || spec->wgrad == SLUICE_WGRAD_CALL_NONE) return 0;
  return spec->wgrad == SLUICE_WGRAD_CALL_LATER || spec->wgrad_mode == SLUICE_WGRAD_DEFERRED || !spec->dgrad;
}

/* Deferred weight gradients need dT_ACT of all chunks. */
static int shares_dact(const sluice_template_spec_t* spec) { return sluice_shares_act(spec) && !is_deferred(spec); }

/* Without weight gradients and with T_M kept, a backward does not read T_DI. */
static int reads_di(const sluice_template_spec_t* spec, int32_t i) {
  return spec->wgrad != SLUICE_WGRAD_CALL_NONE || spec->callback ||
         sluice_restore_is_computed_again(spec->restore_pre_activation[i]);
}

/* Returns the policies of T_DI in this backward: a chunk whose T_DI it does not read needs no slot. */
static void needed_di(const sluice_template_spec_t* spec, uint8_t* out_restore) {
  for (int32_t i = 0; i < spec->num_chunks; ++i) {
    out_restore[i] = reads_di(spec, i) ? spec->restore_input[i] : SLUICE_RESTORE_KEEP;
  }
}

void sluice_place_backward(sluice_builder_t* b, const sluice_template_spec_t* spec) {
  int32_t n = spec->num_chunks, *ring = b->ring, pre_activation = sluice_pre_activation_of(spec);
  int deferred = is_deferred(spec);
  uint8_t restore_input[SLUICE_MAX_CHUNKS];
  needed_di(spec, restore_input);
  int32_t moving_di = sluice_count_moving(restore_input, n);
  int32_t moving_m = sluice_count_moving(spec->restore_pre_activation, n);
  int32_t between = sluice_min_i32(n, spec->single_rank ? RING_WITHIN_LANE : RING_BETWEEN_LANES);
  ring[SLUICE_T_KEPT_DI] = ring[SLUICE_T_KEPT_M] = ring[SLUICE_T_HOST_DI] = ring[SLUICE_T_HOST_M] = n;
  ring[SLUICE_T_DI] = deferred ? moving_di : sluice_ring_of(spec, restore_input, moving_di, backward_di_overlaps);
  ring[pre_activation] = deferred ? moving_m
                         : shares_dact(spec)
                             ? RING_BETWEEN_LANES
                             : sluice_ring_of(spec, spec->restore_pre_activation, moving_m, backward_m_overlaps);
  ring[SLUICE_T_DDO] = ring[SLUICE_T_ROUTE] = deferred ? n : between;
  /* As in forward: if all gradients arrive before the first returns, none may wait for a return. */
  const int runs_ahead = deferred && !spec->bounded && !spec->single_rank && !spec->grouped;
  ring[SLUICE_T_DDI] = ring[SLUICE_T_DGATE] = runs_ahead ? n : between;
  if (!spec->callback) {
    ring[SLUICE_T_DACT] = deferred ? n : RING_WITHIN_LANE;
    ring[SLUICE_T_DM] = deferred ? n : RING_WITHIN_LANE;
    /* One weight_grad of all chunks needs all its products at the same time. */
    ring[SLUICE_T_LOW] = deferred && spec->wgrad == SLUICE_WGRAD_CALL_NOW ? n : RING_WITHIN_LANE;
  }
  sluice_place_tokens(b, spec);
  if (spec->wgrad == SLUICE_WGRAD_CALL_NOW) ring[SLUICE_T_DW] = 1;
  sluice_builder_init_homes(b);
  sluice_place_groups(b, spec);
  sluice_place_restored(b, SLUICE_T_DI, SLUICE_T_KEPT_DI, restore_input);
  sluice_place_restored(b, pre_activation, SLUICE_T_KEPT_M, spec->restore_pre_activation);
  if (spec->callback) return;
  if (shares_dact(spec)) sluice_place_shared_act(b, spec, SLUICE_T_DACT);
  for (int32_t i = 0; i < n; ++i) {
    sluice_slot_ref_t m = sluice_builder_home(b, SLUICE_T_M, i);
    if (m.tensor == SLUICE_T_KEPT_M && !spec->reuse_saved) continue;
    sluice_builder_set_home(b, SLUICE_T_DM, i, m.tensor, m.slot);
  }
}

/* kind: REDISPATCH or DISPATCH_GRAD. */
static void add_sending(sluice_builder_t* b, const sluice_template_spec_t* spec, int32_t kind, int32_t i) {
  const int again = kind == SLUICE_OP_REDISPATCH;
  sluice_op_t* s = sluice_builder_add(b, kind, i);
  sluice_op_write(b, s, SLUICE_T_SEND);
  sluice_op_write(b, s, sluice_arrives_in(spec));
  sluice_add_node_dispatch(b, spec, again ? SLUICE_OP_NODE_DISPATCH : SLUICE_OP_NODE_DISPATCH_GRAD, i);
}

/* Returns the exchange with which the rows of a chunk begin to arrive. */
static int32_t first_sending(const sluice_template_spec_t* spec, int32_t i) {
  const int is_again = sluice_restore_is_sent_again(spec->restore_input[i]) && !spec->experts_first;
  return is_again ? SLUICE_OP_REDISPATCH : SLUICE_OP_DISPATCH_GRAD;
}

/* Restores T_DI of a chunk that was not kept. Other ranks may need a re-dispatch that this one does not need. is_sent:
 * the exchange has been added already. */
static void add_restore_input(sluice_builder_t* b, const sluice_template_spec_t* spec, int32_t i, int is_sent) {
  int wanted = reads_di(spec, i);
  if (sluice_restore_is_offloaded(spec->restore_input[i]) && wanted)
    sluice_add_copy(b, SLUICE_OP_COPY_IN, SLUICE_T_DI, SLUICE_T_HOST_DI, i);
  if (!sluice_restore_is_sent_again(spec->restore_input[i])) return;
  if (!b->single_rank && !is_sent) add_sending(b, spec, SLUICE_OP_REDISPATCH, i);
  if (!wanted) return;
  sluice_op_t* u = sluice_builder_add(b, SLUICE_OP_UNPACK, i);
  if (!b->single_rank) sluice_op_read(b, u, SLUICE_T_RECV);
  sluice_op_write(b, u, SLUICE_T_DI);
}

static void add_dispatch_grad(sluice_builder_t* b, const sluice_template_spec_t* spec, int32_t i, int is_sent) {
  if (!b->single_rank && !is_sent) add_sending(b, spec, SLUICE_OP_DISPATCH_GRAD, i);
  sluice_op_t* u = sluice_builder_add(b, SLUICE_OP_UNPACK_GRAD, i);
  if (!b->single_rank) sluice_op_read(b, u, SLUICE_T_RECV);
  sluice_op_write(b, u, SLUICE_T_DDO);
  sluice_op_write(b, u, SLUICE_T_ROUTE);
}

static void add_weight_grad(sluice_builder_t* b, const sluice_template_spec_t* spec, int32_t chunk) {
  sluice_op_t* w = sluice_builder_add(b, SLUICE_OP_WEIGHT_GRAD, chunk);
  sluice_op_read(b, w, SLUICE_T_DI);
  sluice_op_read(b, w, SLUICE_T_DDO);
  sluice_op_read(b, w, SLUICE_T_ROUTE); /* for the gradient of b2 */
  sluice_op_read(b, w, SLUICE_T_DM);
  sluice_op_read(b, w, SLUICE_T_DACT);
  if (spec->low_rank && spec->dgrad) sluice_op_read(b, w, SLUICE_T_LOW); /* what the chunk's gradients left there */
  sluice_op_write(b, w, SLUICE_T_DW);
  sluice_op_write_low(b, spec, w);
}

static void add_experts_grad(sluice_builder_t* b, const sluice_template_spec_t* spec, int32_t i) {
  int recompute = sluice_restore_is_computed_again(spec->restore_pre_activation[i]);
  if (spec->callback) {
    if (recompute) sluice_add_host_expert(b, i);
    sluice_op_t* e = sluice_builder_add(b, SLUICE_OP_EXPERT_GRAD, i);
    sluice_op_read(b, e, SLUICE_T_DI);
    sluice_op_read(b, e, SLUICE_T_DO);
    sluice_op_read(b, e, SLUICE_T_ROUTE);
    sluice_op_read(b, e, SLUICE_T_DDO);
    sluice_op_write(b, e, SLUICE_T_DDO); /* scaled in place by the route weights */
    sluice_op_write(b, e, SLUICE_T_DDI);
    sluice_op_write(b, e, SLUICE_T_DGATE);
    if (spec->wgrad == SLUICE_WGRAD_CALL_NOW) sluice_op_write(b, e, SLUICE_T_DW);
    return;
  }
  if (recompute) {
    sluice_op_t* again = sluice_builder_add(b, SLUICE_OP_RECOMPUTE, i);
    sluice_op_read(b, again, SLUICE_T_DI);
    sluice_op_write(b, again, SLUICE_T_M);
    sluice_op_write(b, again, SLUICE_T_DACT); /* scratch of the activation that adds the biases */
    sluice_op_write_low(b, spec, again);
  }
  sluice_op_t* g2 = sluice_builder_add(b, SLUICE_OP_GEMM2_GRAD, i);
  sluice_op_read(b, g2, SLUICE_T_DDO);
  sluice_op_write(b, g2, SLUICE_T_DACT);
  sluice_op_write_low(b, spec, g2);
  sluice_op_t* act = sluice_builder_add(b, SLUICE_OP_ACTIVATION_GRAD, i);
  sluice_op_read(b, act, SLUICE_T_M);
  sluice_op_read(b, act, SLUICE_T_DACT);
  sluice_op_read(b, act, SLUICE_T_DDO); /* dT_DO . b2 with bias */
  sluice_op_read(b, act, SLUICE_T_ROUTE);
  sluice_op_write(b, act, SLUICE_T_DM);
  if (spec->wgrad) sluice_op_write(b, act, SLUICE_T_DACT);
  sluice_op_write(b, act, SLUICE_T_DGATE);
  sluice_op_t* g1 = sluice_builder_add(b, SLUICE_OP_GEMM1_GRAD, i);
  sluice_op_read(b, g1, SLUICE_T_DM);
  sluice_op_write(b, g1, SLUICE_T_DDI);
  if (spec->low_rank) sluice_op_read(b, g1, SLUICE_T_LOW); /* leaves what GEMM2_GRAD has written for weight_grad */
  sluice_op_write_low(b, spec, g1);
}

static void add_reduce_grad(sluice_builder_t* b, int32_t chunk) {
  sluice_op_t* x = sluice_builder_add(b, SLUICE_OP_REDUCE_GRAD, chunk);
  if (b->single_rank) {
    sluice_op_read(b, x, SLUICE_T_DDI);
    sluice_op_read(b, x, SLUICE_T_DGATE);
  } else {
    sluice_op_read(b, x, SLUICE_T_RECV);
  }
  sluice_op_write(b, x, SLUICE_T_OUT);
}

static void add_returning(sluice_builder_t* b, const sluice_template_spec_t* spec, int32_t i) {
  const int two_levels = sluice_has_two_levels(spec);
  if (two_levels) sluice_add_node_combine(b, SLUICE_OP_NODE_COMBINE_GRAD, i);
  sluice_op_t* r = sluice_builder_add(b, SLUICE_OP_COMBINE_GRAD, i);
  sluice_op_read(b, r, two_levels ? SLUICE_T_NODE : SLUICE_T_DDI);
  sluice_op_read(b, r, SLUICE_T_DGATE);
  sluice_op_write(b, r, SLUICE_T_SEND);
  sluice_op_write(b, r, SLUICE_T_RECV);
}

static void add_combine_grad(sluice_builder_t* b, const sluice_template_spec_t* spec, int32_t i) {
  if (!b->single_rank) add_returning(b, spec, i);
  if (!spec->chunks_by_experts) add_reduce_grad(b, i);
}

static void add_copy_in_m(sluice_builder_t* b, const sluice_template_spec_t* spec, int32_t i) {
  if (i >= spec->num_chunks || !sluice_restore_is_offloaded(spec->restore_pre_activation[i])) return;
  sluice_add_copy(b, SLUICE_OP_COPY_IN, sluice_pre_activation_of(spec), SLUICE_T_HOST_M, i);
}

/* Adds everything that a chunk's backward waits for: its rows first, because a recomputation needs nothing else, or its
 * gradients, if nothing is recomputed: then only the weight gradients read the rows. The order of the two exchanges
 * must not depend on how T_M is restored, which each rank chooses, but on the spec; among two copies, that of T_M comes
 * first, because then only the weight gradients read T_DI. If T_M's slot is shared, its copy waits for the
 * previous chunk and is added with that chunk. is_sent: the first of the exchanges has been added already. */
static void add_arrival(sluice_builder_t* b, const sluice_template_spec_t* spec, int32_t i, int is_sent) {
  const int32_t sent = is_sent ? first_sending(spec, i) : -1;
  if (!shares_dact(spec)) add_copy_in_m(b, spec, i);
  if (spec->experts_first) add_dispatch_grad(b, spec, i, sent == SLUICE_OP_DISPATCH_GRAD);
  add_restore_input(b, spec, i, sent == SLUICE_OP_REDISPATCH);
  if (!spec->experts_first) add_dispatch_grad(b, spec, i, sent == SLUICE_OP_DISPATCH_GRAD);
}

/* Adds a group: gradients of chunk i return while chunk `next` is sent. The local ops of both follow. */
static void add_group(sluice_builder_t* b, const sluice_template_spec_t* spec, int32_t i, int32_t next) {
  add_returning(b, spec, i);
  add_sending(b, spec, first_sending(spec, next), next);
  sluice_builder_group(b);
  if (!spec->chunks_by_experts) add_reduce_grad(b, i);
}

void sluice_build_backward(sluice_builder_t* b, const sluice_template_spec_t* spec) {
  int32_t n = spec->num_chunks;
  int deferred = is_deferred(spec);
  if (!spec->dgrad) {
    add_weight_grad(b, spec, -1);
    return;
  }
  int32_t ahead = spec->bounded || spec->grouped ? RING_BETWEEN_LANES : b->ring[SLUICE_T_DDO];
  if (ahead > b->ring[SLUICE_T_DDO])
    ahead = b->ring[SLUICE_T_DDO]; /* T_DI has as many slots for chunks that need one */
  int dispatches = sluice_has_part(spec, SLUICE_PART_DISPATCH);
  int experts = sluice_has_part(spec, SLUICE_PART_EXPERTS);
  int weights = experts && spec->wgrad == SLUICE_WGRAD_CALL_NOW && !spec->callback;
  const int copies_late = shares_dact(spec) && dispatches;
  if (copies_late) add_copy_in_m(b, spec, 0);
  for (int32_t i = 0; i < sluice_min_i32(ahead, n) && dispatches; ++i) add_arrival(b, spec, i, 0);
  for (int32_t i = 0; i < n; ++i) {
    const int is_group = spec->grouped && i + ahead < n;
    if (experts) add_experts_grad(b, spec, i);
    if (is_group) {
      add_group(b, spec, i, i + ahead);
    } else if (sluice_has_part(spec, SLUICE_PART_COMBINE)) {
      add_combine_grad(b, spec, i);
    }
    if (weights && !deferred) add_weight_grad(b, spec, i);
    if (copies_late) add_copy_in_m(b, spec, i + 1);
    if (i + ahead < n && dispatches) add_arrival(b, spec, i + ahead, is_group);
  }
  if (spec->chunks_by_experts) add_reduce_grad(b, -1);
  if (weights && deferred) add_weight_grad(b, spec, -1);
}
