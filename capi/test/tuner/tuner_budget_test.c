// SPDX-License-Identifier: Apache-2.0
/* The tuner under a memory budget: plans race within the budget, are read back, and are priced by the planner. */

#include "capi/test/rig/rig.h"
#include "capi/test/tuner/tuner_world.h"
#include "third_party/bazel/test.h"

/* Under a budget, the few plans with the best prices run as ordinary steps, the same on all ranks and within the
 * budget. This includes mode profile, which would otherwise have to run every plan that fits. */
TEST(Budget_BestPlansRace_InsideTheBudget) {
  static const uint64_t budgets[][2] = {{64 << 20, 64 << 20}, {1 << 20, 1 << 20}, {215000, 620000}}; /* by ranks */
  for (int32_t i = 0; i < 8; ++i) {
    int32_t ranks = 1 + i % 2, mode = i < 6 ? SLUICE_TUNER_ADAPTIVE : SLUICE_TUNER_PROFILE,
            has_machine = (i + i / 2) % 2;
    tuner_world_t* w = tuner_world(ranks, mode, has_machine);
    w->budget = budgets[i / 2 % 3][ranks - 1], w->changes = i == 1 ? 3 : 0, w->steps = w->changes ? 60 : 24;
    run_and_agree(w);
    assert_memory_equal(w->policies[0], w->policies[ranks - 1], sizeof w->policies[0]);
    assert_true(w->num_decisions[0] >= 1 && w->settled[0]);
    const sluice_tuner_decision_t* d = &w->decisions[0][w->num_decisions[0] - 1];
    const sluice_tuner_policy_t* p = &w->policies[0][w->num_decisions[0] - 1];
    assert_true(p->restore_input >= 0 && p->restore_pre_activation >= 0 && p->memory_budget == w->budget);
    assert_true(p->total_bytes > 0 && p->total_bytes <= w->budget);
    const uint64_t most = w->changes ? w->budget : p->total_bytes; /* each batch size has its own plan */
    for (int32_t r = 0; r < ranks; ++r) assert_true(w->peak_bytes[r] <= most);
    assert_true((d->why == SLUICE_WHY_RACED) == (d->num_raced >= 2) && (d->why != SLUICE_WHY_RACED || d->seconds > 0));
    assert_true(d->why == SLUICE_WHY_RACED || i / 2 == 2);
    assert_true(d->num_raced <= 4);
    assert_true((d->predicted_seconds > 0) == has_machine);
    if (d->why == SLUICE_WHY_RACED) assert_true(w->stats[0].race_passes > 0);
    assert_true(w->stats[0].timed_passes > w->stats[0].race_passes);
    printf("budget %8llu, %d ranks: n %d, T_DI %d, T_M %d, mode %d (%s of %d in %lld passes), %llu bytes, peak %llu\n",
           (unsigned long long)w->budget, ranks, d->num_chunks, p->restore_input, p->restore_pre_activation,
           d->wgrad_mode, sluice_tuner_why_name(d->why), d->num_raced, (long long)d->race_passes,
           (unsigned long long)p->total_bytes, (unsigned long long)w->peak_bytes[0]);
  }
}

static void must_reuse(const sluice_tuner_policy_t* p) {
  assert_true(p->restore_input == SLUICE_RESTORE_OFFLOAD || p->restore_input == SLUICE_RESTORE_REDISPATCH);
  assert_true(p->restore_pre_activation == SLUICE_RESTORE_OFFLOAD ||
              p->restore_pre_activation == SLUICE_RESTORE_RECOMPUTE);
}

/* Reuse without a budget: n and one of S1 to S4 are chosen together, the same on all ranks, for each batch size. */
TEST(Reuse_NoBudget_ChunksAndStrategyAreChosenForEachSize) {
  static const int32_t modes[] = {SLUICE_TUNER_PROFILE, SLUICE_TUNER_ADAPTIVE, SLUICE_TUNER_ADAPTIVE,
                                  SLUICE_TUNER_MODEL};
  for (int32_t i = 0; i < 8; ++i) {
    const int32_t ranks = 1 + i % 2, mode = modes[i / 2], has_machine = i / 2 >= 2;
    tuner_world_t* w = tuner_world(ranks, mode, has_machine);
    w->reuse = 1, w->grows = 1, w->steps = 360, w->waits = 1, w->wgrad_mode = SLUICE_WGRAD_ADAPTIVE;
    run_and_agree(w);
    assert_memory_equal(w->policies[0], w->policies[ranks - 1], sizeof w->policies[0]);
    assert_true(w->settled[0]);
    int32_t sizes = 0;
    for (int32_t k = 0; k < w->num_decisions[0]; ++k) {
      const sluice_tuner_decision_t* d = &w->decisions[0][k];
      const sluice_tuner_policy_t* p = &w->policies[0][k];
      must_reuse(p);
      assert_true(d->num_chunks >= 2); /* one chunk cannot share buffers */
      assert_int_equal(d->wgrad_mode, SLUICE_WGRAD_PER_CHUNK);
      assert_true(p->memory_budget == 0 && w->parts[0][k] == d->num_chunks);
      assert_true(mode == SLUICE_TUNER_MODEL ? d->why == SLUICE_WHY_PREDICTED
                                             : d->why == SLUICE_WHY_RACED || d->why == SLUICE_WHY_QUESTIONED);
      assert_true(mode == SLUICE_TUNER_MODEL || (d->seconds > 0 && d->num_raced >= 1));
      assert_true(has_machine == (d->predicted_seconds > 0));
      if (k == 0 || d->rows > 2 * w->decisions[0][k - 1].rows) ++sizes;
      printf("reuse, %d ranks, mode %d: %lld rows: n %d, T_DI %d, T_M %d (%s of %d)\n", ranks, mode, (long long)d->rows,
             d->num_chunks, p->restore_input, p->restore_pre_activation, sluice_tuner_why_name(d->why), d->num_raced);
    }
    assert_true(sizes >= 2); /* one of few rows, one of many */
  }
}

/* Under a budget, too, only plans with these strategies are chosen. */
TEST(Reuse_UnderABudget_NoPlanKeepsRows) {
  for (int32_t ranks = 1; ranks <= 2; ++ranks) {
    tuner_world_t* w = tuner_world(ranks, SLUICE_TUNER_ADAPTIVE, 0);
    w->reuse = 1, w->budget = 64 << 20, w->steps = 24;
    run_and_agree(w);
    assert_true(w->num_decisions[0] >= 1);
    for (int32_t k = 0; k < w->num_decisions[0]; ++k) must_reuse(&w->policies[0][k]);
  }
}

/* If the budget lies between those of two policies, a plan keeps some chunks, and its decision says how many. */
TEST(Budget_BetweenTwoPolicies_DecisionSaysHowManyChunksItKeeps) {
  int32_t num_parts = 0, num_whole = 0;
  for (uint64_t budget = 615000; budget <= 675000; budget += 3000) {
    tuner_world_t* w = tuner_world(2, SLUICE_TUNER_MODEL, 1);
    w->budget = budget, w->steps = 2;
    run_and_agree(w);
    assert_true(w->num_decisions[0] >= 1);
    const int32_t last = w->num_decisions[0] - 1, kept = w->parts[0][last];
    const sluice_tuner_policy_t* p = &w->policies[0][last];
    assert_int_equal(kept, w->parts[1][last]);
    assert_true(kept >= 1 && kept <= w->decisions[0][last].num_chunks);
    if (kept == w->decisions[0][last].num_chunks) {
      ++num_whole;
      continue;
    }
    ++num_parts; /* other chunks are sent again and recomputed; these are not */
    assert_true(p->restore_input != SLUICE_RESTORE_REDISPATCH || p->restore_pre_activation != SLUICE_RESTORE_RECOMPUTE);
  }
  printf("plans of part of their chunks: %d, of all: %d\n", num_parts, num_whole);
  assert_true(num_parts > 0 && num_whole > 0);
}

/* Trains with alternating batches of 256, 32, 128 and 64 tokens, under the smallest budget (of those tried) that has a
 * plan, plus `more` bytes. */
static tuner_world_t* sizes_under_budget(int32_t ranks, int32_t mode, int32_t has_machine, uint64_t more,
                                         const char* import) {
  static uint64_t least[MAX_RANKS + 1];
  for (uint64_t budget = least[ranks] > 0 ? least[ranks] : 260000u * (uint64_t)ranks;; budget += 8000) {
    tuner_world_t* w = tuner_world(ranks, mode, has_machine);
    w->changes = 2, w->steps = least[ranks] > 0 ? 90 : 1, w->budget = budget + (least[ranks] > 0 ? more : 0);
    w->import[0] = w->import[1] = import;
    tuner_run(w);
    if (least[ranks] > 0) return w;
    if (w->status[0] == SLUICE_OK) least[ranks] = budget, budget -= 8000;
    assert_true(w->status[0] == SLUICE_OK || w->status[0] == SLUICE_E_OVER_BUDGET);
  }
}

/* The last decision for this many tokens per rank. Sizes differ by factors of two, since skew may add rows. */
static int32_t decision_for(const tuner_world_t* w, int64_t tokens) {
  for (int32_t k = w->num_decisions[0] - 1; k >= 0; --k) {
    const int64_t rows = w->decisions[0][k].rows;
    if (rows > tokens * 3 / 4 && rows <= tokens * 3 / 2) return k;
  }
  fail_msg("no decision for batches of %d tokens", (int)tokens);
  return -1;
}

/* Each batch size has its own plan within the budget: the largest batches send again and recompute, small ones keep. */
TEST(Budget_BatchesDiffer_EachSizeHasItsPlan) {
  int32_t num_different = 0;
  for (int32_t i = 0; i < 6; ++i) {
    const int32_t ranks = 1 + i % 2, has_machine = i / 2 % 2;
    tuner_world_t* w = sizes_under_budget(ranks, has_machine ? SLUICE_TUNER_MODEL : SLUICE_TUNER_ADAPTIVE, has_machine,
                                          (uint64_t)(i / 4) * 16000, NULL);
    must_agree(w);
    assert_memory_equal(w->policies[0], w->policies[ranks - 1], sizeof w->policies[0]);
    assert_true(w->settled[0]);
    for (int32_t r = 0; r < ranks; ++r) assert_true(w->peak_bytes[r] <= w->budget);
    const int32_t large = decision_for(w, 256);
    for (int64_t tokens = 256; tokens >= 32; tokens /= 2) {
      const int32_t k = decision_for(w, tokens);
      const sluice_tuner_decision_t* d = &w->decisions[0][k];
      const sluice_tuner_policy_t *p = &w->policies[0][k], *of_large = &w->policies[0][large];
      assert_true(p->total_bytes <= w->budget && p->memory_budget == w->budget);
      num_different += p->restore_input != of_large->restore_input ||
                       p->restore_pre_activation != of_large->restore_pre_activation ||
                       d->num_chunks != w->decisions[0][large].num_chunks;
      printf("budget %llu, %d ranks: %lld tokens: n %d, T_DI %d, T_M %d (%s of %d), %llu bytes\n",
             (unsigned long long)w->budget, ranks, (long long)tokens, d->num_chunks, p->restore_input,
             p->restore_pre_activation, sluice_tuner_why_name(d->why), d->num_raced,
             (unsigned long long)p->total_bytes);
    }
    if (i < 4 && has_machine && ranks > 1) { /* a tight budget; a single rank has one chunk in any case */
      assert_true(w->policies[0][large].restore_input != SLUICE_RESTORE_KEEP ||
                  w->policies[0][large].restore_pre_activation != SLUICE_RESTORE_KEEP ||
                  w->parts[0][large] < w->decisions[0][large].num_chunks);
      const int32_t small = decision_for(w, 32);
      assert_int_equal(w->policies[0][small].restore_input, SLUICE_RESTORE_KEEP);
      assert_int_equal(w->policies[0][small].restore_pre_activation, SLUICE_RESTORE_KEEP);
      assert_true(w->decisions[0][small].num_chunks <= w->decisions[0][large].num_chunks);
    }
  }
  assert_true(num_different > 0);
}

/* The plan of each batch size is read back from a file. */
TEST(Budget_BatchesDiffer_FileHoldsThePlanOfEachSize) {
  tuner_world_t* w = sizes_under_budget(2, SLUICE_TUNER_ADAPTIVE, 1, 0, NULL);
  must_agree(w);
  char* text = strdup(w->written[0]);
  int32_t num_chunks[4];
  sluice_tuner_policy_t policies[4];
  for (int32_t i = 0; i < 4; ++i) {
    const int32_t k = decision_for(w, 256 >> i);
    num_chunks[i] = w->decisions[0][k].num_chunks, policies[i] = w->policies[0][k];
  }
  w = sizes_under_budget(2, SLUICE_TUNER_ADAPTIVE, 1, 4000, text); /* imported answers need some bytes */
  must_agree(w);
  assert_int_equal(w->stats[0].race_passes, 0);
  assert_int_equal(w->num_decisions[0], 4);
  for (int32_t i = 0; i < 4; ++i) {
    const int32_t k = decision_for(w, 256 >> i);
    assert_int_equal(w->decisions[0][k].why, SLUICE_WHY_IMPORTED);
    assert_int_equal(w->decisions[0][k].num_chunks, num_chunks[i]);
    assert_int_equal(w->policies[0][k].restore_input, policies[i].restore_input);
    assert_int_equal(w->policies[0][k].restore_pre_activation, policies[i].restore_pre_activation);
  }
  free(text);
}

/* With several outstanding forwards of any sizes, each replay has the plan of its original. */
TEST(Budget_BatchesDiffer_RepeatedForwardsKeepTheirPlan) {
  for (int32_t has_machine = 0; has_machine <= 1; ++has_machine) {
    tuner_world_t* w = tuner_world(2, SLUICE_TUNER_ADAPTIVE, has_machine);
    w->changes = 1, w->steps = 48, w->budget = 1 << 20, w->repeats = 3, w->evaluates = 1;
    run_and_agree(w);
    assert_int_equal(w->num_different[0] + w->num_different[1], 0);
    for (int32_t r = 0; r < 2; ++r) assert_true(w->peak_bytes[r] <= w->budget);
  }
}

/* A plan from a file that does not fit is ignored: another plan is chosen. The answer is for an existing layer, but
 * with n = 256, whose schedules alone exceed the budget. */
TEST(Budget_PlanOfAFileThatDoesNotFit_IsChosenAgain) {
  char text[512];
  tuner_world_t* w = tuner_world(2, SLUICE_TUNER_ADAPTIVE, 1);
  w->budget = 1 << 20, w->steps = 24;
  run_and_agree(w);
  assert_non_null(strstr(w->written[0], "{\"sluice_decisions\": 3"));
  snprintf(text, sizeof text,
           "{\"sluice_decisions\": 3, \"answers\": [{\"layer\": \"%.16s\", \"rows\": 1, \"num_chunks\": 256, "
           "\"wgrad_mode\": \"deferred\", \"restore_input\": \"keep\", \"restore_pre_activation\": \"keep\"}]}",
           strstr(w->written[0], "\"layer\": \"") + strlen("\"layer\": \""));
  w = tuner_world(2, SLUICE_TUNER_ADAPTIVE, 1);
  w->budget = 1 << 20, w->steps = 24, w->import[0] = w->import[1] = text;
  run_and_agree(w);
  assert_int_equal(w->decisions[0][w->num_decisions[0] - 1].why, SLUICE_WHY_RACED);
}

/* If the tuner has a machine, plans have the planner's seconds, and the fastest plan that fits is chosen. */
TEST(Plans_WithAMachine_CarryThePlannersSeconds) {
  rig_t rig;
  assert_int_equal(rig_open_context(&rig, NULL), SLUICE_OK);
  sluice_planner_t* planner = NULL;
  assert_int_equal(sluice_planner_create(tuner_machine, strlen(tuner_machine), &planner), SLUICE_OK);
  DEFAULTS(sluice_tuner_config, tuner);
  tuner.machine = planner;
  assert_int_equal(sluice_context_tune(rig.context, &tuner), SLUICE_OK);
  DEFAULTS(sluice_moe_config, layer);
  layer.model_width = M, layer.hidden_width = H, layer.num_experts = 4;
  assert_int_equal(rig_open_layer(&rig, &layer), SLUICE_OK);
  DEFAULTS(sluice_plan_config, config);
  config.max_tokens = 512, config.memory_budget = (uint64_t)1 << 30;
  sluice_plan_t* plan = NULL;
  assert_int_equal(sluice_plan_create(rig.moe, &config, &plan), SLUICE_OK);
  static sluice_plan_candidate_t lines[512];
  static sluice_planner_candidate_t priced[512];
  int32_t num_lines = 0, num_priced = 0;
  assert_int_equal(sluice_plan_candidates(plan, lines, 512, &num_lines), SLUICE_OK);
  DEFAULTS(sluice_planner_workload, work);
  work.model_width = M, work.hidden_width = H, work.num_experts = 4, work.num_tokens = 512;
  work.memory_budget = config.memory_budget;
  assert_int_equal(sluice_planner_choose(planner, &work, NULL, priced, 512, &num_priced, NULL), SLUICE_OK);
  assert_int_equal(num_lines, num_priced);
  sluice_plan_info_t info = {.struct_size = sizeof info};
  assert_int_equal(sluice_plan_get_info(plan, &info), SLUICE_OK);
  for (int32_t i = 0; i < num_lines; ++i) {
    assert_true(lines[i].relative_time == priced[i].forward_seconds + priced[i].backward_seconds);
    assert_true(info.relative_time <= lines[i].relative_time);
  }
  sluice_plan_destroy(plan);
  sluice_planner_destroy(planner);
  rig_close(&rig);
}
