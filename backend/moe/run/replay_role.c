#include "backend/moe/run/replay_role.h"

#include "backend/moe/routing/routes.h"

static uint64_t hash_of(const sluice_forward_t* f) {
  return f->pass.moe->strategies->routes->hash(f->pass.moe, f->args->expert_ids);
}

/* ---- nobody chooses ---- */

static void look_nowhere(sluice_forward_t* f) { (void)f; }

static const sluice_replay_forward_t* choose_none(sluice_forward_t* f, uint32_t like) {
  (void)f, (void)like;
  return NULL;
}

static void note_nothing(const sluice_forward_t* f) { (void)f; }

static const sluice_replay_role_t nobody = {.look_back = look_nowhere, .choose = choose_none, .note = note_nothing};

/* ---- the first time ---- */

static void hash_kept(sluice_forward_t* f) {
  if (sluice_forward_keeps(f)) f->routes = hash_of(f);
}

static void note(const sluice_forward_t* f) {
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

static const sluice_replay_role_t first = {.look_back = hash_kept, .choose = choose_none, .note = note};

/* ---- again ---- */

static void take_form(sluice_forward_t* f, const sluice_replay_forward_t* repeated) {
  f->restore_set = repeated->restore_set, f->grouped = repeated->grouped, f->two_levels = repeated->two_levels;
}

static void look_back(sluice_forward_t* f) {
  sluice_replay_t* kept = &f->pass.moe->replay;
  f->routes = hash_of(f);
  f->like = sluice_replay_like(kept, f->routes);
  const sluice_replay_forward_t* repeated = sluice_replay_choose(kept, f->like);
  if (repeated == NULL) return;
  f->num_chunks = repeated->num_chunks;
  take_form(f, repeated);
}

static const sluice_replay_forward_t* choose(sluice_forward_t* f, uint32_t like) {
  sluice_replay_forward_t* repeated = sluice_replay_choose(&f->pass.moe->replay, like);
  if (repeated == NULL) return NULL;
  repeated->is_repeated = 1;
  f->wgrad_mode = repeated->wgrad_mode;
  take_form(f, repeated);
  return repeated;
}

static const sluice_replay_role_t again = {
    .is_repetition = 1, .look_back = look_back, .choose = choose, .note = note_nothing};

const sluice_replay_role_t* sluice_replay_role_of(const sluice_moe_t* moe, const sluice_moe_forward_args_t* args) {
  if (moe->decision.table == NULL) return &nobody;
  return args->repeats ? &again : &first;
}
