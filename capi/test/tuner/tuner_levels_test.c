// SPDX-License-Identifier: Apache-2.0
/* Layers that leave open whether tokens are sent by rank or by node. The bytes sent show the choice. */

#include "capi/test/tuner/tuner_world.h"
#include "third_party/bazel/test.h"

enum { RANKS = 4, PER_NODE = 2, TOP_K = 4 };

/* The costs of `ranks` ranks, with rates in bytes per second; `within`: between ranks of a node, 0: there are no nodes.
 */
static const char* machine_text(int32_t ranks, double between, double within) {
  static char text[1024];
  char nodes[128] = "";
  if (within > 0) {
    snprintf(nodes, sizeof nodes,
             "\"ranks_per_node\": 2, \"node_exchange\": {\"bytes_per_second\": %g, \"startup_seconds\": 1e-6}, ",
             within);
  }
  snprintf(text, sizeof text,
           "{\"sluice_machine\": 2, \"name\": \"levels\", \"world_size\": %d, %s"
           "\"gemm\": {\"f32\": {\"flops_per_second\": 1e10, \"half_rows\": 8}}, "
           "\"rows\": {\"bytes_per_second\": 5e9}, \"activation_seconds\": 1e-10, \"activation_grad_seconds\": 2e-10, "
           "\"exchange\": {\"bytes_per_second\": %g, \"startup_seconds\": 1e-6}, "
           "\"host_copy\": {\"bytes_per_second\": 4e9}, \"op_seconds\": 1e-7, \"pass_seconds\": 1e-6}",
           ranks, nodes, between);
  return text;
}

/* Two nodes of two ranks. */
static const char* machine_of(double between, double within) { return machine_text(RANKS, between, within); }

static tuner_world_t* world_of(int32_t deduplicate, int32_t mode, const char* machine) {
  tuner_world_t* w = tuner_world(RANKS, mode, machine != NULL);
  for (int32_t r = 0; r < RANKS; ++r) w->machine[r] = machine;
  w->deduplicate = deduplicate, w->top_k = TOP_K, w->ranks_per_node = PER_NODE;
  w->layers = 1, w->steps = 40, w->num_chunks = 2, w->wgrad_mode = SLUICE_WGRAD_DEFERRED;
  return w;
}

/* Writes the bytes that each rank sends in the last step; ranks that do not exist send none. Worlds with equally many
 * steps have the same routing then. */
static void run(tuner_world_t* w, uint64_t sent[RANKS]) {
  run_and_agree(w);
  memcpy(sent, w->sent_bytes, RANKS * sizeof *sent);
}

static void run_fixed(int32_t deduplicate, int32_t top_k, uint64_t sent[RANKS]) {
  tuner_world_t* w = world_of(deduplicate, SLUICE_TUNER_ADAPTIVE, NULL);
  w->top_k = top_k;
  run(w, sent);
}

static int is_same(const uint64_t* a, const uint64_t* b) { return memcmp(a, b, RANKS * sizeof *a) == 0; }

TEST(Levels_ByPrediction_GoWhereTheSlowLinkIs) {
  uint64_t by_rank[RANKS], by_node[RANKS], sent[RANKS];
  run_fixed(SLUICE_DEDUPLICATE_RANKS, TOP_K, by_rank);
  run_fixed(SLUICE_DEDUPLICATE_NODES, TOP_K, by_node);
  assert_false(is_same(by_rank, by_node));
  tuner_world_t* w = world_of(SLUICE_DEDUPLICATE_ADAPTIVE, SLUICE_TUNER_MODEL, machine_of(1e6, 1e10));
  run(w, sent);
  assert_true(is_same(sent, by_node));
  assert_true(w->stats[0].timed_passes > 60 && w->stats[0].total_seconds > 0); /* of 40 steps with two passes each */
  run(world_of(SLUICE_DEDUPLICATE_ADAPTIVE, SLUICE_TUNER_MODEL, machine_of(1e10, 1e6)), sent);
  assert_true(is_same(sent, by_rank));
}

/* Two levels that are predicted to lose are never tried: every step sends by rank. */
TEST(Levels_PredictedToLose_NeverRun) {
  uint64_t by_rank[RANKS], sent[RANKS];
  for (int32_t steps = 7; steps < 12; steps += 2) { /* at a fixed n two levels would run from the third step on */
    tuner_world_t* w = world_of(SLUICE_DEDUPLICATE_RANKS, SLUICE_TUNER_ADAPTIVE, NULL);
    w->steps = steps;
    run(w, by_rank);
    w = world_of(SLUICE_DEDUPLICATE_ADAPTIVE, SLUICE_TUNER_ADAPTIVE, machine_of(1e10, 1e6));
    w->steps = steps;
    run(w, sent);
    assert_true(is_same(sent, by_rank));
  }
}

/* With predictions only, and a machine with one kind of link, the tuner cannot decide. */
TEST(Levels_MachineWithoutNodes_PredictsNothing) {
  uint64_t by_rank[RANKS], sent[RANKS];
  run_fixed(SLUICE_DEDUPLICATE_RANKS, TOP_K, by_rank);
  run(world_of(SLUICE_DEDUPLICATE_ADAPTIVE, SLUICE_TUNER_MODEL, tuner_machine), sent);
  assert_true(is_same(sent, by_rank));
}

/* Under a budget, levels are chosen with the plan by predicted time, and the bytes equal those of a layer with the same
 * plan and configured levels. Without a machine nothing is predicted. */
TEST(Levels_UnderABudget_AreThosePredictedToTakeLess) {
  for (int32_t i = 0; i < 3; ++i) {
    uint64_t sent[2][RANKS];
    for (int32_t is_given = 0; is_given < 2; ++is_given) {
      const int32_t given = i == 0 ? SLUICE_DEDUPLICATE_NODES : SLUICE_DEDUPLICATE_RANKS;
      const char* machine = i == 2 ? NULL : i == 0 ? machine_of(1e6, 1e10) : machine_of(1e10, 1e6);
      tuner_world_t* w = world_of(is_given ? given : SLUICE_DEDUPLICATE_ADAPTIVE,
                                  machine != NULL ? SLUICE_TUNER_MODEL : SLUICE_TUNER_ADAPTIVE, machine);
      w->budget = 1 << 23, w->num_chunks = 0, w->steps = machine != NULL ? 8 : 1; /* 1: before measured times decide */
      run(w, sent[is_given]);
      for (int32_t r = 0; r < RANKS; ++r) assert_true(w->peak_bytes[r] <= w->budget);
    }
    assert_true(is_same(sent[0], sent[1]));
  }
}

/* ---- layers that leave open whether they are deduplicated at all ---- */

enum { PAIR = 2 };

/* Two ranks with one kind of link. With K = 4, a rank's copies are about half of its rows. */
static tuner_world_t* pair_of(int32_t deduplicate, int32_t mode, double link) {
  tuner_world_t* w = tuner_world(PAIR, mode, 1);
  for (int32_t r = 0; r < PAIR; ++r) w->machine[r] = machine_text(PAIR, link, 0);
  w->deduplicate = deduplicate, w->top_k = TOP_K;
  w->layers = 1, w->steps = 40, w->num_chunks = 2, w->wgrad_mode = SLUICE_WGRAD_DEFERRED;
  return w;
}

static tuner_world_t* slow_pair(int32_t deduplicate, int32_t mode) { return pair_of(deduplicate, mode, 1e6); }

/* The link costs almost nothing, so the tables and sums of copies dominate. */
static tuner_world_t* fast_pair(int32_t deduplicate, int32_t mode) { return pair_of(deduplicate, mode, 1e12); }

/* Predictions choose copies over a slow link and rows over a fast link, with the bytes and n of a layer for which this
 * is configured. */
TEST(Copies_ByPrediction_GoOverASlowLinkOnly) {
  uint64_t rows[RANKS], copies[RANKS], sent[RANKS];
  run(slow_pair(SLUICE_DEDUPLICATE_NONE, SLUICE_TUNER_MODEL), rows);
  run(slow_pair(SLUICE_DEDUPLICATE_RANKS, SLUICE_TUNER_MODEL), copies);
  assert_true(copies[0] < rows[0] && copies[1] < rows[1]);
  run(slow_pair(SLUICE_DEDUPLICATE_ANY, SLUICE_TUNER_MODEL), sent);
  assert_true(is_same(sent, copies));
  run(fast_pair(SLUICE_DEDUPLICATE_ANY, SLUICE_TUNER_MODEL), sent);
  assert_true(is_same(sent, rows));
}

/* Copies never run if they are predicted to lose or cannot be chosen. Every step sends what a layer without
 * deduplication sends, and nothing is decided about the form. */
TEST(Copies_WhereTheyCannotWinOrBeChosen_NeverRun) {
  for (int32_t i = 0; i < 6; ++i) {
    uint64_t sent[2][RANKS];
    int32_t num_decisions[2];
    for (int32_t any = 0; any < 2; ++any) {
      const int32_t deduplicate = any ? SLUICE_DEDUPLICATE_ANY : SLUICE_DEDUPLICATE_NONE;
      tuner_world_t* w = i == 0   ? fast_pair(deduplicate, SLUICE_TUNER_ADAPTIVE)
                         : i == 1 ? slow_pair(deduplicate, SLUICE_TUNER_PROFILE)
                                  : slow_pair(deduplicate, SLUICE_TUNER_ADAPTIVE);
      if (i == 2) w->has_machine[0] = w->has_machine[1] = 0;
      if (i == 3) w->top_k = 1;
      if (i == 4) w->budget = 1 << 23, w->num_chunks = 0, w->steps = 1; /* 1: before measured times decide */
      if (i == 5) w->reuse = 1, w->steps = 1;
      if (i < 4) w->steps = 7; /* early enough to see a race */
      run(w, sent[any]);
      num_decisions[any] = w->num_decisions[0];
    }
    if (!is_same(sent[0], sent[1])) fail_msg("case %d: other bytes than rows have", i);
    if (i > 0) assert_int_equal(num_decisions[0], num_decisions[1]); /* case 0 decides for rows */
  }
}

/* ---- races of both kinds of layers ---- */

/* A layer that leaves open its levels, or whether it is deduplicated (2), or one of the two candidates (0 and 1). */
static tuner_world_t* levels_of(int32_t candidate, int32_t has_machine) {
  static const int32_t values[] = {SLUICE_DEDUPLICATE_RANKS, SLUICE_DEDUPLICATE_NODES, SLUICE_DEDUPLICATE_ADAPTIVE};
  return world_of(values[candidate], SLUICE_TUNER_ADAPTIVE, has_machine ? machine_of(1e6, 1e10) : NULL);
}
static tuner_world_t* copies_of(int32_t candidate, int32_t has_machine) {
  static const int32_t values[] = {SLUICE_DEDUPLICATE_NONE, SLUICE_DEDUPLICATE_RANKS, SLUICE_DEDUPLICATE_ANY};
  tuner_world_t* w = slow_pair(values[candidate], SLUICE_TUNER_ADAPTIVE);
  w->has_machine[0] = w->has_machine[1] = has_machine;
  return w;
}

/* Both candidates run as ordinary steps and are measured, at a configured n or at those that are searched; one stays.
 */
static void check_races(tuner_world_t* (*make)(int32_t candidate, int32_t has_machine), int32_t least_machine) {
  static const int32_t steps[] = {160, 24, 24, 40}; /* by n: enough for the search before this race */
  for (int32_t i = 0; i < 8; ++i) {
    const int32_t n = i % 4, has_machine = i / 4;
    if (has_machine < least_machine) continue;
    uint64_t sent[RANKS], fixed[2][RANKS];
    tuner_world_t* w = make(2, has_machine);
    w->num_chunks = n, w->steps = steps[n], w->wgrad_mode = n == 3 ? SLUICE_WGRAD_ADAPTIVE : SLUICE_WGRAD_DEFERRED;
    run(w, sent);
    assert_true(w->settled[0]);
    const int32_t chosen = w->picks[0][w->num_picks[0] - 1];
    if (n > 0) assert_in_range(chosen, n, n); /* a fixed n is the only one tried */
    for (int32_t candidate = 0; candidate < 2; ++candidate) {
      w = make(candidate, has_machine);
      w->num_chunks = chosen, w->steps = steps[n];
      run(w, fixed[candidate]);
    }
    assert_true(is_same(sent, fixed[0]) || is_same(sent, fixed[1]));
  }
}

TEST(Levels_Raced_SettleOnAllRanks) { check_races(levels_of, 0); }

TEST(Copies_Raced_SettleOnAllRanks) { check_races(copies_of, 1); }

/* With activation checkpointing a replayed forward has the levels or the form of the original, even if the choice has
 * changed. Both save the same bytes. */
TEST(LevelsAndCopies_RepeatedForwards_KeepTheirs) {
  for (int32_t i = 0; i < 4; ++i) {
    tuner_world_t* w = i < 2 ? levels_of(2, 0) : copies_of(2, 1);
    w->repeats = 3, w->reverse = i % 2;
    run_and_agree(w);
    for (int32_t r = 0; r < w->world_size; ++r) assert_int_equal(w->num_different[r], 0);
  }
}

/* If ranks have different numbers of tokens, also none, all bind again for the largest, and exchange copies again. */
TEST(LevelsAndCopies_DifferentBatchesPerRank_AllRanksAgree) {
  for (int32_t i = 0; i < 3; ++i) {
    tuner_world_t* w = i == 0 ? world_of(SLUICE_DEDUPLICATE_NODES, SLUICE_TUNER_ADAPTIVE, NULL)
                              : slow_pair(SLUICE_DEDUPLICATE_ANY, i == 1 ? SLUICE_TUNER_ADAPTIVE : SLUICE_TUNER_MODEL);
    w->num_chunks = 0, w->empty = 2, w->changes = 3, w->evaluates = i > 0;
    run_and_agree(w);
  }
}

/* With nodes there are three forms, and the slowest link decides. */
TEST(Copies_OnNodes_TakeTheWayOfTheSlowLink) {
  uint64_t fixed[3][RANKS], sent[RANKS];
  for (int32_t way = SLUICE_DEDUPLICATE_NONE; way <= SLUICE_DEDUPLICATE_NODES; ++way) run_fixed(way, TOP_K, fixed[way]);
  run(world_of(SLUICE_DEDUPLICATE_ANY, SLUICE_TUNER_MODEL, machine_of(1e6, 1e10)), sent);
  assert_true(is_same(sent, fixed[SLUICE_DEDUPLICATE_NODES]));
  run(world_of(SLUICE_DEDUPLICATE_ANY, SLUICE_TUNER_MODEL, machine_of(1e10, 1e6)), sent);
  assert_true(is_same(sent, fixed[SLUICE_DEDUPLICATE_RANKS]));
  run(world_of(SLUICE_DEDUPLICATE_ANY, SLUICE_TUNER_MODEL, machine_of(1e12, 1e12)), sent);
  assert_true(is_same(sent, fixed[SLUICE_DEDUPLICATE_NONE]));
  for (int32_t r = 0; r < 2; ++r) { /* in a race */
    tuner_world_t* w = world_of(SLUICE_DEDUPLICATE_ANY, SLUICE_TUNER_ADAPTIVE, machine_of(1e6, r ? 1e10 : 1e6));
    run(w, sent);
    assert_true(w->settled[0] && (is_same(sent, fixed[0]) || is_same(sent, fixed[1]) || is_same(sent, fixed[2])));
  }
}

/* The newest decision about deduplication; NULL: none. */
static const sluice_tuner_form_t* newest_form(const tuner_world_t* w, const sluice_tuner_decision_t** out_decision) {
  for (int32_t i = w->num_decisions[0] - 1; i >= 0; --i) {
    *out_decision = &w->decisions[0][i];
    if (w->forms[0][i].chose_deduplication) return &w->forms[0][i];
  }
  return NULL;
}

/* A decision names the form, the reason, and the seconds of this form and of the runner-up, also if rows win, by
 * prediction or in a race. A layer without a choice has no such decision. */
TEST(Copies_Decided_TellBothWaysWithTheirSeconds) {
  const sluice_tuner_decision_t* d = NULL;
  uint64_t sent[RANKS];
  for (int32_t slow = 0; slow <= 1; ++slow) {
    run((slow ? slow_pair : fast_pair)(SLUICE_DEDUPLICATE_ANY, SLUICE_TUNER_MODEL), sent);
    tuner_world_t* w = (slow ? slow_pair : fast_pair)(SLUICE_DEDUPLICATE_ANY, SLUICE_TUNER_ADAPTIVE);
    run(w, sent);
    const sluice_tuner_form_t* form = newest_form(w, &d);
    assert_non_null(form);
    assert_int_equal(form->deduplicate, w->last_deduplicate[0]);
    assert_int_equal(d->why, slow ? SLUICE_WHY_RACED : SLUICE_WHY_PREDICTED);
    assert_true(d->num_chunks == 2 && d->predicted_seconds > 0);
    assert_true(d->runner_up_chunks == 2 && form->runner_up_predicted_seconds > 0);
    assert_true(form->runner_up_deduplicate != form->deduplicate);
    assert_true(slow ? d->seconds > 0 && d->runner_up_seconds > 0 : d->runner_up_seconds == 0);
    const int copies_win = form->deduplicate == SLUICE_DEDUPLICATE_RANKS;
    const double copies = copies_win ? d->predicted_seconds : form->runner_up_predicted_seconds;
    const double rows = copies_win ? form->runner_up_predicted_seconds : d->predicted_seconds;
    assert_true(slow ? copies < rows : rows < copies);
  }
  for (int32_t i = 0; i < 2; ++i) {
    tuner_world_t* w = slow_pair(SLUICE_DEDUPLICATE_ANY, SLUICE_TUNER_ADAPTIVE);
    if (i == 0) w->top_k = 1;
    if (i == 1) w->world_size = 1, w->top_k = 2;
    run_and_agree(w);
    assert_true(newest_form(w, &d) == NULL && w->num_copied[0] == 0);
  }
}

/* A run that imports the decisions of another run sends the same form without a race, whatever its own machine
 * predicts, and also without a machine. It ignores answers that the layer cannot run. */
TEST(Copies_DecisionsOfAnotherRun_AreKept) {
  static char kept[65536];
  const sluice_tuner_decision_t* d = NULL;
  uint64_t sent[RANKS];
  for (int32_t slow = 0; slow <= 1; ++slow) {
    tuner_world_t* w = (slow ? slow_pair : fast_pair)(SLUICE_DEDUPLICATE_ANY, SLUICE_TUNER_MODEL);
    run(w, sent);
    memcpy(kept, w->written[0], sizeof kept);
    assert_non_null(strstr(kept, slow ? "\"deduplicate\": \"ranks\"" : "\"deduplicate\": \"none\""));
    for (int32_t i = 0; i < 2; ++i) {
      w = (slow ? fast_pair : slow_pair)(SLUICE_DEDUPLICATE_ANY, SLUICE_TUNER_ADAPTIVE);
      if (i == 1) w->has_machine[0] = w->has_machine[1] = 0;
      w->import[0] = w->import[1] = kept;
      run(w, sent);
      assert_int_equal(w->num_copied[0], slow ? w->steps : 0);
      assert_true(newest_form(w, &d) != NULL && d->why == SLUICE_WHY_IMPORTED && d->num_raced == 0);
      assert_string_equal(w->written[0], kept);
    }
  }
  char* word = strstr(kept, "\"ranks\"");
  memcpy(word, "\"nodes\"", 7);
  tuner_world_t* w = fast_pair(SLUICE_DEDUPLICATE_ANY, SLUICE_TUNER_ADAPTIVE);
  w->import[0] = w->import[1] = kept;
  run(w, sent);
  assert_true(w->num_copied[0] == 0 && newest_form(w, &d) != NULL && d->why == SLUICE_WHY_PREDICTED);
}
