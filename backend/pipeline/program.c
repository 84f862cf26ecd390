// SPDX-License-Identifier: Apache-2.0
#include "backend/pipeline/program.h"

#include <stdio.h>

/* Every micro-batch has the same ops on a stage, so they form blocks of equal size, followed by the reductions and the
 * flush. */
static int32_t find_at(const sluice_pipeline_program_t* program, int32_t stage, int32_t kind, int32_t virtual_stage,
                       int32_t micro_batch) {
  int32_t first = program->first_op[stage];
  int32_t behind = program->first_op[stage + 1] - 1 - sluice_pipeline_num_reduces(&program->spec);
  int32_t block = (behind - first) / program->spec.num_micro_batches;
  int32_t begin = first + micro_batch * block, end = begin + block;
  if (kind == SLUICE_STAGE_REDUCE) begin = behind, end = program->first_op[stage + 1] - 1;
  for (int32_t i = begin; i < end; ++i) {
    const sluice_stage_op_t* op = &program->ops[i];
    if (op->kind == kind && op->virtual_stage == virtual_stage && op->micro_batch == micro_batch) return i;
  }
  return -1;
}

int32_t sluice_pipeline_find(const sluice_pipeline_program_t* program, int32_t kind, int32_t virtual_stage,
                             int32_t micro_batch) {
  int32_t stage = kind == SLUICE_STAGE_FLUSH ? virtual_stage : sluice_pipeline_stage_of(&program->spec, virtual_stage);
  if (kind == SLUICE_STAGE_FLUSH) return program->first_op[stage + 1] - 1;
  return find_at(program, stage, kind, virtual_stage, micro_batch);
}

static int32_t kind_at_other_end(int32_t kind) {
  switch (kind) {
    case SLUICE_STAGE_RECEIVE_ACTIVATION: return SLUICE_STAGE_SEND_ACTIVATION;
    case SLUICE_STAGE_SEND_ACTIVATION: return SLUICE_STAGE_RECEIVE_ACTIVATION;
    case SLUICE_STAGE_RECEIVE_GRADIENT: return SLUICE_STAGE_SEND_GRADIENT;
    default: return SLUICE_STAGE_RECEIVE_GRADIENT;
  }
}

void sluice_pipeline_match(sluice_pipeline_program_t* program) {
  for (int32_t i = 0; i < program->num_ops; ++i) {
    sluice_stage_op_t* op = &program->ops[i];
    op->match = -1;
    if (!sluice_stage_op_is_message(op->kind)) continue;
    int32_t kind = kind_at_other_end(op->kind), c = sluice_stage_op_other_end(op->kind, op->virtual_stage);
    op->match = find_at(program, op->peer, kind, c, op->micro_batch);
  }
}

int sluice_stage_op_describe(const sluice_stage_op_t* op, char* text, size_t room) {
  if (op->kind == SLUICE_STAGE_FLUSH) return snprintf(text, room, "flush of stage %d", op->stage);
  if (op->kind == SLUICE_STAGE_REDUCE) {
    return snprintf(text, room, "reduce of virtual stage %d on stage %d", op->virtual_stage, op->stage);
  }
  return snprintf(text, room, "%s of micro-batch %d in virtual stage %d on stage %d", sluice_stage_op_name(op->kind),
                  op->micro_batch, op->virtual_stage, op->stage);
}

uint64_t sluice_pipeline_stage_bytes(const sluice_pipeline_spec_t* spec, int32_t stage) {
  uint64_t bytes = 0;
  for (int32_t k = 0; k < spec->num_virtual; ++k) {
    int32_t c = sluice_pipeline_virtual_stage(spec, stage, k);
    bytes += (uint64_t)spec->in_flight[c] * spec->activation_bytes[c];
    if (c > 0 && sluice_pipeline_crosses(spec, c - 1)) {
      bytes += (uint64_t)spec->receives_ahead * spec->message_bytes[c - 1];
    }
    if (spec->separate_wgrad) bytes += (uint64_t)spec->held[c] * spec->held_bytes[c];
  }
  return bytes;
}

void sluice_pipeline_program_destroy(sluice_pipeline_program_t* program, sluice_allocator_t* allocator) {
  if (program == NULL) return;
  sluice_free(allocator, program->memory, program->memory_bytes);
}
