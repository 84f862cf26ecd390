/* Graph mode: layers under a capacity on a CUDA context, executed by the fake driver, cuBLAS and NCCL. The oracle is
 * the same layer in exact mode on the same fakes. Nothing here says anything about a GPU's speed. What a capture does
 * is in cuda_graph_test. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/device/cuda/fake/fake_cuda.h"
#include "capi/test/cuda/fake_rigs.h"
#include "capi/test/cuda/fakes.h"
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

static void CudaCapacity_DgradThenWgradAndOutstandingSteps_HaveTheBitsOfExact(void** state) {
  (void)state;
  for (int w = 0; w < 2; ++w) {
    case_t c = world_small_case();
    c.world_size = RANKS[w], c.num_chunks = 2, c.separate_wgrad = 1, c.gated = 1, c.bias = 1;
    check(&c);
    c.separate_wgrad = 0, c.outstanding = 3, c.accumulate = 1, c.dtype = SLUICE_DTYPE_BF16, c.grad_f32 = 1;
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
      cmocka_unit_test(CudaCapacity_DgradThenWgradAndOutstandingSteps_HaveTheBitsOfExact),
      cmocka_unit_test(CudaCapacity_HostWaits_NoneInForwardAndBackward),
      cmocka_unit_test(CudaCapacity_BytesOnTheWire_AreThoseOfTheCpuInBothModes),
      cmocka_unit_test(CudaCapacity_CallsAfterTheFirst_HaveNoHeaderEither),
      cmocka_unit_test(CudaCapacity_AnyWaitLeftOut_LeavesAHazard),
      cmocka_unit_test(CudaCapacity_RoutesBeyondItAndBadIds_AreCountedAndReported),
  };
  if (getenv("CMOCKA_TEST_FILTER") != NULL) cmocka_set_test_filter(getenv("CMOCKA_TEST_FILTER"));
  return cmocka_run_group_tests(tests, NULL, NULL);
}
