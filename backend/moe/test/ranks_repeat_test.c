// SPDX-License-Identifier: Apache-2.0
/* A replayed forward for which the ranks find no original: all ranks then run the current choice, also a rank on which
 * an earlier forward had the same routing. */

#include "backend/base/hash.h"
#include "backend/moe/context/context.h"
#include "backend/moe/layer/layer.h"
#include "capi/test/ranks/play.h"
#include "third_party/bazel/test.h"

/* The choices of the first forward and of all later ones. Scenes differ in what changes between them. */
typedef struct repeat_scene_s {
  sluice_pass_choice_t first, later;
  int32_t deduplicate; /* an open SLUICE_DEDUPLICATE_*; else the layer reuses buffers */
} repeat_scene_t;

typedef struct hook_s {
  sluice_policy_hook_t base; /* first member: the engine sees the hook as this */
  sluice_pass_choice_t later;
  sluice_pass_choice_t ran[MAX_RANKS]; /* on each rank: the choice of its last backward */
} hook_t;

static void agree(sluice_policy_hook_t* base, const sluice_moe_t* moe, sluice_decision_state_t* decision,
                  const sluice_step_report_t* const* reports, int32_t world_size) {
  hook_t* hook = (hook_t*)(void*)base;
  (void)moe;
  for (int32_t r = 0; r < world_size; ++r) {
    const sluice_pass_report_t* pass = &reports[r]->pass[SLUICE_BACKWARD];
    if (pass->pass_ns > 0) hook->ran[r] = pass->choice;
  }
  decision->choice = hook->later;
}

static const sluice_policy_hook_vtable_t vtable = {.agree = agree};

static uint64_t results(const rig_t* rig) {
  const uint64_t hash = sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, rig->out.tensor.data, rig->out.bytes);
  return sluice_hash_bytes(hash, rig->grad_tokens.tensor.data, rig->grad_tokens.bytes);
}

static void run(part_t* me) {
  const repeat_scene_t* scene = me->play->scene;
  hook_t hook = {.base.vtable = &vtable, .later = scene->later};
  sluice_moe_config_t config = config_for(me->world_size);
  config.num_chunks = 0, config.reuse = !scene->deduplicate;
  config.deduplicate = scene->deduplicate;
  WORKS(rig_open(&me->rig, me->comm, &config));
  sluice_policy_hook_t* own = me->rig.context->policy_hook;
  sluice_decision_state_t* decision = &me->rig.moe->decision;
  decision->table = &hook;
  decision->choice = scene->first;
  me->rig.context->policy_hook = &hook.base;

  sluice_step_t* step = NULL;
  WORKS(rig_forward(&me->rig, &step));
  sluice_step_drop(step);
  me->rig.forward.needs_backward = 0; /* so that an unknown replay is not bound */
  WORKS(rig_forward(&me->rig, NULL));
  me->rig.forward.needs_backward = 1;

  me->rig.forward.repeats = 1;
  int32_t* ids = me->rig.ids.tensor.data;
  for (int32_t k = 0; k < config.top_k; ++k) ids[k] = me->rank == 1 ? (ids[k] + 1) % config.num_experts : ids[k];
  WORKS(rig_step(&me->rig));
  const uint64_t repeated = results(&me->rig);
  me->rig.forward.repeats = 0;
  WORKS(rig_step(&me->rig)); /* its header reports the choice of the previous backward */
  EXPECT(results(&me->rig) == repeated);
  for (int32_t r = 0; r < me->world_size; ++r) {
    const sluice_pass_choice_t* ran = &hook.ran[r];
    EXPECT(ran->num_chunks == scene->later.num_chunks && ran->restore_set == scene->later.restore_set);
    EXPECT(ran->deduplicate == scene->later.deduplicate && ran->wgrad_mode == hook.ran[0].wgrad_mode);
  }
  me->rig.context->policy_hook = own;
}

TEST(Ranks_RepetitionThatOneRankAloneKnows_AllRunWhatIsChosenNow) {
  static const repeat_scene_t scenes[] = {
      {{.num_chunks = 2, .restore_set = 1}, {.num_chunks = 2, .restore_set = 2}},
      {{.num_chunks = 1, .restore_set = 1}, {.num_chunks = 2, .restore_set = 2}},
      {{.num_chunks = 2, .restore_set = 2, .wgrad_mode = 1}, {.num_chunks = 2, .restore_set = 2}},
      {{.num_chunks = 2, .deduplicate = 2}, {.num_chunks = 2, .deduplicate = 1}, .deduplicate = 3},
      {{.num_chunks = 2, .deduplicate = 1}, {.num_chunks = 2, .deduplicate = 2}, .deduplicate = 3},
  };
  for (size_t i = 0; i < sizeof scenes / sizeof scenes[0]; ++i) {
    perform(&(play_t){.run = run, .scene = &scenes[i], .world_size = scenes[i].deduplicate ? 4 : 2});
  }
}
