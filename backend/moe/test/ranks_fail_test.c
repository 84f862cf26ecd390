// SPDX-License-Identifier: Apache-2.0
/* A callback or an op of the device fails on one rank: the other ranks get an error that names this rank. */

#include "backend/device/fake/fake_device.h"
#include "backend/moe/context/context.h"
#include "capi/test/ranks/play.h"
#include "third_party/bazel/test.h"

/* ---- a callback fails ---- */

static void callback_run(part_t* me) {
  sluice_moe_config_t config = config_for(me->world_size);
  config.callback_experts = 1;
  WORKS(rig_open(&me->rig, me->comm, &config));
  uint64_t digest = good_round(me, __LINE__);
  for (int in_backward = 0; in_backward < 2; ++in_backward) {
    sluice_step_t *step = NULL, *other = NULL;
    rig_reset(&me->rig);
    if (in_backward) WORKS(rig_forward(&me->rig, &step));
    me->rig.callback_failure = me->rank == 1 ? 42 : 0;
    sluice_status_t status = in_backward ? rig_backward(&me->rig, step) : rig_forward(&me->rig, &step);
    if (me->rank == 1) {
      STATUS(status, SLUICE_E_EXTERNAL, "it returned 42");
    } else {
      WORKS(status);
    }
    /* The next header reports it, whatever the call. */
    me->rig.callback_failure = 0;
    status = in_backward || me->rank == 1 ? rig_forward(&me->rig, &other) : rig_backward(&me->rig, step);
    if (me->rank == 1) {
      STATUS(status, SLUICE_E_EXTERNAL, "an earlier pass failed on this rank");
    } else {
      STATUS(status, SLUICE_E_PEER_REFUSED, "rank 1 refused");
      EXPECT(strstr(last_message(), "it returned 42") != NULL && last_error()->peer == 1);
    }
    sluice_step_drop(step);
    sluice_step_drop(other);
    EXPECT(good_round(me, __LINE__) == digest);
  }
}

TEST(Ranks_CallbackFails_OthersLearnAtTheNextHeader) {
  for (int32_t w = 2; w <= 3; ++w) {
    play_t play = {.run = callback_run, .world_size = w};
    perform(&play);
  }
}

/* ---- a device fails ---- */

typedef struct device_scene_s {
  int32_t on;
  uint64_t nth;   /* index of the op (or pass) in one training step */
  int32_t beyond; /* out: no such op exists */
} device_scene_t;

static void device_run(part_t* me) {
  device_scene_t* scene = (device_scene_t*)(uintptr_t)me->play->scene;
  sluice_moe_config_t config = config_for(me->world_size);
  WORKS(rig_open(&me->rig, me->comm, &config));
  sluice_device_t* fake = NULL;
  WORKS(sluice_fake_device_create(me->rig.context->device, &fake));
  me->rig.context->device = fake;
  uint64_t digest = good_round(me, __LINE__);
  const sluice_fake_submit_t* submits = NULL;
  uint64_t per_step = sluice_fake_device_submits(fake, &submits);
  uint64_t limit = scene->on == SLUICE_FAKE_DEVICE_BEGIN ? 2 : per_step;
  /* Failing exchanges are tested with communicators. */
  int is_exchange = scene->on == SLUICE_FAKE_DEVICE_JOB && scene->nth < limit && submits[scene->nth].run_on_failure;
  if (me->rank == 0) scene->beyond = scene->nth >= limit;
  if (scene->nth >= limit || is_exchange) return;
  sluice_fake_device_fault_t fault = {.on = scene->on, .nth = limit + scene->nth, .status = SLUICE_E_NO_MEMORY};
  if (me->rank == 1) sluice_fake_device_inject(fake, &fault);

  rig_reset(&me->rig);
  sluice_status_t status = whole_step(me);
  if (me->rank == 1) STATUS(status, SLUICE_E_NO_MEMORY, "failed on command");
  sluice_step_t* step = NULL;
  if (me->rank == 1 || status == SLUICE_OK) status = rig_forward(&me->rig, &step);
  if (scene->on == SLUICE_FAKE_DEVICE_JOB) { /* the exchanges ran: nothing is lost */
    STATUS(status, me->rank == 1 ? SLUICE_E_NO_MEMORY : SLUICE_E_PEER_REFUSED, "failed on command");
    if (me->rank != 1) EXPECT(last_error()->peer == 1);
    EXPECT(good_round(me, __LINE__) == digest);
  } else { /* the rank could not take part in the payload */
    STATUS(status, me->rank == 1 ? SLUICE_E_ABORTED : SLUICE_E_PEER_LOST, "");
    if (me->rank != 1) EXPECT(last_error()->peer == 1);
    meet(me);
    check_new_comm(me, __LINE__);
  }
}

TEST(Ranks_NthOpOfADeviceFails_OthersAreTold) {
  for (int32_t on = SLUICE_FAKE_DEVICE_BEGIN; on <= SLUICE_FAKE_DEVICE_JOB; ++on) {
    for (int32_t w = 2; w <= 3; ++w) {
      device_scene_t scene = {.on = on};
      for (; !scene.beyond && scene.nth < 100; ++scene.nth) {
        play_t play = {.run = device_run, .scene = &scene, .world_size = w};
        perform(&play);
      }
      assert_in_range(scene.nth, on == SLUICE_FAKE_DEVICE_BEGIN ? 3 : 20, 99);
    }
  }
}
