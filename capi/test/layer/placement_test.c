// SPDX-License-Identifier: Apache-2.0
/* Experts that change owner and slot between steps; the host moves their parameters and gradients. Results equal those
 * of a run without moves. Steps update the parameters, so that an error in one step persists. */
#include <math.h>

#include "capi/test/cuda/fakes_checks.h"
#include "capi/test/world/sweeps.h"
#include "third_party/bazel/test.h"

enum { ROUNDS = 4 };

/* A configuration with reproducible bits: configured n, chunks of tokens, weight gradients by chunk, gemm "ref". */
static case_t base_case(int32_t world_size) {
  case_t c = world_small_case();
  c.world_size = world_size, c.num_chunks = 2, c.bias = 1, c.rounds = ROUNDS;
  c.chunking = SLUICE_CHUNKING_TOKENS, c.wgrad_mode = SLUICE_WGRAD_PER_CHUNK;
  c.moves = WORLD_MOVES_EVEN;
  return c;
}

/* Returns whether a run with moves has the bits of the run without; *out_distance is the distance of the two. */
static int compare(const case_t* c, int params, double* out_distance) {
  result_t moved, still;
  case_t without = *c;
  without.moves = WORLD_MOVES_NONE;
  case_run(c, &moved);
  case_run(&without, &still);
  must_work(c, &moved);
  must_work(&without, &still);
  const int identical = world_identical(c, &moved, &still, params);
  *out_distance = world_distance(c, &moved, &still);
  assert_true(isfinite(still.out[0][0]) && still.out[0][0] != 0);
  world_free(&moved);
  world_free(&still);
  return identical;
}

static void tell(const case_t* c, double distance) { fail_msg("%s: distance %g", case_text(c), distance); }

static void check_bits(const case_t* c) {
  double distance = 0;
  for (int32_t moves = WORLD_MOVES_EVEN; moves <= WORLD_MOVES_UNEVEN; ++moves) {
    case_t with = *c;
    with.moves = moves;
    if (!compare(&with, 1, &distance)) tell(&with, distance);
  }
}

/* With moves, weight gradients are summed in other chunks and are only near. In one round, outputs and gradients of
 * tokens and route weights have the same bits if has_bits; later rounds would see the updates. */
static void check_near(const case_t* c, int has_bits) {
  double distance = 0;
  for (int32_t moves = WORLD_MOVES_EVEN; moves <= WORLD_MOVES_UNEVEN; ++moves) {
    case_t with = *c;
    with.moves = moves;
    compare(&with, 0, &distance);
    if (!(distance >= 0 && distance <= world_tolerance(c))) tell(&with, distance);
    with.rounds = 1;
    if (has_bits && with.callback_experts && !compare(&with, 0, &distance)) tell(&with, distance);
  }
}

/* The config places the experts at creation. Results match the reference, with the bits of contiguous experts. */
TEST(Create_AnyPlacement_MatchesReference) {
  for (int32_t w = 1; w <= 4; ++w) {
    for (int32_t moves = WORLD_MOVES_EVEN; moves <= WORLD_MOVES_UNEVEN; ++moves) {
      result_t placed, contiguous;
      case_t c = base_case(w), without;
      c.rounds = 0, c.placed = 1, c.moves = moves, c.gated = 1;
      without = c;
      without.placed = 0;
      case_run(&c, &placed);
      case_run(&without, &contiguous);
      must_match(&c, &placed);
      must_be_same(&c, &placed, &contiguous, 1);
      world_free(&placed);
      world_free(&contiguous);
    }
  }
}

TEST(Moves_Gemms_HaveTheBitsOfNone) {
  const char* const gemms[] = {"ref", "native"};
  for (int i = 0; i < 2; ++i) {
    for (int32_t mode = SLUICE_WGRAD_DEFERRED; mode <= SLUICE_WGRAD_PER_CHUNK; ++mode) {
      case_t c = base_case(2);
      c.gemm = gemms[i], c.wgrad_mode = mode, c.hot_expert = 3, c.drop_every = 5;
      check_bits(&c);
    }
  }
}

TEST(Moves_Policies_HaveTheBitsOfNone) {
  const int32_t input[] = {SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_REDISPATCH, SLUICE_RESTORE_OFFLOAD,
                           SLUICE_RESTORE_REDISPATCH};
  const int32_t m[] = {SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_RECOMPUTE,
                       SLUICE_RESTORE_RECOMPUTE};
  for (int i = 0; i < 4; ++i) {
    case_t c = base_case(2 + i % 2 * 2);
    c.restore_input = input[i], c.restore_pre_activation = m[i], c.restore = i % 2, c.reuse_saved = !c.restore;
    c.separate_wgrad = i == 2;
    check_bits(&c);
  }
}

TEST(Moves_UnderACapacity_HaveTheBitsOfNone) {
  for (int i = 0; i < 4; ++i) {
    case_t c = base_case(i % 2 == 0 ? 2 : 4);
    c.capacity = i < 2 ? 18 : 2; /* the second capacity drops routes, which do not depend on the placement */
    check_bits(&c);
  }
}

/* The received rows divide the chunks, and they depend on the placement. */
TEST(Moves_UnderAPlan_AreNear) {
  DEFAULTS(sluice_plan_config, plan);
  plan.max_tokens = 17, plan.num_chunks = 3;
  for (int32_t w = 2; w <= 4; w += 2) {
    double distance = 0;
    case_t given = base_case(w);
    given.num_chunks = 0, given.plan = &plan; /* the host's plan stays, since ranks keep their numbers of experts */
    if (compare(&given, 0, &distance), !(distance >= 0 && distance <= world_tolerance(&given))) tell(&given, distance);
    case_t own = base_case(w);
    own.num_chunks = 0, own.wgrad_mode = SLUICE_WGRAD_ADAPTIVE, own.budget = 1 << 20;
    check_near(&own, 0);
    own.callback_experts = 1;
    check_near(&own, 1);
  }
}

/* Each token has one route to each of two experts. Once both experts are on one rank, it receives all routes. A plan
 * for one expert on each rank allows half of these rows in a chunk, and would split the configured chunk in two. */
TEST(Moves_ToOneRankUnderABudget_MakeAnotherPlan) {
  result_t moved;
  case_t c = base_case(2);
  c.num_chunks = 1, c.budget = 1 << 20, c.rounds = 1;
  c.num_experts = c.top_k = 2;
  c.moves = WORLD_MOVES_UNEVEN; /* the first move leaves rank 0 without experts */
  check_near(&c, 0);
  case_run(&c, &moved);
  must_work(&c, &moved);
  for (int32_t r = 0; r < 2; ++r) assert_int_equal(moved.num_chunks[r], 1);
  world_free(&moved);
}

/* The routes of a token to one rank are summed first, so a move changes the order of sums. */
TEST(Moves_Deduplicated_AreNear) {
  for (int32_t w = 2; w <= 4; w += 2) {
    case_t c = base_case(w);
    c.deduplicate = 1, c.top_k = 4;
    check_near(&c, 0);
  }
}

/* Chunks of rows begin at experts, in the order of the experts' slots. */
TEST(Moves_ChunksByExperts_AreNear) {
  case_t c = base_case(2);
  c.chunking = SLUICE_CHUNKING_ADAPTIVE, c.num_chunks = 3;
  check_near(&c, 0);
  c.callback_experts = 1;
  check_near(&c, 1);
}

int main(void) {
  setenv("SLUICE_POISON", "1", 1);
  const struct CMUnitTest rows[] = {
      SWEEP_TEST(Moves_RanksAndChunks_HaveTheBitsOfNone, world_run, base_case(2), check_bits, sweep_ranks_and_chunks),
      SWEEP_TEST(Moves_Dtypes_HaveTheBitsOfNone, world_run, base_case(4), check_bits, sweep_dtypes),
      SWEEP_TEST(Moves_CallbackExperts_HaveTheBitsOfNone, world_run, base_case(4), check_bits, sweep_callbacks),
      SWEEP_TEST(Moves_RanksAndChunksOnFakes_HaveTheBitsOfNone, run_on_fakes, base_case(2), check_bits,
                 sweep_ranks_and_chunks),
      SWEEP_TEST(Moves_DtypesOnOneDevice_HaveTheBitsOfNone, run_on_local_fakes, base_case(4), check_bits, sweep_dtypes),
      TEST_WITH(run_on_fakes, Moves_Policies_HaveTheBitsOfNone),
      TEST_WITH(run_on_fakes, Moves_UnderACapacity_HaveTheBitsOfNone),
      SWEEP_TEST(Moves_CallbackExpertsOnFakes_HaveTheBitsOfNone, run_on_fakes, base_case(4), check_bits,
                 sweep_callbacks),
      TEST_WITH(run_on_fakes, Moves_Deduplicated_AreNear),
  };
  return RUN_CASES_AFTER(rows);
}
