// SPDX-License-Identifier: Apache-2.0
#include "backend/schedule/check/op_rules.h"

#include <string.h>

#define T(name) SLUICE_T_##name

/* Rows between nodes use T_NODE. */
static void between_nodes(int32_t kind, sluice_op_rule_t* rule) {
  switch (kind) {
    case SLUICE_OP_DISPATCH:
    case SLUICE_OP_DISPATCH_GRAD:
    case SLUICE_OP_REDISPATCH: rule->writes[1] = T(NODE); return;
    case SLUICE_OP_COMBINE: rule->reads[0] = T(NODE), rule->num_reads = 1; return;
    case SLUICE_OP_COMBINE_GRAD: rule->reads[0] = T(NODE); return;
    default: return;
  }
}

static int has_low_rank_terms(int32_t kind) {
  switch (kind) {
    case SLUICE_OP_GEMM1:
    case SLUICE_OP_GEMM2:
    case SLUICE_OP_RECOMPUTE:
    case SLUICE_OP_GEMM2_GRAD:
    case SLUICE_OP_GEMM1_GRAD:
    case SLUICE_OP_WEIGHT_GRAD: return 1;
    default: return 0;
  }
}

sluice_op_rule_t sluice_op_rule(int32_t kind, const sluice_template_spec_t* spec) {
  const sluice_op_row_t* row = sluice_op_row(kind);
  sluice_op_rule_t rule = {
      .lane = sluice_op_lane(kind), .num_reads = (int16_t)row->num_reads, .num_writes = (int16_t)row->num_writes};
  memcpy(rule.reads, row->reads, sizeof rule.reads);
  memcpy(rule.writes, row->writes, sizeof rule.writes);
  if (spec->dedup && spec->direction == SLUICE_FORWARD) {
    if (kind == SLUICE_OP_UNPACK) rule.writes[rule.num_writes++] = T(COPY_WEIGHTS);
    if (kind == SLUICE_OP_COMBINE) rule.reads[rule.num_reads++] = T(COPY_WEIGHTS);
  }
  if (spec->dedup == SLUICE_DEDUPLICATE_NODES) between_nodes(kind, &rule);
  if (spec->low_rank && has_low_rank_terms(kind)) rule.writes[rule.num_writes++] = T(LOW);
  /* GEMM2_GRAD and GEMM1_GRAD leave products for WEIGHT_GRAD. */
  const int reads_low = kind == SLUICE_OP_GEMM1_GRAD || (kind == SLUICE_OP_WEIGHT_GRAD && spec->dgrad);
  if (spec->low_rank && reads_low) rule.reads[rule.num_reads++] = T(LOW);
  if (!spec->single_rank) return rule;
  if (rule.lane == SLUICE_LANE_COMM) rule.lane = SLUICE_LANE_COMPUTE;
  /* With one rank, rows are read from the tokens and summed into them directly. */
  if (kind == SLUICE_OP_UNPACK || kind == SLUICE_OP_UNPACK_GRAD) rule.num_reads = 0;
  if (kind == SLUICE_OP_REDUCE) rule.reads[0] = T(DO);
  if (kind == SLUICE_OP_REDUCE_GRAD) rule.reads[0] = T(DDI), rule.reads[1] = T(DGATE), rule.num_reads = 2;
  return rule;
}
