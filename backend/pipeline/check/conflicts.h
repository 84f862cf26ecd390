// SPDX-License-Identifier: Apache-2.0
/* Conflicts between ops of a stage that access one slot, at least one writing. Private to backend/pipeline/check. */
#pragma once

#include "backend/pipeline/check/finding.h"

/* Returns the fault to report if the later of two ops of a stage, in the order of the list, begins before the earlier
 * has ended; NONE if it may. The flush waits for all ops. */
static inline int32_t sluice_stage_conflict(const sluice_stage_op_t* earlier, const sluice_stage_op_t* later) {
  if (later->kind == SLUICE_STAGE_FLUSH) return SLUICE_PIPELINE_FAULT_OVERWRITTEN;
  for (int32_t w = 0; w < later->num_writes; ++w) {
    for (int32_t a = 0; a < earlier->num_reads + earlier->num_writes; ++a) {
      const sluice_stage_slot_t* other =
          a < earlier->num_reads ? &earlier->reads[a] : &earlier->writes[a - earlier->num_reads];
      if (other->tensor == later->writes[w].tensor && other->virtual_stage == later->writes[w].virtual_stage &&
          other->slot == later->writes[w].slot) {
        return SLUICE_PIPELINE_FAULT_OVERWRITTEN;
      }
    }
  }
  for (int32_t r = 0; r < later->num_reads; ++r) {
    for (int32_t w = 0; w < earlier->num_writes; ++w) {
      const sluice_stage_slot_t* other = &earlier->writes[w];
      if (other->tensor == later->reads[r].tensor && other->virtual_stage == later->reads[r].virtual_stage &&
          other->slot == later->reads[r].slot) {
        return SLUICE_PIPELINE_FAULT_UNDEFINED;
      }
    }
  }
  return SLUICE_PIPELINE_FAULT_NONE;
}
