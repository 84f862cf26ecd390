// SPDX-License-Identifier: Apache-2.0
/* A rank that is gone is reported by rank on all others. */
#include "capi/test/pipeline/pipeline_world.h"

#include <stdatomic.h>
#include <unistd.h>

#include "backend/comm/comm.h"

#define SECOND_NS  UINT64_C(1000000000)
#define BOUNDED_NS (20 * SECOND_NS)
#define SHORT_NS   (2 * SECOND_NS)

static const char* const transports[] = {"local", "tcp"};

/* ---- ranks that are gone ---- */

static sluice_status_t abort_in_call(pw_rank_t* rank, int32_t call, const sluice_stage_call_t* op,
                                     sluice_host_failure_t* out_failure) {
  (void)out_failure;
  if (rank->batch == 1 && rank->rank == 1 && call == PW_FORWARD && op->micro_batch == 2) {
    sluice_pipeline_abort(rank->pipeline);
  }
  return SLUICE_OK;
}

/* All ranks end the previous batch before one of them leaves, so that the loss is not reported for that batch. */
static void meet(pw_rank_t* rank) { pthread_barrier_wait(&rank->world->meeting); }

TEST(Abort_InABatch_EndsThePipelineOnAll) {
  for (size_t t = 0; t < 2; ++t) {
    pw_world_t* world = pw_world_new(transports[t], 3);
    world->in_call = abort_in_call;
    world->between = meet;
    for (int32_t b = 0; b < 3; ++b) pw_world_add(world, 4, 0);
    pw_world_run(world);
    assert_all_work(world, 0);
    for (int32_t b = 1; b < 3; ++b) {
      assert_status(world, 1, b, SLUICE_E_ABORTED, NULL);
      for (int32_t r = 0; r < 3; r += 2) {
        assert_status(world, r, b, SLUICE_E_PEER_LOST, "rank 1");
        assert_int_equal(world->ranks[r].errors[b].peer, 1);
        assert_true(world->ranks[r].took_ns[b] < BOUNDED_NS);
      }
    }
    assert_nothing_wrong(world);
    pw_world_free(world);
  }
}

static void leave_early(pw_rank_t* rank) {
  meet(rank);
  if (rank->rank != 0 || rank->batch != 0 || rank->calls[PW_FORWARD] == 0) return;
  sluice_pipeline_destroy(rank->pipeline);
  rank->pipeline = NULL;
}

TEST(Rank_LeavesBetweenBatches_IsNamedOnAll) {
  for (size_t t = 0; t < 2; ++t) {
    pw_world_t* world = pw_world_new(transports[t], 3);
    world->between = leave_early;
    for (int32_t b = 0; b < 2; ++b) pw_world_add(world, 4, 0);
    pw_world_run(world);
    for (int32_t r = 1; r < 3; ++r) {
      assert_status(world, r, 1, SLUICE_E_PEER_LOST, "rank 0");
      assert_int_equal(world->ranks[r].errors[1].peer, 0);
    }
    pw_world_free(world);
  }
}

static _Atomic int32_t num_returned;

static sluice_status_t hold_until_others_are_back(pw_rank_t* rank, int32_t call, const sluice_stage_call_t* op,
                                                  sluice_host_failure_t* out_failure) {
  (void)out_failure;
  if (rank->batch == 0) return SLUICE_OK;
  if (rank->rank != 0 || call != PW_FORWARD || op->micro_batch != 1) {
    rank->comm->timeout_ns = SHORT_NS; /* only now, since the previous batch may take any time */
    return SLUICE_OK;
  }
  for (int32_t i = 0; i < 6000 && atomic_load(&num_returned) < 2; ++i) usleep(10000);
  return SLUICE_OK;
}

static void note_return(pw_rank_t* rank) {
  if (rank->rank != 0) atomic_fetch_add(&num_returned, 1);
}

TEST(Rank_SleepsInACallback_IsNamedAtTheDeadlineOnAll) {
  for (size_t t = 0; t < 2; ++t) {
    pw_world_t* world = pw_world_new(transports[t], 3);
    world->in_call = hold_until_others_are_back;
    world->after = note_return;
    atomic_store(&num_returned, 0);
    for (int32_t b = 0; b < 2; ++b) pw_world_add(world, 6, 0);
    pw_world_run(world);
    for (int32_t r = 1; r < 3; ++r) {
      assert_status(world, r, 1, SLUICE_E_TIMED_OUT, "for rank 0: check");
      assert_int_equal(world->ranks[r].errors[1].peer, 0);
    }
    assert_true(world->ranks[0].ended[1] == SLUICE_E_TIMED_OUT || world->ranks[0].ended[1] == SLUICE_E_PEER_LOST);
    assert_nothing_wrong(world);
    pw_world_free(world);
  }
}

/* ---- ranks that end a batch and leave ---- */

static _Atomic int32_t num_left;

static void leave_at_once(pw_rank_t* rank) {
  sluice_pipeline_destroy(rank->pipeline);
  rank->pipeline = NULL;
  atomic_fetch_add(&num_left, 1);
}

/* After this call rank 0 also knows that the others have left; over TCP a thread reads it. */
static void wait_until_others_have_left(const pw_rank_t* rank) {
  for (int32_t i = 0; i < 6000 && atomic_load(&num_left) + 1 < rank->world->num_stages; ++i) usleep(10000);
  usleep(200000);
}

static _Atomic int32_t is_held; /* rank 0 is held */

static sluice_status_t fail_when_rank_0_is_held(sluice_host_failure_t* out_failure) {
  for (int32_t i = 0; i < 6000 && !atomic_load(&is_held); ++i) usleep(10000);
  (void)snprintf(out_failure->message, sizeof out_failure->message, "ValueError: boom");
  return SLUICE_E_EXTERNAL;
}

/* When rank 0 returns, it still has to send an output. */
static sluice_status_t fail_and_hold_rank_0(pw_rank_t* rank, int32_t call, const sluice_stage_call_t* op,
                                            sluice_host_failure_t* out_failure) {
  if (call != PW_FORWARD) return SLUICE_OK;
  if (rank->rank == 0 && op->micro_batch == 1) {
    atomic_store(&is_held, 1);
    wait_until_others_have_left(rank);
  }
  return rank->rank == 1 ? fail_when_rank_0_is_held(out_failure) : SLUICE_OK;
}

static int is_last_call(const pw_rank_t* rank, int32_t call) {
  return call == PW_WEIGHT_GRAD && rank->calls[call] == rank->world->batches[0].num_micro_batches;
}

/* When rank 0 returns, it only has to report its end. */
static sluice_status_t fail_and_hold_rank_0_at_the_end(pw_rank_t* rank, int32_t call, const sluice_stage_call_t* op,
                                                       sluice_host_failure_t* out_failure) {
  (void)op;
  if (!is_last_call(rank, call)) return SLUICE_OK;
  if (rank->rank == 0) {
    atomic_store(&is_held, 1);
    wait_until_others_have_left(rank);
  }
  return rank->rank == 1 ? fail_when_rank_0_is_held(out_failure) : SLUICE_OK;
}

/* Holds rank 0 in a wait, when it has posted all its receives. */
static int32_t hold_rank_0_in_a_wait(pw_rank_t* rank) {
  if (rank->rank != 0 || atomic_exchange(&is_held, 1)) return 0;
  wait_until_others_have_left(rank);
  return 0;
}

static sluice_status_t fail_while_rank_0_waits(pw_rank_t* rank, int32_t call, const sluice_stage_call_t* op,
                                               sluice_host_failure_t* out_failure) {
  (void)op;
  return rank->rank == 1 && call == PW_FORWARD ? fail_when_rank_0_is_held(out_failure) : SLUICE_OK;
}

TEST(Rank_EndsABatchAndLeavesAtOnce_ItsReasonIsHeard) {
  for (int32_t i = 0; i < 12; ++i) {
    const int32_t what = i / 4;
    pw_world_t* world = pw_world_new(transports[i % 2], 2 + i / 2 % 2);
    world->config.separate_wgrad = what == 1;
    world->in_call = what == 0   ? fail_and_hold_rank_0
                     : what == 1 ? fail_and_hold_rank_0_at_the_end
                                 : fail_while_rank_0_waits;
    world->is_interrupted = what == 2 ? hold_rank_0_in_a_wait : NULL;
    world->after = leave_at_once;
    atomic_store(&num_left, 0);
    atomic_store(&is_held, 0);
    pw_world_add(world, 4, 0);
    pw_world_run(world);
    assert_status(world, 0, 0, SLUICE_E_PEER_REFUSED, "rank 1 ended batch 1: EXTERNAL");
    assert_status(world, 0, 0, SLUICE_E_PEER_REFUSED, "boom");
    assert_nothing_wrong(world);
    pw_world_free(world);
  }
}
