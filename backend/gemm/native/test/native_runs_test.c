// SPDX-License-Identifier: Apache-2.0
/* Runs of panels: each panel is taken once, by any thread. */
#include <pthread.h>

#include "backend/gemm/native/native_runs.h"
#include "third_party/bazel/test.h"

enum { PROBLEMS = 7, PANELS = 400, MOST_RUNS = 4 };

static const int64_t panels_of[PROBLEMS] = {0, 128, 1, 0, 200, 71, 0};
static int64_t begins[PROBLEMS + 1], least[PROBLEMS];
static sluice_run_t room[MOST_RUNS];

static sluice_runs_t runs_of(int num_runs, int64_t least_of_all) {
  for (int i = 0; i < PROBLEMS; ++i) {
    begins[i + 1] = begins[i] + panels_of[i];
    least[i] = least_of_all;
  }
  assert_int_equal(begins[PROBLEMS], PANELS);
  const sluice_runs_t runs = {PROBLEMS, begins, least, num_runs, room};
  for (int i = 0; i < num_runs; ++i) {
    sluice_runs_set(&runs, i, (int64_t)PANELS * i / num_runs, (int64_t)PANELS * (i + 1) / num_runs);
  }
  return runs;
}

/* Counts how often each panel was taken. */
static void count(const sluice_piece_t* piece, int* taken) {
  for (int64_t panel = piece->first; panel < piece->last; ++panel) ++taken[begins[piece->problem] + panel];
}

static int is_within_its_gemm(const sluice_piece_t* piece) {
  return piece->first >= 0 && piece->first < piece->last && piece->last <= panels_of[piece->problem];
}

static void assert_each_once(const int* taken) {
  for (int i = 0; i < PANELS; ++i) {
    if (taken[i] != 1) fail_msg("panel %d taken %d times", i, taken[i]);
  }
}

/* The panel to prefetch is the next panel of the run, unless another thread takes it first. */
TEST(Take_OwnRun_SaysWhatComesNext) {
  const sluice_runs_t runs = runs_of(2, 1);
  sluice_piece_t piece, next;
  assert_true(sluice_runs_take(&runs, 0, &piece));
  for (int64_t left = PANELS / 2 - piece.last; left > 0; piece = next, left -= piece.last - piece.first) {
    assert_true(sluice_runs_take(&runs, 0, &next));
    assert_int_equal(piece.next_gemm, next.problem);
    assert_int_equal(piece.next_first, next.first);
  }
  assert_int_equal(piece.next_gemm, -1);
}

typedef struct taker_s {
  const sluice_runs_t* runs;
  int index;
  int outside; /* pieces that are not within one GEMM */
  int taken[PANELS];
} taker_t;

static void* take_all(void* data) {
  taker_t* taker = data;
  for (sluice_piece_t piece; sluice_runs_take(taker->runs, taker->index, &piece);) {
    taker->outside += !is_within_its_gemm(&piece);
    count(&piece, taker->taken);
  }
  return NULL;
}

TEST(Take_SeveralThreads_EachPanelOnce) {
  for (int round = 0; round < 200; ++round) {
    const sluice_runs_t runs = runs_of(MOST_RUNS, round % 2 ? 1 : 8);
    static taker_t takers[MOST_RUNS];
    pthread_t threads[MOST_RUNS];
    memset(takers, 0, sizeof takers);
    for (int i = 0; i < MOST_RUNS; ++i) {
      takers[i].runs = &runs;
      takers[i].index = i;
      assert_int_equal(pthread_create(&threads[i], NULL, take_all, &takers[i]), 0);
    }
    int taken[PANELS] = {0};
    for (int i = 0; i < MOST_RUNS; ++i) {
      pthread_join(threads[i], NULL);
      assert_int_equal(takers[i].outside, 0);
      for (int panel = 0; panel < PANELS; ++panel) taken[panel] += takers[i].taken[panel];
    }
    assert_each_once(taken);
  }
}
