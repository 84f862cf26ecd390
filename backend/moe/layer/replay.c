// SPDX-License-Identifier: Apache-2.0
#include "backend/moe/layer/replay.h"

#include <string.h>

uint32_t sluice_replay_like(const sluice_replay_t* replay, uint64_t routes) {
  uint32_t like = 0;
  for (uint32_t i = 0; i < SLUICE_REPLAY_FORWARDS && routes != 0; ++i) {
    like |= (uint32_t)(replay->forwards[i].choice.num_chunks > 0 && replay->forwards[i].routes == routes) << i;
  }
  return like;
}

/* The newest forwards, as many as are outstanding, as bits. */
static uint32_t outstanding_of(const sluice_replay_t* replay) {
  uint32_t places = 0;
  for (int32_t i = 1; i <= replay->outstanding; ++i) {
    places |= 1u << ((replay->next + SLUICE_REPLAY_FORWARDS - (uint32_t)i) % SLUICE_REPLAY_FORWARDS);
  }
  return places;
}

sluice_replay_forward_t* sluice_replay_choose(sluice_replay_t* replay, uint32_t like) {
  const uint32_t outstanding = like & outstanding_of(replay);
  if (outstanding != 0) like = outstanding;
  sluice_replay_forward_t* newest = NULL;
  for (uint32_t i = 0; i < SLUICE_REPLAY_FORWARDS && like != 0; ++i) {
    const uint32_t place = (replay->next + i) % SLUICE_REPLAY_FORWARDS;
    if ((like >> place & 1) == 0) continue;
    newest = &replay->forwards[place];
    if (!newest->is_repeated) return newest;
  }
  if (newest != NULL || !replay->last_was_saved) return newest;
  newest = &replay->forwards[(replay->next + SLUICE_REPLAY_FORWARDS - 1) % SLUICE_REPLAY_FORWARDS];
  return newest->choice.num_chunks > 0 ? newest : NULL;
}

void sluice_replay_add(sluice_replay_t* replay, const sluice_replay_forward_t* forward) {
  replay->last_was_saved = forward != NULL;
  if (forward == NULL) return;
  replay->forwards[replay->next] = *forward;
  replay->next = (replay->next + 1) % SLUICE_REPLAY_FORWARDS;
  if (replay->outstanding < SLUICE_REPLAY_FORWARDS) ++replay->outstanding;
}

void sluice_replay_end(sluice_replay_t* replay) {
  if (replay->outstanding > 0) --replay->outstanding;
}

void sluice_replay_forget(sluice_replay_t* replay) { memset(replay->forwards, 0, sizeof replay->forwards); }
