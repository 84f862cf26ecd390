// SPDX-License-Identifier: Apache-2.0
/* Describes a layer as the work that a machine prices. */
#include "backend/moe/layer/layer.h"
#include "backend/tune/tuner_state.h"

sluice_workload_t sluice_tuner_work_of(const sluice_moe_t* moe) {
  const sluice_moe_config_t* c = &moe->shape.config;
  return (sluice_workload_t){
      .model_width = c->model_width,
      .hidden_width = c->callback_experts ? 4 * c->model_width : c->hidden_width,
      .num_experts = c->num_experts,
      .top_k = c->top_k,
      .gate_factor = moe->shape.gate_factor,
      .dtype = c->dtype,
      .world_size = moe->context->world_size,
      .callback = c->callback_experts,
      .chunking = c->chunking,
      .skew = 1,
      .deduplicate = sluice_shape_deduplication(&moe->shape),
      .ranks_per_node = moe->shape.ranks_per_node,
      .wire_dtype = sluice_layer_wire(moe),
      .lora_rank = c->lora_rank,
      .is_frozen = c->weight_format != SLUICE_WEIGHTS_PLAIN,
      .activation = c->callback_experts ? SLUICE_ACTIVATION_GELU : c->activation, /* the host's activation is unknown */
  };
}

int sluice_tuner_may_predict(const sluice_tuner_t* tuner, const sluice_moe_t* moe) {
  if (!tuner->has_machine || moe->shape.config.callback_experts) return 0; /* the time of a host's expert is unknown */
  return sluice_machine_check_for(&tuner->machine, moe->shape.config.dtype, moe->context->world_size) == SLUICE_OK;
}

int32_t sluice_tuner_deduplication_of(const sluice_workload_t* work, int32_t form) {
  if (form == SLUICE_FORM_TWO_LEVELS) return SLUICE_DEDUPLICATE_NODES;
  return form == SLUICE_FORM_COPIES ? SLUICE_DEDUPLICATE_RANKS : work->deduplicate;
}

int32_t sluice_tuner_form_of(const sluice_workload_t* work, int32_t deduplicate, int32_t is_grouped) {
  if (deduplicate == work->deduplicate) return is_grouped ? SLUICE_FORM_GROUPED : SLUICE_FORM_PLAIN;
  return deduplicate == SLUICE_DEDUPLICATE_NODES ? SLUICE_FORM_TWO_LEVELS : SLUICE_FORM_COPIES;
}
