// SPDX-License-Identifier: Apache-2.0
#include "backend/schedule/check/finding.h"

#include <stdio.h>
#include <string.h>

static const char* const hazard_names[SLUICE_HAZARD_COUNT] = {
    [SLUICE_HAZARD_NONE] = "no hazard",
    [SLUICE_HAZARD_FORM] = "malformed",
    [SLUICE_HAZARD_DEADLOCK] = "deadlock",
    [SLUICE_HAZARD_WRONG_PASS] = "op of the other direction",
    [SLUICE_HAZARD_WRONG_LANE] = "wrong lane",
    [SLUICE_HAZARD_MISSING_ACCESS] = "undeclared access",
    [SLUICE_HAZARD_READ_AFTER_WRITE] = "read-after-write",
    [SLUICE_HAZARD_WRITE_AFTER_READ] = "write-after-read",
    [SLUICE_HAZARD_WRITE_AFTER_WRITE] = "write-after-write",
    [SLUICE_HAZARD_UNDEFINED] = "use before definition",
    [SLUICE_HAZARD_OTHER_CHUNK] = "rows of another chunk",
    [SLUICE_HAZARD_OTHER_TENSOR] = "rows of another tensor",
    [SLUICE_HAZARD_LOST] = "lost result",
    [SLUICE_HAZARD_DOUBLE_RELEASE] = "double release",
    [SLUICE_HAZARD_NOT_RELEASED] = "missing release",
    [SLUICE_HAZARD_USE_AFTER_RELEASE] = "use after release",
};

/* Describes a hazard of releases. */
static int describe_release(const sluice_finding_t* f, const char* op, const char* other, char* text,
                            uint64_t text_bytes) {
  const char *hazard = hazard_names[f->hazard], *tensor = sluice_tensor_kind_name(f->tensor);
  if (f->hazard == SLUICE_HAZARD_NOT_RELEASED) {
    return snprintf(text, text_bytes, "%s: %s is the last to use slot %d of %s and does not free it", hazard, op,
                    f->slot, tensor);
  }
  if (f->hazard == SLUICE_HAZARD_USE_AFTER_RELEASE) {
    return snprintf(text, text_bytes, "%s: %s uses slot %d of %s, which %s has freed", hazard, op, f->slot, tensor,
                    other);
  }
  if (f->other < 0) {
    return snprintf(text, text_bytes, "%s: %s frees slot %d of %s, which this pass does not own at that point", hazard,
                    op, f->slot, tensor);
  }
  return snprintf(text, text_bytes, "%s: %s frees slot %d of %s, which %s has freed", hazard, op, f->slot, tensor,
                  f->other == f->op ? "it" : other);
}

static void name_op(const sluice_template_t* t, int32_t index, char* text, size_t bytes) {
  if (index < 0 || index >= t->num_ops) {
    snprintf(text, bytes, "the end of the pass");
  } else {
    snprintf(text, bytes, "op %d (%s of chunk %d)", index, sluice_op_name(t->ops[index].kind), t->ops[index].chunk);
  }
}

int sluice_finding_describe(const sluice_template_t* t, const sluice_finding_t* f, char* text, uint64_t text_bytes) {
  char op[96], other[96];
  name_op(t, f->op, op, sizeof op);
  name_op(t, f->other, other, sizeof other);
  const char* hazard = hazard_names[f->hazard];
  const char* tensor = sluice_tensor_kind_name(f->tensor);
  switch (f->hazard) {
    case SLUICE_HAZARD_READ_AFTER_WRITE:
    case SLUICE_HAZARD_WRITE_AFTER_READ:
    case SLUICE_HAZARD_WRITE_AFTER_WRITE:
      return snprintf(text, text_bytes,
                      "%s on slot %d of %s: %s does not wait for %s; the edge from the second to the first is missing",
                      hazard, f->slot, tensor, op, other);
    case SLUICE_HAZARD_DEADLOCK:
      return snprintf(text, text_bytes, "%s: %s waits for %s, which is not submitted before it", hazard, op, other);
    case SLUICE_HAZARD_OTHER_CHUNK:
      return snprintf(text, text_bytes, "%s: %s reads slot %d of %s, which %s has written for its own chunk by then",
                      hazard, op, f->slot, tensor, other);
    case SLUICE_HAZARD_OTHER_TENSOR:
      return snprintf(text, text_bytes,
                      "%s: %s reads slot %d of %s, where %s has put another tensor of the same chunk by then", hazard,
                      op, f->slot, tensor, other);
    case SLUICE_HAZARD_UNDEFINED:
      return snprintf(text, text_bytes, "%s: %s reads slot %d of %s, which nothing has written", hazard, op, f->slot,
                      tensor);
    case SLUICE_HAZARD_LOST:
      return snprintf(text, text_bytes, "%s: slot %d of %s does not hold chunk %d at the end of the pass", hazard,
                      f->slot, tensor, f->chunk);
    case SLUICE_HAZARD_MISSING_ACCESS:
      return snprintf(text, text_bytes, "%s: %s does not declare %s", hazard, op,
                      f->tensor >= 0 ? tensor : "what its copy moves");
    case SLUICE_HAZARD_DOUBLE_RELEASE:
    case SLUICE_HAZARD_NOT_RELEASED:
    case SLUICE_HAZARD_USE_AFTER_RELEASE: return describe_release(f, op, other, text, text_bytes);
    default: return snprintf(text, text_bytes, "%s: %s", hazard, op);
  }
}

/* ---- declared accesses ---- */

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
