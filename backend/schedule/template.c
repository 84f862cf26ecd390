/* The templates of a layer's passes. Where chunks lie is decided first, then ops are added in program order, which
 * decides what may overlap:
 *
 *   T_DI kept for all chunks:     S1 S2 .. Sn on the communication lane, then R1 .. Rn, so that computation is never
 *                                 short of rows [own]; with slots reused, S1 S2 R1 S3 R2 .. Sn Rn-1 Rn [MPipe Fig. 5].
 *   restored in backward:         beside the gradients of the same chunk, T_DI first [MPipe Table II].
 *   weight gradients deferred:    after the last input gradient, beside the remaining R'.
 *   chunks cut out of rows:       returned rows stay where they arrive, a slot for each chunk, until one op sums them.
 */
#include <stdint.h>
#include <string.h>

#include "backend/schedule/builder.h"
#include "backend/schedule/releases.h"
#include "backend/schedule/tighten.h"
#include "sluice/moe.h"

#define OPS_PER_CHUNK 12 /* of a backward that restores both tensors */

/* Slots that are handed between lanes are double-buffered; those that one lane fills and empties need one. T_DO is one
 * of the former, under a plan too, where the papers count one slot: with one, the second product of a chunk would wait
 * for the combine of the chunk before it, a whole exchange, and they draw those two beside each other [MPipe Fig. 5].
 */
enum { RING_BETWEEN_LANES = 2, RING_WITHIN_LANE = 1 };

static int32_t min_i32(int32_t a, int32_t b) { return a < b ? a : b; }

/* ---- where chunks lie ---- */

static int32_t count_policy(const uint8_t* restore, int32_t n, int32_t policy) {
  int32_t count = 0;
  for (int32_t i = 0; i < n; ++i) count += restore[i] == policy;
  return count;
}

/* The tensor that policies of T_M speak of. */
static int32_t middle_of(const sluice_template_spec_t* spec) { return spec->callback ? SLUICE_T_DO : SLUICE_T_M; }

/* Homes of T_DI or the middle: kept chunks have a slot each, the others take turns in the ring. */
static void set_restored_homes(sluice_builder_t* b, int32_t tensor, int32_t kept, const uint8_t* restore) {
  int32_t turn = 0;
  for (int32_t i = 0; i < b->num_chunks; ++i) {
    if (restore[i] == SLUICE_RESTORE_KEEP) {
      sluice_builder_set_home(b, tensor, i, kept, i);
    } else {
      sluice_builder_set_home(b, tensor, i, tensor, turn++ % b->ring[tensor]);
    }
  }
}

/* Whether two chunks that follow each other in a ring would be at one slot at once, if it were one slot. What lane
 * order and the exchanges in between order anyway needs no second one; copies are ordered by nothing. */
typedef int (*overlap_fn_t)(const sluice_template_spec_t* spec, const uint8_t* restore, int32_t earlier, int32_t later);

static int32_t ring_of(const sluice_template_spec_t* spec, const uint8_t* restore, int32_t moving,
                       overlap_fn_t overlap) {
  if (moving == 0) return 0;
  int has_policies = spec->keep || spec->direction == SLUICE_BACKWARD; /* else every chunk takes turns */
  int32_t last = -1;
  for (int32_t i = 0; i < spec->num_chunks; ++i) {
    if (has_policies && restore[i] == SLUICE_RESTORE_KEEP) continue;
    if (last >= 0 && overlap(spec, restore, last, i)) return RING_BETWEEN_LANES;
    last = i;
  }
  return RING_WITHIN_LANE;
}

/* Forward fills T_DI on the communication lane, up to two chunks ahead: two chunks on, the combine in between has
 * waited for the earlier chunk's products. Its copy has not been waited for. */
static int forward_di_overlaps(const sluice_template_spec_t* spec, const uint8_t* restore, int32_t earlier,
                               int32_t later) {
  if (restore[earlier] == SLUICE_RESTORE_OFFLOAD) return 1;
  if (spec->single_rank) return 0;
  int has_combine = spec->only == 0 || (spec->only & SLUICE_PART_COMBINE);
  return later - earlier == 1 || !has_combine;
}

/* The compute lane fills T_M and empties it; only the copy of an offloaded chunk still reads it [T_M needs two]. */
static int forward_m_overlaps(const sluice_template_spec_t* spec, const uint8_t* restore, int32_t earlier,
                              int32_t later) {
  (void)spec, (void)later;
  return restore[earlier] == SLUICE_RESTORE_OFFLOAD;
}

/* A weight gradient reads T_DI after its chunk's rows have gone. */
static int backward_di_overlaps(const sluice_template_spec_t* spec, const uint8_t* restore, int32_t earlier,
                                int32_t later) {
  if (restore[later] == SLUICE_RESTORE_OFFLOAD) return 1;
  if (spec->single_rank) return 0;
  int weights = spec->weight_half != SLUICE_WEIGHTS_NONE && !spec->callback;
  return later - earlier == 1 || (later - earlier == 2 && weights);
}

static int backward_m_overlaps(const sluice_template_spec_t* spec, const uint8_t* restore, int32_t earlier,
                               int32_t later) {
  (void)spec, (void)earlier;
  return restore[later] == SLUICE_RESTORE_OFFLOAD;
}

/* All dispatches run ahead of all combines: then nothing may wait for a combine, so outputs have a slot each as well
 * [found with the sim device: with two slots computation stalls behind the last dispatch]. */
static int runs_ahead(const sluice_template_spec_t* spec, int32_t moving_di) {
  return moving_di == 0 && !spec->bounded && !spec->single_rank;
}

/* Dispatches that may run ahead of computation: all of them where every chunk has a slot of T_DI of its own. */
static int32_t forward_ahead(const sluice_builder_t* b, const sluice_template_spec_t* spec) {
  int32_t ring = b->ring[SLUICE_T_DI];
  if (spec->single_rank && ring > 0) return ring;
  return ring == 0 && !spec->bounded ? spec->num_chunks : RING_BETWEEN_LANES;
}

/* Where rows arrive and tokens are written: by chunk, unless one op reads all that has returned. */
static void place_tokens(sluice_builder_t* b, const sluice_template_spec_t* spec) {
  b->ring[SLUICE_T_OUT] = spec->cut_rows ? 1 : spec->num_chunks; /* chunks of tokens are disjoint */
  if (spec->single_rank) return;
  b->ring[SLUICE_T_SEND] = RING_WITHIN_LANE;
  b->ring[SLUICE_T_RECV] = spec->cut_rows ? spec->num_chunks : RING_WITHIN_LANE;
}

static void place_forward(sluice_builder_t* b, const sluice_template_spec_t* spec) {
  int32_t n = spec->num_chunks, *ring = b->ring, middle = middle_of(spec);
  int32_t moving_di = n, moving_m = n;
  if (spec->keep) {
    moving_di -= count_policy(spec->restore_di, n, SLUICE_RESTORE_KEEP);
    moving_m -= count_policy(spec->restore_m, n, SLUICE_RESTORE_KEEP);
  }
  place_tokens(b, spec);
  ring[SLUICE_T_DI] = ring_of(spec, spec->restore_di, moving_di, forward_di_overlaps);
  int32_t outputs = spec->callback ? moving_m : n;
  if (!runs_ahead(spec, moving_di)) {
    outputs = min_i32(outputs, spec->single_rank ? RING_WITHIN_LANE : RING_BETWEEN_LANES);
  }
  ring[SLUICE_T_DO] = outputs;
  if (!spec->callback) {
    ring[SLUICE_T_M] = ring_of(spec, spec->restore_m, moving_m, forward_m_overlaps);
    ring[SLUICE_T_ACT] = RING_WITHIN_LANE;
  }
  ring[SLUICE_T_KEPT_DI] = ring[SLUICE_T_KEPT_M] = ring[SLUICE_T_HOST_DI] = ring[SLUICE_T_HOST_M] = n;
  if (spec->dedup) ring[SLUICE_T_PARCELS] = min_i32(n, forward_ahead(b, spec));
  sluice_builder_init_homes(b);
  if (spec->keep) {
    set_restored_homes(b, SLUICE_T_DI, SLUICE_T_KEPT_DI, spec->restore_di);
    set_restored_homes(b, middle, SLUICE_T_KEPT_M, spec->restore_m);
  }
  /* A T_M that nobody wants afterwards is activated in place. */
  for (int32_t i = 0; i < n && !spec->callback && !spec->gated; ++i) {
    if (spec->keep && spec->restore_m[i] != SLUICE_RESTORE_RECOMPUTE) continue;
    sluice_slot_ref_t m = sluice_builder_home(b, SLUICE_T_M, i);
    sluice_builder_set_home(b, SLUICE_T_ACT, i, m.tensor, m.slot);
  }
}

/* ---- forward ---- */

static void add_copy(sluice_builder_t* b, int32_t kind, int32_t tensor, int32_t host, int32_t i) {
  int out = kind == SLUICE_OP_COPY_OUT;
  sluice_op_t* copy = sluice_builder_add(b, kind, out ? SLUICE_LANE_COPY_OUT : SLUICE_LANE_COPY_IN, i);
  sluice_op_read(b, copy, out ? tensor : host);
  sluice_op_write(b, copy, out ? host : tensor);
}

static void add_dispatch(sluice_builder_t* b, const sluice_template_spec_t* spec, int32_t i) {
  if (!b->single_rank) {
    sluice_op_t* s = sluice_builder_add(b, SLUICE_OP_DISPATCH, SLUICE_LANE_COMM, i);
    sluice_op_write(b, s, SLUICE_T_SEND);
    sluice_op_write(b, s, SLUICE_T_RECV);
  }
  sluice_op_t* u = sluice_builder_add(b, SLUICE_OP_UNPACK, SLUICE_LANE_COMM, i);
  if (!b->single_rank) sluice_op_read(b, u, SLUICE_T_RECV);
  sluice_op_write(b, u, SLUICE_T_DI);
  if (spec->dedup) sluice_op_write(b, u, SLUICE_T_PARCELS); /* weights for the sums that the combine sends back */
  if (spec->keep && spec->restore_di[i] == SLUICE_RESTORE_OFFLOAD) {
    add_copy(b, SLUICE_OP_COPY_OUT, SLUICE_T_DI, SLUICE_T_HOST_DI, i);
  }
}

static void add_host_expert(sluice_builder_t* b, int32_t i) {
  sluice_op_t* e = sluice_builder_add(b, SLUICE_OP_EXPERT, SLUICE_LANE_COMPUTE, i);
  sluice_op_read(b, e, SLUICE_T_DI);
  sluice_op_write(b, e, SLUICE_T_DO);
}

static void add_experts(sluice_builder_t* b, const sluice_template_spec_t* spec, int32_t i) {
  if (spec->callback) {
    add_host_expert(b, i);
    return;
  }
  sluice_op_t* g1 = sluice_builder_add(b, SLUICE_OP_GEMM1, SLUICE_LANE_COMPUTE, i);
  sluice_op_read(b, g1, SLUICE_T_DI);
  sluice_op_write(b, g1, SLUICE_T_M);
  sluice_op_t* act = sluice_builder_add(b, SLUICE_OP_ACTIVATION, SLUICE_LANE_COMPUTE, i);
  sluice_op_read(b, act, SLUICE_T_M);
  sluice_op_write(b, act, SLUICE_T_M);
  sluice_op_write(b, act, SLUICE_T_ACT);
  /* What is stored is the pre-activation with its biases. */
  if (spec->keep && spec->restore_m[i] == SLUICE_RESTORE_OFFLOAD) {
    add_copy(b, SLUICE_OP_COPY_OUT, SLUICE_T_M, SLUICE_T_HOST_M, i);
  }
  sluice_op_t* g2 = sluice_builder_add(b, SLUICE_OP_GEMM2, SLUICE_LANE_COMPUTE, i);
  sluice_op_read(b, g2, SLUICE_T_ACT);
  sluice_op_write(b, g2, SLUICE_T_DO);
}

/* chunk: -1 where rows of all chunks are summed at once. */
static void add_reduce(sluice_builder_t* b, int32_t chunk) {
  sluice_op_t* y = sluice_builder_add(b, SLUICE_OP_REDUCE, SLUICE_LANE_COMM, chunk);
  sluice_op_read(b, y, b->single_rank ? SLUICE_T_DO : SLUICE_T_RECV);
  sluice_op_write(b, y, SLUICE_T_OUT);
}

static void add_combine(sluice_builder_t* b, const sluice_template_spec_t* spec, int32_t i) {
  if (!b->single_rank) {
    sluice_op_t* r = sluice_builder_add(b, SLUICE_OP_COMBINE, SLUICE_LANE_COMM, i);
    sluice_op_read(b, r, SLUICE_T_DO);
    if (spec->dedup) sluice_op_read(b, r, SLUICE_T_PARCELS);
    sluice_op_write(b, r, SLUICE_T_SEND);
    sluice_op_write(b, r, SLUICE_T_RECV);
  }
  if (!spec->cut_rows) add_reduce(b, i);
}

static int has_part(const sluice_template_spec_t* spec, int32_t part) {
  return spec->only == 0 || (spec->only & part) != 0;
}

static void build_forward(sluice_builder_t* b, const sluice_template_spec_t* spec) {
  int32_t n = spec->num_chunks;
  int32_t ahead = forward_ahead(b, spec);
  int dispatches = has_part(spec, SLUICE_PART_DISPATCH);
  for (int32_t i = 0; i < min_i32(ahead, n) && dispatches; ++i) add_dispatch(b, spec, i);
  for (int32_t i = 0; i < n; ++i) {
    if (has_part(spec, SLUICE_PART_EXPERTS)) add_experts(b, spec, i);
    if (has_part(spec, SLUICE_PART_COMBINE)) add_combine(b, spec, i);
    if (i + ahead < n && dispatches) add_dispatch(b, spec, i + ahead);
  }
  if (spec->cut_rows) add_reduce(b, -1);
}

/* ---- backward ---- */

/* Whether gradient rows of all chunks are kept until every input gradient is done. */
static int is_deferred(const sluice_template_spec_t* spec) {
  if (spec->callback || spec->weight_half == SLUICE_WEIGHTS_NONE) return 0;
  return spec->weight_half == SLUICE_WEIGHTS_LATER || spec->wgrad_mode == SLUICE_WGRAD_DEFERRED || !spec->input_half;
}

/* Without weight gradients and with T_M kept, a backward does not read T_DI. */
static int reads_di(const sluice_template_spec_t* spec, int32_t i) {
  return spec->weight_half != SLUICE_WEIGHTS_NONE || spec->callback || spec->restore_m[i] == SLUICE_RESTORE_RECOMPUTE;
}

/* Policies of T_DI as far as this backward reads it: where it does not, the chunk needs no slot. */
static void needed_di(const sluice_template_spec_t* spec, uint8_t* out_restore) {
  for (int32_t i = 0; i < spec->num_chunks; ++i) {
    out_restore[i] = reads_di(spec, i) ? spec->restore_di[i] : SLUICE_RESTORE_KEEP;
  }
}

static void place_backward(sluice_builder_t* b, const sluice_template_spec_t* spec) {
  int32_t n = spec->num_chunks, *ring = b->ring, middle = middle_of(spec);
  int deferred = is_deferred(spec);
  uint8_t restore_di[SLUICE_MAX_CHUNKS];
  needed_di(spec, restore_di);
  int32_t moving_di = n - count_policy(restore_di, n, SLUICE_RESTORE_KEEP);
  int32_t moving_m = n - count_policy(spec->restore_m, n, SLUICE_RESTORE_KEEP);
  int32_t between = min_i32(n, spec->single_rank ? RING_WITHIN_LANE : RING_BETWEEN_LANES);
  ring[SLUICE_T_KEPT_DI] = ring[SLUICE_T_KEPT_M] = ring[SLUICE_T_HOST_DI] = ring[SLUICE_T_HOST_M] = n;
  ring[SLUICE_T_DI] = deferred ? moving_di : ring_of(spec, restore_di, moving_di, backward_di_overlaps);
  ring[middle] = deferred ? moving_m : ring_of(spec, spec->restore_m, moving_m, backward_m_overlaps);
  ring[SLUICE_T_DDO] = ring[SLUICE_T_ROUTE] = deferred ? n : between;
  /* As in forward: where all gradients arrive before the first returns, none may wait for a return. */
  ring[SLUICE_T_DDI] = ring[SLUICE_T_DGATE] = deferred && !spec->bounded && !spec->single_rank ? n : between;
  if (!spec->callback) {
    ring[SLUICE_T_DACT] = deferred ? n : RING_WITHIN_LANE;
    ring[SLUICE_T_DM] = deferred ? n : RING_WITHIN_LANE;
  }
  place_tokens(b, spec);
  if (spec->weight_half == SLUICE_WEIGHTS_NOW) ring[SLUICE_T_DW] = 1;
  sluice_builder_init_homes(b);
  set_restored_homes(b, SLUICE_T_DI, SLUICE_T_KEPT_DI, restore_di);
  set_restored_homes(b, middle, SLUICE_T_KEPT_M, spec->restore_m);
  if (spec->callback) return;
  for (int32_t i = 0; i < n; ++i) {
    sluice_slot_ref_t m = sluice_builder_home(b, SLUICE_T_M, i);
    if (m.tensor == SLUICE_T_KEPT_M && !spec->reuse_saved) continue;
    sluice_builder_set_home(b, SLUICE_T_DM, i, m.tensor, m.slot);
  }
}

/* Brings T_DI of a chunk back, where it was not kept. Other ranks may need a re-dispatch that this one does not. */
static void add_restore_di(sluice_builder_t* b, const sluice_template_spec_t* spec, int32_t i) {
  int wanted = reads_di(spec, i);
  if (spec->restore_di[i] == SLUICE_RESTORE_OFFLOAD && wanted)
    add_copy(b, SLUICE_OP_COPY_IN, SLUICE_T_DI, SLUICE_T_HOST_DI, i);
  if (spec->restore_di[i] != SLUICE_RESTORE_REDISPATCH) return;
  if (!b->single_rank) {
    sluice_op_t* s = sluice_builder_add(b, SLUICE_OP_REDISPATCH, SLUICE_LANE_COMM, i);
    sluice_op_write(b, s, SLUICE_T_SEND);
    sluice_op_write(b, s, SLUICE_T_RECV);
  }
  if (!wanted) return;
  sluice_op_t* u = sluice_builder_add(b, SLUICE_OP_UNPACK, SLUICE_LANE_COMM, i);
  if (!b->single_rank) sluice_op_read(b, u, SLUICE_T_RECV);
  sluice_op_write(b, u, SLUICE_T_DI);
}

static void add_dispatch_grad(sluice_builder_t* b, int32_t i) {
  if (!b->single_rank) {
    sluice_op_t* s = sluice_builder_add(b, SLUICE_OP_DISPATCH_GRAD, SLUICE_LANE_COMM, i);
    sluice_op_write(b, s, SLUICE_T_SEND);
    sluice_op_write(b, s, SLUICE_T_RECV);
  }
  sluice_op_t* u = sluice_builder_add(b, SLUICE_OP_UNPACK_GRAD, SLUICE_LANE_COMM, i);
  if (!b->single_rank) sluice_op_read(b, u, SLUICE_T_RECV);
  sluice_op_write(b, u, SLUICE_T_DDO);
  sluice_op_write(b, u, SLUICE_T_ROUTE);
}

static void add_weight_grad(sluice_builder_t* b, int32_t chunk) {
  sluice_op_t* w = sluice_builder_add(b, SLUICE_OP_WEIGHT_GRAD, SLUICE_LANE_COMPUTE, chunk);
  sluice_op_read(b, w, SLUICE_T_DI);
  sluice_op_read(b, w, SLUICE_T_DDO);
  sluice_op_read(b, w, SLUICE_T_ROUTE); /* for the gradient of b2 */
  sluice_op_read(b, w, SLUICE_T_DM);
  sluice_op_read(b, w, SLUICE_T_DACT);
  sluice_op_write(b, w, SLUICE_T_DW);
}

static void add_experts_grad(sluice_builder_t* b, const sluice_template_spec_t* spec, int32_t i) {
  int recompute = spec->restore_m[i] == SLUICE_RESTORE_RECOMPUTE;
  if (spec->callback) {
    if (recompute) add_host_expert(b, i);
    sluice_op_t* e = sluice_builder_add(b, SLUICE_OP_EXPERT_GRAD, SLUICE_LANE_COMPUTE, i);
    sluice_op_read(b, e, SLUICE_T_DI);
    sluice_op_read(b, e, SLUICE_T_DO);
    sluice_op_read(b, e, SLUICE_T_ROUTE);
    sluice_op_read(b, e, SLUICE_T_DDO);
    sluice_op_write(b, e, SLUICE_T_DDO); /* scaled in place by the route weights */
    sluice_op_write(b, e, SLUICE_T_DDI);
    sluice_op_write(b, e, SLUICE_T_DGATE);
    if (spec->weight_half == SLUICE_WEIGHTS_NOW) sluice_op_write(b, e, SLUICE_T_DW);
    return;
  }
  if (recompute) {
    sluice_op_t* again = sluice_builder_add(b, SLUICE_OP_RECOMPUTE, SLUICE_LANE_COMPUTE, i);
    sluice_op_read(b, again, SLUICE_T_DI);
    sluice_op_write(b, again, SLUICE_T_M);
    sluice_op_write(b, again, SLUICE_T_DACT); /* scratch: the activation that adds the biases */
  }
  sluice_op_t* g2 = sluice_builder_add(b, SLUICE_OP_GEMM2_GRAD, SLUICE_LANE_COMPUTE, i);
  sluice_op_read(b, g2, SLUICE_T_DDO);
  sluice_op_write(b, g2, SLUICE_T_DACT);
  sluice_op_t* act = sluice_builder_add(b, SLUICE_OP_ACTIVATION_GRAD, SLUICE_LANE_COMPUTE, i);
  sluice_op_read(b, act, SLUICE_T_M);
  sluice_op_read(b, act, SLUICE_T_DACT);
  sluice_op_read(b, act, SLUICE_T_DDO); /* dT_DO . b2 with bias */
  sluice_op_read(b, act, SLUICE_T_ROUTE);
  sluice_op_write(b, act, SLUICE_T_DM);
  if (spec->weight_half) sluice_op_write(b, act, SLUICE_T_DACT);
  sluice_op_write(b, act, SLUICE_T_DGATE);
  sluice_op_t* g1 = sluice_builder_add(b, SLUICE_OP_GEMM1_GRAD, SLUICE_LANE_COMPUTE, i);
  sluice_op_read(b, g1, SLUICE_T_DM);
  sluice_op_write(b, g1, SLUICE_T_DDI);
}

static void add_reduce_grad(sluice_builder_t* b, int32_t chunk) {
  sluice_op_t* x = sluice_builder_add(b, SLUICE_OP_REDUCE_GRAD, SLUICE_LANE_COMM, chunk);
  if (b->single_rank) {
    sluice_op_read(b, x, SLUICE_T_DDI);
    sluice_op_read(b, x, SLUICE_T_DGATE);
  } else {
    sluice_op_read(b, x, SLUICE_T_RECV);
  }
  sluice_op_write(b, x, SLUICE_T_OUT);
}

static void add_combine_grad(sluice_builder_t* b, const sluice_template_spec_t* spec, int32_t i) {
  if (!b->single_rank) {
    sluice_op_t* r = sluice_builder_add(b, SLUICE_OP_COMBINE_GRAD, SLUICE_LANE_COMM, i);
    sluice_op_read(b, r, SLUICE_T_DDI);
    sluice_op_read(b, r, SLUICE_T_DGATE);
    sluice_op_write(b, r, SLUICE_T_SEND);
    sluice_op_write(b, r, SLUICE_T_RECV);
  }
  if (!spec->cut_rows) add_reduce_grad(b, i);
}

/* Everything a chunk's backward waits for: its rows first, since a recomputation needs nothing else. */
static void add_arrival(sluice_builder_t* b, const sluice_template_spec_t* spec, int32_t i) {
  add_restore_di(b, spec, i);
  add_dispatch_grad(b, i);
  if (spec->restore_m[i] == SLUICE_RESTORE_OFFLOAD) {
    add_copy(b, SLUICE_OP_COPY_IN, middle_of(spec), SLUICE_T_HOST_M, i);
  }
}

static void build_backward(sluice_builder_t* b, const sluice_template_spec_t* spec) {
  int32_t n = spec->num_chunks;
  int deferred = is_deferred(spec);
  if (!spec->input_half) {
    add_weight_grad(b, -1);
    return;
  }
  int32_t ahead = spec->bounded ? RING_BETWEEN_LANES : b->ring[SLUICE_T_DDO];
  if (ahead > b->ring[SLUICE_T_DDO]) ahead = b->ring[SLUICE_T_DDO]; /* T_DI has as many for chunks that need one */
  int dispatches = has_part(spec, SLUICE_PART_DISPATCH);
  int experts = has_part(spec, SLUICE_PART_EXPERTS);
  int weights = experts && spec->weight_half == SLUICE_WEIGHTS_NOW && !spec->callback;
  for (int32_t i = 0; i < min_i32(ahead, n) && dispatches; ++i) add_arrival(b, spec, i);
  for (int32_t i = 0; i < n; ++i) {
    if (experts) add_experts_grad(b, spec, i);
    if (has_part(spec, SLUICE_PART_COMBINE)) add_combine_grad(b, spec, i);
    if (weights && !deferred) add_weight_grad(b, i);
    if (i + ahead < n && dispatches) add_arrival(b, spec, i + ahead);
  }
  if (spec->cut_rows) add_reduce_grad(b, -1);
  if (weights && deferred) add_weight_grad(b, -1);
}

static uint64_t fnv1a(uint64_t hash, const void* data, size_t bytes) {
  const unsigned char* p = data;
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ p[i]) * 0x100000001b3u;
  return hash;
}

static sluice_status_t check_policies(const sluice_template_spec_t* spec) {
  for (int32_t i = 0; i < SLUICE_MAX_CHUNKS; ++i) {
    int32_t di = spec->restore_di[i], m = spec->restore_m[i];
    int behind = i >= spec->num_chunks;
    if (behind ? di != 0 || m != 0 : di > SLUICE_RESTORE_REDISPATCH || m > SLUICE_RESTORE_RECOMPUTE) {
      return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "schedule: chunk %d of %d has the restore policies %d and %d", i,
                         spec->num_chunks, di, m);
    }
    if (m == SLUICE_RESTORE_REDISPATCH) {
      return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "schedule: T_M of chunk %d cannot be dispatched again", i);
    }
    /* The graph of a host's expert holds its input: neither can go without the other. */
    if (spec->callback && (m == SLUICE_RESTORE_OFFLOAD || (di != SLUICE_RESTORE_KEEP && m == SLUICE_RESTORE_KEEP))) {
      return SLUICE_FAIL(SLUICE_E_UNSUPPORTED,
                         "schedule: callback experts keep the output of chunk %d or compute it again; its input may "
                         "only go where the output is computed again",
                         i);
    }
  }
  return SLUICE_OK;
}

/* Rows of a chunk are where tokens want them only once all have returned: nothing may be bounded or done by parts. */
static sluice_status_t check_cut(const sluice_template_spec_t* spec) {
  int kept = 1;
  for (int32_t i = 0; i < spec->num_chunks; ++i) kept &= spec->restore_di[i] == SLUICE_RESTORE_KEEP;
  int whole = !spec->single_rank && !spec->bounded && !spec->dedup && spec->only == 0;
  if (!spec->cut_rows || (kept && whole)) return SLUICE_OK;
  return SLUICE_FAIL(
      SLUICE_E_UNSUPPORTED,
      "schedule: cut_rows is for whole passes of several ranks that restore no T_DI, without a plan or dedup");
}

static sluice_status_t check_spec(const sluice_template_spec_t* spec) {
  if (spec->num_chunks < 1 || spec->num_chunks > SLUICE_MAX_CHUNKS) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "schedule: number of chunks is %d; it must be in [1, %d]",
                       spec->num_chunks, SLUICE_MAX_CHUNKS);
  }
  if (spec->direction == SLUICE_BACKWARD && !spec->input_half && !spec->weight_half) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "schedule: a backward computes the input half, the weight half or both");
  }
  if (spec->callback && spec->direction == SLUICE_BACKWARD &&
      (!spec->input_half || spec->weight_half == SLUICE_WEIGHTS_LATER)) {
    return SLUICE_FAIL(SLUICE_E_UNSUPPORTED, "schedule: callback experts compute both halves of a backward at once");
  }
  if (spec->dedup && (spec->single_rank || spec->only != 0)) {
    return SLUICE_FAIL(SLUICE_E_UNSUPPORTED,
                       "schedule: dedup is 1; only whole passes of several ranks are deduplicated");
  }
  SLUICE_TRY(check_policies(spec));
  return check_cut(spec);
}

static uint64_t hash_of_comm(const sluice_template_t* t) {
  const int32_t call[] = {t->spec.direction,  t->spec.num_chunks,  t->spec.only,    t->spec.keep,
                          t->spec.input_half, t->spec.weight_half, t->spec.cut_rows};
  uint64_t hash = fnv1a(0xcbf29ce484222325u, call, sizeof call);
  for (int32_t i = 0; i < t->num_ops; ++i) {
    const int32_t what[] = {t->ops[i].kind, t->ops[i].chunk};
    if (sluice_op_is_exchange(t->ops[i].kind)) hash = fnv1a(hash, what, sizeof what);
  }
  return hash;
}

/* Tensors that no op of this template touches need no slots. */
static void drop_unused_rings(sluice_builder_t* b) {
  int used[SLUICE_T_COUNT] = {0};
  for (int32_t i = 0; i < b->num_ops; ++i) {
    for (int32_t r = 0; r < b->ops[i].num_reads; ++r) used[b->ops[i].reads[r].tensor] = 1;
    for (int32_t w = 0; w < b->ops[i].num_writes; ++w) used[b->ops[i].writes[w].tensor] = 1;
  }
  for (int32_t t = 0; t < SLUICE_T_COUNT; ++t) {
    if (!used[t]) b->ring[t] = 0;
  }
}

int32_t sluice_template_max_ops(int32_t num_chunks) { return OPS_PER_CHUNK * num_chunks + 1; }

int32_t sluice_template_max_deps(int32_t num_chunks) { return 4 * sluice_template_max_ops(num_chunks); }

uint64_t sluice_template_bytes(int32_t num_chunks) {
  uint64_t max_ops = (uint64_t)sluice_template_max_ops(num_chunks);
  return sizeof(sluice_template_t) + max_ops * sizeof(sluice_op_t) +
         (uint64_t)sluice_template_max_deps(num_chunks) * sizeof(int32_t) +
         (uint64_t)SLUICE_T_COUNT * (uint64_t)num_chunks * sizeof(sluice_slot_ref_t);
}

sluice_status_t sluice_template_build(const sluice_template_spec_t* spec, sluice_allocator_t* allocator,
                                      sluice_template_t** out_template) {
  *out_template = NULL;
  SLUICE_TRY(check_spec(spec));
  void* memory = sluice_alloc(allocator, sluice_template_bytes(spec->num_chunks), "schedule template");
  if (memory == NULL) return sluice_alloc_status();
  sluice_status_t status = sluice_template_build_into(spec, memory, out_template);
  if (status != SLUICE_OK) sluice_free(allocator, memory, sluice_template_bytes(spec->num_chunks));
  return status;
}

static int is_mixed(const sluice_template_spec_t* spec) {
  for (int32_t i = 1; i < spec->num_chunks; ++i) {
    if (spec->restore_di[i] != spec->restore_di[0] || spec->restore_m[i] != spec->restore_m[0]) return 1;
  }
  return 0;
}

/* An empty template of the spec, in memory of sluice_template_bytes(n). */
static sluice_template_t* lay_out(const sluice_template_spec_t* spec, void* memory) {
  int32_t n = spec->num_chunks;
  sluice_template_t* schedule = memory;
  memset(schedule, 0, sluice_template_bytes(n));
  schedule->bytes = sluice_template_bytes(n);
  schedule->spec = *spec;
  schedule->ops = (sluice_op_t*)(schedule + 1);
  schedule->deps = (int32_t*)(schedule->ops + sluice_template_max_ops(n));
  schedule->homes = (sluice_slot_ref_t*)(schedule->deps + sluice_template_max_deps(n));
  return schedule;
}

sluice_status_t sluice_template_new(const sluice_template_spec_t* spec, sluice_allocator_t* allocator,
                                    sluice_template_t** out_template) {
  *out_template = NULL;
  SLUICE_TRY(check_spec(spec));
  void* memory = sluice_alloc(allocator, sluice_template_bytes(spec->num_chunks), "schedule template");
  if (memory == NULL) return sluice_alloc_status();
  *out_template = lay_out(spec, memory);
  return SLUICE_OK;
}

void sluice_template_seal(sluice_template_t* schedule) {
  uint64_t hash = fnv1a(0xcbf29ce484222325u, &schedule->spec, sizeof schedule->spec);
  hash = fnv1a(hash, schedule->ops, (size_t)schedule->num_ops * sizeof(sluice_op_t));
  schedule->hash = fnv1a(hash, schedule->deps, (size_t)schedule->num_deps * sizeof(int32_t));
  schedule->comm_hash = hash_of_comm(schedule);
}

sluice_status_t sluice_template_build_into(const sluice_template_spec_t* spec, void* memory,
                                           sluice_template_t** out_template) {
  *out_template = NULL;
  SLUICE_TRY(check_spec(spec));
  int32_t n = spec->num_chunks, max_ops = sluice_template_max_ops(n), max_deps = sluice_template_max_deps(n);
  sluice_template_t* schedule = lay_out(spec, memory);
  sluice_builder_t builder = {.ops = schedule->ops,
                              .capacity = max_ops,
                              .single_rank = spec->single_rank,
                              .num_chunks = n,
                              .homes = schedule->homes};
  if (spec->direction == SLUICE_FORWARD) {
    place_forward(&builder, spec);
    build_forward(&builder, spec);
  } else {
    place_backward(&builder, spec);
    build_backward(&builder, spec);
  }
  int32_t num_deps = sluice_builder_derive_deps(&builder, schedule->deps, max_deps);
  if (num_deps < 0 || num_deps > max_deps) {
    return SLUICE_FAIL(num_deps < 0 ? SLUICE_E_NO_MEMORY : SLUICE_E_INTERNAL, "schedule: dependencies of %d ops",
                       max_ops);
  }
  drop_unused_rings(&builder);
  schedule->num_ops = builder.num_ops;
  schedule->num_deps = num_deps;
  memcpy(schedule->ring, builder.ring, sizeof schedule->ring);
  if (is_mixed(spec)) { /* of uniform policies the rings are exact */
    SLUICE_TRY(sluice_template_tighten(schedule, SLUICE_T_DI));
    SLUICE_TRY(sluice_template_tighten(schedule, middle_of(spec)));
  }
  SLUICE_TRY(sluice_template_mark_releases(schedule));
  sluice_template_seal(schedule);
  *out_template = schedule;
  return SLUICE_OK;
}

void sluice_template_destroy(sluice_template_t* schedule, sluice_allocator_t* allocator) {
  if (schedule != NULL) sluice_free(allocator, schedule, schedule->bytes);
}
