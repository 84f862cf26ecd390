// SPDX-License-Identifier: Apache-2.0
#include "backend/pipeline/check/finding.h"

#include <stdio.h>

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
