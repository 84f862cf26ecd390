/* Layers whose tokens travel in two levels on a CUDA context, on fakes: the bits of the CPU's, bytes on the wire, what
 * is read, budgets and plans. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/device/cuda/fake/fake_cuda.h"
#include "capi/test/world/budget_suite.h"
#include "capi/test/world/checks.h"
#include "capi/test/cuda/fakes.h"

enum { RANKS = 4, PER_NODE = 2 };

static case_t base_case(void) {
  case_t c = world_small_case();
  c.world_size = RANKS, c.ranks_per_node = PER_NODE, c.top_k = 4, c.bias = 1, c.deduplicate = SLUICE_DEDUPLICATE_NODES;
  c.dtype = SLUICE_DTYPE_F64;            /* GEMMs of the fake cuBLAS then sum as gemm ref does */
  c.activation = SLUICE_ACTIVATION_RELU; /* no function whose last bits are a library's */
  return c;
}

/* On fakes: no hazard between any two accesses, and nothing left. */
static void run_any(const case_t* c, result_t* out) {
  char text[200], live[200];
  case_t there = *c;
  there.ranks_per_node = c->world_size == RANKS ? PER_NODE : 0;
  fakes_open(c->world_size, 1);
  there.machine = fakes_machine();
  world_run(&there, out);
  if (sluice_fake_cuda_hazards(text, sizeof text) != 0) fail_msg("hazard: %s", text);
  if (fakes_close(live, sizeof live) != 0) fail_msg("left: %s", live);
}

static void check_bits(const case_t* c) {
  result_t got, cpu;
  run_any(c, &got);
  must_work(c, &got);
  world_run(c, &cpu);
  must_work(c, &cpu);
  if (!world_identical(c, &got, &cpu, 1)) {
    fail_msg("n %d K %d drop %d repeat %d hot %d: other bits than on the CPU, distance %g", c->num_chunks, c->top_k,
             c->drop_every, c->repeat_every, c->hot_expert, world_distance(c, &got, &cpu));
  }
  for (int32_t r = 0; r < c->world_size; ++r) assert_int_equal(got.bytes_sent[r], cpu.bytes_sent[r]);
  world_free(&got);
  world_free(&cpu);
}

static void CudaTwoLevels_ChunksAndTopK_HaveTheBitsOfTheCpu(void** state) {
  (void)state;
  for (int32_t n = 1; n <= 4; ++n) {
    for (int32_t k = 1; k <= 8; k *= 2) {
      case_t c = base_case();
      c.num_chunks = n, c.top_k = k, c.wgrad_mode = n % 2;
      check_bits(&c);
    }
  }
}

static void CudaTwoLevels_EveryPolicyAndHalves_HaveTheBitsOfTheCpu(void** state) {
  (void)state;
  static const int32_t pre_activation[] = {SLUICE_RESTORE_KEEP, SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_RECOMPUTE};
  for (int32_t p = 0; p < 9; ++p) {
    case_t c = base_case();
    c.num_chunks = 1 + p % 3, c.gated = p % 2, c.restore_input = p / 3,
    c.restore_pre_activation = pre_activation[p % 3];
    c.separate_wgrad = p % 4 == 1, c.outstanding = 1 + p % 2;
    check_bits(&c);
  }
}

static void CudaTwoLevels_DroppedRepeatedHotAndSilent_HaveTheBitsOfTheCpu(void** state) {
  (void)state;
  case_t c = base_case();
  c.num_chunks = 3, c.drop_every = 3;
  check_bits(&c);
  c.drop_every = 1;
  check_bits(&c);
  c.drop_every = 0, c.repeat_every = 1;
  check_bits(&c);
  c.repeat_every = 0, c.hot_expert = 11, c.uneven_owners = 1;
  check_bits(&c);
  c.hot_expert = -1, c.tokens[1] = 0, c.num_chunks = 16;
  check_bits(&c);
  c.tokens[0] = c.tokens[2] = c.tokens[3] = 0;
  check_bits(&c);
}

/* ---- under budgets and plans ---- */

static budget_suite_t suite_of(void) {
  budget_suite_t suite = {.base = budget_base_case(), .run = run_any, .least_ranks = RANKS, .is_slow = 1};
  suite.base.world_size = RANKS, suite.base.model_width = 4, suite.base.hidden_width = 8;
  for (int32_t r = 0; r < RANKS; ++r) suite.base.tokens[r] /= 2;
  suite.base.top_k = 4, suite.base.deduplicate = SLUICE_DEDUPLICATE_NODES;
  suite.base.machine = fakes_machine();
  return suite;
}

static void CudaTwoLevelsBudget_FromTheSmallestUp_ResultsAreTheSame(void** state) {
  (void)state;
  const budget_suite_t suite = suite_of();
  budget_from_the_smallest_up(&suite);
}

static void CudaTwoLevelsBudget_OddShapesAndPolicies_ResultsAreTheSame(void** state) {
  (void)state;
  const budget_suite_t suite = suite_of();
  budget_odd_shapes_and_policies(&suite);
}

/* The bytes that a plan of its own names are the device allocator's peak. Each pass reads the tokens by rank, a forward
 * the counts besides. */
static void CudaTwoLevelsPlan_EveryPolicy_PeakIsPlannedToTheByte(void** state) {
  (void)state;
  static const int32_t pre_activation[] = {SLUICE_RESTORE_KEEP, SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_RECOMPUTE};
  for (int32_t i = 0; i < 9; ++i) {
    case_t c = base_case();
    char live[200];
    result_t got, plain;
    c.dtype = i % 2 ? SLUICE_DTYPE_BF16 : SLUICE_DTYPE_F32;
    for (int32_t r = 0; r < RANKS; ++r) c.tokens[r] = 48;
    c.hot_expert = i % 4 == 3 ? 1 : -1, c.repeat_every = i % 5 == 4 ? 2 : 0;
    run_any(&c, &plain);
    must_work(&c, &plain);
    sluice_plan_config_t plan;
    sluice_plan_config_init(&plan, sizeof plan);
    plan.max_tokens = 48, plan.max_outstanding = 1, plan.num_chunks = 1 + i % 3;
    plan.restore_input = i % 3, plan.restore_pre_activation = pre_activation[i / 3];
    plan.memory_budget = (uint64_t)1 << 40; /* so that steps take blocks of its capacities */
    c.plan = &plan, c.machine = fakes_machine();
    fakes_open(c.world_size, 1);
    world_run(&c, &got);
    must_work(&c, &got);
    for (int32_t r = 0; r < c.world_size; ++r) {
      assert_int_equal(fakes_waits(r, SLUICE_FORWARD).reads, 2);
      assert_int_equal(fakes_waits(r, SLUICE_BACKWARD).reads, 1);
      assert_int_equal(got.peak_bytes[r], got.planned_bytes[r]);
    }
    if (fakes_close(live, sizeof live) != 0) fail_msg("left: %s", live);
    assert_true(world_identical(&c, &got, &plain, 0));
    world_free(&got);
    world_free(&plain);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(CudaTwoLevels_ChunksAndTopK_HaveTheBitsOfTheCpu),
      cmocka_unit_test(CudaTwoLevels_EveryPolicyAndHalves_HaveTheBitsOfTheCpu),
      cmocka_unit_test(CudaTwoLevels_DroppedRepeatedHotAndSilent_HaveTheBitsOfTheCpu),
      cmocka_unit_test(CudaTwoLevelsBudget_FromTheSmallestUp_ResultsAreTheSame),
      cmocka_unit_test(CudaTwoLevelsBudget_OddShapesAndPolicies_ResultsAreTheSame),
      cmocka_unit_test(CudaTwoLevelsPlan_EveryPolicy_PeakIsPlannedToTheByte),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
