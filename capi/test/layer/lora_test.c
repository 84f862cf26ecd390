// SPDX-License-Identifier: Apache-2.0
/* Adapters of experts (LoRA): the layer computes the same as the dense layer with W + s B A, and the gradients of A and
 * B follow from the dense gradient of W. Runs over gates, adapted matrices, chunks, policies, dtypes and layouts. */
#include "capi/test/cuda/fakes_checks.h"
#include "capi/test/world/budget_suite.h"
#include "capi/test/world/checks.h"
#include "third_party/bazel/test.h"

enum { GATE = WORLD_LORA_GATE, UP = WORLD_LORA_UP, JOINT = WORLD_LORA_JOINT, DOWN = WORLD_LORA_DOWN };

/* Sets of adapted matrices that a gate allows, also with a shared factor and with missing adapters. */
static const int32_t members[][6] = {
    [SLUICE_GATED_NO] = {GATE | DOWN, GATE, DOWN},
    [SLUICE_GATED_HALVES] = {GATE | JOINT | DOWN, GATE | UP | DOWN, GATE, UP, GATE | JOINT, DOWN},
    [SLUICE_GATED_INTERLEAVED] = {GATE | DOWN, GATE, DOWN},
};

static case_t adapted_case(int32_t gated, int32_t lora) {
  case_t c = world_small_case();
  c.gated = gated, c.lora = lora, c.lora_rank = 4;
  if (gated) c.activation = SLUICE_ACTIVATION_SILU;
  return c;
}

TEST(Lora_EveryGateAndMember_MatchesTheDenseLayer) {
  for (int32_t gated = SLUICE_GATED_NO; gated <= SLUICE_GATED_INTERLEAVED; ++gated) {
    for (int i = 0; i < 6 && members[gated][i] != 0; ++i) {
      for (int32_t bits = 0; bits < 8; ++bits) {
        case_t c = adapted_case(gated, members[gated][i]);
        c.bias = bits & 1, c.world_size = 1 + (bits >> 1 & 1), c.num_chunks = bits >> 2 ? 3 : 1;
        check_matches(&c);
      }
    }
  }
}

TEST(Lora_EveryActivation_MatchesTheDenseLayer) {
  for (int32_t a = SLUICE_ACTIVATION_IDENTITY; a <= SLUICE_ACTIVATION_SWIGLU; ++a) {
    for (int32_t gated = a == SLUICE_ACTIVATION_SWIGLU; gated <= SLUICE_GATED_INTERLEAVED; ++gated) {
      case_t c = adapted_case(gated, members[gated][0]);
      c.world_size = 2, c.num_chunks = 2, c.activation = a, c.bias = a % 2;
      check_matches(&c);
    }
  }
}

/* Ranks, chunks, both weight-gradient modes, uneven batches, ranks without rows, one hot expert, other owners. */
TEST(Lora_RanksChunksAndModes_MatchTheDenseLayer) {
  for (int32_t w = 1; w <= 4; ++w) {
    for (int32_t bits = 0; bits < 32; ++bits) {
      case_t c = adapted_case(SLUICE_GATED_HALVES, members[SLUICE_GATED_HALVES][bits % 3]);
      c.world_size = w, c.num_chunks = bits & 1 ? 5 : 2, c.wgrad_mode = bits >> 1 & 1, c.bias = bits >> 2 & 1;
      c.hot_expert = bits >> 3 & 1 ? 1 : -1, c.uneven_owners = w > 1 && bits >> 4;
      if (bits % 3 == 2) c.tokens[w - 1] = 0;
      check_matches(&c);
    }
  }
}

TEST(Lora_SplitCallsHalvesAndRestoredSteps_MatchTheDenseLayer) {
  for (int32_t w = 1; w <= 2; ++w) {
    for (int32_t bits = 0; bits < 32; ++bits) {
      case_t c = adapted_case(bits & 1, members[bits & 1][0]);
      c.world_size = w, c.num_chunks = 3, c.accumulate = bits >> 1 & 1, c.separate_wgrad = bits >> 2 & 1;
      c.restore = bits >> 3 & 1, c.transposed = bits >> 4, c.bias = 1;
      check_matches(&c);
      if (c.separate_wgrad || c.restore || case_run != world_run) continue; /* split calls: on a CPU */
      c.parts = 1, c.num_chunks = 1;
      check_matches(&c);
    }
  }
}

TEST(Lora_ExchangesAndMoves_MatchTheDenseLayer) {
  case_t c = adapted_case(SLUICE_GATED_HALVES, GATE | JOINT | DOWN);
  c.world_size = 3, c.num_chunks = 3;
  c.deduplicate = SLUICE_DEDUPLICATE_RANKS, check_matches(&c);
  c.world_size = 4, c.ranks_per_node = 2, c.deduplicate = SLUICE_DEDUPLICATE_NODES, check_matches(&c);
  c = adapted_case(SLUICE_GATED_HALVES, GATE | UP | DOWN), c.world_size = 2, c.num_chunks = 2, c.capacity = 40;
  check_matches(&c);
  c.capacity = 0, c.num_chunks = 5, c.grouping = SLUICE_GROUPING_ON, check_matches(&c);
  c.reuse = 1, c.restore_input = c.restore_pre_activation = SLUICE_RESTORE_ADAPTIVE, check_matches(&c);
}

/* The host moves adapters with their experts; outputs then do not depend on the placement. */
TEST(Lora_ExpertsThatMove_HaveTheBitsOfThoseThatStay) {
  case_t c = adapted_case(SLUICE_GATED_HALVES, GATE | JOINT | DOWN);
  c.world_size = 3, c.num_chunks = 3, c.rounds = 3, c.chunking = SLUICE_CHUNKING_TOKENS;
  case_t moves = c;
  moves.moves = WORLD_MOVES_UNEVEN;
  check_same_bits(&moves, &c, 1);
}

/* Adapters in f32 or the layer's dtype, as separate matrices or in PEFT's layout, for every dtype of the layer. */
TEST(Lora_DtypesAndLayouts_MatchTheDenseLayer) {
  const int32_t dtypes[] = {SLUICE_DTYPE_F32, SLUICE_DTYPE_BF16, SLUICE_DTYPE_F16, SLUICE_DTYPE_F64};
  for (size_t i = 0; i < 4; ++i) {
    for (int32_t bits = 0; bits < 32; ++bits) {
      const int32_t gated = bits % 3;
      case_t c = adapted_case(gated, members[gated][0]);
      c.dtype = dtypes[i], c.lora_f32 = bits & 1, c.grad_f32 = bits >> 2 & 1;
      c.lora_odd = bits >> 1 & 1 ? 1 + (bits >> 4) : 0;
      c.num_chunks = bits >> 3 & 1 ? 3 : 1, c.accumulate = bits >> 4, c.wgrad_mode = bits >> 2 & 1, c.bias = 1;
      check_matches(&c);
    }
  }
}

/* If packed factors do not fit their buffer, they are packed in turns of neighbouring experts. */
TEST(Lora_FactorsLargerThanTheirRoom_MatchTheDenseLayer) {
  for (int32_t i = 0; i < 4; i += case_run == world_run ? 1 : 3) { /* fakes are slow */
    case_t c = adapted_case(SLUICE_GATED_HALVES, members[SLUICE_GATED_HALVES][i & 1]);
    c.model_width = 320, c.hidden_width = 160, c.lora_rank = 200, c.lora_odd = 1 + (i >> 1);
    c.tokens[0] = 24, c.num_experts = 6;
    check_matches(&c);
  }
}

TEST(Lora_FiniteDifferences_MatchEveryGradient) {
  for (int32_t gated = SLUICE_GATED_NO; gated <= SLUICE_GATED_INTERLEAVED; ++gated) {
    for (int i = 0; i < 2; ++i) {
      case_t c = adapted_case(gated, members[gated][gated == SLUICE_GATED_HALVES ? i : 0]);
      c.dtype = SLUICE_DTYPE_F64, c.tokens[0] = 4, c.model_width = 3, c.hidden_width = 4, c.num_experts = 3,
      c.num_chunks = 1 + i, c.bias = 1, c.lora_rank = 3, c.wgrad_mode = i;
      check_finite_differences(&c);
    }
  }
}

static void check_bits(case_t c, const char* gemm) {
  result_t whole, got;
  c.gemm = gemm, c.num_chunks = 1;
  c.restore_input = c.restore_pre_activation = SLUICE_RESTORE_KEEP;
  world_run(&c, &whole);
  must_work(&c, &whole);
  const int32_t chunks[] = {1, 2, 5, 16};
  for (size_t n = 0; n < 4; ++n) {
    for (int policy = 0; policy < 9; ++policy) {
      c.num_chunks = chunks[n], c.restore_input = policy % 3;
      c.restore_pre_activation = world_pre_activations[policy / 3];
      world_run(&c, &got);
      must_be_same(&c, &got, &whole, c.num_chunks == 1);
      world_free(&got);
    }
  }
  world_free(&whole);
}

TEST(Lora_AnyChunksAndPolicies_HaveTheSameBits) {
  const char* const gemms[] = {"ref", "native"};
  const int32_t dtypes[] = {SLUICE_DTYPE_F32, SLUICE_DTYPE_BF16};
  for (int i = 0; i < 8; ++i) {
    case_t c = adapted_case(i & 1 ? SLUICE_GATED_HALVES : SLUICE_GATED_NO, i & 1 ? GATE | JOINT | DOWN : GATE | DOWN);
    c.world_size = 1 + (i >> 1 & 1), c.dtype = dtypes[i >> 2], c.bias = 1;
    for (int g = 0; g < 2; ++g) check_bits(c, gemms[g]);
  }
}

/* Same bits as a frozen layer without adapters, since the terms of absent adapters are zeros. */
TEST(Lora_LayerWithoutAdaptersInACall_ComputesTheFrozenLayer) {
  case_t c = adapted_case(SLUICE_GATED_HALVES, 0);
  c.world_size = 2, c.num_chunks = 3, c.bias = 1;
  check_matches(&c);
  case_t frozen = c;
  frozen.lora_rank = 0, frozen.frozen = 1;
  check_same_bits(&c, &frozen, 0);
}

/* W + s B A is never formed: a step takes T_LOW and the packed factors in addition to a step with frozen experts. */
TEST(Lora_Peak_IsThatOfTheFrozenStepAndLowRankRows) {
  for (int32_t n = 1; n <= 4; n *= 2) {
    for (int32_t w = 1; w <= 2; ++w) {
      case_t c = adapted_case(SLUICE_GATED_HALVES, GATE | JOINT | DOWN);
      c.tokens[0] = c.tokens[1] = 256, c.model_width = 192, c.hidden_width = 96, c.num_chunks = n, c.world_size = w;
      c.wgrad_mode = SLUICE_WGRAD_ADAPTIVE;
      result_t lora, frozen;
      world_run(&c, &lora);
      must_work(&c, &lora);
      c.lora_rank = c.lora = 0, c.frozen = 1;
      world_run(&c, &frozen);
      must_work(&c, &frozen);
      /* All rows in one chunk, and one more chunk for dT_DI that pending weight gradients may hold. */
      const uint64_t rows = 512 * (uint64_t)w, low = rows * 2 * 4 * sizeof(float), dense = 12 * 3 * 192 * 96 * 4 / 2;
      const uint64_t packed = 2 * 12 * 4 * 192 * sizeof(float), small = 4096;
      for (int32_t r = 0; r < w; ++r) {
        if (lora.peak_bytes[r] > frozen.peak_bytes[r] + low + packed + small) {
          fail_msg("W %d n %d rank %d: peak %llu, frozen %llu, T_LOW %llu, packed factors %llu; W has %llu", w, n, r,
                   (unsigned long long)lora.peak_bytes[r], (unsigned long long)frozen.peak_bytes[r],
                   (unsigned long long)low, (unsigned long long)packed, (unsigned long long)dense);
        }
      }
      world_free(&lora);
      world_free(&frozen);
    }
  }
}

static budget_suite_t adapted_suite(void (*run)(const case_t*, result_t*)) {
  budget_suite_t suite = {.base = budget_base_case(), .run = run, .least_ranks = 1, .is_slow = 1};
  suite.base.lora = GATE | JOINT | DOWN, suite.base.lora_rank = 4;
  return suite;
}

int main(void) {
  setenv("SLUICE_POISON", "1", 1);
  const struct CMUnitTest rows[] = {
      TEST_WITH(run_on_fakes, Lora_EveryGateAndMember_MatchesTheDenseLayer),
      TEST_WITH(run_on_fakes, Lora_RanksChunksAndModes_MatchTheDenseLayer),
      TEST_WITH(run_on_fakes, Lora_SplitCallsHalvesAndRestoredSteps_MatchTheDenseLayer),
      TEST_WITH(run_on_fakes, Lora_ExchangesAndMoves_MatchTheDenseLayer),
      TEST_WITH(run_on_fakes, Lora_DtypesAndLayouts_MatchTheDenseLayer),
      TEST_WITH(run_on_fakes, Lora_FactorsLargerThanTheirRoom_MatchTheDenseLayer),
      TEST_WITH(run_on_fakes, Lora_AnyChunksAndPolicies_HaveTheSameBits),
      BUDGET_TEST(Lora_OddShapesUnderABudget_ResultsAreTheSame, adapted_suite(world_run),
                  budget_odd_shapes_and_policies),
      BUDGET_TEST(Lora_SeparateWgradUnderABudget_IsCounted, adapted_suite(world_run), budget_separate_wgrad),
      BUDGET_TEST(Lora_UnderABudgetOnFakes_ResultsAreTheSame, adapted_suite(run_on_fakes),
                  budget_odd_shapes_and_policies),
  };
  return RUN_CASES_AFTER(rows);
}
