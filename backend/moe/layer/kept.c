#include "backend/moe/layer/kept.h"

#include <string.h>

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
