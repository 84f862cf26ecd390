// SPDX-License-Identifier: Apache-2.0
/* The tuner in running layers: all ranks make the same decisions, decisions are reported and read back, and ranks with
 * different settings get an error. */
#include <stdatomic.h>

#include "capi/test/tuner/tuner_world.h"
#include "third_party/bazel/test.h"

TEST(EveryMode_RanksAgreeAndSettle) {
  static const struct {
    int32_t ranks, mode, machine, why;
  } cases[] = {{2, SLUICE_TUNER_PROFILE, 0, SLUICE_WHY_RACED},
               {3, SLUICE_TUNER_ADAPTIVE, 1, SLUICE_WHY_RACED},
               {4, SLUICE_TUNER_ADAPTIVE, 0, SLUICE_WHY_RACED},
               {2, SLUICE_TUNER_MODEL, 1, SLUICE_WHY_PREDICTED}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
    tuner_world_t* w = tuner_world(cases[i].ranks, cases[i].mode, cases[i].machine);
    run_and_agree(w);
    assert_true(w->settled[0] && w->num_decisions[0] >= 1);
    const sluice_tuner_decision_t* d = &w->decisions[0][0];
    int bootstraps = cases[i].mode == SLUICE_TUNER_ADAPTIVE && !cases[i].machine;
    /* A bootstrap model that clearly predicts one chunk needs no race. */
    if (!bootstraps || d->why != SLUICE_WHY_PREDICTED) assert_int_equal(d->why, cases[i].why);
    assert_true(d->model_width == M && d->hidden_width == H && d->num_experts == 2 * w->world_size);
    assert_true((d->seconds > 0) == (bootstraps || d->why == SLUICE_WHY_RACED));
    assert_true((d->predicted_seconds > 0) == (bootstraps || cases[i].machine == 1));
    assert_true(d->num_raced >= 2 || d->why == SLUICE_WHY_PREDICTED);
    assert_true(w->stats[0].timed_passes > 400 && w->stats[0].total_seconds > 0);
    assert_true(w->stats[0].race_passes < w->stats[0].timed_passes);
    printf("%d ranks, mode %d: n = %d (%s), %lld of %lld passes raced\n", w->world_size, w->mode[0], d->num_chunks,
           sluice_tuner_why_name(d->why), (long long)w->stats[0].race_passes, (long long)w->stats[0].timed_passes);
  }
}

enum { STEPS = 400, SETTLED = 64 };

/* Loads differ between sizes, and slightly between batches of one size. */
TEST(Sizes_DifferentlyUneven_EachSettles) {
  for (int32_t i = 0; i < 4; ++i) {
    const int32_t has_machine = i % 2;
    tuner_world_t* w = tuner_world(2, SLUICE_TUNER_ADAPTIVE, has_machine);
    w->changes = 1 + i / 2, w->uneven = 1, w->top_k = 2, w->layers = 1, w->steps = STEPS, w->waits = SETTLED;
    run_and_agree(w);
    const int32_t num_sizes = w->changes == 1 ? 3 : 4;
    for (int32_t k = 0; k < w->num_decisions[0]; ++k) {
      const sluice_tuner_decision_t* d = &w->decisions[0][k];
      printf("%lld rows: n %d (%s of %d)\n", (long long)d->rows, d->num_chunks, sluice_tuner_why_name(d->why),
             d->num_raced);
    }
    assert_true(w->settled[0] >= SETTLED && w->num_decisions[0] >= num_sizes);
    assert_true(w->stats[0].race_passes < w->stats[0].timed_passes / 2);
    for (int32_t r = 0; r < 2; ++r) { /* equal on all ranks, since all use the same reports */
      const sluice_tuner_stats_t* s = &w->stats[r];
      assert_true(s->num_switches > 4 && s->switch_seconds != 0 && s->switch_seconds < s->total_seconds);
      assert_true(s->switch_seconds == w->stats[0].switch_seconds && s->num_switches == w->stats[0].num_switches);
      assert_true(s->one_valley == w->stats[0].one_valley && s->not_one_valley == w->stats[0].not_one_valley);
    }
    /* An answer is used from the next batch of its size on. */
    const int32_t cycle = num_sizes * w->changes;
    for (int32_t step = w->num_picks[0] - w->settled[0] + cycle; step + cycle < w->num_picks[0]; ++step) {
      assert_int_equal(w->picks[0][step], w->picks[0][step + cycle]); /* the next batch of this size */
    }
  }
}

/* Machines on which chunks cost almost nothing. On the first, larger batches want more chunks; on the second, all. */
#define MACHINE(half_rows, bytes, startup, op)                                                                  \
  "{\"sluice_machine\": 2, \"name\": \"slow link\", "                                                           \
  "\"gemm\": {\"f32\": {\"flops_per_second\": 1e10, \"half_rows\": " half_rows                                  \
  "}}, "                                                                                                        \
  "\"rows\": {\"bytes_per_second\": 5e10}, \"activation_seconds\": 1e-11, \"activation_grad_seconds\": 2e-11, " \
  "\"exchange\": {\"bytes_per_second\": " bytes ", \"startup_seconds\": " startup                               \
  "}, "                                                                                                         \
  "\"host_copy\": {\"bytes_per_second\": 4e9}, \"op_seconds\": " op ", \"pass_seconds\": 1e-5}"
static const char quick_start[] = MACHINE("0.1", "2e8", "1e-7", "1e-7");
static const char no_start[] = MACHINE("0.001", "1.5e8", "1e-9", "1e-9");

/* The n decided for batches of this many rows; 0: no decision. */
static int32_t decided_for(const tuner_world_t* w, int64_t rows) {
  int32_t found = 0; /* the last decision holds */
  for (int32_t i = 0; i < w->num_decisions[0]; ++i) {
    const sluice_tuner_decision_t* d = &w->decisions[0][i];
    if (d->rows >= rows && d->rows < rows + rows / 8) found = d->num_chunks;
  }
  return found;
}

/* Three batch sizes alternate. Each step runs the choice for its own size, although the previous header named another
 * size. Ranks may have different numbers of tokens; then they bind again. */
TEST(SizesInTurn_EachRunsItsOwnN) {
  static const int64_t sizes[] = {256, 32, 128};
  for (int32_t reuse = 0; reuse <= 1; ++reuse) {
    tuner_world_t* w = tuner_world(2, SLUICE_TUNER_MODEL, 1);
    w->machine[0] = w->machine[1] = quick_start;
    w->changes = 1, w->steps = 60, w->layers = 1, w->reuse = reuse;
    run_and_agree(w);
    assert_true(w->settled[0]);
    int32_t n[3], differ = 0;
    for (int32_t k = 0; k < 3; ++k) {
      n[k] = decided_for(w, sizes[k]);
      assert_true(n[k] > 0);
      differ |= n[k] != n[0];
    }
    assert_true(differ);
    for (int32_t step = 9; step < w->steps; ++step) assert_int_equal(w->picks[0][step], n[step % 3]);
    printf("sizes 256, 32, 128 in turn: n %d, %d, %d\n", n[0], n[1], n[2]);
  }
}

/* All ranks run the same choices and every kind of layer is decided, whatever a host does between the steps of a race.
 * Under a budget this excludes layers that live for seven steps, since each plans from the times seen so far. */
TEST(AnySequenceOfCalls_RanksStayTogether) {
  static const struct {
    const char* name;
    int32_t steps, shapes, replaces, evaluates, empty, changes;
    uint64_t budget;
  } cases[] = {{"two shapes in one context", 160, 2, 0, 0, 0, 0, 0},
               {"a layer created again in every fifth step", 160, 0, 5, 0, 0, 0, 0},
               {"created again in every step", 160, 0, 1, 0, 0, 0, 0},
               {"two evaluations before each step", 160, 0, 0, 2, 0, 0, 0},
               {"no tokens on one rank", 160, 0, 0, 0, 2, 0, 0},
               {"no tokens on one rank, batches that change", 160, 0, 0, 0, 1, 4, 0},
               {"all of it", 1600, 2, 7, 1, 2, 4, 0},
               {"all of it under a budget", 160, 2, 7, 1, 2, 4, 64 << 20}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
    for (int32_t has_machine = 0; has_machine <= 1; ++has_machine) {
      tuner_world_t* w = tuner_world(2, SLUICE_TUNER_ADAPTIVE, has_machine);
      w->steps = cases[i].steps, w->shapes = cases[i].shapes;
      w->replaces = cases[i].replaces, w->evaluates = cases[i].evaluates;
      w->empty = cases[i].empty, w->changes = cases[i].changes, w->budget = cases[i].budget;
      run_and_agree(w);
      if (w->budget > 0) continue;
      int32_t kinds = 0; /* one bit for each hidden width */
      for (int32_t d = 0; d < w->num_decisions[0]; ++d) kinds |= w->decisions[0][d].hidden_width == H ? 1 : 2;
      if (kinds != (cases[i].shapes == 2 ? 3 : 1)) fail_msg("%s: decided for kinds %d", cases[i].name, kinds);
    }
  }
}

/* The error on every rank names the settings of both ranks. */
TEST(RanksConfiguredDifferently_AllFailAndSayWhy) {
  static const char decisions[] =
      "{\"sluice_decisions\": 3, \"answers\": [{\"layer\": \"0123456789abcdef\", \"rows\": 9, \"num_chunks\": 4}]}";
  static const struct {
    int32_t odd; /* the rank that differs */
    const char *its, *of_others;
  } cases[] = {
      {1, "rank 1: mode profile, machine ", "mode adaptive, machine "},
      {2, "rank 2: mode adaptive, no machine, no imported decisions", "mode adaptive, machine "},
      {1, ", 1 imported decisions (", ", no imported decisions"},
      {0, "rank 0: mode adaptive, machine ", "mode adaptive, machine "},
  };
  char* other_machine = strdup(tuner_machine); /* same name, other hash */
  strstr(other_machine, "2e-10")[0] = '3';
  for (int which = 0; which < 4; ++which) {
    tuner_world_t* w = tuner_world(3, SLUICE_TUNER_ADAPTIVE, 1);
    if (which == 0) w->mode[1] = SLUICE_TUNER_PROFILE;
    if (which == 1) w->has_machine[2] = 0;
    if (which == 2) w->import[1] = decisions;
    if (which == 3) w->machine[0] = other_machine;
    tuner_run(w);
    for (int32_t r = 0; r < 3; ++r) {
      int32_t odd = cases[which].odd, other = r == odd ? (odd == 0 ? 1 : 0) : r;
      char rank[24];
      snprintf(rank, sizeof rank, "rank %d: mode", other);
      assert_int_equal(w->status[r], SLUICE_E_MISMATCH);
      assert_non_null(strstr(w->message[r], "the tuners of the ranks differ"));
      if (strstr(w->message[r], cases[which].its) == NULL) fail_msg("case %d, rank %d: %s", which, r, w->message[r]);
      assert_non_null(strstr(w->message[r], rank));
      assert_non_null(strstr(w->message[r], cases[which].of_others));
      if (which == 3) {
        const char *first = strchr(strstr(w->message[r], "machine "), '('), *second = strchr(first + 1, '(');
        assert_memory_not_equal(first, second, 9);
      }
    }
  }
  free(other_machine);
}

static _Atomic int32_t num_told;

static void on_log(void* user, int32_t level, const char* message) {
  (void)user, (void)level;
  if (strncmp(message, "sluice: decision: M ", 20) != 0 || strstr(message, "(predicted; ") == NULL) return;
  num_told += strstr(message, "on 2 ranks") != NULL;
}

/* Each rank tells its host's log of each decision. */
TEST(LogOfDecisions_OneLineEach_NoneUnasked) {
  for (int32_t level = SLUICE_LOG_WARN; level <= SLUICE_LOG_INFO; ++level) {
    tuner_world_t* w = tuner_world(2, SLUICE_TUNER_MODEL, 1);
    w->steps = 20, num_told = 0;
    sluice_set_log(on_log, NULL, level);
    tuner_run(w);
    sluice_set_log(NULL, NULL, SLUICE_LOG_ERROR);
    must_agree(w);
    assert_true(w->num_decisions[0] > 0);
    assert_int_equal(num_told, level == SLUICE_LOG_INFO ? 2 * w->num_decisions[0] : 0);
  }
}

/* The next run reads the decisions of this run and races nothing. */
TEST(Decisions_WrittenAndReadAgain_StandFromTheFirstStep) {
  tuner_world_t* w = tuner_world(2, SLUICE_TUNER_PROFILE, 0);
  run_and_agree(w);
  assert_string_equal(w->written[0], w->written[1]);
  int32_t chosen = w->decisions[0][w->num_decisions[0] - 1].num_chunks;
  char* text = strdup(w->written[0]);
  w = tuner_world(2, SLUICE_TUNER_PROFILE, 0);
  w->import[0] = w->import[1] = text;
  w->steps = 20;
  run_and_agree(w);
  for (int32_t i = 2 * w->layers; i < w->num_picks[0]; ++i) assert_int_equal(w->picks[0][i], chosen);
  assert_int_equal(w->stats[0].race_passes, 0);
  assert_int_equal(w->decisions[0][0].why, SLUICE_WHY_IMPORTED);
  assert_string_equal(w->written[0], text); /* the same answers */
  free(text);
}

/* Deduplicated layers are a kind of their own: raced or predicted, with the same decision on all ranks. */
TEST(Deduplicated_EveryMode_DecidesForItsOwnKind) {
  char* others = NULL;
  for (int32_t mode = SLUICE_TUNER_ADAPTIVE; mode <= SLUICE_TUNER_MODEL; ++mode) {
    for (int32_t deduplicate = 0; deduplicate < 2; ++deduplicate) {
      tuner_world_t* w = tuner_world(2, mode, mode != SLUICE_TUNER_PROFILE);
      w->deduplicate = deduplicate;
      run_and_agree(w);
      assert_true(w->num_decisions[0] >= 1 && w->settled[0]);
      const int32_t want = mode == SLUICE_TUNER_MODEL ? SLUICE_WHY_PREDICTED : SLUICE_WHY_RACED;
      assert_int_equal(w->decisions[0][0].why, want);
      assert_true((w->decisions[0][0].predicted_seconds > 0) == (mode != SLUICE_TUNER_PROFILE));
      const char* layer = strstr(w->written[0], "\"layer\": \"");
      assert_non_null(layer);
      if (deduplicate) assert_memory_not_equal(layer, others, 26);
      free(others);
      others = deduplicate ? NULL : strndup(layer, 26);
    }
  }
}

/* ---- layers with a configured number of chunks: the other open choices are raced at this n ---- */

/* One chunk has only one mode, so nothing is open; neither is it with configured n and mode. */
TEST(FixedChunks_NothingOpen_NothingIsAsked) {
  static const struct {
    int32_t num_chunks, wgrad_mode;
  } cases[] = {{3, SLUICE_WGRAD_DEFERRED}, {5, SLUICE_WGRAD_PER_CHUNK}, {1, SLUICE_WGRAD_ADAPTIVE}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
    tuner_world_t* w = tuner_world(2, SLUICE_TUNER_ADAPTIVE, 1);
    w->num_chunks = cases[i].num_chunks, w->wgrad_mode = cases[i].wgrad_mode, w->steps = 10;
    run_and_agree(w);
    for (int32_t k = 0; k < w->num_picks[0]; ++k) assert_int_equal(w->picks[0][k], w->num_chunks);
    assert_true(w->settled[0] && w->num_decisions[0] == 0 && w->stats[0].timed_passes == 0);
  }
}

/* At a fixed n, here one that is no candidate, both weight-gradient modes run. The decision is read back from a file;
 * layers with another n ignore it. */
TEST(FixedChunks_OpenMode_IsRacedAndStandsInAFileForThatN) {
  tuner_world_t* w = tuner_world(2, SLUICE_TUNER_PROFILE, 0);
  w->num_chunks = 5, w->steps = 40;
  run_and_agree(w);
  for (int32_t k = 0; k < w->num_picks[0]; ++k) assert_int_equal(w->picks[0][k], 5);
  assert_true(w->settled[0] && w->decisions[0][0].why == SLUICE_WHY_RACED && w->decisions[0][0].num_raced == 2);
  assert_non_null(strstr(w->written[0], "\"num_chunks\": 5"));
  int32_t mode = w->decisions[0][w->num_decisions[0] - 1].wgrad_mode;
  char* text = strdup(w->written[0]);
  w = tuner_world(2, SLUICE_TUNER_PROFILE, 0);
  w->num_chunks = 5, w->steps = 10, w->import[0] = w->import[1] = text;
  run_and_agree(w);
  assert_int_equal(w->stats[0].race_passes, 0);
  assert_true(w->decisions[0][0].why == SLUICE_WHY_IMPORTED && w->decisions[0][0].num_chunks == 5);
  assert_int_equal(w->decisions[0][0].wgrad_mode, mode);
  memcpy(strstr(text, "\"num_chunks\": 5"), "\"num_chunks\": 7", 15);
  w = tuner_world(2, SLUICE_TUNER_PROFILE, 0);
  w->num_chunks = 5, w->steps = 40, w->import[0] = w->import[1] = text;
  run_and_agree(w);
  assert_int_equal(w->decisions[0][0].why, SLUICE_WHY_RACED);
  free(text);
}

/* ---- machines and replays ---- */

/* The machine of these tests is far from the real one. Steps correct it, the same on all ranks. */
TEST(Machine_AfterSteps_IsFittedOnAllRanksAndPredicts) {
  tuner_world_t* w = tuner_world(2, SLUICE_TUNER_ADAPTIVE, 1);
  run_and_agree(w);
  assert_string_equal(w->refined[0], w->refined[1]);
  assert_non_null(strstr(w->refined[0], "\"provenance\": \"refined\""));
  assert_null(strstr(w->refined[0], "\"median\": 0, ")); /* the error of held-out passes */
  sluice_planner_t* planner = NULL;
  assert_int_equal(sluice_planner_create(w->refined[0], strlen(w->refined[0]), &planner), SLUICE_OK);
  sluice_planner_destroy(planner);
}

/* With activation checkpointing a forward is replayed while n or plans are tried. As in a pipeline, several forwards
 * are outstanding. Each replay saves what its own original did, in any order, even if the forwards look the same on one
 * rank. */
TEST(RepeatedForwards_WhileTrying_SaveWhatTheirFirstDid) {
  static const struct {
    int32_t ranks, mode, outstanding, reverse, same_routing, steps;
    uint64_t budget;
  } cases[] = {
      {2, SLUICE_TUNER_ADAPTIVE, 1, 0, 0, 60, 0},       {2, SLUICE_TUNER_PROFILE, 4, 0, 0, 40, 0},
      {2, SLUICE_TUNER_PROFILE, 4, 1, 2, 40, 0},        {3, SLUICE_TUNER_PROFILE, 32, 1, 1, 12, 0},
      {2, SLUICE_TUNER_ADAPTIVE, 3, 1, 1, 40, 1 << 20}, {1, SLUICE_TUNER_ADAPTIVE, 4, 1, 0, 40, 1 << 20},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
    tuner_world_t* w = tuner_world(cases[i].ranks, cases[i].mode, 1);
    w->repeats = cases[i].outstanding, w->reverse = cases[i].reverse, w->same_routing = cases[i].same_routing;
    w->budget = cases[i].budget, w->steps = cases[i].steps;
    run_and_agree(w);
    for (int32_t r = 0; r < w->world_size; ++r) assert_int_equal(w->num_different[r], 0);
    assert_true(w->repeats > 4 || (w->num_decisions[0] >= 1 && w->stats[0].race_passes > 0));
    if (w->budget == 0) assert_true(w->repeats == 1 || w->num_mixed[0] > 0);
  }
}

/* The original of a replay has left the list, so the replay runs with another n, which is the same on all ranks. */
TEST(RepeatedForwards_MoreThanAreKnown_RunTheSameOnAllRanks) {
  tuner_world_t* w = tuner_world(2, SLUICE_TUNER_PROFILE, 1);
  w->repeats = 40, w->steps = 10, w->layers = 1;
  run_and_agree(w);
  assert_true(w->num_mixed[0] > 0 && w->num_different[0] <= 8 * w->steps);
}

TEST(RepeatedForward_OfOneRankOnly_IsAMismatch) {
  tuner_world_t* w = tuner_world(2, SLUICE_TUNER_PROFILE, 1);
  w->repeats = 1, w->forgets = 2;
  tuner_run(w);
  for (int32_t r = 0; r < 2; ++r) {
    assert_int_equal(w->status[r], SLUICE_E_MISMATCH);
    assert_non_null(strstr(w->message[r], "repeats"));
  }
}

/* Until a size is known, a layer runs one chunk. Its slots are larger than those of the many chunks that its machine
 * favours later. */
TEST(AfterTrials_SlotsThatOnlyTheyNeeded_AreGivenBack) {
  uint64_t bytes[2];
  for (int32_t i = 0; i < 2; ++i) {
    tuner_world_t* w = tuner_world(2, SLUICE_TUNER_MODEL, 1);
    w->machine[0] = w->machine[1] = no_start;
    w->wgrad_mode = SLUICE_WGRAD_PER_CHUNK;
    w->steps = i == 0 ? 4 : 20;
    run_and_agree(w);
    assert_int_equal(w->picks[0][0], 1);
    assert_true(w->picks[0][w->num_picks[0] - 1] >= 8);
    bytes[i] = w->last_bytes[0];
    assert_true(i == 1 || bytes[0] >= w->first_bytes[0]); /* no memory is released while the layers settle */
  }
  printf("%llu bytes while n is on trial, %llu afterwards\n", (unsigned long long)bytes[0],
         (unsigned long long)bytes[1]);
  assert_true(bytes[1] * 10 < bytes[0] * 9);
}

/* A rank that refused decisions has the same state as the other ranks. */
TEST(Decisions_RefusedOnOneRank_LeaveNothing) {
  tuner_world_t* w = tuner_world(2, SLUICE_TUNER_PROFILE, 0);
  w->steps = 4;
  w->refused[1] =
      "{\"sluice_decisions\": 3, \"answers\": [{\"layer\": \"0123456789abcdef\", \"rows\": 64, \"num_chunks\": 16, "
      "\"wgrad_mode\": \"per_chunk\"}, {\"layer\": \"x\"}]}";
  w->import[0] = w->import[1] =
      "{\"sluice_decisions\": 3, \"answers\": [{\"layer\": \"0123456789abcdef\", \"rows\": 64, \"num_chunks\": 4, "
      "\"restore_input\": \"keep\", \"restore_pre_activation\": \"recompute\"}]}";
  run_and_agree(w);
}
