// SPDX-License-Identifier: Apache-2.0
/* Deduplicated layers on a CUDA context, on fakes, by rank and by node: reads, budgets and plans. cuda_layer_suite
 * compares results and bytes sent with the reference and the CPU. */

#include "backend/moe/layer/layer_life.h"
#include "backend/moe/routing/binding.h"
#include "backend/moe/routing/binding_arrays.h"
#include "backend/moe/routing/token_copies.h"
#include "backend/moe/run/run.h"
#include "capi/test/cuda/fake_rigs.h"
#include "capi/test/cuda/fakes_checks.h"
#include "capi/test/world/budget_suite.h"
#include "third_party/bazel/test.h"

enum { RANKS_OF_NODES = 4, PER_NODE = 2 };

/* The deduplication of a case. */
typedef struct way_s {
  int32_t deduplicate;
  uint64_t forward_reads; /* of a pass: the counts, and with nodes the tokens by rank */
  uint64_t backward_reads;
} way_t;

static way_t once_to_each_rank = {SLUICE_DEDUPLICATE_RANKS, 1, 0};
static way_t once_to_each_node = {SLUICE_DEDUPLICATE_NODES, 2, 1};

static int has_nodes(const way_t* way) { return way->deduplicate == SLUICE_DEDUPLICATE_NODES; }

/* ---- invalid numbers from a rank ---- */

/* Rank 0 of two, each with one expert; rank 1 sends three rows of tokens with two routes each. */
TEST(CudaCopies_NumbersOfAPeerThatDoNotFit_NameTheRank) {
  rig_t rig;
  sluice_moe_config_t config = rig_config();
  config.num_experts = 2, config.deduplicate = 1, config.num_chunks = 1;
  open_all(&rig, &config);
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
    b.first_token[0] = 0; /* as a real forward would have kept it */
    b.recv_counts = received_rows, b.send_counts = sent_rows;
    b.token_copies.send_counts = sent, b.token_copies.recv_counts = received;
    assert_int_equal(sluice_token_copies_restore_on_device(&b, NULL), cases[i].is_good ? SLUICE_OK : SLUICE_E_MISMATCH);
    if (cases[i].is_good) continue;
    assert_non_null(strstr(last_message(), "layer 3: the token copies that rank 1 announced do not fit its rows"));
    assert_int_equal(last_error()->peer, 1);
  }
  sluice_layer_release(moe);
  context->world_size = 1;
  close_all(&rig);
}

/* ---- under budgets and plans ---- */

static void run_by_node(const case_t* c, result_t* out) {
  case_t there = *c;
  there.ranks_per_node = c->world_size == RANKS_OF_NODES ? PER_NODE : 0; /* groups of other sizes have no nodes */
  run_on_fakes(&there, out);
}

/* is_small: rows are tiny in comparison with the GEMMs' workspace. */
static budget_suite_t suite_of(const way_t* way, int is_small) {
  budget_suite_t suite = {.base = budget_base_case(), .run = run_on_fakes, .least_ranks = 2, .is_slow = 1};
  suite.base.model_width = is_small ? 4 : 12, suite.base.hidden_width = is_small ? 8 : 24;
  for (int r = 0; r < 4 && is_small; ++r) suite.base.tokens[r] /= 2;
  suite.base.top_k = 4, suite.base.deduplicate = way->deduplicate;
  suite.base.machine = fakes_machine();
  if (has_nodes(way)) suite.run = run_by_node, suite.least_ranks = suite.base.world_size = RANKS_OF_NODES;
  return suite;
}

/* The bytes of the plan are the device allocator's peak. */
static void CudaCopiesPlan_EveryPolicy_PeakIsPlannedToTheByte(void** state) {
  const way_t* way = *state;
  static const int32_t pre_activation[] = {SLUICE_RESTORE_KEEP, SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_RECOMPUTE};
  for (int i = 0; i < (has_nodes(way) ? 9 : 18); i += i < 9 ? 1 : 2) {
    case_t c = world_small_case();
    result_t got, plain;
    c.world_size = has_nodes(way) || i >= 9 ? 4 : 2, c.top_k = 4, c.bias = 1, c.deduplicate = way->deduplicate;
    c.ranks_per_node = has_nodes(way) ? PER_NODE : 0;
    c.dtype = i % 2 ? SLUICE_DTYPE_BF16 : SLUICE_DTYPE_F32;
    c.tokens[0] = c.tokens[1] = c.tokens[2] = c.tokens[3] = 48;
    c.hot_expert = i % 4 == 3 ? 1 : -1, c.repeat_every = i % 5 == 4 ? 2 : 0;
    run_on_fakes(&c, &plain);
    must_work(&c, &plain);
    DEFAULTS(sluice_plan_config, plan);
    plan.max_tokens = 48, plan.max_outstanding = 1, plan.num_chunks = 1 + i % 3;
    plan.restore_input = i % 3, plan.restore_pre_activation = pre_activation[i / 3 % 3];
    plan.memory_budget = (uint64_t)1 << 40; /* so that steps take blocks of its capacities */
    c.plan = &plan;
    run_on_fakes(&c, &got);
    must_work(&c, &got);
    must_read(&c, way->forward_reads, way->backward_reads);
    for (int32_t r = 0; r < c.world_size; ++r) {
      if (got.peak_bytes[r] != got.planned_bytes[r]) {
        fail_msg("case %d rank %d: peak %llu, planned %llu", i, r, (unsigned long long)got.peak_bytes[r],
                 (unsigned long long)got.planned_bytes[r]);
      }
    }
    assert_true(world_identical(&c, &got, &plain, 0));
    world_free(&got);
    world_free(&plain);
  }
}

int main(void) {
  const struct CMUnitTest rows[] = {
      TEST_OF(once_to_each_rank, CudaCopiesPlan_EveryPolicy_PeakIsPlannedToTheByte),
      TEST_OF(once_to_each_node, CudaCopiesPlan_EveryPolicy_PeakIsPlannedToTheByte),
      BUDGET_TEST(CudaDeduplicateBudget_FromTheSmallestUp_ResultsAreTheSame, suite_of(&once_to_each_rank, 1),
                  budget_from_the_smallest_up),
      BUDGET_TEST(CudaDeduplicateBudget_OneHotExpert_StaysWithinThePlan, suite_of(&once_to_each_rank, 0),
                  budget_one_hot_expert),
      BUDGET_TEST(CudaDeduplicateBudget_OddShapesAndPolicies_ResultsAreTheSame, suite_of(&once_to_each_rank, 1),
                  budget_odd_shapes_and_policies),
      BUDGET_TEST(CudaTwoLevelsBudget_FromTheSmallestUp_ResultsAreTheSame, suite_of(&once_to_each_node, 1),
                  budget_from_the_smallest_up),
      BUDGET_TEST(CudaTwoLevelsBudget_OddShapesAndPolicies_ResultsAreTheSame, suite_of(&once_to_each_node, 1),
                  budget_odd_shapes_and_policies),
  };
  return RUN_CASES_AFTER(rows);
}
