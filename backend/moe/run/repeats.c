#include "backend/moe/run/repeats.h"

#include "backend/moe/routing/routes.h"

static void take_form(sluice_forward_t* f, const sluice_replay_forward_t* repeated) {
  f->restore_set = repeated->restore_set, f->grouped = repeated->grouped, f->two_levels = repeated->two_levels;
}

void sluice_forward_look_back(sluice_forward_t* f) {
  const sluice_moe_t* moe = f->pass.moe;
  if (f->repeats || (f->is_noted && sluice_forward_keeps(f)))
    f->routes = moe->strategies->routes->hash(moe, f->args->expert_ids);
  if (!f->repeats) return;
  sluice_replay_t* kept = &f->pass.moe->replay;
  f->like = sluice_replay_like(kept, f->routes);
  const sluice_replay_forward_t* repeated = sluice_replay_choose(kept, f->like);
  if (repeated == NULL) return;
  f->num_chunks = repeated->num_chunks;
  take_form(f, repeated);
}

const sluice_replay_forward_t* sluice_forward_take_repeated(sluice_forward_t* f, uint32_t like) {
  sluice_replay_forward_t* repeated = f->repeats ? sluice_replay_choose(&f->pass.moe->replay, like) : NULL;
  if (repeated == NULL) return NULL;
  repeated->is_repeated = 1;
  f->wgrad_mode = repeated->wgrad_mode;
  take_form(f, repeated);
  return repeated;
}

void sluice_forward_note(const sluice_forward_t* f) {
  if (!f->is_noted) return;
  const sluice_replay_forward_t kept = {
      .routes = f->routes,
      .num_chunks = f->num_chunks,
      .plan = (int16_t)f->plan,
      .wgrad_mode = (uint8_t)f->wgrad_mode,
      .restore_set = (uint8_t)f->restore_set,
      .grouped = (uint8_t)f->grouped,
      .two_levels = (uint8_t)f->two_levels,
  };
  sluice_replay_add(&f->pass.moe->replay, sluice_forward_keeps(f) ? &kept : NULL);
}
