// SPDX-License-Identifier: Apache-2.0
#include "backend/moe/run/repeats.h"

#include "backend/moe/routing/routes.h"

void sluice_forward_look_back(sluice_forward_t* f) {
  const sluice_moe_t* moe = f->pass.moe;
  if (f->repeats || (f->is_noted && sluice_forward_keeps(f)))
    f->routes = moe->strategies->routes->hash(moe, f->args->expert_ids);
  if (!f->repeats) return;
  sluice_replay_t* kept = &f->pass.moe->replay;
  f->like = sluice_replay_like(kept, f->routes);
  const sluice_replay_forward_t* repeated = sluice_replay_choose(kept, f->like);
  if (repeated == NULL) return;
  f->choice = repeated->choice;
}

const sluice_replay_forward_t* sluice_forward_take_repeated(sluice_forward_t* f, uint32_t like) {
  sluice_replay_forward_t* repeated = f->repeats ? sluice_replay_choose(&f->pass.moe->replay, like) : NULL;
  if (repeated == NULL) {
    if (f->repeats) f->choice = f->expected;
    return NULL;
  }
  repeated->is_repeated = 1;
  f->choice = repeated->choice;
  return repeated;
}

void sluice_forward_note(const sluice_forward_t* f) {
  if (!f->is_noted) return;
  const sluice_replay_forward_t kept = {.routes = f->routes, .choice = f->choice, .plan = (int16_t)f->plan};
  sluice_replay_add(&f->pass.moe->replay, sluice_forward_keeps(f) ? &kept : NULL);
}
