// SPDX-License-Identifier: Apache-2.0
/* A rank stays away, leaves, aborts or dies in any phase: the others report it, none hangs, new communicators work. */
#include <unistd.h>

#include "backend/base/clock.h"
#include "capi/test/ranks/play.h"
#include "third_party/bazel/test.h"

/* ---- a rank stays away, leaves, or aborts ---- */

static void absent_run(part_t* me) {
  sluice_moe_config_t config = config_for(me->world_size);
  WORKS(rig_open(&me->rig, me->comm, &config));
  (void)good_round(me, __LINE__);
  me->comm->timeout_ns = SHORT_NS; /* only now, since earlier calls may take any time */
  meet(me);
  if (me->rank != 1) {
    sluice_step_t* step = NULL;
    uint64_t begin = sluice_now_ns();
    STATUS(rig_forward(&me->rig, &step), SLUICE_E_TIMED_OUT, "rank 1");
    uint64_t waited = sluice_now_ns() - begin;
    EXPECT(last_error()->peer == 1);
    EXPECT(waited >= SHORT_NS * 9 / 10 && waited < BOUNDED_NS);
    EXPECT(strstr(last_message(), "header of layer 3, forward") != NULL);
    begin = sluice_now_ns();
    STATUS(rig_forward(&me->rig, &step), SLUICE_E_TIMED_OUT, "no longer usable");
    EXPECT(sluice_now_ns() - begin < SHORT_NS);
  }
  meet(me);
  check_new_comm(me, __LINE__);
}

TEST(Ranks_OneStaysAway_IsNamedAtTheDeadline) {
  for (int32_t w = 2; w <= 4; ++w) perform(&(play_t){.run = absent_run, .world_size = w});
}

/* Rank 0 evaluates while rank 1 does something else. Rank 1 makes its own call after rank 0 has given up, and then
 * reports the call that rank 0 waited for. */
static void evaluator_run(part_t* me) {
  const int trains = *(const int*)me->play->scene;
  sluice_moe_config_t config = config_for(me->world_size);
  sluice_step_t* step = NULL;
  WORKS(rig_open(&me->rig, me->comm, &config));
  (void)good_round(me, __LINE__);
  if (me->rank == 0) {
    me->comm->timeout_ns = SHORT_NS;
    me->rig.forward.needs_backward = 0;
    STATUS(rig_forward(&me->rig, &step), SLUICE_E_TIMED_OUT, "header of layer 3, forward without a backward");
    EXPECT(strstr(last_message(), "in evaluation too") != NULL);
    meet(me);
  } else {
    meet(me);
    me->comm->timeout_ns = SHORT_NS;
    me->rig.forward.needs_backward = trains;
    STATUS(rig_forward(&me->rig, &step), SLUICE_E_PEER_LOST, "entered this call after rank 0 had given up");
    EXPECT(last_error()->peer == 0 && strstr(last_message(), "header of layer 3, forward without a backward") != NULL);
    me->rig.forward.needs_backward = 1;
    STATUS(rig_forward(&me->rig, &step), SLUICE_E_PEER_LOST, "no longer usable");
  }
  meet(me);
  check_new_comm(me, __LINE__);
}

TEST(Ranks_OneEvaluatesAlone_OthersHearThatItGaveUp) {
  for (int trains = 0; trains <= 1; ++trains) {
    perform(&(play_t){.run = evaluator_run, .scene = &trains, .world_size = 2});
  }
}

/* Rank 1 makes one call less than the other ranks and leaves. */
static void leaver_run(part_t* me) {
  sluice_moe_config_t config = config_for(me->world_size);
  WORKS(rig_open(&me->rig, me->comm, &config));
  (void)good_round(me, __LINE__);
  if (me->rank == 1) {
    rig_close(&me->rig);
    sluice_comm_destroy(me->comm);
    me->comm = NULL;
    meet(me);
  } else {
    sluice_step_t* step = NULL;
    STATUS(rig_forward(&me->rig, &step), SLUICE_E_PEER_LOST, "rank 1");
    EXPECT(last_error()->peer == 1);
    STATUS(rig_forward(&me->rig, &step), SLUICE_E_PEER_LOST, "no longer usable");
    meet(me);
  }
  check_new_comm(me, __LINE__);
}

TEST(Ranks_OneLeaves_OthersAreToldAtOnce) {
  for (int32_t w = 2; w <= 3; ++w) perform(&(play_t){.run = leaver_run, .world_size = w});
}

static void* abort_soon(void* argument) {
  usleep(100000);
  sluice_comm_abort(argument);
  return NULL;
}

static void called_off_run(part_t* me) {
  sluice_moe_config_t config = config_for(me->world_size);
  WORKS(rig_open(&me->rig, me->comm, &config));
  (void)good_round(me, __LINE__);
  meet(me);
  if (me->rank == 0) {
    pthread_t thread;
    sluice_step_t* step = NULL;
    uint64_t begin = sluice_now_ns();
    EXPECT(pthread_create(&thread, NULL, abort_soon, me->comm) == 0);
    STATUS(rig_forward(&me->rig, &step), SLUICE_E_ABORTED, "");
    EXPECT(sluice_now_ns() - begin < BOUNDED_NS);
    pthread_join(thread, NULL);
  }
  meet(me);
  check_new_comm(me, __LINE__);
}

TEST(Ranks_AbortFromAnotherThread_EndsTheWait) { perform(&(play_t){.run = called_off_run, .world_size = 2}); }

/* ---- a rank dies in each phase ---- */

typedef struct death_scene_s {
  sluice_fake_fault_t fault;
  int32_t deduplicate;
  int32_t struck; /* output */
} death_scene_t;

/* A failed start is reported to all ranks at once. If a wait fails when all its messages have arrived, the rank just
 * stays away until the deadline; if messages are missing, it gives up as after a timeout. */
static int is_loss(sluice_status_t status, int in_wait) {
  return status == SLUICE_E_PEER_LOST || (in_wait && status == SLUICE_E_TIMED_OUT);
}

static void death_run(part_t* me) {
  death_scene_t* scene = (death_scene_t*)(uintptr_t)me->play->scene;
  sluice_moe_config_t config = config_for(me->world_size);
  config.deduplicate = scene->deduplicate;
  WORKS(rig_open(&me->rig, me->comm, &config));
  if (me->rank == 1) sluice_fake_comm_inject(me->fake, &scene->fault);
  uint64_t begin = sluice_now_ns();
  sluice_status_t status = rig_step(&me->rig);
  int in_wait = scene->fault.on == SLUICE_FAKE_WAIT;
  if (me->rank == 1 && status != SLUICE_OK) {
    EXPECT(is_loss(status, in_wait));
    scene->struck = 1;
  }
  /* The other ranks may have completed the last exchange of a step that fails here; the next header then reports it. */
  if (status == SLUICE_OK) status = rig_step(&me->rig);
  meet(me);
  if (scene->struck) {
    if (me->rank != 1) {
      EXPECT(is_loss(status, in_wait));
      EXPECT(last_error()->peer == 1 || in_wait);
    }
    EXPECT(sluice_now_ns() - begin < BOUNDED_NS);
    check_new_comm(me, __LINE__);
  } /* otherwise the fault is after the first step, so the test ends */
}

TEST(Ranks_OneDiesInEachPhase_OthersNameIt) {
  static const struct {
    int32_t world_size, deduplicate;
    uint64_t least; /* least number of exchanges in a step */
    uint64_t every; /* only one of this many waits fails, since each takes until a deadline */
  } forms[] = {{2, SLUICE_DEDUPLICATE_NONE, 10, 1},
               {3, SLUICE_DEDUPLICATE_NONE, 10, 1},
               {2, SLUICE_DEDUPLICATE_RANKS, 13, 1},
               {4, SLUICE_DEDUPLICATE_NODES, 22, 5}};
  for (size_t form = 0; form < sizeof forms / sizeof forms[0]; ++form) {
    for (int32_t on = SLUICE_FAKE_START; on <= SLUICE_FAKE_WAIT; ++on) {
      uint64_t nth = 0;
      for (int struck = 1; struck; nth += on == SLUICE_FAKE_WAIT ? forms[form].every : 1) {
        death_scene_t scene = {.fault = {.on = on, .nth = nth, .status = SLUICE_E_PEER_LOST, .peer = 1},
                               .deduplicate = forms[form].deduplicate};
        play_t play = {.run = death_run, .scene = &scene, .world_size = forms[form].world_size, .with_fakes = 1};
        if (on == SLUICE_FAKE_WAIT) play.timeout_ns = BRIEF_NS;
        perform(&play);
        struck = scene.struck && nth < 40;
      }
      /* With n = 2 a forward has a header, two dispatches and two combines; a backward has a header, two exchanges of
       * rows and two of scalars in each direction. Deduplication adds slots after the header and scalars with each
       * dispatch; two levels add tables of node copies, and an exchange within the node for each exchange of rows. */
      assert_in_range(nth, forms[form].least, 30 + forms[form].every);
    }
  }
}
