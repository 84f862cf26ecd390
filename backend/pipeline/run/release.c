// SPDX-License-Identifier: Apache-2.0
/* Releases values, and tells the host when its own are released. */
#include "backend/pipeline/run/state.h"

void sluice_stage_tell_released(const sluice_pipeline_t* pipeline, int32_t which, int32_t c, int32_t micro_batch) {
  const int32_t name = which == SLUICE_STAGE_VALUE_OUTPUT ? SLUICE_STAGE_OUTPUT : SLUICE_STAGE_INPUT_GRAD;
  if (pipeline->callbacks.release != NULL) pipeline->callbacks.release(pipeline->user, name, c, micro_batch);
}

/* Returns whether the host must be told. Call before the release. */
static int is_owed(const sluice_stage_value_t* value) {
  return value->readers > 0 && value->view.is_local && value->view.num_tensors > 0;
}

void sluice_stage_leave(sluice_pipeline_t* pipeline, int32_t which, int32_t c, int32_t micro_batch) {
  sluice_stage_value_t* value = sluice_stage_value(pipeline, which, c, micro_batch);
  const int owed = is_owed(value);
  if (sluice_stage_value_leave(value, pipeline->endpoint) && owed) {
    sluice_stage_tell_released(pipeline, which, c, micro_batch);
  }
}

void sluice_stage_drop_all(sluice_pipeline_t* pipeline) {
  const sluice_pipeline_spec_t* spec = &pipeline->agreed.spec;
  for (int32_t k = 0; k < spec->num_virtual; ++k) {
    const int32_t c = sluice_pipeline_virtual_stage(spec, pipeline->agreed.stage, k);
    for (int32_t which = 0; which < SLUICE_STAGE_VALUE_COUNT; ++which) {
      for (int32_t i = 0; i < pipeline->num_micro_batches; ++i) {
        sluice_stage_value_t* value = sluice_stage_value(pipeline, which, c, i);
        const int owed = is_owed(value);
        if (sluice_stage_value_drop(value, pipeline->endpoint) && owed) {
          sluice_stage_tell_released(pipeline, which, c, i);
        }
      }
    }
  }
}
