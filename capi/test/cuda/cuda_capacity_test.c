/* Graph mode: layers under a capacity on a CUDA context, executed by the fake driver, cuBLAS and NCCL. The oracle is
 * the same layer in exact mode on the same fakes. Nothing here says anything about a GPU's speed. */
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/base/hash.h"
#include "backend/device/cuda/fake/fake_cuda.h"
#include "capi/test/cuda/fakes.h"
#include "capi/test/rig/rig.h"
#include "capi/test/world/checks.h"

static void run_on_fakes(const case_t* c, int with_groups, result_t* out) {
  char live[200], hazard[200];
  case_t there = *c;
  fakes_open(c->world_size, with_groups);
  there.machine = fakes_machine();
  world_run(&there, out);
  int64_t hazards = sluice_fake_cuda_hazards(hazard, sizeof hazard);
  int64_t left = fakes_close(live, sizeof live);
  must_work(c, out);
  if (hazards != 0) fail_msg("%lld hazards: %s", (long long)hazards, hazard);
  if (left != 0) fail_msg("left: %s", live);
}

/* Everything has the bits of exact mode: GEMMs add zeros in the same order (a real cuBLAS may sum them in another,
 * a few ulps then), row kernels work row by row. */
static void check_with(const case_t* c, int with_groups) {
  result_t exact, under;
  case_t plain = *c, capacity = *c;
  plain.capacity = 0;
  if (capacity.capacity == 0) capacity.capacity = 18;
  run_on_fakes(&plain, with_groups, &exact);
  run_on_fakes(&capacity, with_groups, &under);
  if (!world_identical(c, &exact, &under, 1)) {
    fail_msg("W %d n %d K %d dtype %d act %d gated %d bias %d restore %d %d: other bits, distance %g", c->world_size,
             c->num_chunks, c->top_k, c->dtype, c->activation, c->gated, c->bias, c->restore_input,
             c->restore_pre_activation, world_distance(c, &exact, &under));
  }
  for (int32_t r = 0; r < c->world_size; ++r) {
    assert_int_equal(under.report_status[r], SLUICE_OK);
    assert_int_equal(under.report[r].num_forwards, c->outstanding > 1 ? c->outstanding : 1);
    assert_int_equal(under.report[r].num_dropped, 0);
  }
  world_free(&exact);
  world_free(&under);
}
static void check(const case_t* c) { check_with(c, 1); }

static const int32_t RANKS[] = {1, 2, 4}, CHUNKS[] = {1, 2, 4};

static void CudaCapacity_RanksAndChunks_HaveTheBitsOfExact(void** state) {
  (void)state;
  for (int w = 0; w < 3; ++w) {
    for (int n = 0; n < 3; ++n) {
      case_t c = world_small_case();
      c.world_size = RANKS[w], c.num_chunks = CHUNKS[n];
      c.bias = (w + n) % 2 == 0, c.gated = n % 2;
      c.wgrad_mode = n == 1 ? SLUICE_WGRAD_PER_CHUNK : SLUICE_WGRAD_DEFERRED;
      check(&c);
      c.dtype = SLUICE_DTYPE_BF16, c.gated = !c.gated;
      check(&c);
    }
  }
}

static void CudaCapacity_CallbackExperts_HaveTheBitsOfExact(void** state) {
  (void)state;
  for (int w = 0; w < 3; ++w) {
    for (int p = 0; p < 2; ++p) {
      case_t c = world_small_case();
      c.world_size = RANKS[w], c.num_chunks = CHUNKS[1 + p], c.callback_experts = 1;
      c.restore_pre_activation = p == 0 ? SLUICE_RESTORE_KEEP : SLUICE_RESTORE_RECOMPUTE;
      check(&c);
      c.drop_every = 3, c.uneven_owners = 1, c.dtype = SLUICE_DTYPE_BF16, c.callback_waits = 1;
      check(&c);
    }
  }
}

static void CudaCapacity_EveryPolicy_HasTheBitsOfExact(void** state) {
  (void)state;
  const int32_t inputs[] = {SLUICE_RESTORE_KEEP, SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_REDISPATCH};
  const int32_t pre_activations[] = {SLUICE_RESTORE_KEEP, SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_RECOMPUTE};
  for (int w = 0; w < 2; ++w) {
    for (int p = 0; p < 9; ++p) {
      case_t c = world_small_case();
      c.world_size = RANKS[w], c.num_chunks = CHUNKS[p % 3], c.bias = 1, c.gated = p % 2;
      c.restore_input = inputs[p / 3], c.restore_pre_activation = pre_activations[p % 3];
      c.reuse_saved = p % 2, c.restore = p % 4 == 3, c.dtype = p % 2 ? SLUICE_DTYPE_BF16 : SLUICE_DTYPE_F32;
      check(&c);
    }
  }
}

static void CudaCapacity_OddShapesSkewAndOwners_HaveTheBitsOfExact(void** state) {
  (void)state;
  for (int w = 0; w < 3; ++w) {
    case_t c = world_small_case();
    c.world_size = RANKS[w], c.num_chunks = 3, c.drop_every = 3;
    check(&c);
    c.drop_every = 1;
    check(&c);
    c.drop_every = 0, c.top_k = 1, c.hot_expert = 11, c.transposed = 1;
    check(&c);
    c.hot_expert = -1, c.uneven_owners = 1, c.num_chunks = 16, c.capacity = 2, c.top_k = 2;
    check(&c);
    c.tokens[0] = 0, c.capacity = 0, c.bias = 1;
    check(&c);
    c.tokens[1] = c.tokens[2] = c.tokens[3] = 0;
    check_with(&c, 0);
  }
}

static void CudaCapacity_HalvesAndOutstandingSteps_HaveTheBitsOfExact(void** state) {
  (void)state;
  for (int w = 0; w < 2; ++w) {
    case_t c = world_small_case();
    c.world_size = RANKS[w], c.num_chunks = 2, c.halves_apart = 1, c.gated = 1, c.bias = 1;
    check(&c);
    c.halves_apart = 0, c.outstanding = 3, c.accumulate = 1, c.dtype = SLUICE_DTYPE_BF16, c.grad_f32 = 1;
    check(&c);
  }
}

static void CudaCapacity_HostWaits_NoneInForwardAndBackward(void** state) {
  (void)state;
  for (int w = 0; w < 3; ++w) {
    case_t c = world_small_case();
    result_t out;
    char live[200];
    c.world_size = RANKS[w], c.num_chunks = 4, c.bias = 1, c.machine = fakes_machine(), c.capacity = 18;
    fakes_open(c.world_size, 1);
    world_run(&c, &out);
    for (int32_t r = 0; r < c.world_size; ++r) {
      assert_int_equal(out.status[r], SLUICE_OK);
      for (int32_t direction = SLUICE_FORWARD; direction <= SLUICE_BACKWARD; ++direction) {
        assert_int_equal(fakes_waits(r, direction).reads, 0);
        if (c.world_size == 1) assert_int_equal(fakes_waits(r, direction).of_driver, 0);
      }
    }
    assert_int_equal(fakes_close(live, sizeof live), 0);
    world_free(&out);
  }
}

/* What the statistics say of both modes: what the same case sends on a CPU. Under a capacity it is more. */
static void CudaCapacity_BytesOnTheWire_AreThoseOfTheCpuInBothModes(void** state) {
  (void)state;
  for (int32_t w = 2; w <= 4; w += 2) {
    uint64_t exact = 0;
    for (int64_t capacity = 0; capacity <= 18; capacity += 18) {
      case_t c = world_small_case();
      result_t got, cpu;
      c.world_size = w, c.num_chunks = 2, c.capacity = capacity;
      run_on_fakes(&c, 1, &got);
      world_run(&c, &cpu);
      must_work(&c, &cpu);
      for (int32_t r = 0; r < w; ++r) assert_int_equal(got.bytes_sent[r], cpu.bytes_sent[r]);
      assert_true(got.bytes_sent[0] > exact);
      exact = got.bytes_sent[0];
      world_free(&got);
      world_free(&cpu);
    }
  }
}

static sluice_moe_config_t config_under(int64_t capacity) {
  sluice_moe_config_t config = rig_config();
  config.exchange_mode = SLUICE_EXCHANGE_CAPACITY, config.capacity_rows = capacity;
  return config;
}

static void close_all(rig_t* rig) {
  char live[200];
  rig_close(rig);
  if (fakes_close(live, sizeof live) != 0) fail_msg("left: %s", live);
  rig_use_machine(NULL, 0);
}

static void open_all(rig_t* rig, const sluice_moe_config_t* config) {
  fakes_open(1, 1);
  rig_use_machine(fakes_machine(), 0);
  if (rig_open(rig, NULL, config) != SLUICE_OK) fail_msg("%s", last_message());
}

/* ---- W ranks on rigs ------------------------------------------------------------------------------------------- */

typedef struct rank_s {
  int32_t rank, world_size;
  const sluice_moe_config_t* config;
  pthread_barrier_t* barrier;
  void (*body)(struct rank_s* rank, rig_t* rig);
  int64_t waits, queries;
  uint64_t want, got;
  sluice_status_t status;
  char why[600];
} rank_t;

static int is_local; /* ranks of run_ranks share a device and a local group */

static void* rank_main(void* argument) {
  rank_t* r = argument;
  rig_t rig;
  sluice_comm_t* comm = NULL;
  sluice_comm_config_t config;
  sluice_comm_config_init(&config, sizeof config);
  config.rank = r->rank, config.world_size = r->world_size, config.timeout_ns = 300000000000u;
  rig_use_machine(fakes_machine(), r->rank);
  if (r->world_size > 1) r->status = fakes_machine()->make_comm(r->rank, &config, &comm);
  if (r->status == SLUICE_OK) r->status = rig_open(&rig, comm, r->config);
  if (r->status != SLUICE_OK) abort();
  r->body(r, &rig);
  if (r->status != SLUICE_OK && r->why[0] == '\0') snprintf(r->why, sizeof r->why, "%s", last_message());
  pthread_barrier_wait(r->barrier);
  rig_close(&rig);
  sluice_comm_destroy(comm);
  return NULL;
}

static void run_ranks(int32_t world_size, const sluice_moe_config_t* config, void (*body)(rank_t*, rig_t*),
                      rank_t* ranks) {
  pthread_t threads[4];
  pthread_barrier_t barrier;
  char live[200], hazard[200];
  (is_local ? fakes_open_local : fakes_open)(world_size, 1);
  pthread_barrier_init(&barrier, NULL, (unsigned)world_size);
  for (int32_t r = 0; r < world_size; ++r) {
    ranks[r] = (rank_t){.rank = r, .world_size = world_size, .config = config, .barrier = &barrier, .body = body};
    pthread_create(&threads[r], NULL, rank_main, &ranks[r]);
  }
  for (int r = 0; r < world_size; ++r) pthread_join(threads[r], NULL);
  pthread_barrier_destroy(&barrier);
  int64_t hazards = sluice_fake_cuda_hazards(hazard, sizeof hazard);
  if (fakes_close(live, sizeof live) != 0) fail_msg("left: %s", live);
  for (int r = 0; r < world_size; ++r) {
    if (ranks[r].status != SLUICE_OK) fail_msg("rank %d: %d: %s", r, ranks[r].status, ranks[r].why);
  }
  if (hazards != 0) fail_msg("%lld hazards: %s", (long long)hazards, hazard);
}

/* Once the ranks have made such calls together, a forward and a backward wait for nothing: no read, no header. */
static void count_waits(rank_t* r, rig_t* rig) {
  sluice_step_t* step = NULL;
  r->status = rig_round(rig, NULL);
  pthread_barrier_wait(r->barrier);
  r->waits = sluice_fake_cuda_host_waits(), r->queries = sluice_fake_cuda_queries();
  pthread_barrier_wait(r->barrier);
  if (r->status == SLUICE_OK) r->status = rig_forward(rig, &step);
  if (r->status == SLUICE_OK) r->status = rig_backward(rig, step);
  pthread_barrier_wait(r->barrier);
  r->waits = sluice_fake_cuda_host_waits() - r->waits, r->queries = sluice_fake_cuda_queries() - r->queries;
  pthread_barrier_wait(r->barrier);
  sluice_step_drop(step);
}

static void CudaCapacity_CallsAfterTheFirst_HaveNoHeaderEither(void** state) {
  (void)state;
  const sluice_moe_config_t config = config_under(6), exact = rig_config();
  for (int w = 0; w < 3; ++w) {
    rank_t ranks[4];
    run_ranks(RANKS[w], &config, count_waits, ranks);
    for (int32_t r = 0; r < RANKS[w]; ++r) {
      assert_int_equal(ranks[r].waits, 0);
      assert_int_equal(ranks[r].queries, 0);
    }
    run_ranks(RANKS[w], &exact, count_waits, ranks);
    assert_int_equal(ranks[0].waits, RANKS[w]); /* one read in each rank's forward */
    if (RANKS[w] > 1) assert_true(ranks[0].queries > 0);
  }
}

/* ---- capture --------------------------------------------------------------------------------------------------- */

/* Tokens, routing and weights of round `round`: replays see other ones than the capture. Some routes are dropped, all
 * of one token, and from the second round on one expert is crowded. What no expert sees is NaN: a place that still
 * named the route of an earlier launch would show it. */
static void change_inputs(rig_t* rig, int round) {
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

static void poison(const rig_tensor_t* t) { memset(t->memory, 0xff, t->bytes); }
static uint64_t mix(uint64_t h, const rig_tensor_t* t) { return sluice_hash_bytes(h, t->memory, t->bytes); }
static void poison_outputs(rig_t* rig) {
  poison(&rig->out), poison(&rig->grad_tokens), poison(&rig->grad_weights);
  for (int kind = 0; kind < RIG_NUM_PARAMS; ++kind) {
    for (int32_t e = 0; e < rig->num_local; ++e) poison(&rig->grads[kind][e]);
  }
}
static uint64_t digest_gradients(const rig_t* rig) {
  uint64_t h = mix(mix(SLUICE_HASH_OF_NOTHING, &rig->grad_tokens), &rig->grad_weights);
  for (int kind = 0; kind < RIG_NUM_PARAMS; ++kind) {
    for (int32_t e = 0; e < rig->num_local; ++e) h = mix(h, &rig->grads[kind][e]);
  }
  return h;
}

static uint64_t digest_outputs(const rig_t* rig) { return mix(digest_gradients(rig), &rig->out); }

static sluice_status_t forward_and_backward(rig_t* rig) {
  sluice_step_t* step = NULL;
  sluice_status_t status = rig_forward(rig, &step);
  if (status == SLUICE_OK) status = rig_backward(rig, step);
  sluice_step_drop(step);
  return status;
}

enum { ROUNDS = 4 };
static uint64_t wanted[4][ROUNDS], wanted_gradients[4][ROUNDS]; /* by rank: of exact mode */

static void run_eagerly(rank_t* r, rig_t* rig) {
  for (int round = 0; round < ROUNDS && r->status == SLUICE_OK; ++round) {
    change_inputs(rig, round);
    poison_outputs(rig);
    r->status = forward_and_backward(rig);
    fakes_machine()->settle(r->rank);
    wanted[r->rank][round] = digest_outputs(rig);
    wanted_gradients[r->rank][round] = digest_gradients(rig);
  }
}

/* The context goes on eagerly beside the graph: a launch between a forward and its backward does not touch the step,
 * though the captured one was dropped. What was captured is counted in each launch. */
static void go_on_beside(rank_t* r, rig_t* rig, sluice_fake_graph_t* graph) {
  sluice_step_t* step = NULL;
  sluice_capacity_report_t report;
  sluice_capacity_report_init(&report, sizeof report);
  change_inputs(rig, 1);
  r->status = rig_forward(rig, &step);
  fakes_machine()->settle(r->rank);
  change_inputs(rig, 2);
  sluice_fake_cuda_launch_graph(graph, fakes_stream(r->rank));
  fakes_machine()->settle(r->rank);
  if (r->status == SLUICE_OK && digest_outputs(rig) != wanted[r->rank][2]) r->status = SLUICE_E_INTERNAL;
  change_inputs(rig, 1);
  if (r->status == SLUICE_OK) r->status = rig_backward(rig, step);
  sluice_step_drop(step);
  fakes_machine()->settle(r->rank);
  if (r->status == SLUICE_OK && digest_gradients(rig) != wanted_gradients[r->rank][1]) r->status = SLUICE_E_INTERNAL;
  if (r->status == SLUICE_OK) {
    r->status = sluice_moe_take_capacity_report(rig->moe, fakes_stream(r->rank), &report);
  }
  if (r->status == SLUICE_OK && report.num_forwards != 1 + ROUNDS + 3) r->status = SLUICE_E_INTERNAL;
}

/* One eager call of each kind, then everything into a graph; then each round is a launch. */
static void capture_and_replay(rank_t* r, rig_t* rig) {
  void* stream = fakes_stream(r->rank);
  sluice_fake_graph_t* graph = NULL;
  r->status = forward_and_backward(rig);
  fakes_machine()->settle(r->rank);
  poison_outputs(rig);
  pthread_barrier_wait(r->barrier);
  sluice_step_t* step = NULL;
  sluice_fake_cuda_begin_capture(stream);
  if (r->status == SLUICE_OK) r->status = rig_forward(rig, &step);
  if (r->status == SLUICE_OK) r->status = rig_backward(rig, step);
  if (r->rank % 2 == 0) sluice_step_drop(step);
  int code = sluice_fake_cuda_end_capture(stream, &graph);
  if (r->status == SLUICE_OK && code != 0) {
    r->status = SLUICE_E_INTERNAL;
    snprintf(r->why, sizeof r->why, "the capture ended with %d", code);
  }
  pthread_barrier_wait(r->barrier);
  r->waits = sluice_fake_cuda_host_waits(), r->queries = sluice_fake_cuda_queries();
  for (int round = 0; round < ROUNDS && r->status == SLUICE_OK; ++round) {
    change_inputs(rig, round);
    poison_outputs(rig);
    sluice_fake_cuda_launch_graph(graph, stream);
    fakes_machine()->settle(r->rank);
    if (digest_outputs(rig) == wanted[r->rank][round]) continue;
    r->status = SLUICE_E_INTERNAL;
    snprintf(r->why, sizeof r->why, "round %d has other bits than exact mode", round);
  }
  pthread_barrier_wait(r->barrier);
  r->waits = sluice_fake_cuda_host_waits() - r->waits, r->queries = sluice_fake_cuda_queries() - r->queries;
  pthread_barrier_wait(r->barrier);
  if (r->status == SLUICE_OK && r->rank % 2 == 0) {
    r->status = forward_and_backward(rig); /* blocks are given and taken again */
  } else if (r->status == SLUICE_OK) {
    r->status = forward_and_backward(rig);
    sluice_step_drop(step); /* a captured one, dropped later: nothing is given */
  }
  fakes_machine()->settle(r->rank);
  if (r->status == SLUICE_OK) go_on_beside(r, rig, graph);
  sluice_fake_cuda_destroy_graph(graph);
}

static void CudaGraph_CapturedPasses_ReplayWithOtherRoutingAsExactMode(void** state) {
  (void)state;
  const int32_t policies[][2] = {{SLUICE_RESTORE_KEEP, SLUICE_RESTORE_KEEP},
                                 {SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_OFFLOAD},
                                 {SLUICE_RESTORE_REDISPATCH, SLUICE_RESTORE_RECOMPUTE}};
  for (int w = 0; w < 3; ++w) {
    for (int i = 0; i < 5; ++i) { /* callback experts, whose work is launched again, with the first and the last */
      const int p = i < 3 ? i : i == 3 ? 0 : 2;
      rank_t ranks[4];
      sluice_moe_config_t config = rig_config();
      config.num_chunks = CHUNKS[(w + p) % 3], config.wgrad_mode = p % 2;
      config.restore_input = policies[p][0], config.restore_pre_activation = policies[p][1];
      if (i >= 3) config.callback_experts = 1, config.bias = config.gated = 0;
      run_ranks(RANKS[w], &config, run_eagerly, ranks);
      config.exchange_mode = SLUICE_EXCHANGE_CAPACITY, config.capacity_rows = 12;
      run_ranks(RANKS[w], &config, capture_and_replay, ranks);
      assert_int_equal(ranks[0].waits, 0);
      assert_int_equal(ranks[0].queries, 0);
    }
  }
}

/* With any wait of the capture left out it either ends in an error, or its replay has a hazard. But for those that
 * nothing needs: as in cuda_layer_test. */
static void CudaGraph_AnyWaitLeftOut_IsSeen(void** state) {
  (void)state;
  int64_t waits = 1, seen = 0;
  for (int64_t nth = -1; nth < waits; ++nth) {
    rig_t rig;
    char text[200];
    sluice_moe_config_t config = config_under(12);
    config.num_chunks = 3, config.restore_input = config.restore_pre_activation = SLUICE_RESTORE_OFFLOAD;
    open_all(&rig, &config);
    assert_int_equal(forward_and_backward(&rig), SLUICE_OK);
    rig_reset(&rig);
    sluice_fake_graph_t* graph = NULL;
    sluice_fake_cuda_forget_accesses();
    sluice_fake_cuda_begin_capture(fakes_stream(0));
    sluice_fake_cuda_drop_wait(nth);
    sluice_status_t status = forward_and_backward(&rig);
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

/* ---- what a capture does not take ------------------------------------------------------------------------------ */

static void end_capture(int want) {
  sluice_fake_graph_t* graph = NULL;
  assert_int_equal(sluice_fake_cuda_end_capture(fakes_stream(0), &graph), want);
  sluice_fake_cuda_destroy_graph(graph);
}

#define REFUSED(call, text)                                                   \
  do {                                                                        \
    assert_int_equal(call, SLUICE_E_STATE);                                   \
    if (strstr(last_message(), text) == NULL) fail_msg("%s", last_message()); \
  } while (0)

/* None of them spoils what the host captures otherwise, and the context works on. */
static void CudaGraph_WhatACaptureCannotTake_IsRefusedByName(void** state) {
  (void)state;
  rig_t rig;
  sluice_step_t *step = NULL, *other = NULL;
  sluice_moe_config_t exact = rig_config(), config = config_under(6);
  open_all(&rig, &exact);
  assert_int_equal(rig_forward(&rig, &step), SLUICE_OK);
  sluice_fake_cuda_begin_capture(fakes_stream(0));
  REFUSED(rig_forward(&rig, &other), "set exchange_mode to SLUICE_EXCHANGE_CAPACITY");
  REFUSED(rig_backward(&rig, step), "set exchange_mode to SLUICE_EXCHANGE_CAPACITY");
  end_capture(0);
  assert_int_equal(rig_backward(&rig, step), SLUICE_OK);
  sluice_step_drop(step);
  assert_int_equal(rig_swap_layer(&rig, &config), SLUICE_OK);
  sluice_fake_cuda_begin_capture(fakes_stream(0));
  REFUSED(rig_forward(&rig, &step), "no such forward has run outside a capture yet");
  end_capture(0);
  assert_int_equal(rig_forward(&rig, &step), SLUICE_OK);
  sluice_fake_cuda_begin_capture(fakes_stream(0));
  REFUSED(rig_backward(&rig, step), "no such backward has run outside a capture yet");
  end_capture(0);
  assert_int_equal(rig_backward(&rig, step), SLUICE_OK);
  sluice_step_drop(step);
  /* One step was outstanding outside: two are more. */
  sluice_fake_cuda_begin_capture(fakes_stream(0));
  assert_int_equal(rig_forward(&rig, &step), SLUICE_OK);
  REFUSED(rig_forward(&rig, &other), "lies idle, and a capture cannot make one");
  sluice_capacity_report_t report;
  sluice_capacity_report_init(&report, sizeof report);
  REFUSED(sluice_moe_take_capacity_report(rig.moe, fakes_stream(0), &report), "captured");
  end_capture(0);
  sluice_step_drop(step);
  /* More tokens than ever outside, captured or not: the graph has its buffers. */
  rig.num_tokens = 60;
  rig_reset(&rig);
  sluice_fake_cuda_begin_capture(fakes_stream(0));
  REFUSED(rig_forward(&rig, &step), "a captured graph uses the");
  end_capture(0);
  REFUSED(rig_forward(&rig, &step), "make the largest call once before the first capture");
  rig.num_tokens = 6;
  rig_reset(&rig);
  assert_int_equal(rig_round(&rig, NULL), SLUICE_OK);
  close_all(&rig);
}

static void capture_on_local(rank_t* r, rig_t* rig) {
  sluice_step_t* step = NULL;
  sluice_fake_graph_t* graph = NULL;
  r->status = rig_round(rig, NULL);
  pthread_barrier_wait(r->barrier);
  sluice_fake_cuda_begin_capture(fakes_stream(r->rank));
  sluice_status_t status = rig_forward(rig, &step);
  (void)snprintf(r->why, sizeof r->why, "%d: %s", status, last_message());
  if (status != SLUICE_E_UNSUPPORTED || strstr(r->why, "of a local communicator") == NULL) {
    r->status = SLUICE_E_INTERNAL;
  }
  if (sluice_fake_cuda_end_capture(fakes_stream(r->rank), &graph) != 0) r->status = SLUICE_E_INTERNAL;
  sluice_fake_cuda_destroy_graph(graph);
  pthread_barrier_wait(r->barrier);
  if (r->status == SLUICE_OK) r->status = rig_round(rig, NULL); /* the group works on */
}

static void CudaGraph_LocalCommunicator_IsRefusedByName(void** state) {
  (void)state;
  const sluice_moe_config_t config = config_under(6);
  rank_t ranks[4];
  is_local = 1;
  run_ranks(2, &config, capture_on_local, ranks);
  is_local = 0;
}

/* Steps of before may go in a capture: no event of theirs is recorded or waited for in it. */
static void CudaGraph_EagerStepDroppedInACapture_DoesNotSpoilIt(void** state) {
  (void)state;
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

/* The fake itself: what a capture does not allow fails in it. */
static void FakeCapture_IllegalCalls_FailAndSpoilIt(void** state) {
  (void)state;
  fakes_open(1, 1);
  const sluice_cuda_driver_t* cu = sluice_fake_cuda_driver();
  void *context = NULL, *before = NULL, *inside = NULL, *stream = fakes_stream(0), *other = NULL;
  unsigned long long pointer = 0;
  assert_int_equal(cu->cuDevicePrimaryCtxRetain(&context, 100), 0);
  assert_int_equal(cu->cuCtxPushCurrent_v2(context), 0);
  assert_int_equal(cu->cuEventCreate(&before, SLUICE_CU_EVENT_DISABLE_TIMING), 0);
  assert_int_equal(cu->cuEventCreate(&inside, SLUICE_CU_EVENT_DISABLE_TIMING), 0);
  assert_int_equal(cu->cuStreamCreateWithPriority(&other, SLUICE_CU_STREAM_NON_BLOCKING, 0), 0);
  assert_int_equal(cu->cuEventRecord(before, stream), 0);
  int here = 0;
  for (int which = 0; which < 7; ++which) {
    static const int codes[] = {900, 900, 900, 900, 900, 905, 900};
    sluice_fake_cuda_begin_capture(stream);
    int code = which == 0   ? cu->cuMemAlloc_v2(&pointer, 64)
               : which == 1 ? cu->cuEventSynchronize(before)
               : which == 2 ? cu->cuStreamSynchronize(stream)
               : which == 3 ? cu->cuEventQuery(before)
               : which == 4 ? cu->cuMemHostAlloc((void**)&pointer, 64, 0)
               : which == 5 ? cu->cuStreamWaitEvent(stream, before, 0)
                            : cu->cuMemcpyAsync((unsigned long long)(uintptr_t)&here, pointer, 4, stream);
    assert_int_equal(code, codes[which]);
    end_capture(901);
  }
  /* A stream that is pulled in and not joined; an event of the capture after it. */
  sluice_fake_cuda_begin_capture(stream);
  assert_int_equal(cu->cuEventRecord(inside, stream), 0);
  assert_int_equal(cu->cuStreamWaitEvent(other, inside, 0), 0);
  assert_int_equal(cu->cuEventRecord(before, other), 0);
  end_capture(904);
  assert_int_equal(cu->cuStreamWaitEvent(other, inside, 0), 907);
  assert_int_equal(cu->cuEventRecord(inside, stream), 0);
  assert_int_equal(cu->cuStreamWaitEvent(other, inside, 0), 0);
  assert_int_equal(cu->cuStreamDestroy_v2(other), 0);
  assert_int_equal(cu->cuEventDestroy_v2(before), 0);
  assert_int_equal(cu->cuEventDestroy_v2(inside), 0);
  assert_int_equal(cu->cuCtxPopCurrent_v2(&context), 0);
  assert_int_equal(cu->cuDevicePrimaryCtxRelease_v2(100), 0);
  char live[200];
  if (fakes_close(live, sizeof live) != 0) fail_msg("left: %s", live);
}

/* That nothing is found means something: as in cuda_layer_test. */
static void CudaCapacity_AnyWaitLeftOut_LeavesAHazard(void** state) {
  (void)state;
  char text[200], live[200];
  int64_t found = 0, waits = 1;
  for (int64_t nth = -1; nth < waits; ++nth) {
    case_t c = world_small_case();
    result_t out;
    c.num_chunks = 3, c.bias = 1, c.capacity = 18;
    c.restore_input = c.restore_pre_activation = SLUICE_RESTORE_OFFLOAD;
    fakes_open(1, 1);
    sluice_fake_cuda_drop_wait(nth);
    c.machine = fakes_machine();
    world_run(&c, &out);
    if (nth < 0) waits = sluice_fake_cuda_waits();
    int64_t hazards = sluice_fake_cuda_hazards(text, sizeof text);
    if (nth < 0) assert_int_equal(hazards, 0);
    found += hazards > 0;
    assert_int_equal(fakes_close(live, sizeof live), 0);
    world_free(&out);
  }
  printf("%lld of %lld waits are needed\n", (long long)found, (long long)waits);
  assert_true(waits - found <= 9); /* as there, and the one of the report for the backward: both on one stream */
}

/* ---- overflow -------------------------------------------------------------------------------------------------- */

static void CudaCapacity_RoutesBeyondItAndBadIds_AreCountedAndReported(void** state) {
  (void)state;
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
  sluice_capacity_report_t report;
  sluice_capacity_report_init(&report, sizeof report);
  assert_int_equal(sluice_moe_take_capacity_report(rig.moe, fakes_stream(0), &report), SLUICE_E_CAPACITY);
  assert_non_null(strstr(last_message(), "layer 3, rank 0: 12 of 24 routes in 2 forwards"));
  assert_int_equal(report.num_forwards, 2);
  assert_int_equal(report.num_routes, 24);
  assert_int_equal(report.num_dropped, 12); /* in each chunk two of expert 2, one of 0 or 1 */
  assert_int_equal(report.most_rows, 3);
  assert_int_equal(report.most_expert, 2);
  ids[7] = 4;
  assert_int_equal(rig_forward(&rig, &step), SLUICE_OK);
  sluice_step_drop(step);
  assert_int_equal(sluice_moe_take_capacity_report(rig.moe, fakes_stream(0), &report), SLUICE_E_INVALID_ARGUMENT);
  assert_non_null(strstr(last_message(), "expert_ids[3, 1] was out of range"));
  assert_int_equal(report.bad_route, 7);
  assert_int_equal(report.num_forwards, 1);
  assert_int_equal(sluice_moe_take_capacity_report(rig.moe, fakes_stream(0), &report), SLUICE_OK);
  assert_int_equal(report.num_forwards, 0);
  close_all(&rig);
}

int main(void) {
  setenv("SLUICE_POISON", "1", 1); /* slots are NaN at the start of each pass: padding must be written */
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(CudaCapacity_RanksAndChunks_HaveTheBitsOfExact),
      cmocka_unit_test(CudaCapacity_CallbackExperts_HaveTheBitsOfExact),
      cmocka_unit_test(CudaCapacity_EveryPolicy_HasTheBitsOfExact),
      cmocka_unit_test(CudaCapacity_OddShapesSkewAndOwners_HaveTheBitsOfExact),
      cmocka_unit_test(CudaCapacity_HalvesAndOutstandingSteps_HaveTheBitsOfExact),
      cmocka_unit_test(CudaCapacity_HostWaits_NoneInForwardAndBackward),
      cmocka_unit_test(CudaCapacity_BytesOnTheWire_AreThoseOfTheCpuInBothModes),
      cmocka_unit_test(CudaCapacity_CallsAfterTheFirst_HaveNoHeaderEither),
      cmocka_unit_test(CudaGraph_CapturedPasses_ReplayWithOtherRoutingAsExactMode),
      cmocka_unit_test(CudaGraph_AnyWaitLeftOut_IsSeen),
      cmocka_unit_test(CudaGraph_WhatACaptureCannotTake_IsRefusedByName),
      cmocka_unit_test(CudaGraph_LocalCommunicator_IsRefusedByName),
      cmocka_unit_test(CudaGraph_EagerStepDroppedInACapture_DoesNotSpoilIt),
      cmocka_unit_test(FakeCapture_IllegalCalls_FailAndSpoilIt),
      cmocka_unit_test(CudaCapacity_AnyWaitLeftOut_LeavesAHazard),
      cmocka_unit_test(CudaCapacity_RoutesBeyondItAndBadIds_AreCountedAndReported),
  };
  if (getenv("CMOCKA_TEST_FILTER") != NULL) cmocka_set_test_filter(getenv("CMOCKA_TEST_FILTER"));
  return cmocka_run_group_tests(tests, NULL, NULL);
}
