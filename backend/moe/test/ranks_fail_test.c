// SPDX-License-Identifier: Apache-2.0
/* A callback or an op of the device fails on one rank: the other ranks get an error that names this rank. */

#include "backend/moe/context/context.h"
#include "capi/test/cuda/fakes.h"
#include "capi/test/ranks/play.h"
#include "third_party/bazel/test.h"

/* ---- a callback fails ---- */

/* With recomputation it is the forward callback that fails in backward. */
static void callback_run(part_t* me) {
  const int recomputes = *(const int*)me->play->scene;
  sluice_moe_config_t config = config_for(me->world_size);
  config.callback_experts = 1;
  config.restore_pre_activation = recomputes ? SLUICE_RESTORE_RECOMPUTE : SLUICE_RESTORE_KEEP;
  WORKS(rig_open(&me->rig, me->comm, &config));
  uint64_t digest = good_round(me, __LINE__);
  for (int in_backward = 0; in_backward < 2; ++in_backward) {
    sluice_step_t *step = NULL, *other = NULL;
    rig_reset(&me->rig);
    if (in_backward) WORKS(rig_forward(&me->rig, &step));
    me->rig.callback_failure = me->rank == 1 ? 42 : 0;
    sluice_status_t status = in_backward ? rig_backward(&me->rig, step) : rig_forward(&me->rig, &step);
    if (me->rank == 1) {
      STATUS(status, SLUICE_E_EXTERNAL,
             in_backward && !recomputes ? "failed in backward of chunk 0 (it returned 42)"
                                        : "failed in forward of chunk 0 (it returned 42)");
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
  const layer_machine_t* const machines[] = {NULL, fakes_layer_machine(0), fakes_layer_machine(1)};
  for (int i = 0; i < 12; ++i) {
    const int recomputes = i % 2;
    perform(
        &(play_t){.run = callback_run, .scene = &recomputes, .world_size = 2 + i / 2 % 2, .machine = machines[i / 4]});
  }
}

/* ---- a device fails ---- */

enum { BEGIN, SUBMIT, JOB, MOST_OPS = 100 };

/* A device that wraps another one. One begin or submit fails, or one job instead of running. */
typedef struct faulty_device_s {
  sluice_device_t base;
  sluice_device_t* inner;
  int32_t on;
  uint64_t nth; /* counted over all begins, or over all submits; UINT64_MAX: none fails */
  uint64_t num_begins, num_submits;
  int32_t is_exchange[MOST_OPS]; /* of the first submits */
  sluice_job_fn_t fn;            /* of the running pass */
  void* user;
  _Atomic int32_t failing_job;
} faulty_device_t;

static sluice_status_t fails(const faulty_device_t* device, int32_t on, uint64_t number) {
  if (device->on != on || device->nth != number) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_NO_MEMORY, "device: %llu failed on command", (unsigned long long)number);
}

static sluice_status_t run_job(void* user, int32_t index, sluice_stream_t stream) {
  faulty_device_t* device = user;
  return index == device->failing_job ? fails(device, JOB, device->nth) : device->fn(device->user, index, stream);
}

static sluice_status_t faulty_begin(sluice_device_t* base, int32_t num_events, sluice_job_fn_t fn, void* user,
                                    sluice_stream_t stream) {
  faulty_device_t* device = (faulty_device_t*)base;
  SLUICE_TRY(fails(device, BEGIN, device->num_begins++));
  device->fn = fn, device->user = user, device->failing_job = -1;
  return device->inner->vtable->begin(device->inner, num_events, run_job, device, stream);
}

static sluice_status_t faulty_submit(sluice_device_t* base, const sluice_job_t* job) {
  faulty_device_t* device = (faulty_device_t*)base;
  const uint64_t number = device->num_submits++;
  if (number < MOST_OPS) device->is_exchange[number] = job->run_on_failure;
  SLUICE_TRY(fails(device, SUBMIT, number));
  if (device->on == JOB && device->nth == number) device->failing_job = job->index;
  return device->inner->vtable->submit(device->inner, job);
}

static sluice_status_t faulty_join(sluice_device_t* base) {
  sluice_device_t* inner = ((faulty_device_t*)base)->inner;
  return inner->vtable->join(inner);
}

static void faulty_destroy(sluice_device_t* base) {
  sluice_device_t* inner = ((faulty_device_t*)base)->inner;
  inner->vtable->destroy(inner);
  free(base);
}

static faulty_device_t* wrap(sluice_device_t* inner) {
  static const sluice_device_vtable_t vtable = {
      .destroy = faulty_destroy, .begin = faulty_begin, .submit = faulty_submit, .join = faulty_join};
  faulty_device_t* device = calloc(1, sizeof *device);
  assert_non_null(device);
  device->base =
      (sluice_device_t){.vtable = &vtable, .kernels = inner->kernels, .allocator = inner->allocator, .name = "faulty"};
  device->inner = inner, device->nth = UINT64_MAX;
  return device;
}

typedef struct device_scene_s {
  int32_t on;
  uint64_t nth;   /* index of the op (or pass) in one training step */
  int32_t beyond; /* out: no such op exists */
} device_scene_t;

static void device_run(part_t* me) {
  device_scene_t* scene = (device_scene_t*)(uintptr_t)me->play->scene;
  sluice_moe_config_t config = config_for(me->world_size);
  WORKS(rig_open(&me->rig, me->comm, &config));
  faulty_device_t* device = wrap(me->rig.context->device);
  me->rig.context->device = &device->base;
  uint64_t digest = good_round(me, __LINE__);
  uint64_t limit = scene->on == BEGIN ? 2 : device->num_submits;
  /* Failing exchanges are tested with communicators. */
  int is_exchange = scene->on == JOB && scene->nth < limit && device->is_exchange[scene->nth];
  if (me->rank == 0) scene->beyond = scene->nth >= limit;
  if (scene->nth >= limit || is_exchange) return;
  if (me->rank == 1) device->on = scene->on, device->nth = limit + scene->nth;

  rig_reset(&me->rig);
  sluice_status_t status = rig_step(&me->rig);
  if (me->rank == 1) STATUS(status, SLUICE_E_NO_MEMORY, "failed on command");
  sluice_step_t* step = NULL;
  if (me->rank == 1 || status == SLUICE_OK) status = rig_forward(&me->rig, &step);
  if (scene->on == JOB) { /* the exchanges ran: nothing is lost */
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
  for (int32_t on = BEGIN; on <= JOB; ++on) {
    for (int32_t w = 2; w <= 3; ++w) {
      device_scene_t scene = {.on = on};
      for (; !scene.beyond && scene.nth < MOST_OPS; ++scene.nth) {
        perform(&(play_t){.run = device_run, .scene = &scene, .world_size = w});
      }
      assert_in_range(scene.nth, on == BEGIN ? 3 : 20, 99);
    }
  }
}
