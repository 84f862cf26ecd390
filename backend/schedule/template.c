/* The templates of a layer's passes. Program order decides what may overlap:
 *
 *   rings of n (everything kept): S1 S2 .. Sn on the communication lane, then R1 .. Rn, so that computation is never
 *                                 short of rows [own]; with slots reused, S1 S2 R1 S3 R2 .. Sn Rn-1 Rn [MPipe Fig. 5].
 *   weight gradients deferred:    after the last input gradient, beside the remaining R'.
 */
#include <stdint.h>
#include <string.h>

#include "backend/schedule/builder.h"
#include "sluice/moe.h"

#define OPS_PER_CHUNK 10

/* Slots that are handed between lanes are double-buffered; those that one lane fills and empties need one. */
enum { RING_BETWEEN_LANES = 2, RING_WITHIN_LANE = 1 };

static int32_t min_i32(int32_t a, int32_t b) { return a < b ? a : b; }

static void forward_rings(const sluice_template_spec_t* spec, int32_t* ring) {
  int32_t n = spec->num_chunks;
  ring[SLUICE_T_OUT] = n; /* chunks write disjoint tokens */
  if (!spec->single_rank) ring[SLUICE_T_SEND] = ring[SLUICE_T_RECV] = RING_WITHIN_LANE;
  ring[SLUICE_T_DI] = spec->keep ? n : min_i32(n, spec->single_rank ? RING_WITHIN_LANE : RING_BETWEEN_LANES);
  ring[SLUICE_T_DO] = min_i32(n, spec->single_rank ? RING_WITHIN_LANE : RING_BETWEEN_LANES);
  if (spec->callback) {
    if (spec->keep) ring[SLUICE_T_DO] = n; /* the gate's scalar needs the outputs again */
  } else {
    ring[SLUICE_T_M] = spec->keep ? n : RING_WITHIN_LANE;
    ring[SLUICE_T_ACT] = RING_WITHIN_LANE;
  }
}

static void add_dispatch(sluice_builder_t* b, int32_t i) {
  if (!b->single_rank) {
    sluice_op_t* s = sluice_builder_add(b, SLUICE_OP_DISPATCH, SLUICE_LANE_COMM, i);
    sluice_op_write(b, s, SLUICE_T_SEND);
    sluice_op_write(b, s, SLUICE_T_RECV);
  }
  sluice_op_t* u = sluice_builder_add(b, SLUICE_OP_UNPACK, SLUICE_LANE_COMM, i);
  if (!b->single_rank) sluice_op_read(b, u, SLUICE_T_RECV);
  sluice_op_write(b, u, SLUICE_T_DI);
}

static void add_experts(sluice_builder_t* b, const sluice_template_spec_t* spec, int32_t i) {
  if (spec->callback) {
    sluice_op_t* e = sluice_builder_add(b, SLUICE_OP_EXPERT, SLUICE_LANE_COMPUTE, i);
    sluice_op_read(b, e, SLUICE_T_DI);
    sluice_op_write(b, e, SLUICE_T_DO);
    return;
  }
  sluice_op_t* g1 = sluice_builder_add(b, SLUICE_OP_GEMM1, SLUICE_LANE_COMPUTE, i);
  sluice_op_read(b, g1, SLUICE_T_DI);
  sluice_op_write(b, g1, SLUICE_T_M);
  sluice_op_t* act = sluice_builder_add(b, SLUICE_OP_ACTIVATION, SLUICE_LANE_COMPUTE, i);
  sluice_op_read(b, act, SLUICE_T_M);
  sluice_op_write(b, act, SLUICE_T_M);
  sluice_op_write(b, act, SLUICE_T_ACT);
  sluice_op_t* g2 = sluice_builder_add(b, SLUICE_OP_GEMM2, SLUICE_LANE_COMPUTE, i);
  sluice_op_read(b, g2, SLUICE_T_ACT);
  sluice_op_write(b, g2, SLUICE_T_DO);
}

static void add_combine(sluice_builder_t* b, int32_t i) {
  if (!b->single_rank) {
    sluice_op_t* r = sluice_builder_add(b, SLUICE_OP_COMBINE, SLUICE_LANE_COMM, i);
    sluice_op_read(b, r, SLUICE_T_DO);
    sluice_op_write(b, r, SLUICE_T_SEND);
    sluice_op_write(b, r, SLUICE_T_RECV);
  }
  sluice_op_t* y = sluice_builder_add(b, SLUICE_OP_REDUCE, SLUICE_LANE_COMM, i);
  sluice_op_read(b, y, b->single_rank ? SLUICE_T_DO : SLUICE_T_RECV);
  sluice_op_write(b, y, SLUICE_T_OUT);
}

static int has_part(const sluice_template_spec_t* spec, int32_t part) {
  return spec->only == 0 || (spec->only & part) != 0;
}

static void build_forward(sluice_builder_t* b, const sluice_template_spec_t* spec) {
  int32_t n = spec->num_chunks;
  int32_t ahead = b->ring[SLUICE_T_DI]; /* dispatches that may run ahead of computation */
  int dispatches = has_part(spec, SLUICE_PART_DISPATCH);
  for (int32_t i = 0; i < min_i32(ahead, n) && dispatches; ++i) add_dispatch(b, i);
  for (int32_t i = 0; i < n; ++i) {
    if (has_part(spec, SLUICE_PART_EXPERTS)) add_experts(b, spec, i);
    if (has_part(spec, SLUICE_PART_COMBINE)) add_combine(b, i);
    if (i + ahead < n && dispatches) add_dispatch(b, i + ahead);
  }
}

/* Whether gradient rows of all chunks are kept until every input gradient is done. */
static int is_deferred(const sluice_template_spec_t* spec) {
  if (spec->callback || spec->weight_half == SLUICE_WEIGHTS_NONE) return 0;
  return spec->weight_half == SLUICE_WEIGHTS_LATER || spec->wgrad_mode == SLUICE_WGRAD_DEFERRED || !spec->input_half;
}

static void backward_rings(const sluice_template_spec_t* spec, int32_t* ring) {
  int32_t n = spec->num_chunks;
  int deferred = is_deferred(spec);
  ring[SLUICE_T_DI] = n; /* kept by the step */
  if (spec->callback) {
    ring[SLUICE_T_DO] = n;
  } else {
    ring[SLUICE_T_M] = n;
    ring[SLUICE_T_DM] = deferred ? n : RING_WITHIN_LANE;
    if (spec->weight_half) ring[SLUICE_T_WACT] = deferred ? n : RING_WITHIN_LANE;
  }
  if (spec->weight_half == SLUICE_WEIGHTS_NOW) ring[SLUICE_T_DW] = 1;
  ring[SLUICE_T_DDO] = ring[SLUICE_T_ROUTE] =
      deferred ? n : min_i32(n, spec->single_rank ? RING_WITHIN_LANE : RING_BETWEEN_LANES);
  if (!spec->input_half) return; /* the weight half alone reads what the input half left */
  ring[SLUICE_T_OUT] = n;
  if (!spec->single_rank) ring[SLUICE_T_SEND] = ring[SLUICE_T_RECV] = RING_WITHIN_LANE;
  if (!spec->callback) ring[SLUICE_T_DACT] = RING_WITHIN_LANE;
  ring[SLUICE_T_DDI] = ring[SLUICE_T_DGATE] = min_i32(n, spec->single_rank ? RING_WITHIN_LANE : RING_BETWEEN_LANES);
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
  sluice_op_read(b, w, SLUICE_T_WACT);
  sluice_op_write(b, w, SLUICE_T_DW);
}

static void add_experts_grad(sluice_builder_t* b, const sluice_template_spec_t* spec, int32_t i) {
  if (spec->callback) {
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
  sluice_op_t* g2 = sluice_builder_add(b, SLUICE_OP_GEMM2_GRAD, SLUICE_LANE_COMPUTE, i);
  sluice_op_read(b, g2, SLUICE_T_DDO);
  sluice_op_write(b, g2, SLUICE_T_DACT);
  sluice_op_t* act = sluice_builder_add(b, SLUICE_OP_ACTIVATION_GRAD, SLUICE_LANE_COMPUTE, i);
  sluice_op_read(b, act, SLUICE_T_M);
  sluice_op_read(b, act, SLUICE_T_DACT);
  sluice_op_read(b, act, SLUICE_T_DDO); /* dT_DO . b2 with bias */
  sluice_op_read(b, act, SLUICE_T_ROUTE);
  sluice_op_write(b, act, SLUICE_T_DM);
  if (spec->weight_half) sluice_op_write(b, act, SLUICE_T_WACT);
  sluice_op_write(b, act, SLUICE_T_DGATE);
  sluice_op_t* g1 = sluice_builder_add(b, SLUICE_OP_GEMM1_GRAD, SLUICE_LANE_COMPUTE, i);
  sluice_op_read(b, g1, SLUICE_T_DM);
  sluice_op_write(b, g1, SLUICE_T_DDI);
}

static void add_combine_grad(sluice_builder_t* b, int32_t i) {
  if (!b->single_rank) {
    sluice_op_t* r = sluice_builder_add(b, SLUICE_OP_COMBINE_GRAD, SLUICE_LANE_COMM, i);
    sluice_op_read(b, r, SLUICE_T_DDI);
    sluice_op_read(b, r, SLUICE_T_DGATE);
    sluice_op_write(b, r, SLUICE_T_SEND);
    sluice_op_write(b, r, SLUICE_T_RECV);
  }
  sluice_op_t* x = sluice_builder_add(b, SLUICE_OP_REDUCE_GRAD, SLUICE_LANE_COMM, i);
  if (b->single_rank) {
    sluice_op_read(b, x, SLUICE_T_DDI);
    sluice_op_read(b, x, SLUICE_T_DGATE);
  } else {
    sluice_op_read(b, x, SLUICE_T_RECV);
  }
  sluice_op_write(b, x, SLUICE_T_OUT);
}

static void build_backward(sluice_builder_t* b, const sluice_template_spec_t* spec) {
  int32_t n = spec->num_chunks;
  int deferred = is_deferred(spec);
  if (!spec->input_half) {
    add_weight_grad(b, -1);
    return;
  }
  int32_t ahead = b->ring[SLUICE_T_DDO];
  int dispatches = has_part(spec, SLUICE_PART_DISPATCH);
  int experts = has_part(spec, SLUICE_PART_EXPERTS);
  int weights = experts && spec->weight_half == SLUICE_WEIGHTS_NOW && !spec->callback;
  for (int32_t i = 0; i < min_i32(ahead, n) && dispatches; ++i) add_dispatch_grad(b, i);
  for (int32_t i = 0; i < n; ++i) {
    if (experts) add_experts_grad(b, spec, i);
    if (has_part(spec, SLUICE_PART_COMBINE)) add_combine_grad(b, i);
    if (weights && !deferred) add_weight_grad(b, i);
    if (i + ahead < n && dispatches) add_dispatch_grad(b, i + ahead);
  }
  if (weights && deferred) add_weight_grad(b, -1);
}

static uint64_t fnv1a(uint64_t hash, const void* data, size_t bytes) {
  const unsigned char* p = data;
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ p[i]) * 0x100000001b3u;
  return hash;
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
  return SLUICE_OK;
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

sluice_status_t sluice_template_build(const sluice_template_spec_t* spec, sluice_allocator_t* allocator,
                                      sluice_template_t** out_template) {
  *out_template = NULL;
  SLUICE_TRY(check_spec(spec));
  int32_t max_ops = OPS_PER_CHUNK * spec->num_chunks + 1;
  int32_t max_deps = 4 * max_ops;
  uint64_t bytes =
      sizeof(sluice_template_t) + (uint64_t)max_ops * sizeof(sluice_op_t) + (uint64_t)max_deps * sizeof(int32_t);
  sluice_template_t* schedule = sluice_alloc_zeroed(allocator, bytes, "schedule template");
  if (schedule == NULL) return SLUICE_E_NO_MEMORY;
  schedule->bytes = bytes;
  schedule->spec = *spec;
  schedule->ops = (sluice_op_t*)(schedule + 1);
  schedule->deps = (int32_t*)(schedule->ops + max_ops);

  sluice_builder_t builder = {.ops = schedule->ops, .capacity = max_ops, .single_rank = spec->single_rank};
  if (spec->direction == SLUICE_FORWARD) {
    forward_rings(spec, builder.ring);
    build_forward(&builder, spec);
  } else {
    backward_rings(spec, builder.ring);
    build_backward(&builder, spec);
  }
  int32_t num_deps = sluice_builder_derive_deps(&builder, schedule->deps, max_deps);
  if (num_deps < 0 || num_deps > max_deps) {
    sluice_template_destroy(schedule, allocator);
    return SLUICE_FAIL(num_deps < 0 ? SLUICE_E_NO_MEMORY : SLUICE_E_INTERNAL, "schedule: dependencies of %d ops",
                       max_ops);
  }
  drop_unused_rings(&builder);
  schedule->num_ops = builder.num_ops;
  schedule->num_deps = num_deps;
  memcpy(schedule->ring, builder.ring, sizeof schedule->ring);
  uint64_t hash = fnv1a(0xcbf29ce484222325u, spec, sizeof *spec);
  hash = fnv1a(hash, schedule->ops, (size_t)schedule->num_ops * sizeof(sluice_op_t));
  schedule->hash = fnv1a(hash, schedule->deps, (size_t)num_deps * sizeof(int32_t));
  *out_template = schedule;
  return SLUICE_OK;
}

void sluice_template_destroy(sluice_template_t* schedule, sluice_allocator_t* allocator) {
  if (schedule != NULL) sluice_free(allocator, schedule, schedule->bytes);
}
