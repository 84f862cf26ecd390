// SPDX-License-Identifier: Apache-2.0
/* Contexts of one process that share a budget: each stays within its share, and errors name the whole budget. */

#include "capi/test/rig/refusals.h"
#include "third_party/bazel/test.h"

/* Opens a context with a share of `whole`: part / parts. */
static void open_share(rig_t* rig, uint64_t whole, uint64_t part, uint64_t parts) {
  sluice_context_config_t context = own_rig_context(whole * part / parts, 1);
  sluice_moe_config_t config = rig_config();
  context.shared_memory_budget = whole, config.num_chunks = 0;
  own_rig_open(rig, &context, &config);
}

static uint64_t peak_of(const rig_t* rig) { return own_rig_stats(rig).peak_bytes; }

TEST(Share_TooSmall_NamesTheWholeThatDoes) {
  rig_t rig;
  sluice_step_t* step = NULL;
  unsigned long long whole = 0;
  open_share(&rig, 10000, 3, 7);
  REFUSED(
      rig_forward(&rig, &step), SLUICE_E_OVER_BUDGET,
      "no plan fits 4285 bytes (4.2 KiB), this context's share of the memory budget of 10000 (9.8 KiB): the leanest");
  assert_int_equal(sscanf(strstr(last_message(), "raise memory_budget to "), "raise memory_budget to %llu", &whole), 1);
  own_rig_close(&rig);

  rig_t three, four; /* both fit in the whole budget that the error named */
  sluice_step_t *first = NULL, *second = NULL;
  open_share(&three, whole, 3, 7);
  open_share(&four, whole, 4, 7);
  WORKS(rig_forward(&three, &first));
  WORKS(rig_forward(&four, &second));
  REFUSED(rig_forward(&three, &step), SLUICE_E_OVER_BUDGET, "this context's share of the memory budget of ");
  WORKS(rig_backward(&four, second));
  WORKS(rig_backward(&three, first));
  sluice_step_drop(first);
  sluice_step_drop(second);
  assert_true(peak_of(&three) <= whole * 3 / 7 && peak_of(&four) <= whole * 4 / 7);
  own_rig_close(&three);
  own_rig_close(&four);
}

/* A share of exactly the smallest budget suffices, and one byte less does not. */
TEST(Share_SetToTheSmallest_DoesAndNoByteLess) {
  for (uint64_t less = 0; less < 2; ++less) {
    rig_t rig;
    sluice_step_t* step = NULL;
    open_share(&rig, 1 << 20, 1, 100);
    const uint64_t least = own_rig_smallest_budget(&rig);
    assert_true(least > (1 << 20) / 100);
    WORKS(sluice_context_set_share(rig.context, least - less, 1 << 20));
    if (less > 0) {
      REFUSED(rig_forward(&rig, &step), SLUICE_E_OVER_BUDGET, "1 more; raise memory_budget to ");
    } else {
      WORKS(rig_step(&rig));
      assert_true(peak_of(&rig) <= least);
      REFUSED(sluice_context_set_share(rig.context, least, 1 << 20), SLUICE_E_STATE, "a plan of ");
    }
    own_rig_close(&rig);
  }
}

/* Two contexts with different layers. The one that needs less has the larger weight. */
TEST(Divide_OfTwoContexts_EachRunsWithWhatItNeeds) {
  enum { WHOLE = 1 << 20 };
  rig_t rigs[2];
  uint64_t needs[2][SLUICE_BUDGET_SIZES], shares[2], weights[2] = {1000, 1};
  int32_t counts[2];
  for (int i = 0; i < 2; ++i) {
    sluice_context_config_t context = own_rig_context(WHOLE / 2, 1);
    sluice_moe_config_t config = rig_config();
    context.shared_memory_budget = WHOLE, config.num_chunks = 0, config.hidden_width *= 1 + 3 * i;
    own_rig_open(&rigs[i], &context, &config);
    WORKS(sluice_moe_smallest_budgets(&rigs[i].moe, 1, rigs[i].num_tokens, UINT64_MAX, &counts[i], needs[i]));
    uint64_t one = 0;
    WORKS(sluice_moe_smallest_budget(rigs[i].moe, (rigs[i].num_tokens * 5 + 3) / 4, &one));
    assert_int_equal(counts[i], SLUICE_BUDGET_SIZES);
    assert_int_equal(needs[i][1], one);
    WORKS(sluice_moe_smallest_budgets(&rigs[i].moe, 1, rigs[i].num_tokens, one - 1, &counts[i], needs[i]));
    assert_int_equal(counts[i], one > needs[i][0] ? 2 : SLUICE_BUDGET_SIZES); /* ends after the first larger one */
    WORKS(sluice_moe_smallest_budgets(&rigs[i].moe, 1, rigs[i].num_tokens, UINT64_MAX, &counts[i], needs[i]));
  }
  assert_true(needs[1][0] > needs[0][0]);
  REFUSED(sluice_budget_divide(needs[0][0] + needs[1][0] - 1, 2, weights, SLUICE_BUDGET_SIZES, needs[0], shares),
          SLUICE_E_OVER_BUDGET, "the 2 contexts need more than the ");
  WORKS(sluice_budget_divide(needs[0][0] + needs[1][0], 2, weights, SLUICE_BUDGET_SIZES, needs[0], shares));
  for (int i = 0; i < 2; ++i) {
    assert_int_equal(shares[i], needs[i][0]);
    WORKS(sluice_context_set_share(rigs[i].context, shares[i], needs[0][0] + needs[1][0]));
    WORKS(rig_step(&rigs[i]));
    own_rig_close(&rigs[i]);
  }
}

TEST(Divide_Bad_IsNamed) {
  rig_t rig, other;
  const sluice_moe_config_t config = rig_config();
  int32_t count = 7;
  uint64_t bytes[SLUICE_BUDGET_SIZES], shares[2] = {7, 7}, weights[2] = {1, 1}, needs[4] = {5, 4, 1, 1};
  WORKS(rig_open(&rig, NULL, &config));
  WORKS(rig_open(&other, NULL, &config));
  sluice_moe_t *both[] = {rig.moe, other.moe}, *none[] = {rig.moe, NULL};
  REFUSED(sluice_moe_smallest_budgets(both, 1, 1, 1, NULL, bytes), BAD, "out_count is NULL");
  REFUSED(sluice_moe_smallest_budgets(both, 1, 1, 1, &count, NULL), BAD, "out_bytes is NULL");
  REFUSED(sluice_moe_smallest_budgets(NULL, 1, 1, 1, &count, bytes), BAD, "there are no layers");
  assert_int_equal(count, 0);
  REFUSED(sluice_moe_smallest_budgets(both, 0, 1, 1, &count, bytes), BAD, "there are no layers");
  REFUSED(sluice_moe_smallest_budgets(both, 1, 0, 1, &count, bytes), BAD, "num_tokens is 0");
  REFUSED(sluice_moe_smallest_budgets(none, 2, 1, 1, &count, bytes), BAD, "layers[1] is NULL");
  REFUSED(sluice_moe_smallest_budgets(both, 2, 1, 1, &count, bytes), BAD, "layers[1] has another context");
  REFUSED(sluice_budget_divide(9, 2, weights, 2, needs, NULL), BAD, "out_shares is NULL");
  REFUSED(sluice_budget_divide(0, 2, weights, 2, needs, shares), BAD, "total is 0");
  REFUSED(sluice_budget_divide(9, 0, weights, 2, needs, shares), BAD, "num_contexts is 0; it must be in [1, 512]");
  REFUSED(sluice_budget_divide(9, 2, weights, 9, needs, shares), BAD, "num_sizes is 9; it must be in [0, 8]");
  REFUSED(sluice_budget_divide(9, 2, NULL, 2, needs, shares), BAD, "weights is NULL");
  REFUSED(sluice_budget_divide(9, 2, weights, 2, NULL, shares), BAD, "needs is NULL");
  REFUSED(sluice_budget_divide(9, 2, weights, 2, needs, shares), BAD, "context 0 needs 4 bytes for size 1");
  needs[1] = UINT64_MAX;
  REFUSED(sluice_budget_divide(9, 2, weights, 2, needs, shares), BAD, "needs are at most 2^53");
  weights[1] = 0;
  REFUSED(sluice_budget_divide(9, 2, weights, 0, NULL, shares), BAD, "weights[1] is 0");
  assert_int_equal(shares[0], 7);
  rig_close(&rig);
  rig_close(&other);
}

TEST(SetShare_Bad_IsNamed) {
  rig_t rig, none;
  uint64_t least = 7;
  const sluice_moe_config_t config = rig_config();
  open_share(&rig, 1 << 20, 1, 2);
  WORKS(rig_open(&none, NULL, &config));
  REFUSED(sluice_context_set_share(NULL, 1, 1), BAD, "context is NULL");
  REFUSED(sluice_context_set_share(rig.context, 0, 1), BAD, "memory_budget is 0 of 1");
  REFUSED(sluice_context_set_share(rig.context, 2, 1), BAD, "memory_budget is 2 of 1");
  REFUSED(sluice_context_set_share(none.context, 1, 1), BAD, "created without memory_budget");
  REFUSED(sluice_moe_smallest_budget(NULL, 1, &least), BAD, "moe is NULL");
  assert_int_equal(least, 0);
  REFUSED(sluice_moe_smallest_budget(rig.moe, 0, &least), BAD, "num_tokens is 0");
  REFUSED(sluice_moe_smallest_budget(rig.moe, 1, NULL), BAD, "out_bytes is NULL");
  own_rig_close(&rig);
  own_rig_close(&none);
}

/* Layers that are created one by one fit into the plan of the first layer, under any budget: they share its slots. */
TEST(Layers_MadeOneByOne_AreInTheFirstPlan) {
  enum { LAYERS = 6 };
  rig_t rig;
  sluice_moe_t* layers[LAYERS];
  sluice_step_t* steps[LAYERS];
  sluice_context_config_t context = own_rig_context(1 << 20, LAYERS);
  sluice_moe_config_t config = rig_config();
  context.num_layers = LAYERS, config.num_chunks = 0;
  own_rig_open(&rig, &context, &config);
  const uint64_t least = own_rig_smallest_budget(&rig);
  own_rig_close(&rig);
  for (int spare = 0; spare < 12; ++spare) {
    context.memory_budget = least + least * (uint64_t)spare / 16;
    own_rig_open(&rig, &context, &config);
    layers[0] = rig.moe;
    for (int i = 0; i < LAYERS; ++i) {
      if (i > 0) WORKS(sluice_moe_create(rig.context, &rig.config, &layers[i]));
      rig.moe = layers[i];
      WORKS(rig_forward(&rig, &steps[i]));
    }
    assert_true(own_rig_stats(&rig).peak_bytes <= context.memory_budget);
    for (int i = LAYERS - 1; i >= 0; --i) {
      rig.moe = layers[i];
      WORKS(rig_backward(&rig, steps[i]));
      sluice_step_drop(steps[i]);
      if (i > 0) sluice_moe_destroy(layers[i]);
    }
    own_rig_close(&rig);
  }
}
