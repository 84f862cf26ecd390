// SPDX-License-Identifier: Apache-2.0
/* Layers with two levels on this CPU: results and gradients compared with the plain f64 reference and with one level,
 * bytes sent on each level, and errors. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/test/refused.h"
#include "capi/test/rig/rig.h"
#include "capi/test/world/checks.h"
#include "capi/test/world/world.h"

static const int32_t nodes_of[][2] = {{4, 2}, {6, 2}, {6, 3}, {8, 2}, {8, 4}}; /* W, ranks per node */
enum { NUM_NODES = sizeof nodes_of / sizeof nodes_of[0] };

static case_t base_case(int32_t which) {
  case_t c = world_small_case();
  c.world_size = nodes_of[which][0], c.ranks_per_node = nodes_of[which][1];
  c.num_experts = 24, c.top_k = 5, c.bias = 1, c.deduplicate = SLUICE_DEDUPLICATE_NODES;
  for (int32_t r = 0; r < c.world_size; ++r) c.tokens[r] = 11 + 7 * r % 13;
  return c;
}

/* Rows reach the experts unchanged, so the results of experts have the same bits. */
static void assert_same_at_experts(const case_t* c, const result_t* a, const result_t* b) {
  for (int32_t r = 0; r < c->world_size; ++r) {
    assert_memory_equal(a->grad_weights[r], b->grad_weights[r],
                        (size_t)(c->tokens[r] * c->top_k) * sizeof *a->grad_weights[r]);
  }
  if (c->callback_experts) return;
  const size_t matrix = (size_t)(c->num_experts * c->hidden_width * c->model_width) * sizeof(double);
  assert_memory_equal(a->grad_params[0], b->grad_params[0], matrix);
  assert_memory_equal(a->grad_params[2], b->grad_params[2], matrix);
}

static void check(const case_t* c) {
  result_t got, one_level, want;
  case_t by_rank = *c;
  by_rank.deduplicate = SLUICE_DEDUPLICATE_RANKS;
  world_run(c, &got);
  world_run(&by_rank, &one_level);
  world_reference(c, &want);
  must_work(c, &got);
  must_work(c, &one_level);
  const double d = world_distance(c, &got, &want);
  if (!(d >= 0 && d <= world_tolerance(c))) {
    fail_msg("W %d by %d n %d K %d E %d dtype %d gated %d restore %d %d: distance %g", c->world_size, c->ranks_per_node,
             c->num_chunks, c->top_k, c->num_experts, c->dtype, c->gated, c->restore_input, c->restore_pre_activation,
             d);
  }
  assert_same_at_experts(c, &got, &one_level);
  world_free(&got);
  world_free(&one_level);
  world_free(&want);
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

TEST(TwoLevels_EveryPolicy_MatchesReference) {
  const int32_t inputs[] = {SLUICE_RESTORE_KEEP, SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_REDISPATCH};
  const int32_t pre_activations[] = {SLUICE_RESTORE_KEEP, SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_RECOMPUTE};
  for (int32_t p = 0; p < 9; ++p) {
    case_t c = base_case(p % NUM_NODES);
    c.num_chunks = 1 + p % 4, c.gated = p % 2;
    c.restore_input = inputs[p / 3], c.restore_pre_activation = pre_activations[p % 3];
    c.reuse_saved = p % 2, c.restore = p % 2;
    check(&c);
    c.restore = !c.restore, c.separate_wgrad = 1, c.outstanding = c.restore ? 1 : 2, c.wgrad_mode = 1;
    check(&c);
  }
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

TEST(TwoLevels_DroppedRepeatedAndHotRoutes_MatchReference) {
  for (int32_t i = 0; i < NUM_NODES; ++i) {
    case_t c = base_case(i);
    c.num_chunks = 3, c.drop_every = 1 + i % 3;
    check(&c);
    c.drop_every = 5, c.repeat_every = 1 + i % 3;
    check(&c);
    c.drop_every = 0, c.hot_expert = 11, c.uneven_owners = i % 2;
    check(&c);
  }
}

TEST(TwoLevels_NoTokensOnSomeRanks_MatchesReference) {
  case_t c = base_case(0);
  c.num_chunks = 4;
  c.tokens[1] = 0;
  check(&c);
  for (int32_t r = 0; r < 4; ++r) c.tokens[r] = 0;
  check(&c);
}

TEST(TwoLevels_CallbackExpertsAndReuse_MatchReference) {
  case_t c = base_case(0);
  c.callback_experts = 1, c.num_chunks = 3;
  check(&c);
  c = base_case(2), c.num_chunks = 2, c.reuse = 1, c.wgrad_mode = SLUICE_WGRAD_ADAPTIVE;
  c.restore_input = c.restore_pre_activation = SLUICE_RESTORE_ADAPTIVE;
  check(&c);
}

TEST(TwoLevels_ManyCycles_KeepNoMemory) {
  case_t c = base_case(0);
  c.num_chunks = 3, c.cycles = 3;
  result_t got;
  world_run(&c, &got);
  must_work(&c, &got);
  for (int32_t r = 0; r < c.world_size; ++r) assert_int_equal(got.growth[r], 0);
  world_free(&got);
}

static void assert_same_bits(const case_t* a, const case_t* b) {
  result_t one, other;
  world_run(a, &one);
  world_run(b, &other);
  must_work(a, &one);
  must_work(b, &other);
  assert_true(world_identical(a, &one, &other, 1));
  world_free(&one);
  world_free(&other);
}

/* With one route for each token, two levels save nothing, so rows take one hop as with one level. */
TEST(TwoLevels_OneRoutePerToken_KeepsOneLevel) {
  for (int32_t dtype = SLUICE_DTYPE_F32; dtype <= SLUICE_DTYPE_F16; ++dtype) {
    case_t c = base_case(dtype % NUM_NODES), one_level;
    c.dtype = dtype, c.top_k = 1, c.num_chunks = 2;
    one_level = c, one_level.deduplicate = SLUICE_DEDUPLICATE_RANKS;
    assert_same_bits(&c, &one_level);
    result_t got, want;
    world_run(&c, &got);
    world_run(&one_level, &want);
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
    assert_same_bits(&c, &by_rank);
    c.restore = by_rank.restore = 1, c.separate_wgrad = by_rank.separate_wgrad = 1;
    assert_same_bits(&c, &by_rank);
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
    assert_same_bits(&c, &by_rank);
  }
}

TEST(TwoLevels_AnyNumberOfChunks_HasTheSameBits) {
  case_t one = base_case(0);
  one.num_chunks = 1, one.wgrad_mode = SLUICE_WGRAD_DEFERRED;
  for (int32_t n = 2; n <= 5; ++n) {
    case_t many = one;
    many.num_chunks = n;
    result_t a, b;
    world_run(&one, &a);
    world_run(&many, &b);
    assert_true(world_identical(&one, &a, &b, 0));
    world_free(&a);
    world_free(&b);
  }
}

/* With one node, with nodes of one rank, or without nodes, there is one level. */
TEST(TwoLevels_OneLevelOfNodes_HasTheBitsOfRanks) {
  for (int32_t per_node = 0; per_node <= 4; per_node += per_node == 1 ? 3 : 1) {
    case_t c = base_case(0), one_level;
    c.ranks_per_node = per_node, c.num_chunks = 2;
    one_level = c, one_level.deduplicate = SLUICE_DEDUPLICATE_RANKS;
    assert_same_bits(&c, &one_level);
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

/* ---- errors ---- */

TEST(TwoLevels_NodesThatDoNotDivideTheRanks_AreRefusedByName) {
  DEFAULTS(sluice_context_config, config);
  config.ranks_per_node = 2;
  sluice_context_t* context = NULL;
  REFUSED(sluice_context_create(&config, NULL, &context), SLUICE_E_INVALID_ARGUMENT,
          "ranks_per_node is 2, which does not divide the 1 ranks");
  config.ranks_per_node = -1;
  REFUSED(sluice_context_create(&config, NULL, &context), SLUICE_E_INVALID_ARGUMENT, "ranks_per_node is -1");
}
