// SPDX-License-Identifier: Apache-2.0
/* The stages of a race: which candidates run against each other next, until there is an answer. */
#include <math.h>

#include "backend/tune/search/search_state.h"
#include "backend/tune/search/search_times.h"

#define CLOSE               1.05 /* candidates this close to the best race against it again */
#define BOOTSTRAP_WITHIN    1.10 /* of the best measured time: a bootstrap prediction worth a race */
#define BOOTSTRAP_NEIGHBOUR 1.3  /* of the first candidate's prediction: its neighbour is tried as well */
#define FEW_COUNT           3
#define FEW_WITHIN          1.25 /* of the best prediction */
#define FEW_APART           1.25 /* factor in n between two of them */
#define GOOD_ENOUGH         1.03 /* of the best time: a nearby size's choice is kept if it takes at most this */

/* Keeps the answer of a nearby size if its time is within noise of the best. If sizes alternate in training, different
 * answers switch n each time, and a first pass after a switch takes longer. */
static int32_t as_nearby(const sluice_search_t* s, int32_t bucket, int32_t best) {
  const sluice_spot_t* spot = &s->spots[bucket];
  int32_t pick = best;
  for (int32_t step = -1; step <= 1; step += 2) {
    const sluice_spot_t* near = sluice_search_answer_within(s, bucket, step, SLUICE_SEARCH_NEAR);
    if (near == NULL) continue;
    if (near->pick == best) return best;
    if (sluice_spot_time(spot, near->pick) <= GOOD_ENOUGH * sluice_spot_time(spot, best)) pick = near->pick;
  }
  return pick;
}

static void settle(sluice_search_t* s, int32_t bucket) {
  sluice_spot_t* spot = &s->spots[bucket];
  int32_t best = sluice_spot_best(spot, spot->raced);
  if (best >= 0) best = as_nearby(s, bucket, best);
  sluice_search_decide(s, bucket, best < 0 ? spot->pick : best, SLUICE_WHY_RACED);
}

/* Candidates close to the best run against it again, alternating, so that drift affects both. */
static void duel_or_settle(sluice_search_t* s, int32_t bucket) {
  sluice_spot_t* spot = &s->spots[bucket];
  int32_t best = sluice_spot_best(spot, spot->raced), second = sluice_spot_best(spot, spot->raced & ~(1u << best));
  if (spot->stage == SLUICE_STAGE_DUEL || spot->stage == SLUICE_STAGE_QUESTION || second < 0 ||
      sluice_spot_time(spot, second) > CLOSE * sluice_spot_time(spot, best)) {
    settle(s, bucket);
    return;
  }
  sluice_sample_t *f = sluice_spot_sample(spot, SLUICE_FORWARD, second),
                  *b = sluice_spot_sample(spot, SLUICE_BACKWARD, second);
  if (spot->is_unsteady) *f = *b = (sluice_sample_t){0};
  f->count = b->count = 1; /* k more steps */
  sluice_search_enter(s, spot, 1u << second, SLUICE_STAGE_DUEL, 0);
}

static void try_wgrad(sluice_search_t* s, int32_t bucket) {
  sluice_spot_t* spot = &s->spots[bucket];
  int32_t best = sluice_spot_best(spot, spot->raced);
  int32_t other = (best + SLUICE_SEARCH_SIZES) % SLUICE_SEARCH_PICKS;
  if (s->config.open_wgrad && sluice_pick_size(best) > 0 && !(spot->raced >> other & 1)) {
    sluice_search_enter(s, spot, 1u << other, SLUICE_STAGE_WGRAD, 0);
    return;
  }
  duel_or_settle(s, bucket);
}

/* Walks to the bottom of the valley: a neighbour of the best that has not run races next. If a neighbour is close to
 * the best, the one after it races too, so that one unlucky time does not end the walk. */
static void walk_on(sluice_search_t* s, int32_t bucket) {
  sluice_spot_t* spot = &s->spots[bucket];
  int32_t best = sluice_spot_best(spot, spot->raced);
  uint32_t set = 0;
  for (int32_t step = -1; step <= 1; step += 2) {
    int32_t size = sluice_search_next_size(sluice_pick_size(best), step, spot->lo, spot->hi);
    for (; size >= spot->lo && size <= spot->hi; size = sluice_search_next_size(size, step, spot->lo, spot->hi)) {
      int32_t pick = sluice_search_pick_of(s, size);
      if (!(spot->raced >> pick & 1)) {
        set |= 1u << pick;
        break;
      }
      if (sluice_spot_time(spot, pick) > CLOSE * sluice_spot_time(spot, best)) break;
    }
  }
  if (set == 0) {
    try_wgrad(s, bucket);
  } else {
    sluice_search_enter(s, spot, set, SLUICE_STAGE_WALK, 0);
  }
}

static void after_few(sluice_search_t* s, int32_t bucket) {
  sluice_spot_t* spot = &s->spots[bucket];
  double best = sluice_spot_time(spot, sluice_spot_best(spot, spot->raced)) * 1e-9 * (double)spot->rows;
  int32_t next = sluice_search_best_predicted(s, spot, spot->raced, 1);
  if (next >= 0 && sluice_search_predicted(s, spot, next) * sluice_search_correction(s, spot, next) < best &&
      spot->worse < FEW_COUNT) {
    ++spot->worse;
    sluice_search_enter(s, spot, 1u << next, SLUICE_STAGE_MORE, 0);
    return;
  }
  duel_or_settle(s, bucket);
}

/* A candidate, and those with the same mode whose n is so near that they would show the same error of the model. */
static uint32_t with_similar(int32_t pick) {
  const int32_t n = sluice_pick_chunks(pick), mode = pick - sluice_pick_size(pick);
  uint32_t set = 1u << pick;
  for (int32_t size = 0; size < SLUICE_SEARCH_SIZES; ++size) {
    const int32_t other = sluice_pick_chunks(size);
    if (other < FEW_APART * n && n < FEW_APART * other) set |= 1u << (size + mode);
  }
  return set;
}

/* Adds the candidates on both sides of `pick`. */
static uint32_t with_neighbours(const sluice_search_t* s, int32_t pick, int32_t lo, int32_t hi) {
  uint32_t set = 1u << pick;
  for (int32_t step = -1; step <= 1; step += 2) {
    const int32_t size = sluice_search_next_size(sluice_pick_size(pick), step, lo, hi);
    const int32_t other = pick - sluice_pick_size(pick) + size;
    if (size >= lo && size <= hi && sluice_search_is_open(s, other)) set |= 1u << other;
  }
  return set;
}

static void start_few(sluice_search_t* s, int32_t bucket) {
  sluice_spot_t* spot = &s->spots[bucket];
  uint32_t set = 0, similar = 0;
  int32_t first = sluice_search_best_predicted(s, spot, 0, 0);
  for (int32_t i = 0; i < FEW_COUNT; ++i) {
    int32_t next = sluice_search_best_predicted(s, spot, similar, 0);
    if (next < 0 || sluice_search_predicted(s, spot, next) > FEW_WITHIN * sluice_search_predicted(s, spot, first))
      break;
    set |= 1u << next;
    similar |= with_similar(next);
  }
  /* A neighbour is always added: a single candidate would confirm nothing. */
  if ((set & (set - 1)) == 0) {
    const int is_one = spot->lo == spot->hi; /* the range has no neighbour */
    set = with_neighbours(s, first, is_one ? s->config.min_size : spot->lo, is_one ? s->config.max_size : spot->hi);
  }
  spot->worse = 0;
  sluice_search_enter(s, spot, set, SLUICE_STAGE_FEW, 0);
}

/* The fewest chunks have run: the candidate that the bootstrap model predicts best races against them. If the fewest
 * are predicted best, their neighbour races, unless its prediction is clearly worse. */
static void start_bootstrapped(sluice_search_t* s, int32_t bucket) {
  sluice_spot_t* spot = &s->spots[bucket];
  int32_t first = sluice_search_pick_of(s, spot->lo), best = first;
  const int32_t second = sluice_search_pick_of(s, sluice_search_next_size(spot->lo, 1, spot->lo, spot->hi));
  for (int32_t size = spot->lo; size <= spot->hi; size = sluice_search_next_size(size, 1, spot->lo, spot->hi)) {
    if (sluice_search_predicted(s, spot, sluice_search_pick_of(s, size)) < sluice_search_predicted(s, spot, best))
      best = sluice_search_pick_of(s, size);
  }
  if (best == first &&
      sluice_search_predicted(s, spot, second) <= BOOTSTRAP_NEIGHBOUR * sluice_search_predicted(s, spot, first))
    best = second;
  if (best == first) {
    sluice_search_decide(s, bucket, first, SLUICE_WHY_PREDICTED);
    return;
  }
  spot->worse = 0;
  /* The first candidates have run one counted step: if others are predicted to be much faster and are, that is
   * enough. */
  spot->expected = (float)(sluice_search_predicted(s, spot, best) / sluice_search_predicted(s, spot, first));
  sluice_search_enter(s, spot, 1u << best, SLUICE_STAGE_BOOTSTRAPPED,
                      SLUICE_BOOTSTRAP_HOPELESS * (double)spot->expected < 1);
}

/* The bootstrap model has more data now: any candidate that it rates as good as the best measured one races. */
static void after_bootstrapped(sluice_search_t* s, int32_t bucket) {
  sluice_spot_t* spot = &s->spots[bucket];
  double least = INFINITY;
  double best = sluice_spot_time(spot, sluice_spot_best(spot, spot->raced)) * 1e-9 * (double)spot->rows;
  int32_t next = -1;
  for (int32_t size = spot->lo; size <= spot->hi; size = sluice_search_next_size(size, 1, spot->lo, spot->hi)) {
    const int32_t pick = sluice_search_pick_of(s, size);
    const double time = sluice_search_predicted(s, spot, pick) * sluice_search_correction(s, spot, pick);
    if (!(spot->raced >> pick & 1) && time < least) least = time, next = pick;
  }
  if (next < 0 || least > BOOTSTRAP_WITHIN * best || spot->worse >= FEW_COUNT) {
    try_wgrad(s, bucket);
    return;
  }
  ++spot->worse;
  sluice_search_enter(s, spot, 1u << next, SLUICE_STAGE_BOOTSTRAPPED, 0);
}

/* Begins with both ends and the middle: with two ends only, a lucky time could start a walk that misses the valley. */
static void start_ends(sluice_search_t* s, int32_t bucket) {
  sluice_spot_t* spot = &s->spots[bucket];
  int32_t lo = spot->lo, middle = spot->hi; /* both move inwards in turn and meet in the middle of the listed sizes */
  while (lo < middle) {
    middle = sluice_search_next_size(middle, -1, spot->lo, spot->hi);
    if (lo < middle) lo = sluice_search_next_size(lo, 1, spot->lo, spot->hi);
  }
  sluice_search_enter(s, spot,
                      1u << sluice_search_pick_of(s, spot->lo) | 1u << sluice_search_pick_of(s, middle) |
                          1u << sluice_search_pick_of(s, spot->hi),
                      SLUICE_STAGE_ENDS, 0);
}

/* Limits candidates to those between the answers of neighbouring sizes [Algorithm 1]. If only predictions are compared,
 * all candidates take part, since a prediction costs no step. */
static void set_range(const sluice_search_t* s, sluice_spot_t* spot, int32_t lo, int32_t hi) {
  const int is_whole = s->config.mode == SLUICE_TUNER_MODEL;
  spot->lo = (int16_t)(is_whole ? s->config.min_size : lo < hi ? lo : hi);
  spot->hi = (int16_t)(is_whole ? s->config.max_size : lo < hi ? hi : lo);
}

void sluice_search_start(sluice_search_t* s, int32_t bucket) {
  sluice_spot_t* spot = &s->spots[bucket];
  const sluice_spot_t *below = sluice_search_answer_near(s, bucket, -1),
                      *above = sluice_search_answer_near(s, bucket, 1);
  int32_t lo = below == NULL ? s->config.min_size : sluice_pick_size(below->pick);
  int32_t hi = above == NULL ? s->config.max_size : sluice_pick_size(above->pick);
  spot->pick = (uint8_t)sluice_search_pick_of(s, s->config.min_size);
  spot->at = spot->rows;
  set_range(s, spot, lo, hi);
  if (s->config.min_size == s->config.max_size && !s->config.open_wgrad) {
    sluice_search_decide(s, bucket, sluice_search_pick_of(s, lo), SLUICE_WHY_ONE_LEFT);
    return;
  }
  if (below != NULL && above != NULL && below->pick == above->pick) {
    sluice_search_decide(s, bucket, below->pick, SLUICE_WHY_INSIDE_RANGE);
    return;
  }
  /* -1: no model, or no prediction for any candidate. */
  int32_t asks = s->config.predict != NULL && s->config.mode != SLUICE_TUNER_PROFILE;
  int32_t liked = asks ? sluice_search_best_predicted(s, spot, 0, 0) : -1;
  if (liked >= 0 && s->config.mode == SLUICE_TUNER_MODEL) {
    sluice_search_decide(s, bucket, liked, SLUICE_WHY_PREDICTED);
    return;
  }
  sluice_search_clear(s, spot);
  set_range(s, spot, lo, hi);
  if (liked >= 0 && s->config.mode == SLUICE_TUNER_ADAPTIVE) {
    start_few(s, bucket);
    return;
  }
  int near_below = sluice_search_answer_within(s, bucket, -1, SLUICE_SEARCH_NEAR) != NULL,
      near_above = sluice_search_answer_within(s, bucket, 1, SLUICE_SEARCH_NEAR) != NULL;
  if (spot->lo < spot->hi && near_below != near_above) { /* that end is better: skip the other */
    int32_t from = near_below ? lo : hi;
    int32_t neighbour = sluice_search_next_size(from, from == spot->lo ? 1 : -1, spot->lo, spot->hi);
    sluice_search_enter(s, spot, 1u << sluice_search_pick_of(s, from) | 1u << sluice_search_pick_of(s, neighbour),
                        SLUICE_STAGE_WALK, 0);
    return;
  }
  if (sluice_search_bootstraps(s) && spot->lo < spot->hi) {
    sluice_search_enter(s, spot, 1u << sluice_search_pick_of(s, spot->lo), SLUICE_STAGE_FIRST, 0);
    return;
  }
  start_ends(s, bucket);
}

void sluice_search_give_up(sluice_search_t* s, int32_t bucket) {
  sluice_spot_t* spot = &s->spots[bucket];
  spot->is_extended = 1; /* otherwise the window would continue */
  sluice_search_close_window(s, spot, sluice_search_window(s, spot));
  if (spot->stage == SLUICE_STAGE_QUESTION || sluice_spot_best(spot, spot->raced) >= 0) {
    settle(s, bucket);
    return;
  }
  const sluice_spot_t *below = sluice_search_answer_near(s, bucket, -1),
                      *above = sluice_search_answer_near(s, bucket, 1), *near = below != NULL ? below : above;
  int32_t liked = sluice_search_best_predicted(s, spot, 0, 0);
  if (near != NULL) {
    sluice_search_decide(s, bucket, near->pick, SLUICE_WHY_INSIDE_RANGE);
  } else if (s->config.predict != NULL && liked >= 0) {
    sluice_search_decide(s, bucket, liked, SLUICE_WHY_PREDICTED);
  } else {
    settle(s, bucket);
  }
}

static void after_first(sluice_search_t* s, int32_t bucket) {
  sluice_spot_t* spot = &s->spots[bucket];
  if (sluice_search_bootstrapped(s, spot, sluice_search_pick_of(s, spot->lo)) > 0) {
    start_bootstrapped(s, bucket);
  } else {
    start_ends(s, bucket); /* the lanes were not timed */
  }
}

int sluice_search_may_question(const sluice_search_t* s, const sluice_spot_t* spot) {
  return s->config.mode != SLUICE_TUNER_MODEL && spot->why != SLUICE_WHY_IMPORTED && spot->why != SLUICE_WHY_ONE_LEFT &&
         spot->passes_since >= spot->question_after && sluice_search_may_spend(s);
}

/* A candidate that no race of this size has tried; -1: all have been. The best by prediction comes first. */
static int32_t untried(sluice_search_t* s, const sluice_spot_t* spot) {
  if (s->config.predict != NULL && s->config.mode == SLUICE_TUNER_ADAPTIVE)
    return sluice_search_best_predicted(s, spot, spot->asked, 0);
  const int32_t mode = spot->pick - sluice_pick_size(spot->pick);
  for (int32_t size = spot->lo; size <= spot->hi; size = sluice_search_next_size(size, 1, spot->lo, spot->hi)) {
    if (!(spot->asked >> (size + mode) & 1) && sluice_search_is_open(s, size + mode)) return size + mode;
  }
  return -1;
}

/* Races the answer against its neighbours and one more candidate: its race assumed one valley over n, between the
 * answers of nearby sizes, and perhaps a model, and may have missed the best n. */
void sluice_search_question(sluice_search_t* s, int32_t bucket) {
  sluice_spot_t* spot = &s->spots[bucket];
  const int32_t lo = s->config.min_size, hi = s->config.max_size;
  uint32_t set = with_neighbours(s, spot->pick, lo, hi);
  int32_t other = (spot->pick + SLUICE_SEARCH_SIZES) % SLUICE_SEARCH_PICKS;
  if (lo == hi && sluice_search_is_open(s, other)) set |= 1u << other; /* n is fixed: only the mode is open */
  spot->at = spot->rows;
  spot->lo = (int16_t)lo, spot->hi = (int16_t)hi;
  spot->asked |= spot->raced | set;
  const int32_t far = untried(s, spot);
  if (far >= 0) set |= 1u << far;
  spot->asked = far >= 0 ? spot->asked | set : 0;
  sluice_search_clear(s, spot);
  sluice_search_enter(s, spot, set, SLUICE_STAGE_QUESTION, 0);
}

void sluice_search_advance(sluice_search_t* s, int32_t bucket) {
  sluice_spot_t* spot = &s->spots[bucket];
  sluice_window_t* window = sluice_search_window(s, spot);
  sluice_search_recall_anchor(spot, window);
  sluice_search_drop_hopeless(s, spot, window);
  do { /* repeated if the race continues: late passes may already have brought those steps */
    for (int32_t p = 0; p < SLUICE_SEARCH_PICKS; ++p) {
      if ((spot->racing >> p & 1) && !sluice_search_is_done(s, spot, p)) return;
    }
  } while (!sluice_search_close_window(s, spot, window));
  if (sluice_spot_best(spot, spot->raced) < 0) { /* no candidate finished a step */
    settle(s, bucket);
    return;
  }
  switch (spot->stage) {
    case SLUICE_STAGE_ENDS:
    case SLUICE_STAGE_WALK: walk_on(s, bucket); return;
    case SLUICE_STAGE_FIRST: after_first(s, bucket); return;
    case SLUICE_STAGE_BOOTSTRAPPED: after_bootstrapped(s, bucket); return;
    case SLUICE_STAGE_WGRAD: duel_or_settle(s, bucket); return;
    case SLUICE_STAGE_FEW:
    case SLUICE_STAGE_MORE: after_few(s, bucket); return;
    default: settle(s, bucket); return;
  }
}
