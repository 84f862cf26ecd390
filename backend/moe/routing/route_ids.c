// SPDX-License-Identifier: Apache-2.0
#include "backend/moe/routing/route_ids.h"

static uint64_t mix(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
  return hash ^ (hash >> 29);
}

uint64_t sluice_routes_hash(const sluice_moe_t* moe, const sluice_tensor_t* expert_ids) {
  const sluice_id_reader_t reader = sluice_id_reader(expert_ids);
  uint64_t hash = mix(1, (uint64_t)expert_ids->shape[0]);
  for (int64_t t = 0; t < expert_ids->shape[0]; ++t) {
    for (int32_t k = 0; k < moe->shape.config.top_k; ++k) hash = mix(hash, (uint64_t)sluice_read_id(&reader, t, k));
  }
  return hash != 0 ? hash : 1;
}
