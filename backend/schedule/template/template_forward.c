// SPDX-License-Identifier: Apache-2.0
#include "backend/schedule/template/directions.h"

#include "backend/base/math.h"

/* Forward fills T_DI on the communication lane, up to two chunks ahead: two chunks later, the combine in between has
 * waited for the earlier chunk's GEMMs, but not for its copy. */
static int forward_di_overlaps(const sluice_template_spec_t* spec, const uint8_t* restore, int32_t earlier,
                               int32_t later) {
  if (sluice_restore_is_offloaded(restore[earlier])) return 1;
  if (spec->single_rank) return 0;
  int has_combine = spec->only == 0 || (spec->only & SLUICE_PART_COMBINE);
  return later - earlier == 1 || !has_combine;
}

/* The compute lane fills and empties T_M; only the copy of an offloaded chunk may still read it [T_M needs two]. */
static int forward_m_overlaps(const sluice_template_spec_t* spec, const uint8_t* restore, int32_t earlier,
                              int32_t later) {
  (void)spec, (void)later;
  return sluice_restore_is_offloaded(restore[earlier]);
}

/* Returns whether all dispatches run before all combines: then nothing may wait for a combine, so outputs have a slot
 * each as well [found with the sim device: with two slots computation stalls after the last dispatch]. Groups require
 * that their two exchanges alternate. */
static int runs_ahead(const sluice_template_spec_t* spec, int32_t moving_di) {
  return moving_di == 0 && !spec->bounded && !spec->single_rank && !spec->grouped;
}

/* Returns how many dispatches may run ahead of computation: all of them if every chunk has its own slot of T_DI. */
static int32_t forward_ahead(const sluice_builder_t* b, const sluice_template_spec_t* spec) {
  int32_t ring = b->ring[SLUICE_T_DI];
  if (spec->single_rank && ring > 0) return ring;
  return ring == 0 && !spec->bounded && !spec->grouped ? spec->num_chunks : RING_BETWEEN_LANES;
}

void sluice_place_forward(sluice_builder_t* b, const sluice_template_spec_t* spec) {
  int32_t n = spec->num_chunks, *ring = b->ring, pre_activation = sluice_pre_activation_of(spec);
  int32_t moving_di = spec->keep ? sluice_count_moving(spec->restore_input, n) : n;
  int32_t moving_m = spec->keep ? sluice_count_moving(spec->restore_pre_activation, n) : n;
  sluice_place_tokens(b, spec);
  ring[SLUICE_T_DI] = sluice_ring_of(spec, spec->restore_input, moving_di, forward_di_overlaps);
  int32_t outputs = spec->callback ? moving_m : n;
  if (!runs_ahead(spec, moving_di)) {
    outputs = sluice_min_i32(outputs, spec->single_rank ? RING_WITHIN_LANE : RING_BETWEEN_LANES);
  }
  ring[SLUICE_T_DO] = outputs;
  if (!spec->callback) {
    ring[SLUICE_T_M] = sluice_shares_act(spec)
                           ? RING_BETWEEN_LANES
                           : sluice_ring_of(spec, spec->restore_pre_activation, moving_m, forward_m_overlaps);
    ring[SLUICE_T_ACT] = RING_WITHIN_LANE;
    ring[SLUICE_T_LOW] = RING_WITHIN_LANE;
  }
  ring[SLUICE_T_KEPT_DI] = ring[SLUICE_T_KEPT_M] = ring[SLUICE_T_HOST_DI] = ring[SLUICE_T_HOST_M] = n;
  if (spec->dedup) ring[SLUICE_T_COPY_WEIGHTS] = sluice_min_i32(n, forward_ahead(b, spec));
  sluice_builder_init_homes(b);
  sluice_place_groups(b, spec);
  if (spec->keep) {
    sluice_place_restored(b, SLUICE_T_DI, SLUICE_T_KEPT_DI, spec->restore_input);
    sluice_place_restored(b, pre_activation, SLUICE_T_KEPT_M, spec->restore_pre_activation);
  }
  if (sluice_shares_act(spec)) sluice_place_shared_act(b, spec, SLUICE_T_ACT);
  /* A T_M that no later op reads is activated in place. */
  for (int32_t i = 0; i < n && !spec->callback && !spec->gated; ++i) {
    if (spec->keep && sluice_restore_is_stored(spec->restore_pre_activation[i])) continue;
    sluice_slot_ref_t m = sluice_builder_home(b, SLUICE_T_M, i);
    sluice_builder_set_home(b, SLUICE_T_ACT, i, m.tensor, m.slot);
  }
}

/* A group has one level (check_spec), so its two exchanges are adjacent. */
static void add_sending(sluice_builder_t* b, const sluice_template_spec_t* spec, int32_t i) {
  sluice_op_t* s = sluice_builder_add(b, SLUICE_OP_DISPATCH, i);
  sluice_op_write(b, s, SLUICE_T_SEND);
  sluice_op_write(b, s, sluice_arrives_in(spec));
  sluice_add_node_dispatch(b, spec, SLUICE_OP_NODE_DISPATCH, i);
}

static void add_unpack(sluice_builder_t* b, const sluice_template_spec_t* spec, int32_t i) {
  sluice_op_t* u = sluice_builder_add(b, SLUICE_OP_UNPACK, i);
  if (!b->single_rank) sluice_op_read(b, u, SLUICE_T_RECV);
  sluice_op_write(b, u, SLUICE_T_DI);
  if (spec->dedup) sluice_op_write(b, u, SLUICE_T_COPY_WEIGHTS); /* weights for the sums that the combine sends */
  if (spec->keep && sluice_restore_is_offloaded(spec->restore_input[i])) {
    sluice_add_copy(b, SLUICE_OP_COPY_OUT, SLUICE_T_DI, SLUICE_T_HOST_DI, i);
  }
}

static void add_dispatch(sluice_builder_t* b, const sluice_template_spec_t* spec, int32_t i) {
  if (!b->single_rank) add_sending(b, spec, i);
  add_unpack(b, spec, i);
}

static void add_experts(sluice_builder_t* b, const sluice_template_spec_t* spec, int32_t i) {
  if (spec->callback) {
    sluice_add_host_expert(b, i);
    return;
  }
  sluice_op_t* g1 = sluice_builder_add(b, SLUICE_OP_GEMM1, i);
  sluice_op_read(b, g1, SLUICE_T_DI);
  sluice_op_write(b, g1, SLUICE_T_M);
  sluice_op_write_low(b, spec, g1);
  sluice_op_t* act = sluice_builder_add(b, SLUICE_OP_ACTIVATION, i);
  sluice_op_read(b, act, SLUICE_T_M);
  sluice_op_write(b, act, SLUICE_T_M);
  sluice_op_write(b, act, SLUICE_T_ACT);
  /* The pre-activation is stored with its biases. */
  if (spec->keep && sluice_restore_is_offloaded(spec->restore_pre_activation[i])) {
    sluice_add_copy(b, SLUICE_OP_COPY_OUT, SLUICE_T_M, SLUICE_T_HOST_M, i);
  }
  sluice_op_t* g2 = sluice_builder_add(b, SLUICE_OP_GEMM2, i);
  sluice_op_read(b, g2, SLUICE_T_ACT);
  sluice_op_write(b, g2, SLUICE_T_DO);
  sluice_op_write_low(b, spec, g2);
}

/* chunk: -1 if rows of all chunks are summed at once. */
static void add_reduce(sluice_builder_t* b, int32_t chunk) {
  sluice_op_t* y = sluice_builder_add(b, SLUICE_OP_REDUCE, chunk);
  sluice_op_read(b, y, b->single_rank ? SLUICE_T_DO : SLUICE_T_RECV);
  sluice_op_write(b, y, SLUICE_T_OUT);
}

static void add_returning(sluice_builder_t* b, const sluice_template_spec_t* spec, int32_t i) {
  const int two_levels = sluice_has_two_levels(spec);
  if (two_levels) sluice_add_node_combine(b, SLUICE_OP_NODE_COMBINE, i);
  sluice_op_t* r = sluice_builder_add(b, SLUICE_OP_COMBINE, i);
  sluice_op_read(b, r, two_levels ? SLUICE_T_NODE : SLUICE_T_DO);
  if (spec->dedup && !two_levels) sluice_op_read(b, r, SLUICE_T_COPY_WEIGHTS);
  sluice_op_write(b, r, SLUICE_T_SEND);
  sluice_op_write(b, r, SLUICE_T_RECV);
}

static void add_combine(sluice_builder_t* b, const sluice_template_spec_t* spec, int32_t i) {
  if (!b->single_rank) add_returning(b, spec, i);
  if (!spec->chunks_by_experts) add_reduce(b, i);
}

/* Adds a group: chunk i returns while chunk `next` is sent. Experts wait for the received rows, while no op waits for
 * tokens, so rows are unpacked first. */
static void add_group(sluice_builder_t* b, const sluice_template_spec_t* spec, int32_t i, int32_t next) {
  add_returning(b, spec, i);
  add_sending(b, spec, next);
  sluice_builder_group(b);
  add_unpack(b, spec, next);
  if (!spec->chunks_by_experts) add_reduce(b, i);
}

/* Adds the exchanges after the experts of chunk i: it returns, and chunk `next` is sent, unless that is beyond the
 * last. The experts wait only for what is sent. With deduplication, the weights of chunk i are read when it returns,
 * and their slot is the next chunk's. */
static void add_exchanges(sluice_builder_t* b, const sluice_template_spec_t* spec, int32_t i, int32_t next) {
  const int sends = next < spec->num_chunks && sluice_has_part(spec, SLUICE_PART_DISPATCH);
  const int sends_first = spec->experts_first && !spec->dedup;
  if (sends && sends_first) add_dispatch(b, spec, next);
  if (sluice_has_part(spec, SLUICE_PART_COMBINE)) add_combine(b, spec, i);
  if (sends && !sends_first) add_dispatch(b, spec, next);
}

void sluice_build_forward(sluice_builder_t* b, const sluice_template_spec_t* spec) {
  int32_t n = spec->num_chunks;
  int32_t ahead = forward_ahead(b, spec);
  int dispatches = sluice_has_part(spec, SLUICE_PART_DISPATCH);
  for (int32_t i = 0; i < sluice_min_i32(ahead, n) && dispatches; ++i) add_dispatch(b, spec, i);
  for (int32_t i = 0; i < n; ++i) {
    if (sluice_has_part(spec, SLUICE_PART_EXPERTS)) add_experts(b, spec, i);
    if (spec->grouped && i + ahead < n) {
      add_group(b, spec, i, i + ahead);
      continue;
    }
    add_exchanges(b, spec, i, i + ahead);
  }
  if (spec->chunks_by_experts) add_reduce(b, -1);
}
