/* Deduplicated layers on a CUDA context, on fakes: the bits of the CPU's, bytes on the wire, what is refused. The
 * layer's suite (cuda_layer_suite.c) holds them against the reference. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "backend/device/cuda/fake/fake_cuda.h"
#include "backend/moe/binding.h"
#include "capi/test/checks.h"
#include "capi/test/fakes.h"
#include "capi/test/rig.h"

static case_t base_case(void) {
  case_t c = world_small_case();
  c.world_size = 2, c.top_k = 4, c.bias = 1, c.deduplicate = 1;
  c.dtype = SLUICE_DTYPE_F64;            /* products of the fake cuBLAS then sum as gemm ref does */
  c.activation = SLUICE_ACTIVATION_RELU; /* no function whose last bits are a library's */
  return c;
}

/* On fakes: no hazard between any two accesses, and nothing left. */
static void run(const case_t* c, result_t* out) {
  char text[200], live[200];
  case_t there = *c;
  fakes_open(c->world_size, 1);
  there.machine = fakes_machine();
  world_run(&there, out);
  must_work(c, out);
  if (sluice_fake_cuda_hazards(text, sizeof text) != 0) fail_msg("hazard: %s", text);
  if (fakes_close(live, sizeof live) != 0) fail_msg("left: %s", live);
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
    without = c, without.deduplicate = 0, without.chunk_cut = SLUICE_CHUNK_CUT_TOKENS;
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
    int32_t parcels; /* of rank 1, for its three rows */
    int is_good;
  } cases[] = {{2, 1}, {3, 1}, {1, 0}, {0, 0}, {4, 0}, {-1, 0}, {INT32_MAX, 0}, {INT32_MIN, 0}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
    int32_t received_rows[] = {0, 3}, sent_rows[] = {0, 0};
    int32_t sent[] = {0, 0}, received[] = {0, cases[i].parcels};
    sluice_binding_t b;
    assert_int_equal(sluice_binding_of_rows(moe, (const int64_t[]){3}, &b), SLUICE_OK);
    b.recv_counts = received_rows, b.send_counts = sent_rows;
    b.parcels.send_counts = sent, b.parcels.recv_counts = received;
    assert_int_equal(sluice_parcels_restore_far(&b, NULL), cases[i].is_good ? SLUICE_OK : SLUICE_E_MISMATCH);
    if (cases[i].is_good) continue;
    assert_non_null(strstr(last_message(), "layer 3: the parcels that rank 1 announced do not fit its rows"));
    assert_int_equal(last_peer(), 1);
  }
  sluice_layer_release(moe);
  context->world_size = 1;
  rig_close(&rig);
  char live[200];
  if (fakes_close(live, sizeof live) != 0) fail_msg("left: %s", live);
  rig_use_machine(NULL, 0);
}

/* ---- what is refused ---- */

static void expect_refused(case_t* c, const char* text) {
  result_t out;
  char live[200];
  fakes_open(c->world_size, 1);
  c->machine = fakes_machine();
  world_run(c, &out);
  for (int32_t r = 0; r < c->world_size; ++r) {
    assert_int_equal(out.status[r], SLUICE_E_UNSUPPORTED);
    if (strstr(out.message[r], text) == NULL) fail_msg("%s", out.message[r]);
  }
  world_free(&out);
  if (fakes_close(live, sizeof live) != 0) fail_msg("left: %s", live);
}

static void CudaDeduplicate_BudgetsPlansAndCeilings_AreRefusedByName(void** state) {
  (void)state;
  case_t c = base_case();
  c.budget = (uint64_t)1 << 30;
  expect_refused(&c, "deduplicate is 1, which does not run under a budget on device");
  c.budget = 0, c.host_budget = (uint64_t)1 << 30;
  expect_refused(&c, "deduplicate is 1, which does not run under a budget on device");
  c.host_budget = 0, c.ceiling = 18;
  expect_refused(&c, "set deduplicate to 0, or exchange_mode to exact");
  sluice_plan_config_t plan;
  sluice_plan_config_init(&plan, sizeof plan);
  plan.max_tokens = 100;
  c.ceiling = 0, c.plan = &plan;
  expect_refused(&c, "sluice_plan_create: layer");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(CudaDeduplicate_RanksChunksAndTopK_HaveTheBitsOfTheCpu),
      cmocka_unit_test(CudaDeduplicate_DroppedRepeatedHotAndSilent_HaveTheBitsOfTheCpu),
      cmocka_unit_test(CudaDeduplicate_AtTheExperts_HasTheBitsWithout),
      cmocka_unit_test(CudaDeduplicate_AnyNumberOfChunks_HasTheSameBits),
      cmocka_unit_test(CudaDeduplicate_NumbersOfAPeerThatDoNotFit_NameTheRank),
      cmocka_unit_test(CudaDeduplicate_BudgetsPlansAndCeilings_AreRefusedByName),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
