// SPDX-License-Identifier: Apache-2.0
#include "backend/model/shape.h"

#include <math.h>
#include <string.h>

static int32_t experts_of(const sluice_shape_t* shape, const int32_t* first_position, int32_t rank) {
  if (first_position == NULL) return shape->config.num_experts / shape->world_size;
  return first_position[rank + 1] - first_position[rank];
}

void sluice_shape_set_experts(sluice_shape_t* shape, const int32_t* first_position) {
  shape->num_local = experts_of(shape, first_position, shape->rank);
  shape->most_local = 0;
  for (int32_t r = 0; r < shape->world_size; ++r) {
    const int32_t experts = experts_of(shape, first_position, r);
    if (experts > shape->most_local) shape->most_local = experts;
  }
}

void sluice_shape_init(sluice_shape_t* out, const sluice_moe_config_t* config, const sluice_chunk_policies_t* policies,
                       int32_t rank, int32_t world_size, const int32_t* first_position, int32_t on_device_memory) {
  memset(out, 0, sizeof *out);
  out->config = *config;
  out->config.next = NULL;
  out->config.expert_rank = out->config.expert_slot = NULL;
  out->config.restore_input_of = out->config.restore_pre_activation_of = NULL;
  if (policies != NULL) out->policies = *policies;
  out->rank = rank;
  out->world_size = world_size;
  sluice_shape_set_experts(out, first_position);
  out->gate_factor = config->gated ? 2 : 1;
  out->on_device_memory = (int16_t)on_device_memory;
}

void sluice_shape_set_nodes(sluice_shape_t* shape, int32_t ranks_per_node) {
  const int several = ranks_per_node > 1 && ranks_per_node < shape->world_size && shape->config.top_k > 1;
  shape->ranks_per_node = (int16_t)(several ? ranks_per_node : 0);
}

sluice_shape_t sluice_shape_widest(const sluice_shape_t* shape) {
  sluice_shape_t widest = *shape;
  widest.num_local = shape->most_local;
  return widest;
}

/* Whether any chunk's policy, from a list or for all chunks, does not keep rows. */
static int restores(const uint8_t* listed, int32_t count, int32_t policy) {
  int any = count == 0 && !sluice_restore_is_kept(sluice_restore_of(policy));
  for (int32_t i = 0; i < count; ++i) any |= !sluice_restore_is_kept(listed[i]);
  return any;
}

int sluice_shape_restores_input(const sluice_shape_t* shape) {
  return restores(shape->policies.di, shape->policies.count, shape->config.restore_input);
}

int sluice_shape_restores_pre_activation(const sluice_shape_t* shape) {
  return restores(shape->policies.m, shape->policies.count, shape->config.restore_pre_activation);
}

int sluice_shape_chunks_by_experts(const sluice_shape_t* shape, int32_t num_chunks) {
  const sluice_moe_config_t* c = &shape->config;
  const sluice_chunking_t chunking = {.num_chunks = num_chunks,
                                      .chunking = c->chunking,
                                      .num_experts = c->num_experts,
                                      .world_size = shape->world_size,
                                      .deduplicate = sluice_shape_is_deduplicated(shape),
                                      .restore_input = sluice_restore_of(c->restore_input),
                                      .restore_pre_activation = sluice_restore_of(c->restore_pre_activation)};
  return sluice_shape_capacity(shape) == 0 && !shape->on_device_memory && !c->reuse &&
         sluice_chunking_is_by_rows(&chunking);
}

double sluice_token_copies_share(int32_t num_experts, int32_t world_size, int32_t top_k) {
  double none = 1, elsewhere = num_experts - ceil((double)num_experts / world_size);
  for (int32_t k = 0; k < top_k; ++k) none *= fmax(0, elsewhere - k) / (double)(num_experts - k);
  return world_size * (1 - none) / top_k;
}
