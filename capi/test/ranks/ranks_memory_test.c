// SPDX-License-Identifier: Apache-2.0
/* Several outstanding steps, a failure of each allocation, and the bytes of a step: nothing leaks and no rank hangs. */

#include "backend/base/clock.h"
#include "capi/test/ranks/play.h"
#include "third_party/bazel/test.h"

/* ---- steps ---- */

enum { NUM_STEPS = 4 };

/* Inputs of step s: the routes are shifted by s. */
static void set_inputs(part_t* me, int32_t s) {
  rig_reset(&me->rig);
  for (int64_t i = 0; i < me->rig.num_tokens * me->rig.config.top_k; ++i) {
    int32_t* id = (int32_t*)me->rig.ids.tensor.data + i;
    *id = (*id + s) % me->rig.config.num_experts;
  }
  for (int64_t i = 0; i < me->rig.num_tokens * me->rig.config.model_width; ++i) {
    ((float*)me->rig.tokens.tensor.data)[i] += (float)s;
  }
}

static void outstanding_run(part_t* me) {
  sluice_moe_config_t config = config_for(me->world_size);
  config.wgrad_mode = SLUICE_WGRAD_DEFERRED; /* adaptive mode may alternate between two orders of sums */
  WORKS(rig_open(&me->rig, me->comm, &config));
  uint64_t one_by_one[NUM_STEPS];
  for (int32_t s = 0; s < NUM_STEPS; ++s) {
    set_inputs(me, s);
    WORKS(rig_step(&me->rig));
    one_by_one[s] = rig_digest_gradients(&me->rig);
  }
  int64_t live = atomic_load(&me->rig.heap.live_bytes);
  sluice_step_t* steps[NUM_STEPS] = {NULL};
  for (int32_t s = 0; s < NUM_STEPS; ++s) {
    set_inputs(me, s);
    WORKS(rig_forward(&me->rig, &steps[s]));
  }
  for (int32_t s = NUM_STEPS - 1; s >= 0; --s) {
    set_inputs(me, s);
    if (s != 1) { /* step 1 is dropped without a backward */
      WORKS(rig_backward(&me->rig, steps[s]));
      EXPECT(rig_digest_gradients(&me->rig) == one_by_one[s]);
    }
    sluice_step_drop(steps[s]);
  }
  EXPECT(atomic_load(&me->rig.heap.live_bytes) == live);
  /* A step outlives its layer and context. */
  set_inputs(me, 0);
  sluice_step_t* last = NULL;
  WORKS(rig_forward(&me->rig, &last));
  sluice_moe_destroy(me->rig.moe);
  sluice_context_destroy(me->rig.context);
  me->rig.moe = NULL, me->rig.context = NULL;
  sluice_step_drop(last);
  rig_close(&me->rig);
}

TEST(Steps_SeveralOutstanding_AnyOrderOfBackward) {
  for (int32_t w = 1; w <= 3; ++w) perform(&(play_t){.run = outstanding_run, .world_size = w});
}

/* ---- memory ---- */

typedef struct starve_scene_s {
  int64_t nth;
  int32_t separate_wgrad;
  int32_t deduplicate;
  int32_t struck; /* output */
} starve_scene_t;

#define STARVED(status) ((status) == SLUICE_E_NO_MEMORY && strstr(last_message(), "refused") != NULL)

/* With one rank, the nth allocation fails anywhere; the same call then works. */
static void starve_alone_run(part_t* me) {
  starve_scene_t* scene = (starve_scene_t*)(uintptr_t)me->play->scene;
  sluice_moe_config_t config = config_for(1);
  rig_t* rig = &me->rig;
  memset(rig, 0, sizeof *rig);
  heap_init(&rig->heap);
  atomic_store(&rig->heap.fail_at, scene->nth);
  rig->world_size = 1;
  DEFAULTS(sluice_context_config, context_config);
  context_config.gemm = "ref";
  context_config.allocate = heap_allocate, context_config.release = heap_release,
  context_config.allocate_user = &rig->heap;
  int failures = 0;
#define TRY(call)                     \
  do {                                \
    sluice_status_t status_ = (call); \
    if (status_ != SLUICE_OK) {       \
      EXPECT(STARVED(status_));       \
      ++failures;                     \
      WORKS(call);                    \
    }                                 \
  } while (0)
  TRY(sluice_context_create(&context_config, NULL, &rig->context));
  TRY(sluice_context_trace(rig->context, 16));
  TRY(rig_open_layer(rig, &config));
  sluice_step_t* step = NULL;
  TRY(rig_forward(rig, &step));
  if (scene->separate_wgrad) {
    rig->backward.parts = SLUICE_BACKWARD_DGRAD;
    TRY(rig_backward(rig, step));
    rig->backward.parts = SLUICE_BACKWARD_WGRAD;
  }
  TRY(rig_backward(rig, step));
#undef TRY
  sluice_step_drop(step);
  EXPECT(failures <= 1);
  scene->struck = failures;
  atomic_store(&rig->heap.fail_at, -1);
  uint64_t digest = good_round(me, __LINE__);
  EXPECT(good_round(me, __LINE__) == digest);
}

TEST(OneRank_NthAllocationFails_LeaksNothingAndRetries) {
  for (int32_t split = 0; split < 2; ++split) {
    starve_scene_t scene = {.separate_wgrad = split, .struck = 1};
    for (; scene.struck && scene.nth < 200; ++scene.nth) {
      scene.struck = 0;
      perform(&(play_t){.run = starve_alone_run, .scene = &scene, .world_size = 1});
    }
    assert_in_range(scene.nth, 10, 199);
  }
}

/* Rank 0 of two ranks fails in the nth allocation of its passes. */
static void starve_pair_run(part_t* me) {
  starve_scene_t* scene = (starve_scene_t*)(uintptr_t)me->play->scene;
  sluice_moe_config_t config = config_for(2);
  config.deduplicate = scene->deduplicate;
  WORKS(rig_open(&me->rig, me->comm, &config));
  if (me->rank == 0) atomic_store(&me->rig.heap.fail_at, atomic_load(&me->rig.heap.calls) + scene->nth);
  uint64_t begin = sluice_now_ns();
  const sluice_status_t status = rig_step(&me->rig);
  if (me->rank == 0) {
    if (status != SLUICE_OK) EXPECT(STARVED(status));
    scene->struck = status != SLUICE_OK;
  }
  atomic_store(&me->rig.heap.fail_at, -1);
  int lost = status == SLUICE_E_PEER_LOST;
  if (me->rank == 1 && status != SLUICE_OK && !lost) STATUS(status, SLUICE_E_PEER_REFUSED, "rank 0 refused");
  EXPECT(sluice_now_ns() - begin < BOUNDED_NS);
  meet(me);
  if (me->rank == 1) scene->struck |= lost ? 2 : 0;
  meet(me);
  if (scene->struck & 2) { /* rank 0 had agreed to send rows and could not, so it aborted the group */
    check_new_comm(me, __LINE__);
  } else {
    (void)good_round(me, __LINE__);
  }
}

TEST(TwoRanks_NthAllocationFails_NobodyHangs) {
  for (int32_t deduplicate = 0; deduplicate < 2; ++deduplicate) {
    starve_scene_t scene = {.deduplicate = deduplicate, .struck = 1};
    for (; scene.struck && scene.nth < 200; ++scene.nth) {
      scene.struck = 0;
      perform(&(play_t){.run = starve_pair_run, .scene = &scene, .world_size = 2});
    }
    assert_in_range(scene.nth, 8 + deduplicate, 199);
  }
}

/* ---- bytes ---- */

/* Bytes in the trace and in the counters equal those given to the communicator, without headers. */
static void traffic_run(part_t* me) {
  const int32_t* deduplicate = me->play->scene;
  sluice_moe_config_t config = config_for(me->world_size);
  config.deduplicate = *deduplicate;
  WORKS(rig_open(&me->rig, me->comm, &config));
  WORKS(sluice_context_trace(me->rig.context, 64));
  WORKS(rig_step(&me->rig));
  const sluice_fake_call_t* calls = NULL;
  uint64_t num_calls = sluice_fake_comm_calls(me->fake, &calls), on_wire = 0;
  for (uint64_t i = 0; i < num_calls; ++i) on_wire += calls[i].op == SLUICE_FAKE_START ? calls[i].send_bytes : 0;
  on_wire -= UINT64_C(2) * 1024 * ((uint64_t)me->world_size - 1);
  sluice_trace_event_t events[64];
  int64_t count = 0;
  WORKS(sluice_context_take_trace(me->rig.context, events, 64, &count));
  uint64_t traced = 0, tables = 0;
  for (int64_t i = 0; i < count; ++i) {
    traced += events[i].bytes;
    if (strcmp(events[i].op, "pass") == 0) tables += events[i].bytes;
  }
  sluice_context_stats_t stats = {.struct_size = sizeof stats};
  WORKS(sluice_context_get_stats(me->rig.context, 0, &stats));
  EXPECT(on_wire > 0 && traced == on_wire && stats.bytes_sent == on_wire);
  EXPECT((tables > 0) == *deduplicate);
}

TEST(Trace_BytesOfAStep_AreThoseOnTheWire) {
  for (int32_t deduplicate = 0; deduplicate < 2; ++deduplicate) {
    perform(&(play_t){.run = traffic_run, .scene = &deduplicate, .world_size = 3, .with_fakes = 1});
  }
}
