// SPDX-License-Identifier: Apache-2.0
/* Deduplicated layers, whose tokens travel once to each rank, or once to each node and within it to each rank: results
 * and gradients against the plain f64 reference and against the same layer with one copy more, bytes sent, budgets,
 * refusals. On this CPU, and some of it on CUDA (fakes), with cuda_copies_test. */
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

static const int32_t nodes_of[][2] = {{4, 2}, {6, 2}, {6, 3}, {8, 2}, {8, 4}}; /* W, ranks per node */
enum { NUM_NODES = sizeof nodes_of / sizeof nodes_of[0] };

static case_t rank_case(void) {
  case_t c = world_small_case();
  c.world_size = 2, c.top_k = 4, c.bias = 1, c.deduplicate = SLUICE_DEDUPLICATE_RANKS;
  return c;
}

static case_t node_case(int32_t which) {
  case_t c = world_small_case();
  c.world_size = nodes_of[which][0], c.ranks_per_node = nodes_of[which][1];
  c.num_experts = 24, c.top_k = 5, c.bias = 1, c.deduplicate = SLUICE_DEDUPLICATE_NODES;
  for (int32_t r = 0; r < c.world_size; ++r) c.tokens[r] = 11 + 7 * r % 13;
  return c;
}

/* The same layer with one level in place of two, or with rows in place of copies. */
static case_t plainer(const case_t* c) {
  case_t other = *c;
  other.deduplicate = c->deduplicate == SLUICE_DEDUPLICATE_NODES ? SLUICE_DEDUPLICATE_RANKS : SLUICE_DEDUPLICATE_NONE;
  if (other.deduplicate == SLUICE_DEDUPLICATE_NONE) other.chunking = SLUICE_CHUNKING_TOKENS;
  return other;
}

/* Compares with the reference and, at the experts, with the plainer layer. */
static void check(const case_t* c) {
  result_t got, plain;
  const case_t other = plainer(c);
  case_run(c, &got);
  case_run(&other, &plain);
  must_match(c, &got);
  must_work(&other, &plain);
  must_be_same_at_experts(c, &got, &plain);
  world_free(&got);
  world_free(&plain);
}

TEST(TwoLevels_NodesAndChunks_MatchReference) {
  const int32_t chunks[] = {1, 2, 3, 7};
  for (int32_t i = 0; i < 4 * NUM_NODES; ++i) {
    const int32_t n = i % 4;
    case_t c = node_case(i / 4);
    c.num_chunks = chunks[n], c.gated = (i / 4 + n) % 3 == 0, c.wgrad_mode = n % 2;
    check(&c);
  }
}

TEST(TwoLevels_EveryDtypeAndTopK_MatchesReference) {
  const int32_t dtypes[] = {SLUICE_DTYPE_F32, SLUICE_DTYPE_BF16, SLUICE_DTYPE_F16, SLUICE_DTYPE_F64};
  for (int32_t i = 0; i < 4; ++i) {
    for (int32_t k = 1; k <= 24; k = k < 4 ? k + 1 : 2 * k) {
      case_t c = node_case((i + k) % NUM_NODES);
      c.top_k = k, c.num_chunks = 3, c.dtype = dtypes[i];
      check(&c);
    }
  }
}

TEST(TwoLevels_Reuse_MatchesReference) {
  case_t c = node_case(2);
  c.num_chunks = 2, c.reuse = 1, c.wgrad_mode = SLUICE_WGRAD_ADAPTIVE;
  c.restore_input = c.restore_pre_activation = SLUICE_RESTORE_ADAPTIVE;
  check(&c);
}

/* A sum of one row is that row, rounded twice to the same value. With one route for each token, two levels save
 * nothing, so rows take one hop as with one level. */
TEST(Deduplicate_OneRoutePerToken_HasTheBitsOfThePlainerLayer) {
  for (int32_t i = 0; i < 6; ++i) {
    case_t c = i < 3 ? rank_case() : node_case(i % NUM_NODES);
    c.dtype = SLUICE_DTYPE_F32 + i % 3, c.top_k = 1, c.num_chunks = 2;
    if (i < 3) c.world_size = 3;
    const case_t other = plainer(&c);
    result_t got, want;
    case_run(&c, &got);
    case_run(&other, &want);
    must_be_same(&c, &got, &want, 1);
    for (int32_t r = 0; r < c.world_size && i >= 3; ++r) assert_int_equal(got.bytes_sent[r], want.bytes_sent[r]);
    world_free(&got);
    world_free(&want);
  }
}

/* Chunks are cut by tokens, so one chunk has all of a token's sums. */
TEST(Deduplicate_AnyNumberOfChunks_HasTheSameBits) {
  for (int32_t dtype = SLUICE_DTYPE_F32; dtype <= SLUICE_DTYPE_F16; ++dtype) {
    case_t one = rank_case(), many;
    one.dtype = dtype, one.world_size = 4;
    many = one;
    for (many.num_chunks = 2; many.num_chunks <= 7; ++many.num_chunks) check_same_bits(&one, &many, 0);
  }
}

/* Until the tuner decides, an adaptive layer sends by rank. */
TEST(TwoLevels_LeftOpen_BeginsByRank) {
  for (int32_t i = 0; i < NUM_NODES; ++i) {
    case_t c = node_case(i), by_rank;
    c.num_chunks = 1 + i % 3, c.wgrad_mode = i % 2;
    by_rank = c, by_rank.deduplicate = SLUICE_DEDUPLICATE_RANKS;
    c.deduplicate = SLUICE_DEDUPLICATE_ADAPTIVE;
    check_same_bits(&c, &by_rank, 1);
    c.restore = by_rank.restore = 1, c.separate_wgrad = by_rank.separate_wgrad = 1;
    check_same_bits(&c, &by_rank, 1);
  }
}

/* An adaptive layer that cannot have two levels uses one, without an error. */
TEST(TwoLevels_LeftOpenWhereThereAreNone_IsByRank) {
  for (int32_t what = 0; what < 4; ++what) {
    case_t c = node_case(0), by_rank;
    c.num_chunks = 2;
    if (what == 0) c.top_k = 1;
    if (what == 1) c.ranks_per_node = 0;
    if (what == 2) c.budget = 1 << 22;
    if (what == 3) c.reuse = 1, c.restore_input = c.restore_pre_activation = SLUICE_RESTORE_ADAPTIVE;
    by_rank = c, by_rank.deduplicate = SLUICE_DEDUPLICATE_RANKS;
    c.deduplicate = SLUICE_DEDUPLICATE_ADAPTIVE;
    check_same_bits(&c, &by_rank, 1);
  }
}

/* With one node, with nodes of one rank, or without nodes, there is one level. */
TEST(TwoLevels_OneLevelOfNodes_HasTheBitsOfRanks) {
  for (int32_t per_node = 0; per_node <= 4; per_node += per_node == 1 ? 3 : 1) {
    case_t c = node_case(0), one_level;
    c.ranks_per_node = per_node, c.num_chunks = 2;
    one_level = c, one_level.deduplicate = SLUICE_DEDUPLICATE_RANKS;
    check_same_bits(&c, &one_level, 1);
  }
}

/* ---- bytes ---- */

/* Without nodes each rank is a node: its copies go to other nodes, and nothing is forwarded. */
typedef struct traffic_s {
  uint64_t copies_out, copies_in;     /* to and from other nodes */
  uint64_t forwards_out, forwards_in; /* to and from other ranks of the node */
  uint64_t routes_out, routes_in;     /* to and from other ranks */
} traffic_t;

static traffic_t traffic_of(const case_t* c, int32_t rank) {
  traffic_t sum = {0};
  const int32_t per_node = c->deduplicate == SLUICE_DEDUPLICATE_NODES ? c->ranks_per_node : 1;
  const int32_t node = rank / per_node, local = rank % per_node;
  for (int32_t from = 0; from < c->world_size; ++from) {
    for (int64_t t = 0; t < c->tokens[from]; ++t) {
      int rank_seen[WORLD_MAX_RANKS] = {0}, node_seen[WORLD_MAX_RANKS] = {0};
      for (int32_t k = 0; k < c->top_k; ++k) {
        const int64_t e = world_expert(c, from, t, k);
        if (e < 0) continue;
        const int32_t to = world_owner(c, (int32_t)e), through = to / per_node * per_node + from % per_node;
        sum.routes_out += from == rank && to != rank, sum.routes_in += from != rank && to == rank;
        if (node_seen[to / per_node]++ == 0) {
          sum.copies_out += from == rank && to / per_node != node;
          sum.copies_in += to / per_node == node && from / per_node != node && from % per_node == local;
        }
        if (rank_seen[to]++ > 0) continue;
        sum.forwards_out += through == rank && to != rank;
        sum.forwards_in += to == rank && through != rank;
      }
    }
  }
  return sum;
}

/* Bytes that a rank sends: rows and sums, to the experts and back, in both directions, and rows once more if they are
 * dispatched again; tables and scalars of token copies; for node copies, their numbers by chunk in whole words of 8
 * bytes, and 8 bytes for each possible token. */
static uint64_t bytes_of(const case_t* c, traffic_t t, uint64_t row) {
  const uint64_t again = c->restore_input == SLUICE_RESTORE_REDISPATCH;
  const uint64_t out = t.copies_out + t.forwards_out, in = t.copies_in + t.forwards_in;
  const uint64_t bytes = (2 + again) * out * row + 2 * in * row + 3 * 4 * t.routes_out + 4 * t.routes_in;
  if (c->deduplicate != SLUICE_DEDUPLICATE_NODES) return bytes;
  uint64_t most = 0, counts = ((uint64_t)c->num_chunks * 4 + 7) / 8 * 8;
  for (int32_t r = 0; r < c->world_size; ++r) most = (uint64_t)c->tokens[r] > most ? (uint64_t)c->tokens[r] : most;
  return bytes + (uint64_t)(c->world_size / c->ranks_per_node - 1) * (counts + 8 * most);
}

static void check_bytes(case_t c, result_t* got) {
  c.num_chunks = 3, c.drop_every = 7;
  case_run(&c, got);
  must_work(&c, got);
  const uint64_t row = (uint64_t)c.model_width * 4;
  for (int32_t r = 0; r < c.world_size; ++r) assert_int_equal(got->bytes_sent[r], bytes_of(&c, traffic_of(&c, r), row));
}

TEST(Deduplicate_BytesSent_AreThoseOfTokenCopies) {
  for (int32_t i = 0; i < 4; ++i) {
    case_t c = rank_case();
    c.world_size = i < 2 ? 2 : 4, c.model_width = 256, c.num_experts = 4;
    c.restore_input = i % 2 ? SLUICE_RESTORE_REDISPATCH : SLUICE_RESTORE_KEEP;
    result_t got, plain;
    check_bytes(c, &got);
    c.num_chunks = 3, c.drop_every = 7, c.deduplicate = SLUICE_DEDUPLICATE_NONE;
    case_run(&c, &plain);
    for (int32_t r = 0; r < 2 && i < 2; ++r) { /* a rank's two routes share a row; some are dropped */
      const double share = (double)got.bytes_sent[r] / (double)plain.bytes_sent[r];
      printf("W 2 K 4 E 4, rank %d: %.3f of the bytes of rows\n", r, share);
      assert_true(share > 0.5 && share < 0.6);
    }
    world_free(&got);
    world_free(&plain);
  }
}

TEST(TwoLevels_BytesSent_AreThoseOfNodeCopiesAndForwards) {
  for (int32_t i = 0; i < NUM_NODES; ++i) {
    case_t c = node_case(i);
    c.model_width = 64;
    result_t got;
    check_bytes(c, &got);
    world_free(&got);
  }
}

/* ---- budgets and plans: memory stays within them for any routing, and results equal those without ---- */

enum { RANKS = 4, PER_NODE = 2 };

static budget_suite_t suite_of(void) {
  budget_suite_t suite = {.base = budget_base_case(), .run = world_run, .least_ranks = 2};
  suite.base.top_k = 4, suite.base.deduplicate = SLUICE_DEDUPLICATE_RANKS;
  return suite;
}

/* Two nodes of two ranks; groups of other sizes have no nodes. */
static void run_on_nodes(const case_t* given, result_t* out) {
  case_t c = *given;
  c.ranks_per_node = c.world_size == RANKS ? PER_NODE : 0;
  world_run(&c, out);
}

static budget_suite_t suite_by_node(void) {
  budget_suite_t suite = suite_of();
  suite.run = run_on_nodes, suite.least_ranks = suite.base.world_size = RANKS;
  suite.base.deduplicate = SLUICE_DEDUPLICATE_NODES;
  return suite;
}

TEST(DeduplicatePrediction_SeveralRanks_EqualsTheAllocatorOfEach) {
  budget_predictions(&(budget_suite_t){.base = rank_case(), .run = world_run, .least_ranks = 2});
}

/* Repeated ids may give a rank more routes than distinct ids could; the tables still have room. */
static void budget_of_repeated_ids(const budget_suite_t* suite) {
  for (int32_t w = suite->least_ranks; w <= 4; ++w) {
    case_t c = suite->base;
    c.world_size = w, c.repeat_every = 3, c.wgrad_mode = SLUICE_WGRAD_PER_CHUNK;
    c.budget = 2 * budget_smallest(suite, c);
    budget_check(suite, c);
  }
}

/* The host's experts, as in plans of rows. */
static void budget_of_callbacks(const budget_suite_t* suite) {
  for (int32_t keeps = 0; keeps < 2; ++keeps) {
    case_t c = suite->base;
    c.world_size = suite->least_ranks, c.callback_experts = 1, c.bias = 0;
    c.restore_input = keeps ? SLUICE_RESTORE_KEEP : SLUICE_RESTORE_REDISPATCH;
    c.restore_pre_activation = keeps ? SLUICE_RESTORE_KEEP : SLUICE_RESTORE_RECOMPUTE;
    c.budget = budget_smallest(suite, c);
    budget_check(suite, c);
  }
}

/* All tokens are on ranks of one local index, and most of their routes go to one node. The rank with this index in this
 * node forwards more rows than any rank receives. */
TEST(TwoLevelsBudget_OneRankPassesOnMost_StaysWithinThePlan) {
  const budget_suite_t suite = suite_by_node();
  const int32_t chunks[] = {1, 2, 3, 8};
  for (int32_t i = 0; i < 4; ++i) {
    case_t c = suite.base;
    c.num_experts = 4, c.top_k = 2, c.hot_expert = 3, c.num_chunks = chunks[i];
    c.tokens[1] = c.tokens[3] = 0;
    c.budget = budget_smallest(&suite, c);
    budget_check(&suite, c);
  }
}

/* A plan that the host makes counts the most rows that a rank may forward. */
TEST(TwoLevelsPlan_OfTheHost_HoldsWhatItSays) {
  for (int32_t i = 0; i < 9; ++i) {
    case_t c = suite_by_node().base;
    c.gated = i % 2, c.outstanding = 1 + i % 2, c.hot_expert = i % 4 == 3 ? 3 : -1;
    DEFAULTS(sluice_plan_config, plan);
    plan.max_tokens = 96, plan.max_outstanding = c.outstanding, plan.num_chunks = 1 + i % 4, plan.wgrad_mode = i % 2;
    plan.restore_input = i / 3, plan.restore_pre_activation = world_pre_activations[i % 3];
    c.plan = &plan;
    result_t got;
    run_on_nodes(&c, &got);
    must_work(&c, &got);
    for (int32_t r = 0; r < RANKS; ++r) {
      assert_true(got.peak_bytes[r] <= got.predicted_bytes[r]);
      assert_true(got.predicted_bytes[r] <= got.planned_bytes[r]);
    }
    world_free(&got);
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

/* Every budget case by rank and by node. */
#define BOTH(what, of_check)                                   \
  BUDGET_TEST(DeduplicateBudget_##what, suite_of(), of_check), \
      BUDGET_TEST(TwoLevelsBudget_##what, suite_by_node(), of_check)
#define BY_NODE(what, which, sweep) SWEEP_TEST(TwoLevels_##what, world_run, node_case(which), check, sweep)

int main(void) {
  const struct CMUnitTest rows[] = {
      BOTH(FromTheSmallestUp_ResultsAreTheSame, budget_from_the_smallest_up),
      BOTH(OneHotExpert_StaysWithinThePlan, budget_one_hot_expert),
      BOTH(OddShapesAndPolicies_ResultsAreTheSame, budget_odd_shapes_and_policies),
      BOTH(SeparateWgrad_ResultsAreTheSame, budget_separate_wgrad),
      BOTH(RepeatedIds_StayWithinThePlan, budget_of_repeated_ids),
      BOTH(CallbackExperts_ResultsAreTheSame, budget_of_callbacks),
      BOTH(OneHotExpertOffloaded_ResultsAreTheSame, host_budget_one_hot_expert),
      BUDGET_TEST(DeduplicateBudget_MoreOutstandingThanSaid_RefusedByName, suite_of(),
                  budget_more_outstanding_than_said),
      SWEEP_TEST(Deduplicate_RanksAndChunks_MatchReference, world_run, rank_case(), check, sweep_ranks_and_chunks),
      SWEEP_TEST(Deduplicate_EveryPolicy_MatchesReference, world_run, rank_case(), check, sweep_policies),
      SWEEP_TEST(Deduplicate_EveryDtype_MatchesReference, world_run, rank_case(), check, sweep_dtypes),
      SWEEP_TEST(Deduplicate_EveryDtypeOnFakes_MatchesReference, run_on_fakes, rank_case(), check, sweep_dtypes),
      SWEEP_TEST(Deduplicate_AnyRoutes_MatchReference, world_run, rank_case(), check, sweep_routes),
      SWEEP_TEST(Deduplicate_AnyBatches_MatchReference, world_run, rank_case(), check, sweep_batches),
      SWEEP_TEST(Deduplicate_CallbackExperts_MatchReference, world_run, rank_case(), check, sweep_callbacks),
      BY_NODE(EveryPolicyOnPairs_MatchesReference, 0, sweep_policies),
      BY_NODE(EveryPolicyOnTriples_MatchesReference, 2, sweep_policies),
      BY_NODE(EveryPolicyOnFours_MatchesReference, 4, sweep_policies),
      BY_NODE(AnyRoutesOnPairs_MatchReference, 0, sweep_routes),
      BY_NODE(AnyRoutesOnTriples_MatchReference, 2, sweep_routes),
      BY_NODE(AnyRoutesOnFours_MatchReference, 4, sweep_routes),
      BY_NODE(AnyBatches_MatchReference, 0, sweep_batches),
      BY_NODE(CallbackExperts_MatchReference, 0, sweep_callbacks),
      TEST_WITH(run_on_fakes, Deduplicate_AnyNumberOfChunks_HasTheSameBits),
      TEST_WITH(run_on_fakes, Deduplicate_BytesSent_AreThoseOfTokenCopies),
  };
  return RUN_CASES_AFTER(rows);
}
