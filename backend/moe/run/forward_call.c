// SPDX-License-Identifier: Apache-2.0
#include "backend/moe/run/forward_call.h"

#include <string.h>

#include "backend/moe/pass/lanes.h"
#include "backend/moe/routing/binding_arrays.h"
#include "backend/plan/plan.h"

sluice_template_spec_t sluice_run_spec(const sluice_pass_t* pass, int32_t direction, int32_t keep) {
  const sluice_moe_t* moe = pass->moe;
  const sluice_binding_t* binding = &pass->binding;
  sluice_template_spec_t spec = {
      .direction = direction,
      .num_chunks = binding->num_chunks,
      .single_rank = moe->context->world_size == 1,
      .callback = moe->shape.config.callback_experts,
      .gated = moe->shape.config.gated != SLUICE_GATED_NO,
      .bounded = (pass->is_bounded || sluice_shape_is_lean(&moe->shape)) && !binding->chunks_by_experts,
      .dedup = binding->deduplicate,
      .chunks_by_experts = (int16_t)binding->chunks_by_experts,
      .grouped = binding->grouped,
      .low_rank = moe->shape.config.lora_rank > 0,
  };
  memcpy(spec.restore_input, binding->restore_input, sizeof spec.restore_input);
  memcpy(spec.restore_pre_activation, binding->restore_pre_activation, sizeof spec.restore_pre_activation);
  spec.keep = keep;
  spec.shares_act = binding->shares_act && sluice_spec_offloads_m(&spec);
  return spec;
}

/* Whether exchanges can be grouped. Plans count one send slot and one receive slot, layers that reuse buffers save
 * memory, and coded rows must be read before another exchange is posted. */
static int may_group(const sluice_moe_t* moe, const sluice_binding_t* binding, int32_t num_chunks) {
  const int has_pairs = num_chunks > SLUICE_GROUPED_CHUNKS && moe->context->world_size > 1 && !binding->two_levels &&
                        sluice_layer_wire(moe) == SLUICE_WIRE_LAYER_DTYPE;
  return has_pairs && !sluice_is_planned(moe) && !moe->shape.config.reuse;
}

void sluice_run_take_travel(sluice_pass_t* pass) {
  pass->travel = sluice_strategies_of(pass->moe, pass->binding.deduplicate)->travel;
}

sluice_status_t sluice_forward_take_template(sluice_forward_t* f) {
  sluice_template_spec_t spec = sluice_run_spec(&f->pass, SLUICE_FORWARD, sluice_forward_keeps(f));
  const sluice_moe_t* moe = f->pass.moe;
  spec.experts_first = sluice_pass_lanes(&f->pass)->are_streams && !sluice_is_planned(moe) && !spec.single_rank;
  return sluice_engine_template(f->pass.context, &spec, &f->pass.schedule);
}

sluice_status_t sluice_forward_choose_template(sluice_forward_t* f, int32_t num_chunks, int32_t restore_input,
                                               int32_t restore_pre_activation,
                                               const sluice_chunk_policies_t* by_chunk) {
  sluice_binding_t* binding = &f->pass.binding;
  binding->num_chunks = num_chunks;
  if (!sluice_is_planned(f->pass.moe)) sluice_binding_take_deduplication(binding, f->pass.moe, f->choice.deduplicate);
  sluice_run_take_travel(&f->pass);
  binding->grouped = f->choice.grouped && may_group(f->pass.moe, binding, num_chunks);
  binding->shares_act = 1; /* a configured policy asks for less memory; a plan with room overrides this below */
  if (f->pass.moe->plan != NULL) binding->shares_act = (uint8_t)f->pass.moe->plan->shares_act;
  for (int32_t i = 0; i < num_chunks && sluice_forward_keeps(f); ++i) {
    binding->restore_input[i] = (uint8_t)sluice_policy_of_di(restore_input, by_chunk, i);
    binding->restore_pre_activation[i] = (uint8_t)sluice_policy_of_m(restore_pre_activation, by_chunk, i);
  }
  return sluice_forward_take_template(f);
}

sluice_status_t sluice_forward_choose_by_config(sluice_forward_t* f, int32_t num_chunks) {
  const sluice_shape_t* shape = &f->pass.moe->shape;
  const sluice_restore_set_t* set = &sluice_restore_sets[f->choice.restore_set]; /* 0: all kept */
  const int32_t input = shape->config.restore_input, pre_activation = shape->config.restore_pre_activation;
  return sluice_forward_choose_template(f, num_chunks, input < 0 ? set->restore_input : input,
                                        pre_activation < 0 ? set->restore_pre_activation : pre_activation,
                                        &shape->policies);
}
