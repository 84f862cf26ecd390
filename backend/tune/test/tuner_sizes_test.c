// SPDX-License-Identifier: Apache-2.0
/* The number of rows that is assumed for a batch whose load varies. */

#include "backend/tune/search/search_state.h"
#include "backend/tune/tuner_sizes.h"
#include "third_party/bazel/test.h"

enum { TOKENS = 500, TOP_K = 2, BALANCED = TOKENS * TOP_K };

static sluice_tuner_table_t* table_of(void** state) { return *state; }

static int setup(void** state) {
  sluice_tuner_table_t* table = calloc(1, sizeof *table);
  if (table == NULL) return -1;
  table->work.top_k = TOP_K;
  table->work.skew = 1;
  *state = table;
  return 0;
}
static int teardown(void** state) {
  free(*state);
  return 0;
}

/* A number of rows at the border between two buckets of the search. */
static int64_t find_edge(void) {
  int64_t rows = BALANCED + BALANCED / 4;
  while (sluice_search_bucket(rows) == sluice_search_bucket(rows + 1)) ++rows;
  return rows;
}

TEST(Rows_AroundAnEdgeOfBuckets_KeepTheirBucket) {
  sluice_tuner_table_t* table = table_of(state);
  const int64_t edge = find_edge();
  (void)sluice_tuner_note_rows(table, TOKENS, edge);
  const int32_t bucket = sluice_search_bucket(sluice_tuner_rows_of(table, TOKENS));
  for (int32_t batch = 0; batch < 100; ++batch) {
    (void)sluice_tuner_note_rows(table, TOKENS, edge + (batch % 2 ? 1 : -1) * edge / 20);
    assert_int_equal(sluice_search_bucket(sluice_tuner_rows_of(table, TOKENS)), bucket);
  }
}

TEST(Rows_OneDifferentBatch_ChangesNothing) {
  sluice_tuner_table_t* table = table_of(state);
  (void)sluice_tuner_note_rows(table, TOKENS, BALANCED);
  (void)sluice_tuner_note_rows(table, TOKENS, 2 * BALANCED);
  assert_int_equal(sluice_tuner_rows_of(table, TOKENS), BALANCED);
}

TEST(Rows_LoadsThatStayOther_AreFollowed) {
  sluice_tuner_table_t* table = table_of(state);
  (void)sluice_tuner_note_rows(table, TOKENS, BALANCED);
  for (int32_t batch = 0; batch < 40; ++batch) (void)sluice_tuner_note_rows(table, TOKENS, 2 * BALANCED);
  const int64_t rows = sluice_tuner_rows_of(table, TOKENS);
  assert_in_range(sluice_search_bucket(2 * BALANCED) - sluice_search_bucket(rows), 0, 1);
}

TEST(Rows_OfEachSize_AreItsOwn) {
  sluice_tuner_table_t* table = table_of(state);
  for (int32_t batch = 0; batch < 10; ++batch) {
    (void)sluice_tuner_note_rows(table, TOKENS, BALANCED);
    (void)sluice_tuner_note_rows(table, 4 * TOKENS, 6 * BALANCED);
  }
  assert_int_equal(sluice_tuner_rows_of(table, TOKENS), BALANCED);
  assert_int_equal(sluice_tuner_rows_of(table, 4 * TOKENS), 6 * BALANCED);
  table->work.skew = 3; /* of the last batch: used for a size that has not been seen */
  assert_int_equal(sluice_tuner_rows_of(table, 16 * TOKENS), 48 * BALANCED);
}

int main(void) { return run_cases_each(setup, teardown); }
