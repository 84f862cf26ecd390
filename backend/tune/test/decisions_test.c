// SPDX-License-Identifier: Apache-2.0
/* The answers of a search that are written for later runs: final answers, also while they are raced again. */

#include "backend/tune/decisions_json.h"
#include "backend/tune/search/test/surface.h"
#include "backend/tune/tuner.h"
#include "third_party/bazel/test.h"

static const surface_t plain = {.alpha = 1e-5, .beta = 1e-6, .gemm_startup = 1e-6, .gemm_rate = 1e-6, .tile = 1};

/* A tuner with one kind of layer, and the search of that kind. */
static sluice_tuner_t tuner;
static sluice_tuner_table_t table;

static sluice_search_t* begin(void) {
  memset(&tuner, 0, sizeof tuner);
  memset(&table, 0, sizeof table);
  sluice_search_config_t config = config_of(SLUICE_TUNER_PROFILE);
  config.budget_share = 1; /* races are never postponed */
  sluice_search_init(&table.search, &config);
  tuner.tables = &table;
  return &table.search;
}

static const char* written(void) {
  static char text[4096];
  assert_true(sluice_tuner_write(&tuner, text, sizeof text) < sizeof text);
  return text;
}

/* A run that ends while an answer is being raced again keeps that answer. */
TEST(Answer_UnderQuestion_IsWritten) {
  sluice_search_t* s = begin();
  const sluice_spot_t* spot = &s->spots[sluice_search_bucket(4096)];
  uint32_t seed = 1;
  for (int i = 0; i < 100 && spot->state != SLUICE_SPOT_ANSWERED; ++i) run_step(s, &plain, 4096, &seed, 0);
  assert_int_equal(spot->state, SLUICE_SPOT_ANSWERED);
  char answer[64];
  snprintf(answer, sizeof answer, "\"rows\": 4096, \"num_chunks\": %d", sluice_pick_chunks(spot->pick));
  assert_non_null(strstr(written(), answer));
  for (int i = 0; i < 1000 && spot->state == SLUICE_SPOT_ANSWERED; ++i) run_step(s, &plain, 4096, &seed, 0);
  assert_int_equal(spot->state, SLUICE_SPOT_RACING);
  assert_non_null(strstr(written(), answer));
}

/* The race was given up before any pass was timed: this run continues with one chunk, the next run races again. */
TEST(Answer_NothingWasTimed_IsNotWritten) {
  sluice_search_t* s = begin();
  int32_t why = SLUICE_WHY_ON_TRIAL;
  for (int i = 0; i < 500 && why == SLUICE_WHY_ON_TRIAL; ++i) {
    sluice_search_next(s, 4096, &why);
    sluice_search_wait(s, 4096, 0);
  }
  assert_int_equal(s->spots[sluice_search_bucket(4096)].state, SLUICE_SPOT_ANSWERED);
  assert_non_null(strstr(written(), "\"answers\": []"));
  sluice_search_answer(s, 9000, sluice_search_size_of(4)); /* read from a file: valid although this run timed nothing */
  assert_non_null(strstr(written(), "\"rows\": 9000, \"num_chunks\": 4"));
}
