// SPDX-License-Identifier: Apache-2.0
/* Ranks whose configs, wishes or order of calls differ get an error that names the values. */

#include "backend/model/pass_sizes.h"
#include "backend/moe/context/context.h"
#include "capi/test/ranks/play.h"
#include "third_party/bazel/test.h"

typedef struct differ_scene_s {
  const char* name; /* of the field, as in the message */
  size_t offset;    /* in the config */
  int32_t is_wide;
  int64_t common, other; /* 'other' on rank 1 */
  const char* words[2];  /* names of the numbers, if they have any */
} differ_scene_t;

static void set_field(sluice_moe_config_t* config, const differ_scene_t* scene, int64_t x) {
  const int32_t narrow = (int32_t)x;
  memcpy((char*)config + scene->offset, scene->is_wide ? (const void*)&x : &narrow, scene->is_wide ? 8 : 4);
}

static void differ_run(part_t* me) {
  const differ_scene_t* scene = me->play->scene;
  sluice_moe_config_t common = config_for(me->world_size);
  set_field(&common, scene, scene->common);
  sluice_moe_config_t mine = common;
  if (me->rank == 1) set_field(&mine, scene, scene->other);
  WORKS(rig_open(&me->rig, me->comm, &mine));
  for (int repeat = 0; repeat < 2; ++repeat) { /* again, since the communicator stays usable */
    sluice_step_t* step = NULL;
    STATUS(rig_forward(&me->rig, &step), SLUICE_E_MISMATCH, scene->name);
    EXPECT(step == NULL);
    char ranks[2][16], values[2][32];
    snprintf(ranks[0], sizeof ranks[0], "rank %d", me->rank);
    snprintf(ranks[1], sizeof ranks[1], "rank %d", me->rank == 1 ? 0 : 1);
    EXPECT(strstr(last_message(), ranks[0]) != NULL && strstr(last_message(), ranks[1]) != NULL);
    EXPECT(last_error()->peer == (me->rank == 1 ? 0 : 1));
    for (int i = 0; i < 2; ++i) {
      if (scene->words[i] != NULL) { /* the peer's value comes first, and rank 1 has `other` */
        snprintf(values[i], sizeof values[i], "%s %s on rank", (i == 1) == (me->rank == 1) ? "and" : "is",
                 scene->words[i]);
      } else {
        snprintf(values[i], sizeof values[i], "%lld", (long long)(i == 0 ? scene->common : scene->other));
      }
    }
    EXPECT(strstr(last_message(), values[0]) != NULL && strstr(last_message(), values[1]) != NULL);
  }
  WORKS(rig_swap_layer(&me->rig, &common));
  (void)good_round(me, __LINE__);
}

#define FIELD(member, label, common, other)                                                                            \
  {                                                                                                                    \
    label, offsetof(sluice_moe_config_t, member), sizeof(((sluice_moe_config_t*)0)->member) == 8, common, other, { 0 } \
  }
#define NAMED(member, common, other, one, two)                                     \
  {                                                                                \
#member, offsetof(sluice_moe_config_t, member), 0, common, other, { one, two } \
  }

TEST(Ranks_DifferentConfigs_AreNamedWithValues) {
  static const differ_scene_t scenes[] = {
      FIELD(model_width, "model_width", 5, 6),
      FIELD(hidden_width, "hidden_width", 7, 8),
      FIELD(num_experts, "num_experts", 6, 3),
      FIELD(top_k, "top_k", 2, 1),
      NAMED(dtype, SLUICE_DTYPE_F32, SLUICE_DTYPE_BF16, "f32", "bf16"),
      NAMED(activation, SLUICE_ACTIVATION_GELU, SLUICE_ACTIVATION_SILU, "gelu", "silu"),
      NAMED(gated, SLUICE_GATED_HALVES, SLUICE_GATED_NO, "halves", "no"),
      FIELD(bias, "bias", 1, 0),
      FIELD(num_chunks, "num_chunks", 2, 3),
      FIELD(num_chunks, "num_chunks", 1, 0), /* open on one rank, configured on the other */
      NAMED(wgrad_mode, SLUICE_WGRAD_DEFERRED, SLUICE_WGRAD_PER_CHUNK, "deferred", "per chunk"),
      FIELD(callback_experts, "hidden_width", 0, 1), /* callbacks have no hidden width, which differs first */
      NAMED(deduplicate, SLUICE_DEDUPLICATE_NONE, SLUICE_DEDUPLICATE_RANKS, "none", "ranks"),
      NAMED(grouping, SLUICE_GROUPING_ON, SLUICE_GROUPING_OFF, "on", "off"),
      FIELD(reuse, "reuse", 0, 1),
      FIELD(lora_rank, "lora_rank", 4, 5),
      FIELD(layer_id, "layer", 3, 17),
  };
  for (size_t i = 0; i < sizeof scenes / sizeof scenes[0]; ++i) {
    perform(&(play_t){.run = differ_run, .scene = &scenes[i], .world_size = 3});
  }
}

static void wires_run(part_t* me) {
  const sluice_moe_config_t config = config_for(me->world_size);
  WORKS(rig_open_context(&me->rig, me->comm));
  me->rig.context->wire_dtype = me->rank == 1 ? SLUICE_WIRE_BF16 : SLUICE_WIRE_LAYER_DTYPE;
  WORKS(rig_open_layer(&me->rig, &config));
  sluice_step_t* step = NULL;
  STATUS(rig_forward(&me->rig, &step), SLUICE_E_MISMATCH,
         me->rank == 1 ? "wire_dtype of the context is as it is on rank 0 and bf16 on rank 1"
                       : "wire_dtype of the context is bf16 on rank 1 and as it is on rank");
}

TEST(Ranks_DifferentWires_AreNamed) { perform(&(play_t){.run = wires_run, .world_size = 3}); }

/* Ranks may differ in T_M if the config sets when weight gradients are computed: otherwise a rank that keeps its rows
 * would choose another mode than a rank that does not. */
static void restores_run(part_t* me) {
  sluice_moe_config_t config = config_for(2);
  config.chunking = SLUICE_CHUNKING_TOKENS;
  config.restore_input = SLUICE_RESTORE_KEEP;
  config.restore_pre_activation = me->rank == 0 ? SLUICE_RESTORE_KEEP : SLUICE_RESTORE_RECOMPUTE;
  WORKS(rig_open(&me->rig, me->comm, &config));
  sluice_step_t* step = NULL;
  STATUS(rig_forward(&me->rig, &step), SLUICE_E_MISMATCH, "keep different rows for the backward");
  EXPECT(strstr(last_message(), "give both the same wgrad_mode") != NULL);
  config.wgrad_mode = SLUICE_WGRAD_PER_CHUNK;
  WORKS(rig_swap_layer(&me->rig, &config));
  (void)good_round(me, __LINE__);
}

TEST(Ranks_OneRestoresRowsAndTheModeIsOpen_AreToldToNameIt) {
  perform(&(play_t){.run = restores_run, .world_size = 2});
}

/* Config members without a header field of their own: the message does not blame the placement. */
static void kind_run(part_t* me) {
  sluice_moe_config_t common = config_for(3);
  common.wgrad_mode = SLUICE_WGRAD_PER_CHUNK; /* otherwise a rank that restores rows may choose another mode */
  for (int32_t which = 0; which < 2; ++which) {
    sluice_moe_config_t mine = common;
    if (me->rank == 1 && which == 0) mine.restore_input = SLUICE_RESTORE_REDISPATCH;
    if (me->rank == 1 && which == 1) mine.swiglu_limit = 7;
    WORKS(which == 0 ? rig_open(&me->rig, me->comm, &mine) : rig_swap_layer(&me->rig, &mine));
    sluice_step_t* step = NULL;
    STATUS(rig_forward(&me->rig, &step), SLUICE_E_MISMATCH, which == 0 ? "restore_input" : "swiglu_limit");
    EXPECT(strstr(last_message(), "expert_rank") == NULL && last_error()->peer == (me->rank == 1 ? 0 : 1));
  }
  WORKS(rig_swap_layer(&me->rig, &common));
  (void)good_round(me, __LINE__);
}

TEST(Ranks_DifferInWhatOnlyAChecksumTells_AreToldWhatItMayBe) { perform(&(play_t){.run = kind_run, .world_size = 3}); }

static void table_run(part_t* me) {
  static const int32_t one[] = {0, 0, 0, 1}, two[] = {0, 1, 1, 1};
  sluice_moe_config_t config = config_for(2);
  config.expert_rank = me->rank == 0 ? one : two;
  WORKS(rig_open(&me->rig, me->comm, &config));
  sluice_step_t* step = NULL;
  STATUS(rig_forward(&me->rig, &step), SLUICE_E_MISMATCH, "expert_rank");
  config.expert_rank = one;
  WORKS(rig_swap_layer(&me->rig, &config));
  (void)good_round(me, __LINE__);
}

TEST(Ranks_DifferentOwnerTables_AreNamed) { perform(&(play_t){.run = table_run, .world_size = 2}); }

/* First only one rank has a plan, then the plans have different policies. */
static void plans_run(part_t* me) {
  sluice_moe_config_t config = config_for(2);
  WORKS(rig_open(&me->rig, me->comm, &config));
  DEFAULTS(sluice_plan_config, wanted);
  wanted.max_tokens = 64, wanted.num_chunks = 2;
  wanted.restore_input = SLUICE_RESTORE_KEEP;
  wanted.restore_pre_activation = me->rank == 0 ? SLUICE_RESTORE_KEEP : SLUICE_RESTORE_RECOMPUTE;
  sluice_plan_t* plan = NULL;
  WORKS(sluice_plan_create(me->rig.moe, &wanted, &plan));
  if (me->rank == 0) WORKS(sluice_moe_use_plan(me->rig.moe, plan));
  sluice_step_t* step = NULL;
  STATUS(rig_forward(&me->rig, &step), SLUICE_E_MISMATCH, "ranks were given different plans");
  EXPECT(strstr(last_message(), "rank 0: n 2, T_DI keep, T_M keep, 64 tokens, budget 0 (") != NULL);
  EXPECT(strstr(last_message(), "rank 1: none") != NULL);
  if (me->rank == 1) WORKS(sluice_moe_use_plan(me->rig.moe, plan));
  STATUS(rig_forward(&me->rig, &step), SLUICE_E_MISMATCH, "rank 0: n 2, T_DI keep, T_M keep");
  EXPECT(strstr(last_message(), "rank 1: n 2, T_DI keep, T_M recompute") != NULL);
  WORKS(sluice_moe_use_plan(me->rig.moe, NULL));
  (void)good_round(me, __LINE__);
  sluice_plan_destroy(plan);
}

TEST(Ranks_DifferentPlans_AreNamedWithValues) { perform(&(play_t){.run = plans_run, .world_size = 2}); }

/* Rank 0 keeps rows for a backward, rank 1 does not; then one rank wants weight gradients now, the other later. */
static void wishes_run(part_t* me) {
  sluice_moe_config_t config = config_for(2);
  WORKS(rig_open(&me->rig, me->comm, &config));
  sluice_step_t* step = NULL;
  me->rig.forward.needs_backward = me->rank == 0;
  STATUS(rig_forward(&me->rig, &step), SLUICE_E_MISMATCH, "rank 1 runs a forward without a backward (needs_backward 0");
  EXPECT(strstr(last_message(), "in evaluation too") != NULL);
  me->rig.forward.needs_backward = 1;
  WORKS(rig_forward(&me->rig, &step));
  me->rig.backward.parts = me->rank == 0 ? SLUICE_BACKWARD_DGRAD : SLUICE_BACKWARD_BOTH;
  STATUS(rig_backward(&me->rig, step), SLUICE_E_MISMATCH, "the wanted gradients differ");
  EXPECT(strstr(last_message(), "rank 0: input gradients yes, weight gradients later") != NULL);
  me->rig.backward.parts = SLUICE_BACKWARD_BOTH;
  WORKS(rig_backward(&me->rig, step));
  sluice_step_drop(step);
}

TEST(Ranks_DifferentWishes_AreNamed) { perform(&(play_t){.run = wishes_run, .world_size = 2}); }

static void order_run(part_t* me) {
  sluice_moe_config_t config = config_for(me->world_size);
  WORKS(rig_open(&me->rig, me->comm, &config));
  uint64_t digest = good_round(me, __LINE__);
  sluice_moe_t *first = me->rig.moe, *second = NULL;
  config.layer_id = 4;
  WORKS(sluice_moe_create(me->rig.context, &config, &second));
  for (int call = 0; call < 2; ++call) {
    sluice_step_t* step = NULL;
    me->rig.moe = (call == 0) == (me->rank == 0) ? first : second;
    STATUS(rig_forward(&me->rig, &step), SLUICE_E_MISMATCH, "layer 3, forward");
    EXPECT(strstr(last_message(), "layer 4, forward") != NULL && strstr(last_message(), "same order") != NULL);
  }
  me->rig.moe = first;
  EXPECT(good_round(me, __LINE__) == digest);
  me->rig.moe = second;
  EXPECT(good_round(me, __LINE__) == digest);
  me->rig.moe = first;
  sluice_moe_destroy(second);
}

TEST(Ranks_LayersInDifferentOrder_AreNamed) {
  for (int32_t w = 2; w <= 3; ++w) perform(&(play_t){.run = order_run, .world_size = w});
}

static void crossed_run(part_t* me) {
  sluice_moe_config_t config = config_for(me->world_size);
  WORKS(rig_open(&me->rig, me->comm, &config));
  uint64_t digest = good_round(me, __LINE__);
  sluice_step_t *step = NULL, *extra = NULL;
  rig_reset(&me->rig);
  WORKS(rig_forward(&me->rig, &step));
  sluice_status_t status = me->rank == 0 ? rig_forward(&me->rig, &extra) : rig_backward(&me->rig, step);
  STATUS(status, SLUICE_E_MISMATCH, "layer 3, forward");
  EXPECT(strstr(last_message(), "layer 3, backward") != NULL && extra == NULL);
  WORKS(rig_backward(&me->rig, step));
  sluice_step_drop(step);
  EXPECT(good_round(me, __LINE__) == digest);
}

TEST(Ranks_ForwardAgainstBackward_AreNamed) {
  for (int32_t w = 2; w <= 3; ++w) perform(&(play_t){.run = crossed_run, .world_size = w});
}

/* Rank 1 is in a call of something else, whose messages have the size of headers. */
static void stranger_run(part_t* me) {
  sluice_moe_config_t config = config_for(me->world_size);
  char records[2 * SLUICE_HEADER_BYTES] = {0};
  sluice_step_t* step = NULL;
  WORKS(rig_open(&me->rig, me->comm, &config));
  if (me->rank == 0) {
    STATUS(rig_forward(&me->rig, &step), SLUICE_E_MISMATCH, "rank 1 sent no Sluice header");
  } else {
    WORKS(sluice_comm_all_gather(me->comm, records, SLUICE_HEADER_BYTES, "another call"));
  }
}

TEST(Ranks_OneSendsNoHeader_IsNamed) { perform(&(play_t){.run = stranger_run, .world_size = 2}); }
