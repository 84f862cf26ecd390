// SPDX-License-Identifier: Apache-2.0
/* Graph mode on a CUDA context, on fakes: what a graph of captured passes replays, and what a capture rejects; without
 * a capture, the waits of the host, and the report of dropped routes. capacity_test compares results, also on fakes. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/test/refused.h"
#include "backend/device/cuda/fake/fake_cuda.h"
#include "capi/test/cuda/fake_rigs.h"
#include "capi/test/cuda/fakes.h"
#include "capi/test/ranks/play.h"

static const int32_t RANKS[] = {1, 2, 4}, CHUNKS[] = {1, 2, 4};
static const int32_t POLICIES[][2] = {{SLUICE_RESTORE_KEEP, SLUICE_RESTORE_KEEP},
                                      {SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_OFFLOAD},
                                      {SLUICE_RESTORE_REDISPATCH, SLUICE_RESTORE_RECOMPUTE}};

/* ---- capture --------------------------------------------------------------------------------------------------- */

/* Sets tokens, routing and weights of round `round`, so that replays see other values than the capture. Some routes are
 * dropped, including all routes of one token, and from the second round on one expert gets many rows. Rows that no
 * expert reads are NaN, which would expose a stale route of an earlier launch. */
static void change_inputs(rig_t* rig, int round) {
  rig_reset(rig);
  int32_t* ids = rig->ids.tensor.data;
  for (int64_t i = 0; i < rig->num_tokens * rig->config.model_width; ++i) {
    ((float*)rig->tokens.tensor.data)[i] = (float)((i * 5 + round * 3 + rig->rank) % 11 - 5) / 8.0f;
    ((float*)rig->grad_out.tensor.data)[i] = (float)((i * 3 + round * 7 + rig->rank) % 13 - 6) / 8.0f;
  }
  for (int64_t r = 0; r < rig->num_tokens * rig->config.top_k; ++r) {
    int32_t id = (int32_t)((r * 7 + r / 3 + round * 5 + rig->rank) % rig->config.num_experts);
    if (round > 1 && r % 2 == 0) id = 1;
    int is_dropped = (r + round) % 7 == 0 || r / rig->config.top_k == round;
    ids[r] = is_dropped ? -1 : id;
    ((float*)rig->weights.tensor.data)[r] = is_dropped ? NAN : (float)(1 + (r + round) % 5) / 4.0f;
  }
  for (int64_t m = 0; m < rig->config.model_width; ++m) {
    ((float*)rig->tokens.tensor.data)[round * rig->config.model_width + m] = NAN;
    ((float*)rig->grad_out.tensor.data)[round * rig->config.model_width + m] = NAN;
  }
}

enum { ROUNDS = 4 };
static uint64_t wanted[4][ROUNDS], wanted_gradients[4][ROUNDS]; /* by rank: results of exact mode */

static void run_eagerly(part_t* me) {
  rig_t* rig = &me->rig;
  WORKS(rig_open(rig, me->comm, me->play->scene));
  for (int round = 0; round < ROUNDS; ++round) {
    change_inputs(rig, round);
    WORKS(rig_step(rig));
    fakes_machine()->settle(me->rank);
    wanted[me->rank][round] = rig_digest(rig);
    wanted_gradients[me->rank][round] = rig_digest_gradients(rig);
  }
}

static void launch(const part_t* me, sluice_fake_graph_t* graph) {
  if (graph != NULL) sluice_fake_cuda_launch_graph(graph, fakes_stream(me->rank));
  fakes_machine()->settle(me->rank);
}

/* The context also runs eager passes while the graph exists. A launch between a forward and its backward does not
 * change the step, and works although the captured step was dropped. Each launch counts the captured passes. */
static void run_between_launches(part_t* me, sluice_fake_graph_t* graph) {
  rig_t* rig = &me->rig;
  sluice_step_t* step = NULL;
  DEFAULTS(sluice_capacity_report, report);
  change_inputs(rig, 1);
  WORKS(rig_forward(rig, &step));
  fakes_machine()->settle(me->rank);
  change_inputs(rig, 2);
  launch(me, graph);
  EXPECT(rig_digest(rig) == wanted[me->rank][2]);
  change_inputs(rig, 1);
  WORKS(rig_backward(rig, step));
  sluice_step_drop(step);
  fakes_machine()->settle(me->rank);
  EXPECT(rig_digest_gradients(rig) == wanted_gradients[me->rank][1]);
  WORKS(sluice_moe_take_capacity_report(rig->moe, fakes_stream(me->rank), &report));
  EXPECT(report.num_forwards == 1 + ROUNDS + 3);
}

/* What the hosts of all ranks have done between two calls of all ranks. */
typedef struct counts_s {
  int64_t waits, queries;
} counts_t;
static counts_t counted;

static counts_t count_from(part_t* me) {
  meet(me);
  const counts_t now = {sluice_fake_cuda_host_waits(), sluice_fake_cuda_queries()};
  meet(me);
  return now;
}

static void count_since(part_t* me, counts_t before) {
  const counts_t now = count_from(me);
  if (me->rank == 0) counted = (counts_t){now.waits - before.waits, now.queries - before.queries};
}

/* Runs one eager forward and backward, captures both into a graph, then launches the graph once per round. */
static void capture_and_replay(part_t* me) {
  rig_t* rig = &me->rig;
  sluice_fake_graph_t* graph = NULL;
  sluice_step_t* step = NULL;
  WORKS(rig_open(rig, me->comm, me->play->scene));
  WORKS(rig_step(rig));
  fakes_machine()->settle(me->rank);
  rig_reset(rig);
  meet(me);
  sluice_fake_cuda_begin_capture(fakes_stream(me->rank));
  WORKS(rig_forward(rig, &step));
  WORKS(rig_backward(rig, step));
  if (me->rank % 2 == 0) sluice_step_drop(step);
  EXPECT(sluice_fake_cuda_end_capture(fakes_stream(me->rank), &graph) == 0);
  const counts_t before = count_from(me);
  for (int round = 0; round < ROUNDS; ++round) {
    change_inputs(rig, round);
    launch(me, graph);
    EXPECT(rig_digest(rig) == wanted[me->rank][round]);
  }
  count_since(me, before);
  WORKS(rig_step(rig));                          /* blocks are returned and taken again */
  if (me->rank % 2 == 1) sluice_step_drop(step); /* a captured step, dropped later: no block is returned */
  fakes_machine()->settle(me->rank);
  run_between_launches(me, graph);
  sluice_fake_cuda_destroy_graph(graph);
}

static void on_ranks(int32_t world_size, const sluice_moe_config_t* config, void (*run)(part_t* me)) {
  perform(&(play_t){.run = run, .scene = config, .world_size = world_size, .machine = fakes_layer_machine(0)});
}

TEST(CudaGraph_CapturedPasses_ReplayWithOtherRoutingAsExactMode) {
  for (int w = 0; w < 3; ++w) {
    for (int i = 0; i < 5; ++i) { /* the last two use callback experts, whose work each launch repeats */
      const int p = i < 3 ? i : i == 3 ? 0 : 2;
      sluice_moe_config_t config = rig_config();
      config.num_chunks = CHUNKS[(w + p) % 3], config.wgrad_mode = p % 2;
      config.restore_input = POLICIES[p][0], config.restore_pre_activation = POLICIES[p][1];
      if (i >= 3) config.callback_experts = 1, config.bias = config.gated = 0;
      on_ranks(RANKS[w], &config, run_eagerly);
      config.exchange_mode = SLUICE_EXCHANGE_CAPACITY, config.capacity_rows = 12;
      on_ranks(RANKS[w], &config, capture_and_replay);
      assert_int_equal(counted.waits + counted.queries, 0);
    }
  }
}

/* Leaves out each wait of a capture in turn: the capture fails or its replay has a hazard, unless the wait is
 * redundant, as in cuda_layer_test. */
TEST(CudaGraph_AnyWaitLeftOut_IsSeen) {
  int64_t waits = 1, seen = 0;
  for (int64_t nth = -1; nth < waits; ++nth) {
    rig_t rig;
    char text[200];
    sluice_moe_config_t config = config_under(12);
    config.num_chunks = 3, config.restore_input = config.restore_pre_activation = SLUICE_RESTORE_OFFLOAD;
    open_all(&rig, &config);
    assert_int_equal(rig_step(&rig), SLUICE_OK);
    rig_reset(&rig);
    sluice_fake_graph_t* graph = NULL;
    sluice_fake_cuda_forget_accesses();
    sluice_fake_cuda_begin_capture(fakes_stream(0));
    sluice_fake_cuda_drop_wait(nth);
    sluice_status_t status = rig_step(&rig);
    if (nth < 0) waits = sluice_fake_cuda_waits();
    sluice_fake_cuda_drop_wait(-1);
    int code = sluice_fake_cuda_end_capture(fakes_stream(0), &graph);
    if (graph != NULL && status == SLUICE_OK) sluice_fake_cuda_launch_graph(graph, fakes_stream(0));
    fakes_machine()->settle(0);
    int64_t hazards = sluice_fake_cuda_hazards(text, sizeof text);
    if (nth < 0) assert_true(status == SLUICE_OK && code == 0 && hazards == 0);
    seen += status != SLUICE_OK || code != 0 || hazards > 0;
    sluice_fake_cuda_destroy_graph(graph);
    close_all(&rig);
  }
  printf("%lld of %lld waits of a capture are needed\n", (long long)seen, (long long)waits);
  assert_true(waits > 8 && waits - seen <= 4);
}

/* Under a plan of two outstanding steps and a budget of its bytes, the graph's step remains one of the two, even when
 * it is dropped: one more fits, another is refused before any work is enqueued, and the peak stays as planned. */
TEST(CudaGraph_UnderABudget_ReplaysAndItsStepStaysCounted) {
  for (int policy = 0; policy < 3; ++policy) {
    rig_t rig;
    sluice_plan_info_t info;
    sluice_step_t *step = NULL, *other = NULL;
    sluice_fake_graph_t* graph = NULL;
    const sluice_moe_config_t layer = config_under(12);
    open_all(&rig, &layer);
    DEFAULTS(sluice_plan_config, config);
    config.max_tokens = rig.num_tokens, config.max_outstanding = 2;
    config.restore_input = POLICIES[policy][0], config.restore_pre_activation = POLICIES[policy][1];
    sluice_plan_t* plan = use_plan_in_its_bytes(&rig, &config, &info);
    assert_int_equal(rig_step(&rig), SLUICE_OK);
    fakes_machine()->settle(0);
    const uint64_t want = rig_digest(&rig), want_gradients = rig_digest_gradients(&rig);
    sluice_fake_cuda_begin_capture(fakes_stream(0));
    assert_int_equal(rig_step(&rig), SLUICE_OK);
    assert_int_equal(sluice_fake_cuda_end_capture(fakes_stream(0), &graph), 0);
    for (int round = 0; round < 6; ++round) {
      const int is_outstanding = round >= 3; /* the graph runs between a forward and its backward */
      if (is_outstanding) {
        assert_int_equal(rig_forward(&rig, &step), SLUICE_OK);
        sluice_status_t status = rig_forward(&rig, &other);
        if (info.step_bytes > 0) {
          assert_int_equal(status, SLUICE_E_OVER_BUDGET);
          assert_non_null(strstr(last_message(), "max_outstanding is 2"));
        }
        if (status == SLUICE_OK) sluice_step_drop(other);
      }
      rig_reset(&rig);
      sluice_fake_cuda_launch_graph(graph, fakes_stream(0));
      fakes_machine()->settle(0);
      assert_true(rig_digest(&rig) == want);
      if (!is_outstanding) continue;
      rig_reset(&rig);
      assert_int_equal(rig_backward(&rig, step), SLUICE_OK);
      sluice_step_drop(step);
      fakes_machine()->settle(0);
      assert_true(rig_digest_gradients(&rig) == want_gradients);
    }
    sluice_fake_cuda_destroy_graph(graph);
    close_planned(&rig, plan, &info);
  }
}

/* ---- rejected in a capture ------------------------------------------------------------------------------ */

static void end_capture(int want) {
  sluice_fake_graph_t* graph = NULL;
  assert_int_equal(sluice_fake_cuda_end_capture(fakes_stream(0), &graph), want);
  sluice_fake_cuda_destroy_graph(graph);
}

/* A refusal does not invalidate the host's capture, and the context continues to work. */
TEST(CudaGraph_WhatACaptureCannotTake_IsRefusedByName) {
  rig_t rig;
  sluice_step_t *step = NULL, *other = NULL;
  sluice_moe_config_t exact = rig_config(), config = config_under(6);
  open_all(&rig, &exact);
  assert_int_equal(rig_forward(&rig, &step), SLUICE_OK);
  sluice_fake_cuda_begin_capture(fakes_stream(0));
  REFUSED(rig_forward(&rig, &other), SLUICE_E_STATE, "set exchange_mode to SLUICE_EXCHANGE_CAPACITY");
  REFUSED(rig_backward(&rig, step), SLUICE_E_STATE, "set exchange_mode to SLUICE_EXCHANGE_CAPACITY");
  end_capture(0);
  assert_int_equal(rig_backward(&rig, step), SLUICE_OK);
  sluice_step_drop(step);
  assert_int_equal(rig_swap_layer(&rig, &config), SLUICE_OK);
  sluice_fake_cuda_begin_capture(fakes_stream(0));
  REFUSED(rig_forward(&rig, &step), SLUICE_E_STATE, "this forward has not run outside of a capture yet");
  end_capture(0);
  assert_int_equal(rig_forward(&rig, &step), SLUICE_OK);
  sluice_fake_cuda_begin_capture(fakes_stream(0));
  REFUSED(rig_backward(&rig, step), SLUICE_E_STATE, "this backward has not run outside of a capture yet");
  end_capture(0);
  assert_int_equal(rig_backward(&rig, step), SLUICE_OK);
  sluice_step_drop(step);
  /* The eager calls had one outstanding step; the capture needs two. */
  sluice_fake_cuda_begin_capture(fakes_stream(0));
  assert_int_equal(rig_forward(&rig, &step), SLUICE_OK);
  REFUSED(rig_forward(&rig, &other), SLUICE_E_STATE, "is free, and a capture cannot allocate one");
  DEFAULTS(sluice_capacity_report, report);
  REFUSED(sluice_moe_take_capacity_report(rig.moe, fakes_stream(0), &report), SLUICE_E_STATE, "captured");
  end_capture(0);
  sluice_step_drop(step);
  /* More tokens than in any eager call; after a capture the buffers cannot grow, since the graph uses them. */
  rig.num_tokens = 60;
  rig_reset(&rig);
  sluice_fake_cuda_begin_capture(fakes_stream(0));
  REFUSED(rig_forward(&rig, &step), SLUICE_E_STATE, "a captured graph uses the");
  end_capture(0);
  REFUSED(rig_forward(&rig, &step), SLUICE_E_STATE, "run the largest call once before the first capture");
  rig.num_tokens = 6;
  rig_reset(&rig);
  assert_int_equal(rig_round(&rig, NULL), SLUICE_OK);
  close_all(&rig);
}

/* The eager backward left the bias gradients out, whose kernel the capture is the first to launch. */
TEST(CudaGraph_KernelThatHasNotRun_IsRefusedAndTheCaptureIsUsable) {
  rig_t rig;
  sluice_step_t* step = NULL;
  sluice_moe_config_t config = config_under(6);
  config.bias = 1;
  open_all(&rig, &config);
  for (int is_captured = 0; is_captured < 2; ++is_captured) {
    if (is_captured) sluice_fake_cuda_begin_capture(fakes_stream(0));
    assert_int_equal(rig_forward(&rig, &step), SLUICE_OK);
    if (is_captured) {
      REFUSED(rig_backward(&rig, step), SLUICE_E_STATE, "sluice_sum_columns_f32 has not run outside of a capture yet");
      end_capture(0);
    } else {
      rig.grad_table.b1 = rig.grad_table.b3 = rig.grad_table.b2 = NULL;
      assert_int_equal(rig_backward(&rig, step), SLUICE_OK);
      rig_reset(&rig);
    }
    sluice_step_drop(step);
  }
  assert_int_equal(rig_round(&rig, NULL), SLUICE_OK);
  close_all(&rig);
}

/* A capture may drop a step that ran eagerly: the capture neither records nor waits for events of that step. */
TEST(CudaGraph_EagerStepDroppedInACapture_DoesNotSpoilIt) {
  rig_t rig;
  sluice_step_t *eager = NULL, *captured = NULL;
  sluice_fake_graph_t* graph = NULL;
  uint64_t want = 0, got = 0;
  sluice_moe_config_t config = config_under(6);
  config.restore_input = config.restore_pre_activation = SLUICE_RESTORE_OFFLOAD;
  open_all(&rig, &config);
  assert_int_equal(rig_forward(&rig, &eager), SLUICE_OK);
  assert_int_equal(rig_round(&rig, &want), SLUICE_OK);
  rig_reset(&rig);
  sluice_fake_cuda_begin_capture(fakes_stream(0));
  assert_int_equal(rig_forward(&rig, &captured), SLUICE_OK);
  sluice_step_drop(eager);
  assert_int_equal(rig_backward(&rig, captured), SLUICE_OK);
  assert_int_equal(sluice_fake_cuda_end_capture(fakes_stream(0), &graph), 0);
  sluice_step_drop(captured);
  assert_int_equal(rig_round(&rig, &got), SLUICE_OK);
  assert_true(got == want);
  sluice_fake_cuda_destroy_graph(graph);
  close_all(&rig);
}

/* ---- without a capture ------------------------------------------------------------------------------------------ */

/* Counts in a forward and a backward, after all ranks have run one step. */
static void count_waits(part_t* me) {
  sluice_step_t* step = NULL;
  WORKS(rig_open(&me->rig, me->comm, me->play->scene));
  WORKS(rig_round(&me->rig, NULL));
  const counts_t before = count_from(me);
  WORKS(rig_forward(&me->rig, &step));
  WORKS(rig_backward(&me->rig, step));
  count_since(me, before);
  sluice_step_drop(step);
}

TEST(CudaCapacity_CallsAfterTheFirst_HaveNoHeaderEither) {
  const sluice_moe_config_t config = config_under(6), exact = rig_config();
  for (int w = 0; w < 3; ++w) {
    on_ranks(RANKS[w], &config, count_waits);
    assert_int_equal(counted.waits + counted.queries, 0);
    on_ranks(RANKS[w], &exact, count_waits);
    assert_int_equal(counted.waits, RANKS[w]); /* one read in each rank's forward */
    if (RANKS[w] > 1) assert_true(counted.queries > 0);
  }
}

TEST(CudaCapacity_RoutesBeyondItAndBadIds_AreCountedAndReported) {
  rig_t rig;
  const sluice_moe_config_t config = config_under(1);
  open_all(&rig, &config);
  int32_t* ids = rig.ids.tensor.data; /* 6 tokens, 2 routes, 2 chunks */
  for (int t = 0; t < 6; ++t) ids[t * 2] = 2, ids[t * 2 + 1] = t % 2;
  sluice_step_t* step = NULL;
  for (int i = 0; i < 2; ++i) {
    assert_int_equal(rig_forward(&rig, &step), SLUICE_OK);
    sluice_step_drop(step);
  }
  DEFAULTS(sluice_capacity_report, report);
  REFUSED(sluice_moe_take_capacity_report(rig.moe, fakes_stream(0), &report), SLUICE_E_CAPACITY,
          "layer 3, rank 0: 12 of 24 routes in 2 forwards");
  assert_int_equal(report.num_forwards, 2);
  assert_int_equal(report.num_routes, 24);
  assert_int_equal(report.num_dropped, 12); /* in each chunk, two routes to expert 2 and one to expert 0 or 1 */
  assert_int_equal(report.most_rows, 3);
  assert_int_equal(report.most_expert, 2);
  ids[7] = 4;
  assert_int_equal(rig_forward(&rig, &step), SLUICE_OK);
  sluice_step_drop(step);
  REFUSED(sluice_moe_take_capacity_report(rig.moe, fakes_stream(0), &report), SLUICE_E_INVALID_ARGUMENT,
          "expert_ids[3, 1] was out of range");
  assert_int_equal(report.bad_route, 7);
  assert_int_equal(report.num_forwards, 1);
  assert_int_equal(sluice_moe_take_capacity_report(rig.moe, fakes_stream(0), &report), SLUICE_OK);
  assert_int_equal(report.num_forwards, 0);
  close_all(&rig);
}

int main(void) {
  setenv("SLUICE_POISON", "1", 1); /* slots are NaN at the start of each pass, so padding must be written */
  return run_cases(NULL, NULL);
}
