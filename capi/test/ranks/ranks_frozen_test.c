// SPDX-License-Identifier: Apache-2.0
/* Ranks with frozen experts run a backward together with ranks that train theirs. The trained ranks have the bits of a
 * backward in which all train, and unwanted gradients are not written. */

#include "backend/base/hash.h"
#include "capi/test/ranks/play.h"
#include "third_party/bazel/test.h"

typedef struct layer_scene_s {
  const char* name;
  int32_t num_chunks, wgrad_mode, restore_input, restore_pre_activation, deduplicate, capacity_rows, grouping;
  int32_t planned; /* runs under a plan of num_chunks */
  int32_t callback;
} layer_scene_t;

enum {
  NOW = SLUICE_WGRAD_PER_CHUNK,
  LATE = SLUICE_WGRAD_DEFERRED,
  KEEP = SLUICE_RESTORE_KEEP,
  AGAIN = SLUICE_RESTORE_REDISPATCH,
  RECOMPUTE = SLUICE_RESTORE_RECOMPUTE,
  OFFLOAD = SLUICE_RESTORE_OFFLOAD
};

/* With four chunks, a pass that defers weight gradients has its exchanges in another order. */
static const layer_scene_t scenes[] = {
    {.name = "one chunk", .num_chunks = 1},
    {.name = "deferred", .num_chunks = 4, .wgrad_mode = LATE},
    {.name = "by chunk", .num_chunks = 4, .wgrad_mode = NOW},
    {.name = "sent again", .num_chunks = 4, .wgrad_mode = LATE, .restore_input = AGAIN},
    {.name = "sent again by chunk", 4, NOW, AGAIN, RECOMPUTE},
    {.name = "offloaded", 4, LATE, OFFLOAD, OFFLOAD},
    {.name = "grouped", .num_chunks = 4, .wgrad_mode = LATE, .grouping = SLUICE_GROUPING_ON},
    {.name = "deduplicated", .num_chunks = 4, .wgrad_mode = LATE, .deduplicate = SLUICE_DEDUPLICATE_RANKS},
    {.name = "under a capacity", .num_chunks = 4, .wgrad_mode = LATE, .capacity_rows = 8},
    {.name = "planned", .num_chunks = 4, .wgrad_mode = LATE, .restore_input = AGAIN, .planned = 1},
    {.name = "callback experts", .num_chunks = 2, .callback = 1},
};

static void open_layer(part_t* me, const layer_scene_t* scene, sluice_plan_t** out_plan) {
  sluice_moe_config_t config = config_for(me->world_size);
  config.num_chunks = scene->num_chunks, config.wgrad_mode = scene->wgrad_mode;
  config.restore_input = scene->restore_input, config.restore_pre_activation = scene->restore_pre_activation;
  config.deduplicate = scene->deduplicate, config.grouping = scene->grouping;
  config.callback_experts = scene->callback;
  if (scene->callback) config.hidden_width = 0, config.gated = 0, config.bias = 0;
  if (scene->capacity_rows > 0)
    config.exchange_mode = SLUICE_EXCHANGE_CAPACITY, config.capacity_rows = scene->capacity_rows;
  WORKS(rig_open(&me->rig, me->comm, &config));
  if (!scene->planned) return;
  DEFAULTS(sluice_plan_config, wanted);
  wanted.max_tokens = 64, wanted.num_chunks = scene->num_chunks;
  wanted.restore_input = scene->restore_input, wanted.restore_pre_activation = scene->restore_pre_activation;
  WORKS(sluice_plan_create(me->rig.moe, &wanted, out_plan));
  WORKS(sluice_moe_use_plan(me->rig.moe, *out_plan));
}

static uint64_t hash_grads(const part_t* me) {
  uint64_t hash = SLUICE_HASH_OF_NOTHING;
  for (int kind = 0; kind < RIG_NUM_PARAMS; ++kind) {
    for (int32_t e = 0; e < me->rig.num_local; ++e) {
      const rig_tensor_t* grad = &me->rig.grads[kind][e];
      hash = sluice_hash_bytes(hash, grad->tensor.data, grad->bytes);
    }
  }
  return hash;
}

/* Runs a step in which the ranks of the bit set `frozen` want no gradients of parameters. */
static void step_with(part_t* me, uint32_t frozen, uint64_t* out_rows, uint64_t* out_params) {
  rig_t* rig = &me->rig;
  rig_reset(rig);
  if (frozen >> me->rank & 1) rig->backward.grad_params = NULL;
  WORKS(rig_step(rig));
  uint64_t hash = sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, rig->grad_tokens.tensor.data, rig->grad_tokens.bytes);
  *out_rows = sluice_hash_bytes(hash, rig->grad_weights.tensor.data, rig->grad_weights.bytes);
  *out_params = hash_grads(me);
}

static void frozen_run(part_t* me) {
  const layer_scene_t* scene = me->play->scene;
  sluice_plan_t* plan = NULL;
  open_layer(me, scene, &plan);
  const uint64_t untouched = hash_grads(me);
  uint64_t rows, trained;
  step_with(me, (1U << me->world_size) - 1, &rows, &trained);
  const int64_t frozen_bytes = atomic_load(&me->rig.heap.live_bytes);
  step_with(me, 0, &rows, &trained);
  /* If no rank wants weight gradients, rows are not kept for them. */
  const int keeps_rows =
      scene->num_chunks == 4 && scene->wgrad_mode == LATE && !scene->planned && scene->capacity_rows == 0;
  EXPECT(!keeps_rows || atomic_load(&me->rig.heap.live_bytes) > frozen_bytes);
  EXPECT(scene->callback || trained != untouched);
  /* The last iteration is the first case again: no rank is frozen. */
  for (uint32_t i = 1; i <= 1U << me->world_size; ++i) {
    const uint32_t frozen = i % (1U << me->world_size);
    uint64_t got_rows, got_params;
    step_with(me, frozen, &got_rows, &got_params);
    if (got_rows != rows) note(me, __LINE__, "%s: frozen ranks %x: gradients of rows", scene->name, frozen);
    if (got_params != (frozen >> me->rank & 1 ? untouched : trained))
      note(me, __LINE__, "%s: frozen ranks %x: gradients of parameters", scene->name, frozen);
  }
  if (plan != NULL) WORKS(sluice_moe_use_plan(me->rig.moe, NULL));
  sluice_plan_destroy(plan);
}

TEST(Frozen_OnSomeRanks_LeaveTheBitsOfTheOthers) {
  for (size_t i = 0; i < sizeof scenes / sizeof scenes[0]; ++i) {
    for (int32_t w = 1; w <= 3; ++w) perform(&(play_t){.run = frozen_run, .scene = &scenes[i], .world_size = w});
  }
}
