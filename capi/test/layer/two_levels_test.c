// SPDX-License-Identifier: Apache-2.0
/* Layers with two levels on this CPU: results and gradients compared with the plain f64 reference and with one level,
 * bytes sent on each level, and memory under budgets. */

#include "capi/test/world/budget_suite.h"
#include "capi/test/world/sweeps.h"

static const int32_t nodes_of[][2] = {{4, 2}, {6, 2}, {6, 3}, {8, 2}, {8, 4}}; /* W, ranks per node */
enum { NUM_NODES = sizeof nodes_of / sizeof nodes_of[0] };

static case_t base_case(int32_t which) {
  case_t c = world_small_case();
  c.world_size = nodes_of[which][0], c.ranks_per_node = nodes_of[which][1];
  c.num_experts = 24, c.top_k = 5, c.bias = 1, c.deduplicate = SLUICE_DEDUPLICATE_NODES;
  for (int32_t r = 0; r < c.world_size; ++r) c.tokens[r] = 11 + 7 * r % 13;
  return c;
}

/* Compares with the reference and, at the experts, with the same layer with one level. */
static void check(const case_t* c) {
  result_t got, one_level;
  case_t by_rank = *c;
  by_rank.deduplicate = SLUICE_DEDUPLICATE_RANKS;
  case_run(c, &got);
  case_run(&by_rank, &one_level);
  must_match(c, &got);
  must_work(c, &one_level);
  must_be_same_at_experts(c, &got, &one_level);
  world_free(&got);
  world_free(&one_level);
}

static void check_each(const case_t* base, sweep_t sweep) {
  case_t c;
  for (int32_t i = 0; sweep(base, i, &c); ++i) check(&c);
}

TEST(TwoLevels_NodesAndChunks_MatchReference) {
  const int32_t chunks[] = {1, 2, 3, 7};
  for (int32_t i = 0; i < NUM_NODES; ++i) {
    for (int32_t n = 0; n < 4; ++n) {
      case_t c = base_case(i);
      c.num_chunks = chunks[n], c.gated = (i + n) % 3 == 0, c.wgrad_mode = n % 2;
      check(&c);
    }
  }
}

TEST(TwoLevels_PoliciesAndRoutes_MatchReference) {
  for (int32_t i = 0; i < NUM_NODES; i += 2) {
    const case_t base = base_case(i);
    check_each(&base, sweep_policies);
    check_each(&base, sweep_routes);
  }
}

TEST(TwoLevels_BatchesAndCallbackExperts_MatchReference) {
  const case_t base = base_case(0);
  check_each(&base, sweep_batches);
  check_each(&base, sweep_callbacks);
}

TEST(TwoLevels_EveryDtypeAndTopK_MatchesReference) {
  const int32_t dtypes[] = {SLUICE_DTYPE_F32, SLUICE_DTYPE_BF16, SLUICE_DTYPE_F16, SLUICE_DTYPE_F64};
  for (int32_t i = 0; i < 4; ++i) {
    for (int32_t k = 1; k <= 24; k = k < 4 ? k + 1 : 2 * k) {
      case_t c = base_case((i + k) % NUM_NODES);
      c.top_k = k, c.num_chunks = 3, c.dtype = dtypes[i];
      check(&c);
    }
  }
}

TEST(TwoLevels_Reuse_MatchesReference) {
  case_t c = base_case(2);
  c.num_chunks = 2, c.reuse = 1, c.wgrad_mode = SLUICE_WGRAD_ADAPTIVE;
  c.restore_input = c.restore_pre_activation = SLUICE_RESTORE_ADAPTIVE;
  check(&c);
}

/* With one route for each token, two levels save nothing, so rows take one hop as with one level. */
TEST(TwoLevels_OneRoutePerToken_KeepsOneLevel) {
  for (int32_t dtype = SLUICE_DTYPE_F32; dtype <= SLUICE_DTYPE_F16; ++dtype) {
    case_t c = base_case(dtype % NUM_NODES), one_level;
    c.dtype = dtype, c.top_k = 1, c.num_chunks = 2;
    one_level = c, one_level.deduplicate = SLUICE_DEDUPLICATE_RANKS;
    result_t got, want;
    world_run(&c, &got);
    world_run(&one_level, &want);
    must_be_same(&c, &got, &want, 1);
    for (int32_t r = 0; r < c.world_size; ++r) assert_int_equal(got.bytes_sent[r], want.bytes_sent[r]);
    world_free(&got);
    world_free(&want);
  }
}

/* Until the tuner decides, an adaptive layer sends by rank. */
TEST(TwoLevels_LeftOpen_BeginsByRank) {
  for (int32_t i = 0; i < NUM_NODES; ++i) {
    case_t c = base_case(i), by_rank;
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
    case_t c = base_case(0), by_rank;
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
    case_t c = base_case(0), one_level;
    c.ranks_per_node = per_node, c.num_chunks = 2;
    one_level = c, one_level.deduplicate = SLUICE_DEDUPLICATE_RANKS;
    check_same_bits(&c, &one_level, 1);
  }
}

/* ---- bytes ---- */

typedef struct traffic_s {
  uint64_t node_copies_out, node_copies_in; /* to and from other nodes */
  uint64_t forwards_out, forwards_in;       /* to and from other ranks of the node */
  uint64_t routes_out, routes_in;           /* to and from other ranks */
} traffic_t;

static traffic_t traffic_of(const case_t* c, int32_t rank) {
  traffic_t sum = {0};
  const int32_t per_node = c->ranks_per_node, node = rank / per_node, local = rank % per_node;
  for (int32_t from = 0; from < c->world_size; ++from) {
    for (int64_t t = 0; t < c->tokens[from]; ++t) {
      int rank_seen[WORLD_MAX_RANKS] = {0}, node_seen[WORLD_MAX_RANKS] = {0};
      for (int32_t k = 0; k < c->top_k; ++k) {
        const int64_t e = world_expert(c, from, t, k);
        if (e < 0) continue;
        const int32_t to = world_owner(c, (int32_t)e), through = to / per_node * per_node + from % per_node;
        sum.routes_out += from == rank && to != rank, sum.routes_in += from != rank && to == rank;
        if (node_seen[to / per_node]++ == 0) {
          sum.node_copies_out += from == rank && to / per_node != node;
          sum.node_copies_in += to / per_node == node && from / per_node != node && from % per_node == local;
        }
        if (rank_seen[to]++ > 0) continue;
        sum.forwards_out += through == rank && to != rank;
        sum.forwards_in += to == rank && through != rank;
      }
    }
  }
  return sum;
}

/* Bytes that a rank sends: rows and sums, to the experts and back, in both directions; tables and scalars of token
 * copies; for node copies, their numbers by chunk in whole words of 8 bytes, and 8 bytes for each possible token. */
static uint64_t bytes_of(const case_t* c, traffic_t t, uint64_t row) {
  uint64_t most = 0, counts = ((uint64_t)c->num_chunks * 4 + 7) / 8 * 8;
  for (int32_t r = 0; r < c->world_size; ++r) most = (uint64_t)c->tokens[r] > most ? (uint64_t)c->tokens[r] : most;
  const uint64_t nodes = (uint64_t)(c->world_size / c->ranks_per_node);
  const uint64_t rows = t.node_copies_out + t.node_copies_in + t.forwards_out + t.forwards_in;
  return 2 * rows * row + 3 * 4 * t.routes_out + 4 * t.routes_in + (nodes - 1) * (counts + 8 * most);
}

TEST(TwoLevels_BytesSent_AreThoseOfNodeCopiesAndForwards) {
  for (int32_t i = 0; i < NUM_NODES; ++i) {
    case_t c = base_case(i);
    c.num_chunks = 3, c.model_width = 64, c.drop_every = 7;
    result_t got;
    world_run(&c, &got);
    must_work(&c, &got);
    for (int32_t r = 0; r < c.world_size; ++r) {
      assert_int_equal(got.bytes_sent[r], bytes_of(&c, traffic_of(&c, r), 64 * 4));
    }
    world_free(&got);
  }
}

/* ---- budgets and plans: memory stays within them for any routing, and results equal those without ---- */

enum { RANKS = 4, PER_NODE = 2 };

/* Two nodes of two ranks; groups of other sizes have no nodes. */
static void run_on_nodes(const case_t* given, result_t* out) {
  case_t c = *given;
  c.ranks_per_node = c.world_size == RANKS ? PER_NODE : 0;
  world_run(&c, out);
}

static budget_suite_t suite_of(void) {
  budget_suite_t suite = {.base = budget_base_case(), .run = run_on_nodes, .least_ranks = RANKS};
  suite.base.world_size = RANKS, suite.base.top_k = 4, suite.base.deduplicate = SLUICE_DEDUPLICATE_NODES;
  return suite;
}

/* All tokens are on ranks of one local index, and most of their routes go to one node. The rank with this index in this
 * node forwards more rows than any rank receives. */
TEST(TwoLevelsBudget_OneRankPassesOnMost_StaysWithinThePlan) {
  const budget_suite_t suite = suite_of();
  const int32_t chunks[] = {1, 2, 3, 8};
  for (int32_t i = 0; i < 4; ++i) {
    case_t c = suite.base;
    c.num_experts = 4, c.top_k = 2, c.hot_expert = 3, c.num_chunks = chunks[i];
    c.tokens[1] = c.tokens[3] = 0;
    c.budget = budget_smallest(&suite, c);
    budget_check(&suite, c);
  }
}

TEST(TwoLevelsBudget_RepeatedIdsAndCallbacks_ResultsAreTheSame) {
  const budget_suite_t suite = suite_of();
  case_t c = suite.base;
  c.repeat_every = 3;
  c.budget = 2 * budget_smallest(&suite, c);
  budget_check(&suite, c);
  c = suite.base, c.callback_experts = 1, c.bias = 0;
  c.restore_input = SLUICE_RESTORE_REDISPATCH, c.restore_pre_activation = SLUICE_RESTORE_RECOMPUTE;
  c.budget = budget_smallest(&suite, c);
  budget_check(&suite, c);
}

/* A plan that the host makes counts the most rows that a rank may forward. */
TEST(TwoLevelsPlan_OfTheHost_HoldsWhatItSays) {
  for (int32_t i = 0; i < 9; ++i) {
    case_t c = suite_of().base;
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

int main(void) {
  const struct CMUnitTest rows[] = {
      BUDGET_TEST(TwoLevelsBudget_FromTheSmallestUp_ResultsAreTheSame, suite_of(), budget_from_the_smallest_up),
      BUDGET_TEST(TwoLevelsBudget_OneHotExpert_StaysWithinThePlan, suite_of(), budget_one_hot_expert),
      BUDGET_TEST(TwoLevelsBudget_OddShapesAndPolicies_ResultsAreTheSame, suite_of(), budget_odd_shapes_and_policies),
      BUDGET_TEST(TwoLevelsBudget_SeparateWgrad_ResultsAreTheSame, suite_of(), budget_separate_wgrad),
      BUDGET_TEST(TwoLevelsHostBudget_OneHotExpert_ResultsAreTheSame, suite_of(), host_budget_one_hot_expert),
  };
  return RUN_CASES_AFTER(rows);
}
