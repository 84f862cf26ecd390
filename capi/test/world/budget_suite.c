// SPDX-License-Identifier: Apache-2.0
#include "capi/test/world/budget_suite.h"

#include <stdio.h>
#include <string.h>

#include "capi/test/world/checks.h"

case_t budget_base_case(void) {
  return (case_t){.world_size = 2,
                  .tokens = {96, 80, 96, 64},
                  .model_width = 24,
                  .hidden_width = 96,
                  .num_experts = 12,
                  .top_k = 2,
                  .dtype = SLUICE_DTYPE_F32,
                  .activation = SLUICE_ACTIVATION_GELU,
                  .bias = 1,
                  .wgrad_mode = SLUICE_WGRAD_ADAPTIVE,
                  .restore_input = SLUICE_RESTORE_ADAPTIVE,
                  .restore_pre_activation = SLUICE_RESTORE_ADAPTIVE,
                  .reuse_saved = 1,
                  .outstanding = 1,
                  .hot_expert = -1};
}

budget_suite_t cpu_budget_suite(void) {
  return (budget_suite_t){.base = budget_base_case(), .run = world_run, .least_ranks = 1};
}

uint64_t budget_smallest(const budget_suite_t* suite, case_t c) {
  result_t got;
  if (c.budget == 0) c.budget = 1;
  suite->run(&c, &got);
  unsigned long long least = 0;
  for (int32_t r = 0; r < c.world_size; ++r) {
    unsigned long long needs = 0;
    if (got.status[r] == SLUICE_OK) continue;
    if (got.status[r] != SLUICE_E_OVER_BUDGET) fail_msg("rank %d: %d: %s", r, got.status[r], got.message[r]);
    const char* text = strstr(got.message[r], ") needs ");
    if (text == NULL || sscanf(text, ") needs %llu", &needs) != 1) fail_msg("no budget in: %s", got.message[r]);
    assert_non_null(strstr(got.message[r], "raise memory_budget to that"));
    if (needs > least) least = needs;
  }
  world_free(&got);
  return least;
}

void budget_check(const budget_suite_t* suite, case_t c) {
  result_t got, plain;
  case_t whole = c;
  whole.budget = whole.host_budget = 0, whole.num_chunks = 1;
  whole.restore_input_of = whole.restore_pre_activation_of = NULL;
  suite->run(&c, &got);
  must_match(&c, &got);
  for (int32_t r = 0; r < c.world_size && c.budget > 0; ++r) assert_true(got.peak_bytes[r] <= c.budget);
  suite->run(&whole, &plain);
  must_work(&whole, &plain);
  assert_true(world_identical(&c, &got, &plain, 0));
  world_free(&got);
  world_free(&plain);
}

/* Checks budgets from the smallest up, and one byte less. */
static void check_from_the_smallest_up(const budget_suite_t* suite, case_t c) {
  const uint64_t least = budget_smallest(suite, c);
  assert_true(least > 1);
  for (uint64_t i = 0; i < 3; i += suite->is_slow ? 2 : 1) {
    c.budget = least + least * i / 2;
    budget_check(suite, c);
  }
  c.budget = least - 1;
  assert_int_equal(budget_smallest(suite, c), least);
}

void budget_from_the_smallest_up(const budget_suite_t* suite) {
  for (int32_t w = suite->least_ranks; w <= 4; w += suite->is_slow ? w : 1) {
    for (int bits = 0; bits < (suite->is_slow ? 4 : 8); ++bits) {
      case_t c = suite->base;
      c.world_size = w, c.gated = bits & 1, c.restore = bits >> 1 & 1;
      c.outstanding = (suite->is_slow ? bits : bits >> 2) & 1 ? 3 : 1;
      check_from_the_smallest_up(suite, c);
    }
  }
}

void budget_batches_differ(const budget_suite_t* suite) {
  for (int bits = 0; bits < (suite->is_slow ? 4 : 8); ++bits) {
    case_t c = suite->base;
    c.world_size = 1 + (bits & 1), c.outstanding = bits & 2 ? 3 : 1, c.gated = bits >> 2;
    const uint64_t least = budget_smallest(suite, c); /* for the largest batches */
    c.cycles = 2;
    for (int32_t more = 0; more < 5; ++more) {
      c.budget = least + least * (uint64_t)more / 8;
      c.host_budget = more == 4 ? least / 2 : 0;
      budget_check(suite, c);
    }
  }
}

/* Runs one hot expert under a budget a quarter above the smallest for balanced routing. */
static void check_hot(const budget_suite_t* suite, case_t c, double times) {
  c.budget = budget_smallest(suite, c) * 5 / 4;
  result_t balanced, hot;
  suite->run(&c, &balanced);
  must_work(&c, &balanced);
  c.hot_expert = 1, c.hot_times = times;
  budget_check(suite, c);
  suite->run(&c, &hot);
  must_work(&c, &hot);
  uint64_t peak = 0;
  for (int32_t r = 0; r < c.world_size; ++r) peak = hot.peak_bytes[r] > peak ? hot.peak_bytes[r] : peak;
  char share[32];
  snprintf(share, sizeof share, times > 0 ? "%gx" : "with all first routes", times);
  printf("hot %s: W %d, K %d%s: n %d -> %d, peak %llu of budget %llu\n", share, c.world_size, c.top_k,
         c.callback_experts ? ", callback experts computed again" : "", balanced.num_chunks[0], hot.num_chunks[0],
         (unsigned long long)peak, (unsigned long long)c.budget);
  assert_true(hot.num_chunks[0] > balanced.num_chunks[0]);
  world_free(&balanced);
  world_free(&hot);
}

void budget_one_hot_expert(const budget_suite_t* suite) {
  for (int32_t w = 2; w <= 4; w += 2) {
    for (int bits = 0; bits < (suite->is_slow ? 4 : 8); ++bits) {
      case_t c = suite->base;
      c.world_size = w, c.num_experts = 24, c.top_k = 1 + (bits & 1);
      c.callback_experts = bits >> 2;
      if (c.callback_experts) c.restore_pre_activation = SLUICE_RESTORE_RECOMPUTE;
      check_hot(suite, c, bits & 2 ? 10 : 0);
    }
  }
}

void budget_odd_shapes_and_policies(const budget_suite_t* suite) {
  for (int i = 0; i < 9; ++i) {
    case_t c = suite->base;
    c.restore_input = i % 3, c.restore_pre_activation = world_pre_activations[i / 3];
    c.uneven_owners = i % 2, c.drop_every = i % 4 == 1 ? 3 : 0;
    if (i % 3 == 1) c.tokens[0] = 5, c.tokens[1] = 0;
    c.hot_expert = i % 3 == 2 ? 2 : -1;
    c.budget = budget_smallest(suite, c);
    c.budget += c.budget / 8;
    if (i % 2) c.host_budget = 1u << 20;
    budget_check(suite, c);
  }
}

/* Every budget from the smallest up is sufficient. */
void budget_separate_wgrad(const budget_suite_t* suite) {
  for (int32_t w = suite->least_ranks; w <= 4; w += suite->is_slow ? w : 1) {
    for (int bits = 0; bits < 8; bits += suite->is_slow ? 3 : 1) {
      case_t c = suite->base;
      c.world_size = w, c.separate_wgrad = 1, c.gated = bits & 1, c.reuse_saved = bits >> 1 & 1;
      c.outstanding = bits >> 2 ? 2 : 1, c.hot_expert = bits % 3 == 2 ? 3 : -1;
      case_t together = c;
      together.separate_wgrad = 0;
      assert_true(budget_smallest(suite, c) > budget_smallest(suite, together));
      check_from_the_smallest_up(suite, c);
    }
  }
}

void budget_halves_unsaid(const budget_suite_t* suite) {
  for (int32_t w = suite->least_ranks; w <= 3; ++w) {
    case_t c = suite->base;
    c.world_size = w, c.separate_wgrad = c.halves_unsaid = 1, c.budget = 1u << 30;
    result_t got;
    suite->run(&c, &got);
    int named = 0;
    for (int32_t r = 0; r < w; ++r) {
      int own = got.status[r] == SLUICE_E_UNSUPPORTED;
      if (!own) assert_int_equal(got.status[r], SLUICE_E_PEER_REFUSED);
      named += own && strstr(got.message[r], "dgrad alone keeps ") != NULL &&
               strstr(got.message[r], "set separate_wgrad to 1 in the context's config") != NULL;
    }
    assert_int_equal(named, w);
    world_free(&got);
  }
}

/* Checks that all ranks refuse more forwards than max_outstanding. */
static void check_too_many(const budget_suite_t* suite, case_t c) {
  result_t got;
  char text[32];
  snprintf(text, sizeof text, "max_outstanding is %d", c.max_outstanding);
  suite->run(&c, &got);
  for (int32_t r = 0; r < c.world_size; ++r) {
    assert_int_equal(got.status[r], SLUICE_E_OVER_BUDGET);
    assert_non_null(strstr(got.message[r], text));
  }
  world_free(&got);
}

void budget_more_outstanding_than_said(const budget_suite_t* suite) {
  case_t c = suite->base;
  c.top_k = 1, c.hot_expert = 1, c.outstanding = c.max_outstanding = 1;
  c.restore_input = c.restore_pre_activation = SLUICE_RESTORE_KEEP;
  c.budget = budget_smallest(suite, c);
  budget_check(suite, c);
  c.outstanding = 4;
  check_too_many(suite, c);
}

void host_budget_one_hot_expert(const budget_suite_t* suite) {
  case_t c = suite->base;
  c.top_k = 1, c.hot_expert = 1, c.outstanding = 2;
  c.restore_input = c.restore_pre_activation = SLUICE_RESTORE_OFFLOAD;
  c.host_budget = 1000;
  result_t got;
  suite->run(&c, &got);
  unsigned long long needs = 0;
  for (int32_t r = 0; r < c.world_size; ++r) {
    assert_int_equal(got.status[r], SLUICE_E_OVER_BUDGET);
    const char* text = strstr(got.message[r], "takes ");
    assert_non_null(strstr(got.message[r], "raise host_memory_budget to that"));
    assert_int_equal(sscanf(text, "takes %llu", &needs), 1);
  }
  world_free(&got);
  c.host_budget = needs;
  budget_check(suite, c);
  c.budget = 1u << 30; /* both budgets at once */
  budget_check(suite, c);
}

/* Checks that the peak of each rank equals what `plan` predicts from the counts. Returns the number of ranks. */
static int32_t check_predicted(const budget_suite_t* suite, case_t c, sluice_plan_config_t plan, int32_t number) {
  for (int32_t r = 0; r < c.world_size; ++r) {
    if (c.tokens[r] > plan.max_tokens) plan.max_tokens = c.tokens[r];
  }
  c.plan = &plan;
  result_t got;
  suite->run(&c, &got);
  must_work(&c, &got);
  for (int32_t r = 0; r < c.world_size; ++r) {
    const uint64_t peak = got.peak_bytes[r], most = got.predicted_bytes[r];
    if (peak <= most && peak + got.lent_bytes[r] >= most && most <= got.planned_bytes[r]) continue;
    fail_msg("case %d, rank %d of %d: n %d restore %d %d wgrad %d: peak %llu, predicted %llu, planned %llu", number, r,
             c.world_size, plan.num_chunks, plan.restore_input, plan.restore_pre_activation, plan.wgrad_mode,
             (unsigned long long)got.peak_bytes[r], (unsigned long long)got.predicted_bytes[r],
             (unsigned long long)got.planned_bytes[r]);
  }
  world_free(&got);
  return c.world_size;
}

void budget_predictions(const budget_suite_t* suite) {
  static const int32_t chunks[] = {1, 2, 3, 8};
  int32_t checked = 0;
  for (int32_t i = 0; i < 72; ++i) {
    case_t c = suite->base;
    c.world_size = suite->least_ranks + i % 3, c.gated = i / 2 % 2, c.outstanding = 1 + i % 2;
    c.uneven_owners = i % 5 == 4, c.drop_every = i % 4 == 3 ? 5 : 0, c.hot_expert = i % 7 == 6 ? 3 : -1;
    c.dtype = i % 6 == 5 ? SLUICE_DTYPE_BF16 : SLUICE_DTYPE_F32;
    if (i % 8 == 7) c.tokens[1] = 0;
    DEFAULTS(sluice_plan_config, plan);
    plan.max_outstanding = c.outstanding, plan.num_chunks = chunks[i / 3 % 4], plan.wgrad_mode = i % 2;
    plan.restore_input = i / 9 % 3, plan.restore_pre_activation = world_pre_activations[i / 3 % 3];
    checked += check_predicted(suite, c, plan, i);
  }
  printf("predicted bytes equal the allocator's peak%s on %d of %d ranks\n",
         suite->base.gemm != NULL ? ", but for what GEMMs did not borrow," : "", checked, checked);
}

/* Lists that combine every policy of one tensor with every policy of the other, in orders that differ between cases. */
static void fill_lists(int32_t number, int32_t num_chunks, int callback, int32_t* inputs, int32_t* pre_activations) {
  for (int32_t i = 0; i < num_chunks; ++i) {
    inputs[i] = (i + number) % 3, pre_activations[i] = world_pre_activations[(i / 2 + number / 3) % 3];
    if (!callback || (i + number) % 2 == 0) {
      if (callback) pre_activations[i] = SLUICE_RESTORE_RECOMPUTE;
      continue;
    }
    inputs[i] = pre_activations[i] = SLUICE_RESTORE_KEEP;
  }
}

void budget_predictions_by_chunk(const budget_suite_t* suite) {
  static const int32_t chunks[] = {2, 3, 5, 8};
  int32_t checked = 0, inputs[8], pre_activations[8];
  for (int32_t i = 0; i < 96; ++i) {
    case_t c = suite->base;
    c.world_size = suite->least_ranks + i % 3, c.gated = i / 2 % 2, c.outstanding = 1 + i % 2;
    c.uneven_owners = i % 5 == 4, c.drop_every = i % 4 == 3 ? 5 : 0, c.hot_expert = i % 7 == 6 ? 3 : -1;
    c.callback_experts = i % 8 == 7;
    c.dtype = i % 6 == 5 && !c.callback_experts ? SLUICE_DTYPE_BF16 : SLUICE_DTYPE_F32;
    if (i % 9 == 7) c.tokens[1] = 0;
    DEFAULTS(sluice_plan_config, plan);
    plan.max_outstanding = c.outstanding, plan.num_chunks = chunks[i / 3 % 4];
    plan.wgrad_mode = c.callback_experts ? SLUICE_WGRAD_ADAPTIVE : i % 2;
    fill_lists(i, plan.num_chunks, c.callback_experts, inputs, pre_activations);
    plan.restore_input_of = inputs,
    plan.restore_pre_activation_of = i % 5 == 3 && !c.callback_experts ? NULL : pre_activations;
    if (c.callback_experts)
      c.restore_pre_activation = SLUICE_RESTORE_RECOMPUTE; /* host experts may then be called again */
    checked += check_predicted(suite, c, plan, i);
  }
  printf("by chunk: predicted bytes equal the allocator's peak on %d of %d ranks\n", checked, checked);
}

void budget_by_chunk(const budget_suite_t* suite) {
  int32_t inputs[8], pre_activations[8];
  for (int32_t i = 0; i < (suite->is_slow ? 6 : 18); ++i) {
    case_t c = suite->base;
    c.world_size = suite->least_ranks + i % 3, c.num_chunks = i % 2 ? 4 : 8, c.gated = i / 2 % 2;
    c.callback_experts = i % 6 == 5, c.hot_expert = i % 4 == 3 ? 2 : -1, c.outstanding = 1 + i / 3 % 2;
    if (i % 5 == 4) c.tokens[0] = 5;
    fill_lists(i, c.num_chunks, c.callback_experts, inputs, pre_activations);
    c.restore_input_of = inputs, c.restore_pre_activation_of = pre_activations;
    check_from_the_smallest_up(suite, c);
  }
}

/* Bytes of the case's plan, for one pair of policies or for adaptive policies. */
static uint64_t planned_bytes(const budget_suite_t* suite, case_t c, sluice_plan_config_t plan, int32_t input,
                              int32_t pre_activation) {
  result_t got;
  plan.restore_input = input, plan.restore_pre_activation = pre_activation, plan.memory_budget = 0;
  c.plan = &plan;
  suite->run(&c, &got);
  must_work(&c, &got);
  const uint64_t bytes = got.planned_bytes[0];
  world_free(&got);
  return bytes;
}

void budget_between_policies(const budget_suite_t* suite) {
  int32_t checked = 0;
  for (int32_t i = 0; i < 6; ++i) {
    case_t c = suite->base;
    c.world_size = suite->least_ranks + i % 3, c.gated = i / 2 % 2, c.outstanding = 1 + i / 3;
    DEFAULTS(sluice_plan_config, plan);
    plan.max_outstanding = c.outstanding, plan.num_chunks = 4, plan.wgrad_mode = i % 2;
    plan.max_tokens = 96;
    const uint64_t least = planned_bytes(suite, c, plan, SLUICE_RESTORE_REDISPATCH, SLUICE_RESTORE_RECOMPUTE);
    const uint64_t most = planned_bytes(suite, c, plan, SLUICE_RESTORE_KEEP, SLUICE_RESTORE_KEEP);
    for (uint64_t part = 1; part < 5; ++part) {
      plan.memory_budget = least + (most - least) * part / 5;
      checked += check_predicted(suite, c, plan, i);
      case_t own = c; /* under the layer's own plan */
      own.budget = plan.memory_budget;
      budget_check(suite, own);
    }
  }
  printf("between policies: predicted bytes equal the allocator's peak on %d of %d ranks\n", checked, checked);
}

/* ---- under a capacity ---- */

static const int32_t capacity_ranks[] = {1, 2, 4};

case_t capacity_budget_base(void) {
  case_t c = world_small_case();
  c.num_experts = 12, c.bias = 1, c.capacity = 8, c.hidden_width = 64, c.model_width = 24;
  c.tokens[0] = c.tokens[1] = c.tokens[2] = c.tokens[3] = 40;
  c.restore_input = c.restore_pre_activation = SLUICE_RESTORE_ADAPTIVE;
  c.wgrad_mode = SLUICE_WGRAD_ADAPTIVE;
  return c;
}

case_t capacity_budget_case(const budget_suite_t* suite, int32_t world_size, int32_t bits) {
  case_t c = suite->base;
  c.world_size = world_size, c.num_chunks = 1 + bits % 4, c.gated = bits & 1;
  c.outstanding = 1 + bits % 3;
  c.reuse_saved = bits >> 1 & 1, c.restore = bits >> 2 & 1 && c.outstanding == 1;
  c.dtype = bits % 5 == 4 ? SLUICE_DTYPE_BF16 : SLUICE_DTYPE_F32;
  return c;
}

/* Checks a layer under budgets. Returns the number of ranks whose peak equals the budget exactly. */
static int32_t check_peak(const budget_suite_t* suite, case_t c, int32_t bits) {
  result_t without, under;
  int32_t exact = 0;
  suite->run(&c, &without);
  must_work(&c, &without);
  const uint64_t least = budget_smallest(suite, c);
  assert_true(least > 1);
  c.budget = least - 1;
  assert_int_equal(budget_smallest(suite, c), least);
  for (uint64_t times = 1; times <= 2; ++times) {
    c.budget = times * least;
    suite->run(&c, &under);
    must_work(&c, &under);
    for (int32_t r = 0; r < c.world_size; ++r) {
      assert_true(under.peak_bytes[r] <= c.budget);
      assert_int_equal(under.report[r].num_dropped, without.report[r].num_dropped);
      assert_true(under.bytes_sent[r] >= without.bytes_sent[r]);
      if (times == 2 || c.restore) continue; /* saved buffers of the host are not rounded up */
      if (under.peak_bytes[r] != least) {
        fail_msg("W %d bits %d rank %d: peak %llu, planned %llu", c.world_size, bits, r,
                 (unsigned long long)under.peak_bytes[r], (unsigned long long)least);
      }
      ++exact;
    }
    /* The leanest plan recomputes chunk by chunk, which changes the bits of weight gradients, but not of outputs. */
    assert_true(world_identical(&c, &under, &without, 0));
    assert_true(world_distance(&c, &under, &without) <= (c.dtype == SLUICE_DTYPE_BF16 ? 1e-2 : 5e-6));
    world_free(&under);
  }
  world_free(&without);
  return exact;
}

void capacity_budget_peak_is_planned(const budget_suite_t* suite) {
  int32_t checked = 0;
  for (int w = 0; w < 3; ++w) {
    for (int32_t bits = 0; bits < (suite->is_slow ? 6 : 16); ++bits) {
      checked += check_peak(suite, capacity_budget_case(suite, capacity_ranks[w], bits), bits);
    }
  }
  printf("planned bytes were the allocator's peak on %d ranks of %d\n", checked, checked);
}

void capacity_budget_more_outstanding_than_said(const budget_suite_t* suite) {
  for (int w = 0; w < (suite->is_slow ? 2 : 3); ++w) {
    case_t c = capacity_budget_case(suite, capacity_ranks[w], 1);
    c.restore_input = c.restore_pre_activation = SLUICE_RESTORE_KEEP;
    c.outstanding = 2;
    c.budget = budget_smallest(suite, c);
    c.max_outstanding = 2, c.outstanding = 3;
    check_too_many(suite, c);
  }
}

void budget_run_test(void** state) {
  const budget_test_t* test = *state;
  test->check(&test->suite);
}
