// SPDX-License-Identifier: Apache-2.0
/* Stores answers by size and checks the two hypotheses of the papers against them. */
#include <math.h>
#include <string.h>

#include "backend/tune/search/search_state.h"
#include "backend/tune/search/search_times.h"

#define FIRST_QUESTION  512 /* passes of one size before its answer is raced again; doubles while it stands */
#define LATEST_QUESTION 16384
#define WORTH_A_CHANGE  1.005 /* a new answer replaces the old one if it is faster by this factor */
#define HILL            1.03  /* slower by this factor than both sides: more than one valley */

static void tell(sluice_search_t* s, const sluice_spot_t* spot, int32_t why) {
  ++s->stats.num_decisions;
  if (s->config.decided == NULL) return;
  double rows = (double)spot->rows, time = sluice_spot_time(spot, spot->pick);
  int32_t second = sluice_spot_best(spot, spot->raced & ~(1u << spot->pick));
  const sluice_search_decision_t decision = {
      .rows = spot->rows,
      .pick = spot->pick,
      .why = why,
      .seconds = time == INFINITY ? 0 : time * rows * 1e-9,
      .predicted_seconds = sluice_search_predicted(s, spot, spot->pick),
      .runner_up = second,
      .runner_up_seconds = second < 0 ? 0 : sluice_spot_time(spot, second) * rows * 1e-9,
      .num_raced = __builtin_popcount(spot->raced),
      .race_passes = spot->race_passes,
  };
  s->config.decided(s->config.user, &decision);
}

const sluice_spot_t* sluice_search_answer_within(const sluice_search_t* s, int32_t bucket, int32_t step,
                                                 int32_t distance) {
  for (int32_t b = bucket + step; b >= 0 && b < SLUICE_SEARCH_BUCKETS && distance > 0; b += step, --distance) {
    if (s->spots[b].state == SLUICE_SPOT_ANSWERED) return &s->spots[b];
  }
  return NULL;
}

const sluice_spot_t* sluice_search_answer_near(const sluice_search_t* s, int32_t bucket, int32_t step) {
  return sluice_search_answer_within(s, bucket, step, SLUICE_SEARCH_BUCKETS);
}

/* Checks "the best n grows with q" for a raced answer and the nearest answers below and above it. */
static void test_hypothesis(sluice_search_t* s, int32_t bucket) {
  const sluice_spot_t *below = sluice_search_answer_near(s, bucket, -1),
                      *above = sluice_search_answer_near(s, bucket, 1);
  int size = sluice_pick_size(s->spots[bucket].pick);
  if (below == NULL && above == NULL) return;
  int holds = (below == NULL || sluice_pick_size(below->pick) <= size) &&
              (above == NULL || sluice_pick_size(above->pick) >= size);
  *(holds ? &s->stats.monotonic : &s->stats.not_monotonic) += 1;
}

/* Checks "time over n has one valley" for all candidates that ran with the answer's mode: no candidate between two
 * others is slower than both by more than noise. */
static void test_valley(sluice_search_t* s, const sluice_spot_t* spot, int32_t mode) {
  double before = INFINITY, crest = 0; /* the best so far, and the worst after it */
  int32_t count = 0, holds = 1;
  for (int32_t size = 0; size < SLUICE_SEARCH_SIZES; ++size) {
    double time = sluice_spot_time(spot, size + SLUICE_SEARCH_SIZES * mode);
    if (time == INFINITY) continue;
    ++count;
    if (crest > HILL * before && crest > HILL * time) holds = 0;
    if (time < before) before = time, crest = 0;
    if (time > crest) crest = time;
  }
  if (count >= 3) *(holds ? &s->stats.one_valley : &s->stats.not_one_valley) += 1;
}

void sluice_search_decide(sluice_search_t* s, int32_t bucket, int32_t pick, int32_t why) {
  sluice_spot_t* spot = &s->spots[bucket];
  int questioned = spot->stage == SLUICE_STAGE_QUESTION && why == SLUICE_WHY_RACED;
  if (questioned && sluice_spot_time(spot, spot->pick) <= WORTH_A_CHANGE * sluice_spot_time(spot, pick))
    pick = spot->pick;
  int changed = questioned && spot->pick != pick;
  spot->question_after = questioned && !changed && spot->question_after < LATEST_QUESTION ? 2 * spot->question_after
                         : questioned && !changed                                         ? LATEST_QUESTION
                                                                                          : FIRST_QUESTION;
  s->stats.num_questioned += questioned;
  s->stats.num_changed += changed;
  spot->state = SLUICE_SPOT_ANSWERED;
  if (spot->pick != pick) memset(spot->usual, 0, sizeof spot->usual);
  spot->pick = (uint8_t)pick;
  spot->why = (uint8_t)(questioned ? SLUICE_WHY_QUESTIONED : why);
  spot->racing = 0;
  spot->passes_since = 0;
  double model = sluice_search_predicted(s, spot, pick), time = sluice_spot_time(spot, pick);
  if (model > 0 && time < INFINITY) s->scale = time * 1e-9 * (double)spot->rows / model;
  if (why == SLUICE_WHY_RACED) {
    test_hypothesis(s, bucket);
    test_valley(s, spot, sluice_pick_wgrad(pick));
  }
  tell(s, spot, spot->why);
}

int sluice_spot_is_worth_keeping(const sluice_spot_t* spot) {
  if (spot->state == SLUICE_SPOT_RACING) return spot->stage == SLUICE_STAGE_QUESTION;
  if (spot->state != SLUICE_SPOT_ANSWERED) return 0;
  return spot->why != SLUICE_WHY_RACED || sluice_spot_time(spot, spot->pick) < INFINITY;
}
