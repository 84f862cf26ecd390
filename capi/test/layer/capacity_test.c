// SPDX-License-Identifier: Apache-2.0
/* Layers under a capacity on this CPU: bits of exact exchanges if no route is dropped, dropped routes, counters,
 * errors. */
#include <float.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "capi/test/cuda/fakes_checks.h"
#include "capi/test/rig/refusals.h"
#include "capi/test/world/budget_suite.h"
#include "capi/test/world/sweeps.h"

static case_t base_case(void) {
  case_t c = world_small_case();
  c.bias = 1;
  return c;
}

/* Under a capacity, unused slots are rows of zeros between the others. They add nothing to a weight gradient, but AMX
 * and AVX512-BF16 sum rows in pairs, and the zeros change the pairs. Their f32 sums of at most 40 products below 1 may
 * therefore differ by rounding. */
static int sums_by_pairs(const case_t* c) {
  return c->dtype == SLUICE_DTYPE_BF16 && c->gemm != NULL && strcmp(c->gemm, "native") == 0;
}
#define PAIRED_SUMS (40 * (double)FLT_EPSILON / 2)

/* Compares outputs and all gradients with exact exchanges. No chunk may exceed the capacity. */
static void check(const case_t* c) {
  result_t exact, capacity;
  case_t under = *c;
  under.capacity = c->capacity > 0 ? c->capacity : c->repeat_every > 0 ? 36 : 18;
  case_t plain = *c;
  plain.capacity = 0;
  plain.chunking = SLUICE_CHUNKING_TOKENS; /* as under a capacity, so that weight gradients have the same sums */
  case_run(&plain, &exact);
  case_run(&under, &capacity);
  const int is_paired = sums_by_pairs(c);
  must_be_same(c, &exact, &capacity, !is_paired);
  if (is_paired && world_distance(c, &exact, &capacity) > PAIRED_SUMS) fail_msg("%s: other sums", case_text(c));
  for (int32_t r = 0; r < c->world_size; ++r) {
    assert_int_equal(capacity.report_status[r], SLUICE_OK);
    assert_int_equal(capacity.report[r].num_forwards,
                     c->cycles * WORLD_CYCLE + (c->outstanding > 1 ? c->outstanding : 1));
    assert_int_equal(capacity.report[r].num_dropped, 0);
  }
  world_free(&exact);
  world_free(&capacity);
}

static const int32_t RANKS[] = {1, 2, 4}, CHUNKS[] = {1, 2, 4};

/* As many rows as fit, in chunks of few tokens. */
TEST(Capacity_OfTwoRows_HasTheBitsOfExact) {
  for (int w = 0; w < 3; ++w) {
    case_t c = base_case();
    c.world_size = RANKS[w], c.top_k = 1, c.uneven_owners = 1, c.num_chunks = 16, c.capacity = 2, c.transposed = 1;
    check(&c);
  }
}

TEST(Capacity_DgradThenWgradAndOutstandingSteps_HaveTheBitsOfExact) {
  for (int w = 0; w < 2; ++w) {
    case_t c = base_case();
    c.world_size = RANKS[w], c.num_chunks = 2, c.separate_wgrad = 1, c.gated = 1;
    check(&c);
    c.separate_wgrad = 0, c.outstanding = 3, c.accumulate = 1;
    check(&c);
    c.dtype = SLUICE_DTYPE_BF16, c.grad_f32 = 1, c.gemm = "ref";
    check(&c);
    c.gemm = "native";
    check(&c);
  }
}

/* Callback experts are called on all slots; unused slots are rows of zeros, and so are their gradients. */
TEST(Capacity_CallbackExperts_HaveTheBitsOfExactAndEveryPlace) {
  for (int w = 0; w < 3; ++w) {
    for (int p = 0; p < 3; ++p) {
      case_t c = base_case();
      c.world_size = RANKS[w], c.num_chunks = CHUNKS[p], c.callback_experts = 1, c.bias = 0;
      c.restore_pre_activation = p == 0 ? SLUICE_RESTORE_KEEP : SLUICE_RESTORE_RECOMPUTE;
      c.restore_input = p == 2 ? SLUICE_RESTORE_REDISPATCH : SLUICE_RESTORE_KEEP;
      check(&c);
      c.drop_every = 3, c.hot_expert = 11, c.tokens[0] = p == 1 ? 0 : c.tokens[0], c.uneven_owners = 1;
      check(&c);
      c.capacity = 18;
      result_t got;
      case_run(&c, &got);
      must_work(&c, &got);
      for (int32_t r = 0; r < c.world_size; ++r) {
        int32_t experts = 0, again = p == 0 ? 1 : 2;
        for (int32_t e = 0; e < c.num_experts; ++e) experts += world_owner(&c, e) == r;
        assert_int_equal(got.calls[r], experts * c.num_chunks * again);
        if (again == 1) assert_int_equal(got.most_rows[r], experts * c.world_size * c.capacity);
      }
      world_free(&got);
    }
  }
}

/* From each rank to each expert, every chunk sends rows up to the full capacity. */
TEST(Capacity_BytesOnTheWire_AreThoseOfTheCapacity) {
  case_t c = base_case();
  result_t exact, under;
  c.world_size = 4, c.num_chunks = 2;
  case_run(&c, &exact);
  c.capacity = 6;
  case_run(&c, &under);
  must_work(&c, &under);
  /* Rows travel out and back, in forward and backward: four times. Scalars travel twice. */
  uint64_t rows = 2u * 9u * 6u; /* chunks, experts of other ranks, capacity */
  for (int32_t r = 0; r < 4; ++r) {
    assert_int_equal(under.report_status[r], SLUICE_OK);
    uint64_t all = rows * 2 /* to the experts, and as many for the tokens of other ranks */ * (2 * 11 * 4 + 4);
    assert_int_equal(under.bytes_sent[r], all);
    printf("rank %d: %llu bytes exact, %llu under a capacity of 6 (%lld of %lld routes, most %lld)\n", r,
           (unsigned long long)exact.bytes_sent[r], (unsigned long long)under.bytes_sent[r],
           (long long)under.report[r].num_dropped, (long long)under.report[r].num_routes,
           (long long)under.report[r].most_rows);
    assert_true(under.report[r].most_rows <= 6 && under.report[r].most_rows > 0);
  }
  world_free(&exact);
  world_free(&under);
}

/* ---- overflow -------------------------------------------------------------------------------------------------- */

/* Sets dropped routes to -1 and counts them: chunk by chunk, in (token, k) order. */
static int64_t drop_beyond(rig_t* rig, int64_t capacity, int64_t* out_most, int32_t* out_expert) {
  int64_t dropped = 0, T = rig->num_tokens;
  int32_t n = rig->config.num_chunks, K = rig->config.top_k, *ids = rig->ids.tensor.data;
  *out_most = 0;
  for (int32_t i = 0; i < n; ++i) {
    int64_t counts[RIG_MAX_EXPERTS] = {0};
    for (int64_t r = T * i / n * K; r < T * (i + 1) / n * K; ++r) {
      int32_t e = ids[r];
      if (e < 0) continue;
      if (++counts[e] > capacity) ids[r] = -1, ++dropped;
      /* ties go to the larger slot */
      if (counts[e] > *out_most || (counts[e] == *out_most && e > *out_expert)) *out_most = counts[e], *out_expert = e;
    }
  }
  return dropped;
}

static void crowd(rig_t* rig) {
  int32_t* ids = rig->ids.tensor.data;
  for (int64_t t = 0; t < rig->num_tokens; ++t) ids[t * 2] = t == 1 ? -1 : 2, ids[t * 2 + 1] = (int32_t)(t % 2);
}

TEST(Capacity_RoutesBeyondIt_AreDroppedCountedAndReported) {
  rig_t rig;
  sluice_moe_config_t config = rig_config();
  config.chunking = SLUICE_CHUNKING_TOKENS; /* as under a capacity */
  assert_int_equal(rig_open(&rig, NULL, &config), SLUICE_OK);
  crowd(&rig);
  int64_t most = 0;
  int32_t expert = -1;
  int64_t dropped = drop_beyond(&rig, 1, &most, &expert);
  assert_int_equal(dropped, 5);
  assert_int_equal(rig_step(&rig), SLUICE_OK);
  const uint64_t want = rig_digest(&rig);
  config.exchange_mode = SLUICE_EXCHANGE_CAPACITY, config.capacity_rows = 1;
  assert_int_equal(rig_swap_layer(&rig, &config), SLUICE_OK);
  crowd(&rig);
  assert_int_equal(rig_step(&rig), SLUICE_OK);
  assert_true(rig_digest(&rig) == want);
  DEFAULTS(sluice_capacity_report, report);
  REFUSED(sluice_moe_take_capacity_report(rig.moe, NULL, &report), SLUICE_E_CAPACITY,
          "layer 3, rank 0: 5 of 11 routes in 1 forwards");
  assert_non_null(strstr(last_message(), "expert 2 would have had 3 rows"));
  assert_int_equal(report.num_dropped, dropped);
  assert_int_equal(report.num_routes, 11);
  assert_int_equal(report.num_forwards, 1);
  assert_int_equal(report.most_rows, most);
  assert_int_equal(report.most_expert, expert);
  assert_int_equal(report.bad_route, -1);
  /* Taking the report resets it. */
  assert_int_equal(sluice_moe_take_capacity_report(rig.moe, NULL, &report), SLUICE_OK);
  assert_int_equal(report.num_forwards, 0);
  assert_int_equal(report.most_expert, -1);
  own_rig_close(&rig);
}

/* ---- errors ------------------------------------------------------------------------------------------- */

TEST(Capacity_WhatItDoesNotTake_IsRefusedByName) {
  rig_t rig;
  sluice_moe_config_t good = rig_config(), c;
  assert_int_equal(rig_open(&rig, NULL, &good), SLUICE_OK);
  DEFAULTS(sluice_capacity_report, report);
  assert_int_equal(sluice_moe_take_capacity_report(rig.moe, NULL, &report), SLUICE_E_STATE);
  good.exchange_mode = SLUICE_EXCHANGE_CAPACITY, good.capacity_rows = 4;
#define REFUSES(field, value, text) \
  c = good, c.field = (value);      \
  refuses_layer(&rig, &c, BAD, text)
  REFUSES(exchange_mode, 2, "exchange_mode is 2; known are exact (0) and capacity (1)");
  REFUSES(exchange_mode, SLUICE_EXCHANGE_EXACT, "capacity_rows is 4, but exchange_mode is exact");
  REFUSES(capacity_rows, 0, "capacity_rows is 0; with 2 chunks and 4 experts it must be in [1, ");
  REFUSES(capacity_rows, INT64_MAX, "it must be in [1, 268435455]");
  REFUSES(chunking, 2, "chunking is 2; known are adaptive (0) and tokens (1)");
#undef REFUSES
  assert_int_equal(rig_swap_layer(&rig, &good), SLUICE_OK);
  sluice_dispatch_t* dispatch = NULL;
  REFUSED(sluice_dispatch_forward(rig.moe, rig.forward.tokens, rig.forward.expert_ids, NULL, &dispatch),
          SLUICE_E_UNSUPPORTED, "exchange_mode capacity");
  DEFAULTS(sluice_plan_config, plan_config);
  sluice_plan_t* plan = NULL;
  plan_config.max_tokens = 6, plan_config.num_chunks = 3;
  REFUSED(sluice_plan_create(rig.moe, &plan_config, &plan), SLUICE_E_INVALID_ARGUMENT,
          "num_chunks is 3, but capacity_rows 4 of layer 3 is per chunk for 2 chunks");
  ((int32_t*)rig.ids.tensor.data)[3] = 4;
  sluice_step_t* step = NULL;
  REFUSED(rig_forward(&rig, &step), SLUICE_E_INVALID_ARGUMENT, "expert_ids[1, 1] is 4");
  assert_int_equal(rig_round(&rig, NULL), SLUICE_OK);
  report.struct_size = 3;
  assert_int_equal(sluice_moe_take_capacity_report(rig.moe, NULL, &report), SLUICE_E_ABI);
  assert_int_equal(sluice_moe_take_capacity_report(NULL, NULL, &report), SLUICE_E_INVALID_ARGUMENT);
  rig_close(&rig);
}

/* ---- under a budget -------------------------------------------------------------------------------------------- */

static budget_suite_t suite_of(void) {
  return (budget_suite_t){.base = capacity_budget_base(), .run = world_run, .least_ranks = 1};
}

/* A larger budget chooses a policy that keeps more, up to the policy that keeps everything. */
TEST(Budget_UnderACapacity_MoreRoomKeepsMore) {
  const budget_suite_t suite = suite_of();
  case_t c = capacity_budget_case(&suite, 2, 3);
  const uint64_t least = budget_smallest(&suite, c);
  uint64_t last = 0;
  for (uint64_t part = 0; part <= 8; ++part) {
    result_t got;
    c.budget = least + least * part / 4;
    world_run(&c, &got);
    must_work(&c, &got);
    assert_true(got.peak_bytes[0] <= c.budget);
    if (part == 0) last = got.bytes_sent[0];
    assert_true(got.bytes_sent[0] <= last); /* fewer rows are sent again */
    last = got.bytes_sent[0];
    world_free(&got);
  }
  result_t exact;
  c.budget = 0;
  world_run(&c, &exact);
  assert_int_equal(last, exact.bytes_sent[0]);
  world_free(&exact);
}

TEST(Plan_UnderACapacity_IsHeldToItsTokensAndReplacedOnAllRanks) {
  rig_t rig;
  sluice_moe_config_t config = rig_config();
  config.exchange_mode = SLUICE_EXCHANGE_CAPACITY, config.capacity_rows = 6;
  assert_int_equal(rig_open(&rig, NULL, &config), SLUICE_OK);
  uint64_t want = 0, got = 0;
  assert_int_equal(rig_round(&rig, &want), SLUICE_OK);
  DEFAULTS(sluice_plan_config, plan_config);
  plan_config.max_tokens = 5;
  sluice_plan_info_t info;
  sluice_plan_t* small = own_rig_plan(&rig, &plan_config, &info);
  int32_t count = 0;
  sluice_plan_candidate_t lines[32];
  assert_int_equal(sluice_plan_candidates(small, lines, 32, &count), SLUICE_OK);
  assert_int_equal(count, 9 * 2); /* restore policies x weight-gradient modes; n is the config's */
  plan_config.max_tokens = 6, plan_config.restore_pre_activation = SLUICE_RESTORE_RECOMPUTE;
  sluice_plan_t* large = own_rig_plan(&rig, &plan_config, &info);
  assert_int_equal(info.num_chunks, 2);
  assert_int_equal(info.max_chunks, 2);
  assert_int_equal(info.chunk_rows, 6 * 4);
  assert_int_equal(info.kept_rows, 2 * 6 * 4);
  assert_int_equal(sluice_moe_use_plan(rig.moe, small), SLUICE_OK);
  REFUSED(rig_round(&rig, NULL), SLUICE_E_OVER_BUDGET, "this layer's plan is for at most 5");
  assert_int_equal(sluice_moe_use_plan(rig.moe, large), SLUICE_OK);
  for (int round = 0; round < 3; ++round) { /* the first round exchanges a header, the others none */
    assert_int_equal(rig_round(&rig, &got), SLUICE_OK);
    assert_int_equal(got, want);
  }
  assert_int_equal(sluice_moe_use_plan(rig.moe, NULL), SLUICE_OK);
  assert_int_equal(rig_round(&rig, &got), SLUICE_OK);
  assert_int_equal(got, want);
  sluice_plan_destroy(small);
  sluice_plan_destroy(large);
  own_rig_close(&rig);
}

/* Ranks agree on a plan for at most 4 tokens. A rank with more tokens refuses the call; fewer tokens are valid. */
TEST(Budget_UnderACapacity_MoreTokensThanAgreed_AreRefused) {
  rig_t rig;
  const sluice_context_config_t context = own_rig_context(1 << 20, 1);
  sluice_moe_config_t config = rig_config();
  config.exchange_mode = SLUICE_EXCHANGE_CAPACITY, config.capacity_rows = 6;
  own_rig_open(&rig, &context, &config);
  rig.num_tokens = 4;
  assert_int_equal(rig_round(&rig, NULL), SLUICE_OK);
  rig.num_tokens = 6;
  assert_int_equal(rig_round(&rig, NULL), SLUICE_E_OVER_BUDGET);
  assert_non_null(strstr(last_message(),
                         "6 tokens, but the plan that the ranks agreed on under a capacity is for at most 4: pass at "
                         "most this many, run the largest batch first"));
  rig.num_tokens = 2;
  assert_int_equal(rig_round(&rig, NULL), SLUICE_OK);
  rig_close(&rig);
}

int main(void) {
  setenv("SLUICE_POISON", "1", 1); /* slots are NaN at the start of each pass, so padding must be written */
  const struct CMUnitTest rows[] = {
      BUDGET_TEST(Budget_UnderACapacity_PeakIsWhatWasPlannedToTheByte, suite_of(), capacity_budget_peak_is_planned),
      BUDGET_TEST(Budget_UnderACapacity_MoreOutstandingThanSaid_RefusedOnAllRanks, suite_of(),
                  capacity_budget_more_outstanding_than_said),
      SWEEP_TEST(Capacity_RanksAndChunks_HaveTheBitsOfExact, world_run, base_case(), check, sweep_ranks_and_chunks),
      SWEEP_TEST(Capacity_EveryPolicy_HasTheBitsOfExact, world_run, base_case(), check, sweep_policies),
      SWEEP_TEST(Capacity_AnyRoutes_HaveTheBitsOfExact, world_run, base_case(), check, sweep_routes),
      SWEEP_TEST(Capacity_AnyBatches_HaveTheBitsOfExact, world_run, base_case(), check, sweep_batches),
      SWEEP_TEST(Capacity_EveryPolicyOnFakes_HasTheBitsOfExact, run_on_fakes, base_case(), check, sweep_policies),
      SWEEP_TEST(Capacity_AnyRoutesOnFakes_HaveTheBitsOfExact, run_on_fakes, base_case(), check, sweep_routes),
      SWEEP_TEST(Capacity_AnyBatchesOnFakes_HaveTheBitsOfExact, run_on_fakes, base_case(), check, sweep_batches),
      SWEEP_TEST(Capacity_AnyRoutesOnOldFakes_HaveTheBitsOfExact, run_on_old_fakes, base_case(), check, sweep_routes),
      TEST_WITH(run_on_fakes, Capacity_OfTwoRows_HasTheBitsOfExact),
      TEST_WITH(run_on_fakes, Capacity_DgradThenWgradAndOutstandingSteps_HaveTheBitsOfExact),
      TEST_WITH(run_on_fakes, Capacity_CallbackExperts_HaveTheBitsOfExactAndEveryPlace),
  };
  return RUN_CASES_AFTER(rows);
}
