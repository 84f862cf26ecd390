// SPDX-License-Identifier: Apache-2.0
/* Layers with a configured number of chunks: the tuner races the other open choices at this n, and no others. */

#include "capi/test/tuner/tuner_world.h"
#include "third_party/bazel/test.h"

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

/* At any fixed n both weight-gradient modes run, and the faster mode stays. */
TEST(FixedChunks_OpenMode_IsRacedAtThatN) {
  static const struct {
    int32_t mode, machine;
  } cases[] = {
      {SLUICE_TUNER_PROFILE, 0}, {SLUICE_TUNER_ADAPTIVE, 0}, {SLUICE_TUNER_ADAPTIVE, 1}, {SLUICE_TUNER_MODEL, 1}};
  static const int32_t chunks[] = {4, 2, 5, 20}; /* candidates of the search for n, and a number that is no candidate */
  for (size_t i = 0; i < 2 * sizeof cases / sizeof cases[0]; ++i) {
    const int32_t mode = cases[i % 4].mode, has_machine = cases[i % 4].machine, n = chunks[(i + i / 4) % 4];
    tuner_world_t* w = tuner_world(2, mode, has_machine);
    w->num_chunks = n, w->steps = 40;
    run_and_agree(w);
    for (int32_t k = 0; k < w->num_picks[0]; ++k) assert_int_equal(w->picks[0][k], n);
    assert_true(w->settled[0] && w->num_decisions[0] >= 1);
    const sluice_tuner_decision_t* d = &w->decisions[0][0];
    assert_int_equal(d->num_chunks, n);
    if (!has_machine) assert_true(d->why == SLUICE_WHY_RACED && d->num_raced == 2);
    if (has_machine) assert_true(d->predicted_seconds > 0);
    if (mode == SLUICE_TUNER_MODEL) assert_int_equal(d->why, SLUICE_WHY_PREDICTED);
    printf("mode %d, machine %d: weight gradients %s at n = %d (%s, %d raced)\n", mode, has_machine,
           d->wgrad_mode == SLUICE_WGRAD_DEFERRED ? "deferred" : "per chunk", n, sluice_tuner_why_name(d->why),
           d->num_raced);
  }
}

/* A decision for an n that is no candidate is read back from a file; layers with another n ignore it. */
TEST(FixedChunks_DecisionOfAFile_StandsForThatN) {
  tuner_world_t* w = tuner_world(2, SLUICE_TUNER_PROFILE, 0);
  w->num_chunks = 5, w->steps = 40;
  run_and_agree(w);
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
