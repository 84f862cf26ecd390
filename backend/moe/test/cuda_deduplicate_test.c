/* Deduplicated layers on a CUDA context, on fakes: the bits of the CPU's, bytes on the wire, budgets and plans,
 * what is refused. The layer's suite (cuda_layer_suite.c) holds them against the reference. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/device/cuda/fake/fake_cuda.h"
#include "backend/moe/layer/layer_life.h"
#include "backend/moe/routing/binding.h"
#include "backend/moe/routing/offsets.h"
#include "backend/moe/routing/token_copies.h"
#include "backend/moe/run/make_layer.h"
#include "capi/test/cuda/fakes.h"
#include "capi/test/rig/rig.h"
#include "capi/test/world/budget_suite.h"
#include "capi/test/world/checks.h"

static case_t base_case(void) {
  case_t c = world_small_case();
  c.world_size = 2, c.top_k = 4, c.bias = 1, c.deduplicate = 1;
  c.dtype = SLUICE_DTYPE_F64;            /* GEMMs of the fake cuBLAS then sum as gemm ref does */
  c.activation = SLUICE_ACTIVATION_RELU; /* no function whose last bits are a library's */
  return c;
}

/* On fakes: no hazard between any two accesses, and nothing left. */
static void run_any(const case_t* c, result_t* out) {
  char text[200], live[200];
  case_t there = *c;
  fakes_open(c->world_size, 1);
  there.machine = fakes_machine();
  world_run(&there, out);
  if (sluice_fake_cuda_hazards(text, sizeof text) != 0) fail_msg("hazard: %s", text);
  if (fakes_close(live, sizeof live) != 0) fail_msg("left: %s", live);
}

static void run(const case_t* c, result_t* out) {
  run_any(c, out);
  must_work(c, out);
}

static void check_bits(const case_t* c) {
  result_t got, cpu;
  run(c, &got);
  world_run(c, &cpu);
  must_work(c, &cpu);
  if (!world_identical(c, &got, &cpu, 1)) {
    fail_msg("W %d n %d K %d T %lld drop %d repeat %d: other bits than on the CPU, distance %g", c->world_size,
             c->num_chunks, c->top_k, (long long)c->tokens[0], c->drop_every, c->repeat_every,
             world_distance(c, &got, &cpu));
  }
  for (int32_t r = 0; r < c->world_size; ++r) assert_int_equal(got.bytes_sent[r], cpu.bytes_sent[r]);
  world_free(&got);
  world_free(&cpu);
}

static void CudaDeduplicate_RanksChunksAndTopK_HaveTheBitsOfTheCpu(void** state) {
  (void)state;
  for (int32_t w = 1; w <= 4; ++w) {
    for (int32_t n = 1; n <= 4; ++n) {
      case_t c = base_case();
      c.world_size = w, c.num_chunks = n, c.top_k = w + n - 1, c.wgrad_mode = n % 2;
      check_bits(&c);
    }
  }
}

static void CudaDeduplicate_DroppedRepeatedHotAndSilent_HaveTheBitsOfTheCpu(void** state) {
  (void)state;
  for (int32_t w = 2; w <= 4; w += 2) {
    case_t c = base_case();
    c.world_size = w, c.num_chunks = 3, c.drop_every = 3;
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
}

/* Rows reach the experts unchanged: gradients there, and of route weights, have the bits of a layer without. */
static void CudaDeduplicate_AtTheExperts_HasTheBitsWithout(void** state) {
  (void)state;
  for (int32_t w = 2; w <= 4; w += 2) {
    case_t c = base_case(), without;
    result_t got, plain;
    c.world_size = w, c.num_chunks = 3, c.gated = 1, c.dtype = SLUICE_DTYPE_BF16;
    without = c, without.deduplicate = 0, without.chunking = SLUICE_CHUNKING_TOKENS;
    run(&c, &got);
    run(&without, &plain);
    size_t elements = (size_t)(c.num_experts * c.hidden_width * c.model_width);
    for (int32_t r = 0; r < w; ++r) {
      assert_memory_equal(got.grad_weights[r], plain.grad_weights[r], (size_t)(c.tokens[r] * c.top_k) * sizeof(double));
      assert_true(got.bytes_sent[r] < plain.bytes_sent[r]);
    }
    for (int i = 0; i < 3; ++i)
      assert_memory_equal(got.grad_params[i], plain.grad_params[i], elements * sizeof(double));
    world_free(&got);
    world_free(&plain);
  }
}

static void CudaDeduplicate_AnyNumberOfChunks_HasTheSameBits(void** state) {
  (void)state;
  for (int32_t dtype = SLUICE_DTYPE_F32; dtype <= SLUICE_DTYPE_F16; ++dtype) {
    case_t c = base_case();
    result_t one, many;
    c.world_size = 4, c.dtype = dtype, c.activation = SLUICE_ACTIVATION_SILU, c.gated = 1;
    run(&c, &one);
    for (c.num_chunks = 2; c.num_chunks <= 7; c.num_chunks += 5) {
      run(&c, &many);
      assert_true(world_identical(&c, &one, &many, 0));
      world_free(&many);
    }
    world_free(&one);
  }
}

/* ---- numbers of a rank that does not keep to the rules ---- */

/* Rank 0 of two that own an expert each; rank 1 sends three rows of two routes a token. */
static void CudaDeduplicate_NumbersOfAPeerThatDoNotFit_NameTheRank(void** state) {
  (void)state;
  rig_t rig;
  sluice_moe_config_t config = rig_config();
  config.num_experts = 2, config.deduplicate = 1, config.num_chunks = 1;
  fakes_open(1, 1);
  rig_use_machine(fakes_machine(), 0);
  if (rig_open(&rig, NULL, &config) != SLUICE_OK) fail_msg("%s", last_message());
  sluice_context_t* context = rig.context;
  sluice_moe_t* moe = NULL;
  context->world_size = 2;
  assert_int_equal(sluice_layer_create(context, &config, NULL, &moe), SLUICE_OK);
  static const struct {
    int32_t token_copies; /* of rank 1, for its three rows */
    int is_good;
  } cases[] = {{2, 1}, {3, 1}, {1, 0}, {0, 0}, {4, 0}, {-1, 0}, {INT32_MAX, 0}, {INT32_MIN, 0}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
    int32_t received_rows[] = {0, 3}, sent_rows[] = {0, 0};
    int32_t sent[] = {0, 0}, received[] = {0, cases[i].token_copies};
    sluice_binding_t b = {.memory = &moe->context->pass_memory};
    assert_int_equal(sluice_binding_of_rows(moe, (const int64_t[]){3}, &b), SLUICE_OK);
    b.first_token[0] = 0; /* what is kept of a forward says it in a real one */
    b.recv_counts = received_rows, b.send_counts = sent_rows;
    b.token_copies.send_counts = sent, b.token_copies.recv_counts = received;
    assert_int_equal(sluice_token_copies_restore_on_device(&b, NULL), cases[i].is_good ? SLUICE_OK : SLUICE_E_MISMATCH);
    if (cases[i].is_good) continue;
    assert_non_null(strstr(last_message(), "layer 3: the token copies that rank 1 announced do not fit its rows"));
    assert_int_equal(last_peer(), 1);
  }
  sluice_layer_release(moe);
  context->world_size = 1;
  rig_close(&rig);
  char live[200];
  if (fakes_close(live, sizeof live) != 0) fail_msg("left: %s", live);
  rig_use_machine(NULL, 0);
}

/* ---- under budgets and plans ---- */

/* is_small: rows are next to nothing beside the GEMMs' workspace. */
static budget_suite_t suite_of(int is_small) {
  budget_suite_t suite = {.base = budget_base_case(), .run = run_any, .least_ranks = 2, .is_slow = 1};
  suite.base.model_width = is_small ? 4 : 12, suite.base.hidden_width = is_small ? 8 : 24;
  for (int r = 0; r < 4 && is_small; ++r) suite.base.tokens[r] /= 2;
  suite.base.top_k = 4, suite.base.deduplicate = 1;
  suite.base.machine = fakes_machine();
  return suite;
}

static void CudaDeduplicateBudget_FromTheSmallestUp_ResultsAreTheSame(void** state) {
  (void)state;
  const budget_suite_t suite = suite_of(1);
  budget_from_the_smallest_up(&suite);
}

static void CudaDeduplicateBudget_OneHotExpert_StaysWithinThePlan(void** state) {
  (void)state;
  const budget_suite_t suite = suite_of(0);
  budget_one_hot_expert(&suite);
}

static void CudaDeduplicateBudget_OddShapesAndPolicies_ResultsAreTheSame(void** state) {
  (void)state;
  const budget_suite_t suite = suite_of(1);
  budget_odd_shapes_and_policies(&suite);
}

/* The bytes that a plan of its own names are the device allocator's peak, and the routes still take one read. */
static void CudaDeduplicatePlan_EveryPolicy_PeakIsPlannedToTheByte(void** state) {
  (void)state;
  static const int32_t pre_activation[] = {SLUICE_RESTORE_KEEP, SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_RECOMPUTE};
  for (int i = 0; i < 18; i += i < 9 ? 1 : 2) {
    case_t c = base_case();
    char live[200];
    result_t got, plain;
    c.dtype = i % 2 ? SLUICE_DTYPE_BF16 : SLUICE_DTYPE_F32, c.world_size = i < 9 ? 2 : 4;
    c.tokens[0] = c.tokens[1] = c.tokens[2] = c.tokens[3] = 48;
    c.hot_expert = i % 4 == 3 ? 1 : -1, c.repeat_every = i % 5 == 4 ? 2 : 0;
    run(&c, &plain);
    sluice_plan_config_t plan;
    sluice_plan_config_init(&plan, sizeof plan);
    plan.max_tokens = 48, plan.max_outstanding = 1, plan.num_chunks = 1 + i % 3;
    plan.restore_input = i % 3, plan.restore_pre_activation = pre_activation[i / 3 % 3];
    plan.memory_budget = (uint64_t)1 << 40; /* so that steps take blocks of its capacities */
    c.plan = &plan, c.machine = fakes_machine();
    fakes_open(c.world_size, 1);
    world_run(&c, &got);
    must_work(&c, &got);
    for (int32_t r = 0; r < c.world_size; ++r) {
      assert_int_equal(fakes_waits(r, SLUICE_FORWARD).reads, 1);
      assert_int_equal(fakes_waits(r, SLUICE_BACKWARD).reads, 0);
      if (got.peak_bytes[r] != got.planned_bytes[r]) {
        fail_msg("case %d rank %d: peak %llu, planned %llu", i, r, (unsigned long long)got.peak_bytes[r],
                 (unsigned long long)got.planned_bytes[r]);
      }
    }
    if (fakes_close(live, sizeof live) != 0) fail_msg("left: %s", live);
    assert_true(world_identical(&c, &got, &plain, 0));
    world_free(&got);
    world_free(&plain);
  }
}

/* ---- what is refused ---- */

static void CudaDeduplicate_UnderACapacity_IsRefusedByName(void** state) {
  (void)state;
  case_t c = base_case();
  result_t out;
  c.capacity = 18;
  run_any(&c, &out);
  for (int32_t r = 0; r < c.world_size; ++r) {
    assert_int_equal(out.status[r], SLUICE_E_UNSUPPORTED);
    assert_non_null(strstr(out.message[r], "set deduplicate to 0, or exchange_mode to exact"));
  }
  world_free(&out);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(CudaDeduplicate_RanksChunksAndTopK_HaveTheBitsOfTheCpu),
      cmocka_unit_test(CudaDeduplicate_DroppedRepeatedHotAndSilent_HaveTheBitsOfTheCpu),
      cmocka_unit_test(CudaDeduplicate_AtTheExperts_HasTheBitsWithout),
      cmocka_unit_test(CudaDeduplicate_AnyNumberOfChunks_HasTheSameBits),
      cmocka_unit_test(CudaDeduplicate_NumbersOfAPeerThatDoNotFit_NameTheRank),
      cmocka_unit_test(CudaDeduplicateBudget_FromTheSmallestUp_ResultsAreTheSame),
      cmocka_unit_test(CudaDeduplicateBudget_OneHotExpert_StaysWithinThePlan),
      cmocka_unit_test(CudaDeduplicateBudget_OddShapesAndPolicies_ResultsAreTheSame),
      cmocka_unit_test(CudaDeduplicatePlan_EveryPolicy_PeakIsPlannedToTheByte),
      cmocka_unit_test(CudaDeduplicate_UnderACapacity_IsRefusedByName),
  };
  if (getenv("CMOCKA_TEST_FILTER") != NULL) cmocka_set_test_filter(getenv("CMOCKA_TEST_FILTER"));
  return cmocka_run_group_tests(tests, NULL, NULL);
}
