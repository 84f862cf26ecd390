// SPDX-License-Identifier: Apache-2.0
#include "backend/pipeline/timeline_json.h"

#include "backend/base/text.h"

#define NS_PER_S 1e9

static int is_shown(const sluice_stage_op_t* op) {
  if (op->kind == SLUICE_STAGE_FLUSH) return 0;
  return !sluice_stage_op_is_message(op->kind) || sluice_stage_op_is_send(op->kind);
}

static int is_beside(const sluice_stage_op_t* op) {
  return sluice_stage_op_is_message(op->kind) || op->kind == SLUICE_STAGE_REDUCE;
}

uint64_t sluice_pipeline_write_timeline(const sluice_pipeline_program_t* program, const double* begin,
                                        const double* end, char* data, uint64_t room) {
  sluice_text_t text = sluice_text(data, room);
  const char* separator = "";
  sluice_text_add(&text, "{\"events\": [");
  for (int32_t i = 0; i < program->num_ops; ++i) {
    const sluice_stage_op_t* op = &program->ops[i];
    if (!is_shown(op) || end[i] < begin[i]) continue;
    sluice_text_add(&text,
                    "%s\n {\"op\": \"%s\", \"lane\": \"%s\", \"begin_ns\": %.0f, \"end_ns\": %.0f, \"chunk\": %d, "
                    "\"direction\": \"%s\", \"layer\": %d, \"rank\": %d}",
                    separator, sluice_stage_op_name(op->kind), is_beside(op) ? "comm" : "compute", begin[i] * NS_PER_S,
                    end[i] * NS_PER_S, op->micro_batch,
                    op->kind <= SLUICE_STAGE_SEND_ACTIVATION ? "forward" : "backward", op->virtual_stage, op->stage);
    separator = ",";
  }
  sluice_text_add(&text, "\n]}\n");
  return text.used;
}
