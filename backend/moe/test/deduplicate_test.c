// SPDX-License-Identifier: Apache-2.0
/* Deduplicated layers on this CPU: results and gradients against the plain f64 reference and against the same layer
 * without deduplication, bytes sent, refusals. */
#include <stdio.h>
#include <string.h>

#include "backend/moe/layer/layer_life.h"
#include "backend/moe/routing/binding.h"
#include "backend/moe/routing/binding_arrays.h"
#include "backend/moe/routing/routes.h"
#include "backend/moe/routing/token_copies.h"
#include "backend/moe/run/run.h"
#include "capi/test/cuda/fakes_checks.h"
#include "capi/test/rig/refusals.h"
#include "capi/test/world/budget_suite.h"
#include "capi/test/world/sweeps.h"

static case_t base_case(void) {
  case_t c = world_small_case();
  c.world_size = 2, c.top_k = 4, c.bias = 1, c.deduplicate = 1;
  return c;
}

/* Compares with the reference and, at the experts, with the same layer without deduplication. */
static void check(const case_t* c) {
  result_t got, plain;
  case_t without = *c;
  without.deduplicate = 0, without.chunking = SLUICE_CHUNKING_TOKENS;
  case_run(c, &got);
  case_run(&without, &plain);
  must_match(c, &got);
  must_work(c, &plain);
  must_be_same_at_experts(c, &got, &plain);
  world_free(&got);
  world_free(&plain);
}

TEST(Deduplicate_AnyTopK_MatchesReference) {
  for (int32_t k = 1; k <= 12; k += k < 8 ? 1 : 4) {
    case_t c = base_case();
    c.world_size = 2 + k % 3, c.top_k = k, c.num_chunks = 2;
    check(&c);
  }
}

/* A sum of one row is that row, rounded twice to the same value. */
TEST(Deduplicate_OneRoutePerToken_HasTheBitsOfRows) {
  for (int32_t dtype = SLUICE_DTYPE_F32; dtype <= SLUICE_DTYPE_F16; ++dtype) {
    case_t c = base_case();
    c.dtype = dtype, c.top_k = 1, c.world_size = 3, c.num_chunks = 2;
    case_t without = c;
    without.deduplicate = 0, without.chunking = SLUICE_CHUNKING_TOKENS;
    check_same_bits(&c, &without, 1);
  }
}

/* Chunks are cut by tokens, so one chunk has all of a token's sums. */
TEST(Deduplicate_AnyNumberOfChunks_HasTheSameBits) {
  for (int32_t dtype = SLUICE_DTYPE_F32; dtype <= SLUICE_DTYPE_F16; ++dtype) {
    case_t one = base_case(), many;
    one.dtype = dtype, one.world_size = 4;
    many = one;
    for (many.num_chunks = 2; many.num_chunks <= 7; ++many.num_chunks) check_same_bits(&one, &many, 0);
  }
}

/* ---- bytes ---- */

typedef struct traffic_s {
  uint64_t routes_out, token_copies_out, routes_in, token_copies_in; /* to and from other ranks */
} traffic_t;

static traffic_t traffic_of(const case_t* c, int32_t rank) {
  traffic_t sum = {0, 0, 0, 0};
  for (int32_t from = 0; from < c->world_size; ++from) {
    for (int64_t t = 0; t < c->tokens[from]; ++t) {
      int seen[WORLD_MAX_RANKS] = {0};
      for (int32_t k = 0; k < c->top_k; ++k) {
        int64_t e = world_expert(c, from, t, k);
        if (e < 0) continue;
        int32_t to = world_owner(c, (int32_t)e);
        int out = from == rank && to != rank, in = from != rank && to == rank;
        sum.routes_out += (uint64_t)out, sum.routes_in += (uint64_t)in;
        if (seen[to]++ > 0) continue;
        sum.token_copies_out += (uint64_t)out, sum.token_copies_in += (uint64_t)in;
      }
    }
  }
  return sum;
}

/* Forward: rows and weights out, sums back, slots before; backward: rows and weights out, sums and scalars back. */
static uint64_t bytes_with(traffic_t t, uint64_t row, int redispatches) {
  return (2 + (uint64_t)redispatches) * t.token_copies_out * row + 2 * t.token_copies_in * row + 3 * 4 * t.routes_out +
         4 * t.routes_in;
}

TEST(Deduplicate_BytesSent_AreThoseOfTokenCopies) {
  for (int32_t w = 2; w <= 4; w += 2) {
    for (int32_t redispatches = 0; redispatches < 2; ++redispatches) {
      case_t c = base_case();
      c.world_size = w, c.num_chunks = 3, c.model_width = 256, c.drop_every = 7, c.num_experts = 4, c.top_k = 4;
      c.restore_input = redispatches ? SLUICE_RESTORE_REDISPATCH : SLUICE_RESTORE_KEEP;
      c.restore_pre_activation = SLUICE_RESTORE_KEEP;
      result_t got, plain;
      case_run(&c, &got);
      case_t without = c;
      without.deduplicate = 0;
      case_run(&without, &plain);
      must_work(&c, &got);
      for (int32_t r = 0; r < w; ++r) {
        traffic_t t = traffic_of(&c, r);
        assert_int_equal(got.bytes_sent[r], bytes_with(t, 256 * 4, redispatches));
        double share = (double)got.bytes_sent[r] / (double)plain.bytes_sent[r];
        printf("W %d K 4 E 4, rank %d: %llu bytes, %llu without (%.3f)\n", w, r, (unsigned long long)got.bytes_sent[r],
               (unsigned long long)plain.bytes_sent[r], share);
        if (w == 2) assert_true(share > 0.5 && share < 0.6); /* a rank's two routes share a row; some are dropped */
      }
      world_free(&got);
      world_free(&plain);
    }
  }
}

/* ---- budgets and plans: as without deduplication, and compared with that ---- */

static budget_suite_t suite_of(void) {
  budget_suite_t suite = {.base = budget_base_case(), .run = world_run, .least_ranks = 2};
  suite.base.top_k = 4, suite.base.deduplicate = 1;
  return suite;
}

TEST(DeduplicatePrediction_SeveralRanks_EqualsTheAllocatorOfEach) {
  budget_predictions(&(budget_suite_t){.base = base_case(), .run = world_run, .least_ranks = 2});
}

/* Repeated ids may give a rank more routes than distinct ids could; the tables still have room. */
TEST(DeduplicateBudget_RepeatedIds_StayWithinThePlan) {
  const budget_suite_t suite = suite_of();
  for (int32_t w = 2; w <= 4; ++w) {
    case_t c = suite.base;
    c.world_size = w, c.repeat_every = 3, c.wgrad_mode = SLUICE_WGRAD_PER_CHUNK;
    c.budget = 1;
    c.budget = 2 * budget_smallest(&suite, c);
    budget_check(&suite, c);
  }
}

/* The host's experts, and separate weight gradients, as in plans of rows. */
TEST(DeduplicateBudget_CallbackExpertsAndHalves_ResultsAreTheSame) {
  const budget_suite_t suite = suite_of();
  for (int32_t w = 2; w <= 3; ++w) {
    case_t c = suite.base;
    c.world_size = w, c.separate_wgrad = 1, c.reuse_saved = w % 2;
    c.budget = 1;
    c.budget = budget_smallest(&suite, c);
    budget_check(&suite, c);
    c.separate_wgrad = 0, c.callback_experts = 1, c.bias = 0;
    c.restore_input = w == 2 ? SLUICE_RESTORE_KEEP : SLUICE_RESTORE_REDISPATCH;
    c.restore_pre_activation = w == 2 ? SLUICE_RESTORE_KEEP : SLUICE_RESTORE_RECOMPUTE;
    c.budget = 1;
    c.budget = budget_smallest(&suite, c);
    budget_check(&suite, c);
  }
}

/* ---- invalid route indices from a rank ---- */

/* Rank 0 of two, each with one expert; each of two tokens has a route to both. Rank 1 sends two rows. */
static void bind(sluice_moe_t* moe, sluice_binding_t* b) {
  static int32_t ids[] = {0, 1, 0, 1};
  static int64_t shape[] = {2, 2}, strides[] = {2, 1};
  const sluice_tensor_t tensor = {ids, SLUICE_DEVICE_CPU, 0, 2, SLUICE_TYPE_INT, 32, 1, shape, strides, 0};
  assert_int_equal(sluice_binding_route(moe, &tensor, 1, NULL, b), SLUICE_OK);
  b->recv_counts[1] = 2;
  assert_int_equal(sluice_binding_finish(b), SLUICE_OK);
  assert_int_equal(b->num_rows, 4);
}

TEST(Deduplicate_SlotsOfAPeerThatFitNothing_NameTheRank) {
  sluice_context_t* context = NULL;
  assert_int_equal(sluice_engine_create(NULL, NULL, NULL, NULL, &context), SLUICE_OK);
  context->world_size = 2;
  assert_int_equal(sluice_cpu_device_create(&context->allocator, &context->device), SLUICE_OK);
  DEFAULTS(sluice_moe_config, config);
  config.model_width = 4, config.hidden_width = 4, config.num_experts = 2, config.top_k = 2, config.num_chunks = 1;
  config.deduplicate = 1, config.layer_id = 3;
  sluice_moe_t* moe = NULL;
  assert_int_equal(sluice_layer_create(context, &config, NULL, &moe), SLUICE_OK);
  static const struct {
    int32_t slots[2]; /* of rank 1 */
    int is_good;
  } cases[] = {{{0, 2}, 1},  {{1, 2}, 1}, {{0, 1}, 1},         {{0, 0}, 0}, /* twice */
               {{-1, 2}, 0}, {{0, 4}, 0}, {{INT32_MAX, 0}, 0}, {{0, INT32_MIN}, 0}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
    sluice_binding_t b = {.memory = &moe->context->pass_memory};
    bind(moe, &b);
    int32_t slots[] = {0, 2, cases[i].slots[0], cases[i].slots[1]};
    assert_int_equal(sluice_token_copies_restore(&b, slots), cases[i].is_good ? SLUICE_OK : SLUICE_E_MISMATCH);
    if (cases[i].is_good) continue;
    assert_non_null(strstr(last_message(), "layer 3: the token copies that rank 1 announced do not fit its rows"));
    assert_int_equal(last_error()->peer, 1);
  }
  sluice_layer_release(moe);
  sluice_engine_release(context);
}

/* ---- what is refused ---- */

TEST(Deduplicate_ConfigsItDoesNotTake_AreRefusedByName) {
  rig_t rig;
  sluice_moe_config_t good = rig_config(), c;
  assert_int_equal(rig_open(&rig, NULL, &good), SLUICE_OK);
  good.deduplicate = 1;
  c = good, c.deduplicate = 5;
  refuses_layer(&rig, &c, SLUICE_E_INVALID_ARGUMENT, "deduplicate is 5; it must be 0, 1 (by rank), 2 (by node), 3");
  c = good, c.exchange_mode = SLUICE_EXCHANGE_CAPACITY, c.capacity_rows = 4;
  refuses_layer(&rig, &c, SLUICE_E_UNSUPPORTED, "set deduplicate to 0, or exchange_mode to exact");
  rig_close(&rig);
}

TEST(Deduplicate_PartsAlone_AreRefusedByName) {
  rig_t rig;
  sluice_moe_config_t config = rig_config();
  config.deduplicate = 1;
  assert_int_equal(rig_open(&rig, NULL, &config), SLUICE_OK);
  sluice_dispatch_t* dispatch = NULL;
  REFUSED(sluice_dispatch_forward(rig.moe, &rig.tokens.tensor, &rig.ids.tensor, NULL, &dispatch), SLUICE_E_UNSUPPORTED,
          "sluice_dispatch_forward: layer 3 has deduplicate 1");
  assert_null(dispatch);
  uint64_t digest = 0;
  assert_int_equal(rig_round(&rig, &digest), SLUICE_OK); /* with one rank the option has no effect */
  rig_close(&rig);
  assert_int_equal(atomic_load(&rig.heap.live_bytes), 0);
}

int main(void) {
  const struct CMUnitTest rows[] = {
      BUDGET_TEST(DeduplicateBudget_FromTheSmallestUp_ResultsAreTheSame, suite_of(), budget_from_the_smallest_up),
      BUDGET_TEST(DeduplicateBudget_OneHotExpert_StaysWithinThePlan, suite_of(), budget_one_hot_expert),
      BUDGET_TEST(DeduplicateBudget_OddShapesAndPolicies_ResultsAreTheSame, suite_of(), budget_odd_shapes_and_policies),
      BUDGET_TEST(DeduplicateBudget_MoreOutstandingThanSaid_RefusedByName, suite_of(),
                  budget_more_outstanding_than_said),
      BUDGET_TEST(DeduplicateHostBudget_OneHotExpert_ResultsAreTheSame, suite_of(), host_budget_one_hot_expert),
      SWEEP_TEST(Deduplicate_RanksAndChunks_MatchReference, world_run, base_case(), check, sweep_ranks_and_chunks),
      SWEEP_TEST(Deduplicate_EveryPolicy_MatchesReference, world_run, base_case(), check, sweep_policies),
      SWEEP_TEST(Deduplicate_EveryDtype_MatchesReference, world_run, base_case(), check, sweep_dtypes),
      SWEEP_TEST(Deduplicate_EveryDtypeOnFakes_MatchesReference, run_on_fakes, base_case(), check, sweep_dtypes),
      SWEEP_TEST(Deduplicate_AnyRoutes_MatchReference, world_run, base_case(), check, sweep_routes),
      SWEEP_TEST(Deduplicate_AnyBatches_MatchReference, world_run, base_case(), check, sweep_batches),
      SWEEP_TEST(Deduplicate_CallbackExperts_MatchReference, world_run, base_case(), check, sweep_callbacks),
      TEST_WITH(run_on_fakes, Deduplicate_AnyNumberOfChunks_HasTheSameBits),
      TEST_WITH(run_on_fakes, Deduplicate_BytesSent_AreThoseOfTokenCopies),
  };
  return RUN_CASES_AFTER(rows);
}
