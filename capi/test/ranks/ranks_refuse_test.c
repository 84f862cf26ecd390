// SPDX-License-Identifier: Apache-2.0
/* One rank refuses its call. The other ranks report the rank and its reason, and all continue. */

#include "capi/test/ranks/play.h"
#include "third_party/bazel/test.h"

typedef struct refusal_scene_s {
  int32_t refuser;
  int32_t kind;
} refusal_scene_t;

enum {
  REFUSE_ID,
  REFUSE_TOKENS,
  REFUSE_STRUCT,
  REFUSE_NULL_ARGS,
  REFUSE_HOST,
  REFUSE_GRAD_OUT,
  REFUSE_STEP,
  REFUSE_DONE_STEP,
  REFUSE_COUNT
};
static const char* const refusal_text[] = {"expert_ids[1, 0] is 99",
                                           "tokens",
                                           "sluice_moe_forward_args_t",
                                           "is NULL",
                                           "no room on the host",
                                           "grad_out",
                                           "step is NULL",
                                           "has run its backward already"};
static const sluice_status_t refusal_status[] = {BAD, BAD, SLUICE_E_ABI,  BAD, SLUICE_E_OVER_BUDGET,
                                                 BAD, BAD, SLUICE_E_STATE};

static void refusal_run(part_t* me) {
  const refusal_scene_t* scene = me->play->scene;
  sluice_moe_config_t config = config_for(me->world_size);
  WORKS(rig_open(&me->rig, me->comm, &config));
  uint64_t digest = good_round(me, __LINE__);
  int64_t live = atomic_load(&me->rig.heap.live_bytes);
  rig_t* rig = &me->rig;
  sluice_step_t *step = NULL, *done = NULL;
  if (scene->kind >= REFUSE_GRAD_OUT) {
    WORKS(rig_forward(rig, &done));
    WORKS(rig_backward(rig, done));
    WORKS(rig_forward(rig, &step));
  }
  sluice_status_t status = SLUICE_OK;
  if (me->rank == scene->refuser) {
    switch (scene->kind) {
      case REFUSE_ID:
        ((int32_t*)rig->ids.tensor.data)[2] = 99;
        status = rig_forward(rig, &step);
        break;
      case REFUSE_TOKENS: rig->tokens.tensor.ndim = 3, status = rig_forward(rig, &step); break;
      case REFUSE_STRUCT: rig->forward.struct_size = 3, status = rig_forward(rig, &step); break;
      case REFUSE_NULL_ARGS: status = sluice_moe_forward(rig->moe, NULL, NULL, &step); break;
      case REFUSE_HOST:
        rig->forward.local_status = SLUICE_E_OVER_BUDGET, rig->forward.local_message = refusal_text[REFUSE_HOST];
        status = rig_forward(rig, &step);
        break;
      case REFUSE_GRAD_OUT: rig->grad_out.tensor.type_bits = 64, status = rig_backward(rig, step); break;
      case REFUSE_STEP: status = rig_backward(rig, NULL); break;
      default: status = rig_backward(rig, done); break;
    }
    STATUS(status, refusal_status[scene->kind], refusal_text[scene->kind]);
  } else {
    char who[32];
    snprintf(who, sizeof who, "rank %d refused its", scene->refuser);
    status = scene->kind >= REFUSE_GRAD_OUT ? rig_backward(rig, step) : rig_forward(rig, &step);
    STATUS(status, SLUICE_E_PEER_REFUSED, who);
    EXPECT(strstr(last_message(), refusal_text[scene->kind]) != NULL);
    EXPECT(strstr(last_message(), sluice_status_name(refusal_status[scene->kind])) != NULL);
    EXPECT(last_error()->peer == scene->refuser);
  }
  if (scene->kind >= REFUSE_GRAD_OUT) { /* no step was used up */
    rig_reset(rig);
    WORKS(rig_backward(rig, step));
  }
  sluice_step_drop(step);
  sluice_step_drop(done);
  EXPECT(atomic_load(&rig->heap.live_bytes) == live);
  EXPECT(good_round(me, __LINE__) == digest);
}

TEST(Ranks_OneRefuses_OthersNameItAndGoOn) {
  for (int32_t w = 2; w <= 3; ++w) {
    for (int32_t kind = 0; kind < REFUSE_COUNT; ++kind) {
      const refusal_scene_t scene = {.refuser = kind % w, .kind = kind};
      perform(&(play_t){.run = refusal_run, .scene = &scene, .world_size = w});
    }
  }
}

static void two_refuse_run(part_t* me) {
  sluice_moe_config_t config = config_for(me->world_size);
  WORKS(rig_open(&me->rig, me->comm, &config));
  sluice_step_t* step = NULL;
  if (me->rank > 0) me->rig.forward.expert_ids = NULL;
  STATUS(rig_forward(&me->rig, &step), me->rank > 0 ? BAD : SLUICE_E_PEER_REFUSED, "expert_ids");
  if (me->rank == 0) EXPECT(last_error()->peer == 1);
  (void)good_round(me, __LINE__);
}

TEST(Ranks_SeveralRefuse_EachKeepsItsOwnReason) { perform(&(play_t){.run = two_refuse_run, .world_size = 3}); }
