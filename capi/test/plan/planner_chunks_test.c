// SPDX-License-Identifier: Apache-2.0
/* The planner with policies that differ between chunks: a policy for as many chunks as fit a budget, and lists. */

#include "capi/test/plan/planner_rig.h"
#include "capi/test/rig/refusals.h"
#include "third_party/bazel/test.h"

enum { STEPS = 16 };

static const sluice_planner_choice_t keep = {8, SLUICE_RESTORE_KEEP, SLUICE_RESTORE_KEEP, SLUICE_WGRAD_DEFERRED};

static double seconds_of(const sluice_planner_candidate_t* c) { return c->forward_seconds + c->backward_seconds; }

static int is_part(const sluice_planner_candidate_t* c) { return c->kept_chunks < c->choice.num_chunks; }

/* Bytes of the leanest and of the fastest policy for all chunks. */
static void range_of(uint64_t* out_least, uint64_t* out_most) {
  sluice_planner_workload_t w = new_workload();
  int32_t count = 0;
  w.memory_budget = (uint64_t)1 << 40;
  *out_most = candidates[choose(planner, &w, NULL, &count)].total_bytes;
  *out_least = UINT64_MAX;
  for (int32_t i = 0; i < count; ++i) {
    assert_true(candidates[i].kept_chunks == candidates[i].choice.num_chunks);
    if (candidates[i].total_bytes < *out_least) *out_least = candidates[i].total_bytes;
  }
}

/* A candidate that keeps part of the chunks fits where its policy for all chunks does not. Its numbers equal those of
 * predict for as many chunks, and it is the fastest at some budgets. */
TEST(Choose_BetweenTwoPolicies_ListsAndTakesPart) {
  sluice_planner_workload_t w = new_workload();
  int32_t count = 0, num_chosen_parts = 0, num_parts = 0;
  uint64_t least = 0, most = 0;
  range_of(&least, &most);
  for (int step = 1; step < STEPS; ++step) {
    w.memory_budget = least + (most - least) * (uint64_t)step / STEPS;
    w.may_keep_part = 0, w.kept_chunks = 0;
    const double whole = seconds_of(&candidates[choose(planner, &w, NULL, &count)]);
    const int32_t num_whole = count;
    w.may_keep_part = 1;
    const int32_t chosen = choose(planner, &w, NULL, &count);
    assert_true(seconds_of(&candidates[chosen]) <= whole);
    num_chosen_parts += is_part(&candidates[chosen]) && seconds_of(&candidates[chosen]) < whole;
    for (int32_t i = 0; i < count; ++i) {
      const sluice_planner_candidate_t* c = &candidates[i];
      assert_int_equal(is_part(c), i >= num_whole);
      if (!is_part(c)) continue;
      ++num_parts;
      assert_true(c->total_bytes <= w.memory_budget && c->bytes_over == 0);
      int32_t all = 0; /* the same policy for all chunks is over the budget */
      while (all < num_whole && memcmp(&candidates[all].choice, &c->choice, sizeof c->choice) != 0) ++all;
      assert_true(all < num_whole && candidates[all].verdict == SLUICE_PLANNER_OVER_BUDGET);
      w.kept_chunks = c->kept_chunks;
      const sluice_planner_prediction_t p = predict(planner, &w, c->choice);
      w.kept_chunks = 0;
      assert_true(p.fits && p.total_bytes == c->total_bytes && p.kept_chunks == c->kept_chunks);
      assert_true(p.forward_seconds == c->forward_seconds && p.backward_seconds == c->backward_seconds);
    }
  }
  printf("%d candidates keep part, %d of them chosen in %d budgets\n", num_parts, num_chosen_parts, STEPS - 1);
  assert_true(num_chosen_parts > 0);
}

/* Without may_keep_part, from an older caller, or with a fixed policy, all candidates treat all chunks the same. */
TEST(Choose_NotAskedForPart_ListsWholePoliciesAlone) {
  sluice_planner_workload_t w = new_workload();
  int32_t count = 0;
  uint64_t least = 0, most = 0;
  range_of(&least, &most);
  w.memory_budget = least + (most - least) / 2, w.may_keep_part = 1;
  choose(planner, &w, NULL, &count);
  assert_true(count > 8 * 9 * 2);
  const sluice_planner_choice_t held = {0, SLUICE_RESTORE_KEEP, SLUICE_RESTORE_ADAPTIVE, SLUICE_WGRAD_ADAPTIVE};
  choose(planner, &w, &held, &count);
  for (int32_t i = 0; i < count; ++i) assert_false(is_part(&candidates[i]));
  w.struct_size = offsetof(sluice_planner_workload_t, restore_input_of);
  choose(planner, &w, NULL, &count);
  assert_int_equal(count, 8 * 9 * 2);
}

/* Each further kept chunk costs bytes and saves time, since it is neither sent again nor recomputed. */
TEST(Predict_KeptChunks_BytesGrowAndTimeFalls) {
  sluice_planner_workload_t w = new_workload();
  w.memory_budget = (uint64_t)1 << 40;
  sluice_planner_prediction_t last = {0};
  for (int32_t k = 1; k < keep.num_chunks; ++k) {
    w.kept_chunks = k;
    const sluice_planner_prediction_t p = predict(planner, &w, keep);
    assert_int_equal(p.kept_chunks, k);
    if (k > 1) assert_true(p.step_bytes > last.step_bytes && p.backward_seconds < last.backward_seconds);
    last = p;
  }
  w.kept_chunks = keep.num_chunks; /* all chunks, as 0 means */
  const sluice_planner_prediction_t all = predict(planner, &w, keep);
  w.kept_chunks = 0;
  const sluice_planner_prediction_t whole = predict(planner, &w, keep);
  assert_memory_equal(&all, &whole, sizeof all);
  assert_true(all.step_bytes > last.step_bytes && all.kept_chunks == keep.num_chunks);
}

/* A list of equal policies equals this policy. A mixed list lies between its policies in bytes and in time. */
TEST(Predict_PoliciesByChunk_AreThoseOfTheLists) {
  sluice_planner_workload_t w = new_workload();
  const sluice_planner_choice_t four = {4, SLUICE_RESTORE_KEEP, SLUICE_RESTORE_KEEP, SLUICE_WGRAD_PER_CHUNK};
  const sluice_planner_choice_t s4 = {4, SLUICE_RESTORE_REDISPATCH, SLUICE_RESTORE_RECOMPUTE, SLUICE_WGRAD_PER_CHUNK};
  sluice_planner_choice_t listed = {4, SLUICE_RESTORE_BY_CHUNK, SLUICE_RESTORE_BY_CHUNK, SLUICE_WGRAD_PER_CHUNK};
  const int32_t same_di[] = {2, 2, 2, 2}, same_m[] = {3, 3, 3, 3}, mixed_di[] = {0, 0, 2, 2}, mixed_m[] = {0, 0, 3, 3};
  const sluice_planner_prediction_t kept = predict(planner, &w, four), lean = predict(planner, &w, s4);
  w.restore_input_of = same_di, w.restore_pre_activation_of = same_m;
  const sluice_planner_prediction_t same = predict(planner, &w, listed);
  assert_memory_equal(&same, &lean, sizeof same);
  w.restore_input_of = mixed_di, w.restore_pre_activation_of = mixed_m;
  const sluice_planner_prediction_t mixed = predict(planner, &w, listed);
  assert_true(mixed.step_bytes > lean.step_bytes && mixed.step_bytes < kept.step_bytes);
  assert_true(mixed.backward_seconds < lean.backward_seconds && mixed.backward_seconds > kept.backward_seconds);
  listed.restore_pre_activation = SLUICE_RESTORE_ADAPTIVE; /* or left open, since there is a list */
  const sluice_planner_prediction_t open = predict(planner, &w, listed);
  assert_memory_equal(&open, &mixed, sizeof open);

  int32_t count = 0;
  const sluice_planner_choice_t wanted = {4, SLUICE_RESTORE_ADAPTIVE, SLUICE_RESTORE_ADAPTIVE, SLUICE_WGRAD_ADAPTIVE};
  w.may_keep_part = 1; /* no effect, since a list fixes the policies */
  choose(planner, &w, &wanted, &count);
  assert_int_equal(count, 2);
  for (int32_t i = 0; i < count; ++i) {
    const sluice_planner_choice_t* c = &candidates[i].choice;
    assert_true(c->restore_input == SLUICE_RESTORE_BY_CHUNK && c->restore_pre_activation == SLUICE_RESTORE_BY_CHUNK);
    assert_true(candidates[i].total_bytes == predict(planner, &w, *c).total_bytes);
  }
}

TEST(Predict_ListUnderABudget_BytesAreThoseOfARealPlan) {
  sluice_planner_workload_t w = new_workload();
  const int32_t di[] = {0, 2, 1, 2}, m[] = {0, 3, 1, 3};
  rig_t rig;
  sluice_moe_config_t layer = rig_config();
  layer.num_chunks = 0;
  WORKS(rig_open(&rig, NULL, &layer));
  w.model_width = layer.model_width, w.hidden_width = layer.hidden_width, w.num_tokens = 64;
  w.num_experts = layer.num_experts, w.top_k = layer.top_k, w.world_size = 1, w.gated = layer.gated;
  w.memory_budget = 1u << 30, w.restore_input_of = di, w.restore_pre_activation_of = m;
  DEFAULTS(sluice_plan_config, config);
  config.max_tokens = 64, config.memory_budget = w.memory_budget, config.num_chunks = 4;
  config.wgrad_mode = SLUICE_WGRAD_DEFERRED, config.restore_input_of = di, config.restore_pre_activation_of = m;
  sluice_plan_info_t info;
  sluice_plan_destroy(own_rig_plan(&rig, &config, &info));
  const sluice_planner_prediction_t p =
      predict(planner, &w, (sluice_planner_choice_t){4, SLUICE_RESTORE_BY_CHUNK, SLUICE_RESTORE_BY_CHUNK, 0});
  assert_int_equal(p.slot_bytes, info.slot_bytes);
  assert_int_equal(p.step_bytes, info.step_bytes);
  assert_int_equal(p.kept_chunks, info.kept_chunks);
  assert_true(info.restore_input == SLUICE_RESTORE_BY_CHUNK && info.restore_pre_activation == SLUICE_RESTORE_BY_CHUNK);
  rig_close(&rig);
}

TEST(BadChunks_EveryField_IsRefusedByName) {
  sluice_planner_prediction_t p = {.struct_size = sizeof p};
  const int32_t good[] = {0, 2, 0, 2}, bad[] = {0, 2, 7, 2};
  const sluice_planner_choice_t four = {4, SLUICE_RESTORE_KEEP, SLUICE_RESTORE_KEEP, SLUICE_WGRAD_DEFERRED};
  sluice_planner_choice_t c = four;
  sluice_planner_workload_t w = new_workload();
  int32_t count = 0;
#define REFUSES(change, status, text) \
  (void)(change);                     \
  REFUSED(sluice_planner_predict(planner, &w, &c, &p, NULL, 0), status, text)
  REFUSES(w.kept_chunks = 5, BAD, "kept_chunks is 5; it must be in [1, num_chunks = 4], or 0 for all");
  REFUSES(w.kept_chunks = -1, BAD, "kept_chunks is -1");
  REFUSES(w.kept_chunks = 3, BAD, "kept_chunks is 3 of 4 and there is no budget");
  w.memory_budget = 1u << 30;
  REFUSED(sluice_planner_choose(planner, &w, NULL, NULL, 0, &count, NULL), BAD,
          "kept_chunks is 3, but each candidate has its own number: set it to 0");
  REFUSES(w.callback_experts = 1, SLUICE_E_UNSUPPORTED,
          "callback experts keep their rows in all of 4 chunks, not in 3");
  w = new_workload();
  REFUSES(w.may_keep_part = 2, BAD, "may_keep_part is 2; it is 0 or 1");
  w = new_workload();
  REFUSES(w.restore_input_of = bad, BAD, "workload: restore_input_of[2] is 7; known are");
  REFUSES((w.restore_input_of = good, w.callback_experts = 1), SLUICE_E_UNSUPPORTED,
          "chunk 1 has restore_input redispatch, restore_pre_activation keep");
  w = new_workload();
  REFUSES(w.restore_pre_activation_of = good, BAD, "workload: restore_pre_activation_of[1] is 2; known are");
  w = new_workload(), w.restore_input_of = good;
  REFUSED(sluice_planner_choose(planner, &w, NULL, NULL, 0, &count, NULL), BAD,
          "restore_input_of names a policy for each chunk, but num_chunks is 0");
  w = new_workload();
  REFUSES(c.restore_input = SLUICE_RESTORE_BY_CHUNK, BAD,
          "restore_input is 255; known are keep (0), offload (1) and re-dispatch (2), and with the workload's");
  c = four;
  REFUSES(c.restore_pre_activation = SLUICE_RESTORE_BY_CHUNK, BAD, "restore_pre_activation is 255");
}

int main(void) { return run_cases(planner_open, planner_close); }
