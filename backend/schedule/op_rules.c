#include "backend/schedule/op_rules.h"

#define COMPUTE SLUICE_LANE_COMPUTE
#define COMM    SLUICE_LANE_COMM
#define T(name) SLUICE_T_##name

static const sluice_op_rule_t rules[SLUICE_OP_COUNT] = {
    [SLUICE_OP_DISPATCH] = {COMM, {0}, 0, {T(SEND), T(RECV)}, 2},
    [SLUICE_OP_UNPACK] = {COMM, {T(RECV)}, 1, {T(DI)}, 1},
    [SLUICE_OP_GEMM1] = {COMPUTE, {T(DI)}, 1, {T(M)}, 1},
    [SLUICE_OP_ACTIVATION] = {COMPUTE, {T(M)}, 1, {T(M), T(ACT)}, 2},
    [SLUICE_OP_GEMM2] = {COMPUTE, {T(ACT)}, 1, {T(DO)}, 1},
    [SLUICE_OP_EXPERT] = {COMPUTE, {T(DI)}, 1, {T(DO)}, 1},
    [SLUICE_OP_COMBINE] = {COMM, {T(DO)}, 1, {T(SEND), T(RECV)}, 2},
    [SLUICE_OP_REDUCE] = {COMM, {T(RECV)}, 1, {T(OUT)}, 1},
    [SLUICE_OP_DISPATCH_GRAD] = {COMM, {0}, 0, {T(SEND), T(RECV)}, 2},
    [SLUICE_OP_UNPACK_GRAD] = {COMM, {T(RECV)}, 1, {T(DDO), T(ROUTE)}, 2},
    [SLUICE_OP_GEMM2_GRAD] = {COMPUTE, {T(DDO)}, 1, {T(DACT)}, 1},
    [SLUICE_OP_ACTIVATION_GRAD] = {COMPUTE, {T(M), T(DACT), T(ROUTE), T(DDO)}, 4, {T(DM), T(DGATE)}, 2},
    [SLUICE_OP_GEMM1_GRAD] = {COMPUTE, {T(DM)}, 1, {T(DDI)}, 1},
    [SLUICE_OP_EXPERT_GRAD] = {COMPUTE, {T(DI), T(DO), T(ROUTE), T(DDO)}, 4, {T(DDO), T(DDI), T(DGATE)}, 3},
    [SLUICE_OP_COMBINE_GRAD] = {COMM, {T(DDI), T(DGATE)}, 2, {T(SEND), T(RECV)}, 2},
    [SLUICE_OP_REDUCE_GRAD] = {COMM, {T(RECV)}, 1, {T(OUT)}, 1},
    [SLUICE_OP_WEIGHT_GRAD] = {COMPUTE, {T(DI), T(DDO), T(ROUTE), T(DM), T(DACT)}, 5, {T(DW)}, 1},
    [SLUICE_OP_COPY_OUT] = {SLUICE_LANE_COPY_OUT, {0}, 0, {0}, 0},
    [SLUICE_OP_COPY_IN] = {SLUICE_LANE_COPY_IN, {0}, 0, {0}, 0},
    [SLUICE_OP_REDISPATCH] = {COMM, {0}, 0, {T(SEND), T(RECV)}, 2},
    [SLUICE_OP_RECOMPUTE] = {COMPUTE, {T(DI)}, 1, {T(M)}, 1},
};

sluice_op_rule_t sluice_op_rule(int32_t kind, const sluice_template_spec_t* spec) {
  sluice_op_rule_t rule = rules[kind];
  if (spec->dedup && spec->direction == SLUICE_FORWARD) {
    if (kind == SLUICE_OP_UNPACK) rule.writes[rule.num_writes++] = T(PARCELS);
    if (kind == SLUICE_OP_COMBINE) rule.reads[rule.num_reads++] = T(PARCELS);
  }
  if (!spec->single_rank) return rule;
  if (rule.lane == COMM) rule.lane = COMPUTE;
  /* Rows come from the tokens and go to them directly. */
  if (kind == SLUICE_OP_UNPACK || kind == SLUICE_OP_UNPACK_GRAD) rule.num_reads = 0;
  if (kind == SLUICE_OP_REDUCE) rule.reads[0] = T(DO);
  if (kind == SLUICE_OP_REDUCE_GRAD) rule.reads[0] = T(DDI), rule.reads[1] = T(DGATE), rule.num_reads = 2;
  return rule;
}
