#include "backend/moe/kept.h"

#include <string.h>

#include "backend/moe/binding.h"
#include "backend/moe/route_ids.h"

static uint64_t mix(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
  return hash ^ (hash >> 29);
}

uint64_t sluice_kept_routes(const sluice_moe_t* moe, const sluice_tensor_t* expert_ids) {
  if (moe->shape.is_far) return 0;
  const sluice_id_reader_t reader = sluice_id_reader(expert_ids);
  uint64_t hash = mix(1, (uint64_t)expert_ids->shape[0]);
  for (int64_t t = 0; t < expert_ids->shape[0]; ++t) {
    for (int32_t k = 0; k < moe->shape.config.top_k; ++k) hash = mix(hash, (uint64_t)sluice_read_id(&reader, t, k));
  }
  return hash != 0 ? hash : 1;
}

uint32_t sluice_kept_like(const sluice_kept_t* kept, uint64_t routes) {
  uint32_t like = 0;
  for (uint32_t i = 0; i < SLUICE_KEPT && routes != 0; ++i) {
    like |= (uint32_t)(kept->forwards[i].num_chunks > 0 && kept->forwards[i].routes == routes) << i;
  }
  return like;
}

sluice_kept_forward_t* sluice_kept_choose(sluice_kept_t* kept, uint32_t like) {
  sluice_kept_forward_t* newest = NULL;
  for (uint32_t i = 0; i < SLUICE_KEPT && like != 0; ++i) {
    const uint32_t place = (kept->next + i) % SLUICE_KEPT;
    if ((like >> place & 1) == 0) continue;
    newest = &kept->forwards[place];
    if (!newest->is_repeated) return newest;
  }
  if (newest != NULL || !kept->last_was_saved) return newest;
  newest = &kept->forwards[(kept->next + SLUICE_KEPT - 1) % SLUICE_KEPT];
  return newest->num_chunks > 0 ? newest : NULL;
}

void sluice_kept_add(sluice_kept_t* kept, const sluice_kept_forward_t* forward) {
  kept->last_was_saved = forward != NULL;
  if (forward == NULL) return;
  kept->forwards[kept->next] = *forward;
  kept->next = (kept->next + 1) % SLUICE_KEPT;
}

void sluice_kept_forget(sluice_kept_t* kept) { memset(kept->forwards, 0, sizeof kept->forwards); }
