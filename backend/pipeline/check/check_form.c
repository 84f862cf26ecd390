// SPDX-License-Identifier: Apache-2.0
/* Checks the form of a program: numbers in range, each op once, accesses, matches, and the order. */
#include <stdio.h>

#include "backend/pipeline/check/check.h"

static void find(sluice_pipeline_finding_t* finding, int32_t fault, int32_t op) {
  if (finding->fault != SLUICE_PIPELINE_FAULT_NONE) return;
  *finding = (sluice_pipeline_finding_t){.fault = fault, .op = op, .other = -1};
}

/* Increases along the ops of one micro-batch on a stage: down the virtual stages, then up. */
static int32_t position(const sluice_stage_op_t* op) {
  int32_t is_down = op->kind <= SLUICE_STAGE_SEND_ACTIVATION;
  int32_t turn = is_down ? op->virtual_stage : 2 * SLUICE_PIPELINE_MAX_VIRTUAL_STAGES - op->virtual_stage;
  return turn * SLUICE_STAGE_OP_COUNT + op->kind;
}

static int has_valid_numbers(const sluice_pipeline_program_t* program, int32_t index, int32_t stage) {
  const sluice_stage_op_t* op = &program->ops[index];
  const sluice_pipeline_spec_t* spec = &program->spec;
  if (op->stage != stage || op->num_needs < 0 || op->first_need < 0 ||
      op->first_need > program->num_needs - op->num_needs) {
    return 0;
  }
  for (int32_t n = 0; n < op->num_needs; ++n) {
    int32_t needed = program->needs[op->first_need + n];
    if (needed < program->first_op[stage] || needed >= program->first_op[stage + 1] || needed == index) return 0;
  }
  if (index == program->first_op[stage + 1] - 1) return op->kind == SLUICE_STAGE_FLUSH;
  int32_t c = op->virtual_stage;
  if (op->kind < 0 || op->kind >= SLUICE_STAGE_FLUSH || c < 0 || c >= sluice_pipeline_num_virtual_stages(spec) ||
      op->micro_batch < 0 || op->micro_batch >= spec->num_micro_batches) {
    return 0;
  }
  if (sluice_pipeline_stage_of(spec, c) != stage) return 0;
  if (op->kind == SLUICE_STAGE_REDUCE) {
    return sluice_pipeline_num_reduces(spec) > 0 && op->micro_batch == spec->num_micro_batches - 1;
  }
  return sluice_stage_op_exists(spec, op->kind, c);
}

static int comes_behind(const sluice_stage_op_t* a, const sluice_stage_op_t* b) {
  if (b->kind == SLUICE_STAGE_FLUSH) return 1;
  const int a_reduces = a->kind == SLUICE_STAGE_REDUCE, b_reduces = b->kind == SLUICE_STAGE_REDUCE;
  if (a_reduces || b_reduces) return b_reduces && (!a_reduces || a->virtual_stage > b->virtual_stage);
  if (a->micro_batch != b->micro_batch) return a->micro_batch < b->micro_batch;
  return position(a) < position(b);
}

static int32_t count_of_stage(const sluice_pipeline_spec_t* spec, int32_t stage) {
  int32_t count = 0;
  for (int32_t k = 0; k < spec->num_virtual; ++k) {
    int32_t c = sluice_pipeline_virtual_stage(spec, stage, k);
    for (int32_t kind = 0; kind < SLUICE_STAGE_OP_COUNT; ++kind) count += sluice_stage_op_exists(spec, kind, c);
  }
  return count * spec->num_micro_batches + sluice_pipeline_num_reduces(spec) + 1;
}

/* Checks that ops exist, in strictly increasing order and in the right number: then each occurs once. */
static void check_ops(const sluice_pipeline_program_t* program, int32_t stage, sluice_pipeline_finding_t* finding) {
  int32_t first = program->first_op[stage], end = program->first_op[stage + 1];
  if (end - first != count_of_stage(&program->spec, stage)) find(finding, SLUICE_PIPELINE_FAULT_FORM, -1);
  for (int32_t i = first; i < end && finding->fault == SLUICE_PIPELINE_FAULT_NONE; ++i) {
    int is_valid =
        has_valid_numbers(program, i, stage) && (i == first || comes_behind(&program->ops[i - 1], &program->ops[i]));
    if (!is_valid) find(finding, SLUICE_PIPELINE_FAULT_FORM, i);
  }
}

static int are_slots(const sluice_pipeline_program_t* program, const sluice_stage_op_t* op,
                     const sluice_stage_slot_t* slots, int32_t num_slots, const sluice_stage_access_t* accesses,
                     int32_t num_accesses) {
  if (num_slots != num_accesses) return 0;
  for (int32_t i = 0; i < num_slots; ++i) {
    int32_t c = accesses[i].virtual_stage, t = accesses[i].tensor, ring = program->ring[c][t];
    if (slots[i].tensor != t || slots[i].virtual_stage != c || ring < 1 || slots[i].slot != op->micro_batch % ring) {
      return 0;
    }
  }
  return 1;
}

static void check_accesses(const sluice_pipeline_program_t* program, int32_t index,
                           sluice_pipeline_finding_t* finding) {
  const sluice_stage_op_t* op = &program->ops[index];
  if (op->kind == SLUICE_STAGE_FLUSH) return;
  sluice_stage_accesses_t table = sluice_stage_op_accesses(&program->spec, op->kind, op->virtual_stage);
  if (!are_slots(program, op, op->reads, op->num_reads, table.reads, table.num_reads) ||
      !are_slots(program, op, op->writes, op->num_writes, table.writes, table.num_writes)) {
    find(finding, SLUICE_PIPELINE_FAULT_ACCESS, index);
  }
}

static void check_match(const sluice_pipeline_program_t* program, int32_t index, sluice_pipeline_finding_t* finding) {
  const sluice_stage_op_t* op = &program->ops[index];
  if (!sluice_stage_op_is_message(op->kind)) return;
  const sluice_stage_op_t* other = op->match >= 0 && op->match < program->num_ops ? &program->ops[op->match] : NULL;
  int is_pair = other != NULL && other->match == index && other->stage == op->peer && other->peer == op->stage &&
                other->micro_batch == op->micro_batch &&
                other->virtual_stage == sluice_stage_op_other_end(op->kind, op->virtual_stage) &&
                op->virtual_stage == sluice_stage_op_other_end(other->kind, other->virtual_stage) &&
                sluice_stage_op_is_message(other->kind) &&
                sluice_stage_op_is_send(other->kind) != sluice_stage_op_is_send(op->kind);
  if (!is_pair) find(finding, SLUICE_PIPELINE_FAULT_MESSAGE, index);
}

/* Places and the list of the order must agree, and contain every op that an order must have. */
static void check_order(const sluice_pipeline_program_t* program, int32_t stage, sluice_pipeline_finding_t* finding) {
  if (program->policy->order == NULL) return;
  int32_t first = program->first_position[stage], count = program->first_position[stage + 1] - first, placed = 0;
  for (int32_t i = program->first_op[stage]; i < program->first_op[stage + 1]; ++i) {
    const sluice_stage_op_t* op = &program->ops[i];
    int is_ordered = !sluice_stage_op_is_message(op->kind) || program->policy->is_blocking;
    int is_in_place = op->place >= 0 && op->place < count && program->order[first + op->place] == i;
    if (is_ordered ? !is_in_place : op->place != -1) find(finding, SLUICE_PIPELINE_FAULT_FORM, i);
    placed += is_ordered;
  }
  if (placed != count) find(finding, SLUICE_PIPELINE_FAULT_FORM, -1);
}

void sluice_pipeline_check_form(const sluice_pipeline_program_t* program, sluice_pipeline_finding_t* out_finding) {
  *out_finding = (sluice_pipeline_finding_t){.fault = SLUICE_PIPELINE_FAULT_NONE, .op = -1, .other = -1};
  for (int32_t s = 0; s < program->spec.num_stages; ++s) {
    check_ops(program, s, out_finding);
    if (out_finding->fault != SLUICE_PIPELINE_FAULT_NONE) return;
    check_order(program, s, out_finding);
  }
  for (int32_t i = 0; i < program->num_ops; ++i) {
    check_accesses(program, i, out_finding);
    check_match(program, i, out_finding);
  }
}

/* ---- descriptions ---- */

static void name(const sluice_pipeline_program_t* program, int32_t op, char* text, size_t room) {
  if (op < 0 || op >= program->num_ops) {
    snprintf(text, room, "no op");
  } else {
    sluice_stage_op_describe(&program->ops[op], text, room);
  }
}

int sluice_pipeline_finding_describe(const sluice_pipeline_program_t* program, const sluice_pipeline_finding_t* finding,
                                     char* text, size_t room) {
  char op[128], other[128];
  name(program, finding->op, op, sizeof op);
  name(program, finding->other, other, sizeof other);
  switch (finding->fault) {
    case SLUICE_PIPELINE_FAULT_NONE: return snprintf(text, room, "no fault");
    case SLUICE_PIPELINE_FAULT_FORM: return snprintf(text, room, "malformed: %s", op);
    case SLUICE_PIPELINE_FAULT_ACCESS:
      return snprintf(text, room, "undeclared access: %s accesses a slot that it does not declare", op);
    case SLUICE_PIPELINE_FAULT_MESSAGE:
      return snprintf(text, room, "unmatched message: %s has no counterpart on stage %d", op,
                      finding->op >= 0 ? program->ops[finding->op].peer : -1);
    case SLUICE_PIPELINE_FAULT_OVERWRITTEN:
      return snprintf(text, room, "overwritten: %s may run before %s, whose slot it writes", op, other);
    case SLUICE_PIPELINE_FAULT_UNDEFINED:
      return snprintf(text, room, "use before definition: %s may run before %s, which writes what it reads", op, other);
    case SLUICE_PIPELINE_FAULT_IN_FLIGHT: return snprintf(text, room, "over a limit: %s is one op too many", op);
    case SLUICE_PIPELINE_FAULT_COLUMN_ORDER:
      return snprintf(text, room, "replicas in different collectives: one runs %s, another %s", op, other);
    default:
      return snprintf(text, room, "deadlock after %lld events: %s waits forever", (long long)finding->events, op);
  }
}
