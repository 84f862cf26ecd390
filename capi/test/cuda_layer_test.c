/* The layer on a CUDA context, executed by the fake driver, cuBLAS and NCCL: against the plain f64 reference and
 * against the same case on this CPU. Nothing here says anything about a GPU's speed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/device/cuda/fake/fake_cuda.h"
#include "capi/test/fakes.h"

static case_t base_case(void) {
  return (case_t){.world_size = 1,
                  .tokens = {13, 9, 17, 5},
                  .model_width = 11,
                  .hidden_width = 19,
                  .num_experts = 12,
                  .top_k = 2,
                  .num_chunks = 1,
                  .dtype = SLUICE_DTYPE_F32,
                  .activation = SLUICE_ACTIVATION_GELU,
                  .restore_input = SLUICE_RESTORE_KEEP,
                  .restore_middle = SLUICE_RESTORE_KEEP,
                  .hot_expert = -1};
}

/* Towards the reference as layer_test's: f32 sums of some 20 terms, 8 bits in bf16 and 11 in f16 between ops. */
static double tolerance(const case_t* c) {
  switch (c->dtype) {
    case SLUICE_DTYPE_F64: return 3e-7;
    case SLUICE_DTYPE_F32: return 5e-6;
    case SLUICE_DTYPE_F16: return 1e-2;
    default: return 6e-2;
  }
}

/* Towards the CPU: products differ in the order of their sums, activations by their last bits, and a value that lies
 * between two of the type may be rounded either way between ops. In ulps of 1 (distances are relative above 1). */
static double ulps_of_cpu(const case_t* c) {
  switch (c->dtype) {
    case SLUICE_DTYPE_F64: return 3e-7;
    case SLUICE_DTYPE_F32: return 16 * 1.1920929e-7;
    case SLUICE_DTYPE_F16: return 4 * 9.765625e-4;
    default: return 4 * 7.8125e-3;
  }
}

static void run_on_fakes(const case_t* c, int with_groups, result_t* out) {
  char live[200], hazard[200];
  case_t there = *c;
  fakes_open(c->world_size, with_groups);
  there.machine = fakes_machine();
  world_run(&there, out);
  int64_t hazards = sluice_fake_cuda_hazards(hazard, sizeof hazard);
  int64_t left = fakes_close(live, sizeof live);
  for (int32_t r = 0; r < c->world_size; ++r) {
    if (out->status[r] != SLUICE_OK) fail_msg("rank %d: %d: %s", r, out->status[r], out->message[r]);
  }
  if (hazards != 0) fail_msg("%lld hazards: %s", (long long)hazards, hazard);
  if (left != 0) fail_msg("left: %s", live);
}

static void check_with(const case_t* c, int with_groups) {
  result_t got, want, cpu;
  run_on_fakes(c, with_groups, &got);
  world_run(c, &cpu);
  world_reference(c, &want);
  double d = world_distance(c, &got, &want), e = world_distance(c, &got, &cpu);
  if (!(d >= 0 && d <= tolerance(c) && e >= 0 && e <= ulps_of_cpu(c))) {
    fail_msg("W %d n %d K %d dtype %d act %d gated %d bias %d restore %d %d: distance %g, of the CPU %g", c->world_size,
             c->num_chunks, c->top_k, c->dtype, c->activation, c->gated, c->bias, c->restore_input, c->restore_middle,
             d, e);
  }
  world_free(&got);
  world_free(&want);
  world_free(&cpu);
}
static void check(const case_t* c) { check_with(c, 1); }

static const int32_t RANKS[] = {1, 2, 4}, CHUNKS[] = {1, 2, 4};

static void CudaLayer_RanksAndChunks_MatchReferenceAndCpu(void** state) {
  (void)state;
  for (int w = 0; w < 3; ++w) {
    for (int n = 0; n < 3; ++n) {
      case_t c = base_case();
      c.world_size = RANKS[w], c.num_chunks = CHUNKS[n];
      c.bias = (w + n) % 2 == 0, c.gated = n % 2;
      c.wgrad_mode = n == 1 ? SLUICE_WGRAD_PER_CHUNK : SLUICE_WGRAD_DEFERRED;
      check(&c);
      c.dtype = SLUICE_DTYPE_BF16, c.gated = !c.gated;
      check(&c);
    }
  }
}

static void CudaLayer_EveryActivation_MatchesReferenceAndCpu(void** state) {
  (void)state;
  for (int32_t a = SLUICE_ACTIVATION_IDENTITY; a <= SLUICE_ACTIVATION_SWIGLU; ++a) {
    case_t c = base_case();
    c.activation = a, c.num_chunks = 2, c.bias = 1, c.gated = a == SLUICE_ACTIVATION_SWIGLU || a % 2;
    check(&c);
  }
}

static void CudaLayer_EveryPolicy_MatchesReferenceAndCpu(void** state) {
  (void)state;
  const int32_t inputs[] = {SLUICE_RESTORE_KEEP, SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_REDISPATCH};
  const int32_t middles[] = {SLUICE_RESTORE_KEEP, SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_RECOMPUTE};
  for (int w = 0; w < 2; ++w) {
    for (int p = 0; p < 9; ++p) {
      case_t c = base_case();
      c.world_size = RANKS[w], c.num_chunks = CHUNKS[p % 3], c.bias = 1, c.gated = p % 2;
      c.restore_input = inputs[p / 3], c.restore_middle = middles[p % 3];
      c.reuse_saved = p % 2, c.restore = p % 4 == 3;
      check(&c);
      c.num_chunks = 4, c.dtype = SLUICE_DTYPE_BF16, c.restore = !c.restore;
      check(&c);
    }
  }
}

static void CudaLayer_OtherDtypesAndGradientsInF32_MatchReferenceAndCpu(void** state) {
  (void)state;
  const int32_t dtypes[] = {SLUICE_DTYPE_F16, SLUICE_DTYPE_F64, SLUICE_DTYPE_BF16};
  for (int d = 0; d < 3; ++d) {
    case_t c = base_case();
    c.world_size = 2, c.num_chunks = 3, c.bias = 1, c.dtype = dtypes[d], c.gated = 1;
    check(&c);
    c.grad_f32 = c.dtype != SLUICE_DTYPE_F64, c.accumulate = 1;
    check(&c);
    check_with(&c, 0);
    check_with(&c, 2);
  }
}

static void CudaLayer_OddShapesAndOwners_MatchReferenceAndCpu(void** state) {
  (void)state;
  for (int w = 0; w < 3; ++w) {
    case_t c = base_case();
    c.world_size = RANKS[w], c.num_chunks = 3, c.drop_every = 3;
    check(&c);
    c.drop_every = 1;
    check(&c);
    c.drop_every = 0, c.top_k = 12;
    check(&c);
    c.top_k = 1, c.hot_expert = 11, c.transposed = 1;
    check(&c);
    c.hot_expert = -1, c.uneven_owners = 1, c.num_chunks = 16;
    check(&c);
    c.tokens[0] = 0;
    check(&c);
  }
}

static void CudaLayer_HalvesApartAndOutstandingSteps_MatchReferenceAndCpu(void** state) {
  (void)state;
  for (int w = 0; w < 2; ++w) {
    case_t c = base_case();
    c.world_size = RANKS[w], c.num_chunks = 2, c.halves_apart = 1, c.gated = 1, c.bias = 1;
    check(&c);
    c.halves_apart = 0, c.outstanding = 3;
    check(&c);
    c.restore_input = c.restore_middle = SLUICE_RESTORE_OFFLOAD;
    check(&c);
  }
}

/* Exact mode: the counts of a forward are read once; a backward reads nothing. Other waits of the driver are those of
 * memory that is returned, and there is none in a pass. */
static void CudaLayer_HostWaits_OneInForwardNoneInBackward(void** state) {
  (void)state;
  for (int w = 0; w < 3; ++w) {
    case_t c = base_case();
    result_t out;
    char live[200];
    c.world_size = RANKS[w], c.num_chunks = 4, c.bias = 1, c.machine = fakes_machine();
    fakes_open(c.world_size, 1);
    world_run(&c, &out);
    for (int32_t r = 0; r < c.world_size; ++r) {
      assert_int_equal(out.status[r], SLUICE_OK);
      assert_int_equal(fakes_waits(r, SLUICE_FORWARD).reads, 1);
      assert_int_equal(fakes_waits(r, SLUICE_BACKWARD).reads, 0);
    }
    if (c.world_size == 1) {
      assert_int_equal(fakes_waits(0, SLUICE_FORWARD).of_driver, 1);
      assert_int_equal(fakes_waits(0, SLUICE_BACKWARD).of_driver, 0);
    }
    assert_int_equal(fakes_close(live, sizeof live), 0);
    world_free(&out);
  }
}

/* That nothing is found means something: with one wait left out a hazard is. At most these may be missing unseen, in
 * one rank's forward and backward with offload: the two of a lane for the host's stream (its jobs wait for more), the
 * two of the host's stream for a lane (what the test reads is not noted), that of the second pass for the first (one
 * stream), and those of three saved buffers that are given back and not taken again. */
static int64_t runs_with_hazards(const case_t* c, int64_t* out_runs) {
  char text[200], live[200];
  int64_t found = 0, waits = 1;
  for (int64_t nth = -1; nth < waits; ++nth) {
    case_t there = *c;
    result_t out;
    fakes_open(c->world_size, 1);
    sluice_fake_cuda_drop_wait(nth);
    there.machine = fakes_machine();
    world_run(&there, &out);
    if (nth < 0) waits = sluice_fake_cuda_waits();
    int64_t hazards = sluice_fake_cuda_hazards(text, sizeof text);
    if (nth < 0) assert_int_equal(hazards, 0);
    found += hazards > 0;
    assert_int_equal(fakes_close(live, sizeof live), 0);
    world_free(&out);
  }
  *out_runs = waits;
  return found;
}

static void CudaLayer_AnyWaitLeftOut_LeavesAHazard(void** state) {
  (void)state;
  for (int32_t w = 1; w <= 2; ++w) {
    int64_t runs = 0;
    case_t c = base_case();
    c.world_size = w, c.num_chunks = 3, c.bias = 1;
    c.restore_input = w == 1 ? SLUICE_RESTORE_OFFLOAD : SLUICE_RESTORE_KEEP;
    c.restore_middle = w == 1 ? SLUICE_RESTORE_OFFLOAD : SLUICE_RESTORE_RECOMPUTE;
    int64_t found = runs_with_hazards(&c, &runs);
    printf("W %d: %lld of %lld waits are needed\n", w, (long long)found, (long long)runs);
    /* Ranks race for the numbers of their waits, so that some are left out twice and others never. */
    if (w == 1) assert_true(runs - found <= 8);
    assert_true(2 * found > runs);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(CudaLayer_RanksAndChunks_MatchReferenceAndCpu),
      cmocka_unit_test(CudaLayer_EveryActivation_MatchesReferenceAndCpu),
      cmocka_unit_test(CudaLayer_EveryPolicy_MatchesReferenceAndCpu),
      cmocka_unit_test(CudaLayer_OtherDtypesAndGradientsInF32_MatchReferenceAndCpu),
      cmocka_unit_test(CudaLayer_OddShapesAndOwners_MatchReferenceAndCpu),
      cmocka_unit_test(CudaLayer_HalvesApartAndOutstandingSteps_MatchReferenceAndCpu),
      cmocka_unit_test(CudaLayer_HostWaits_OneInForwardNoneInBackward),
      cmocka_unit_test(CudaLayer_AnyWaitLeftOut_LeavesAHazard),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
