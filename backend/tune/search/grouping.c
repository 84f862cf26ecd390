// SPDX-License-Identifier: Apache-2.0
#include "backend/tune/search/grouping.h"

#include <math.h>
#include <string.h>

#include "backend/tune/search/search_times.h"

enum { TOLD_NOTHING = 0, TOLD_PLAIN = 1, TOLD_ALTERNATIVE = 2 };
enum { NOTHING = 0, RACING = 1, DECIDED = 2, GIVEN_UP = 3, IMPORTED = 4 };

#define STEPS      4    /* a warm-up and three counted steps */
#define FASTER     0.99 /* of the time of the plain form: the alternative wins at this or less */
#define MOST_ASKED 512  /* requested steps without a counted one, after which the plain form wins */
/* Factor by which the skew must change, up or down, before the form is raced again. */
#define DRIFTED 1.5
#define STEADY  256
/* Steps after which both forms race again within the budget of races; doubles each time the answer stands. */
#define FIRST_QUESTION  256
#define LATEST_QUESTION 8192

void sluice_grouping_init(sluice_grouping_t* g, const sluice_grouping_config_t* config) {
  memset(g, 0, sizeof *g);
  g->config = *config;
}

/* ---- candidates ---- */

static double predicted(const sluice_grouping_t* g, const sluice_search_t* s, int64_t rows, int32_t pick,
                        int32_t form) {
  const sluice_grouping_config_t* c = &g->config;
  double seconds = 0;
  for (int32_t direction = SLUICE_FORWARD; direction <= SLUICE_BACKWARD; ++direction)
    seconds += c->predict(c->user, rows, sluice_search_chunks(s, pick), sluice_pick_wgrad(pick), direction, form);
  return seconds > 0 ? seconds : INFINITY;
}

static int has_chunks(const sluice_grouping_form_t* form, const sluice_search_t* s, int32_t pick) {
  return sluice_search_chunks(s, pick) >= form->least_chunks;
}

static void set_side(sluice_grouping_spot_t* spot, int32_t side, int32_t pick, int32_t form) {
  spot->picks[side] = (uint8_t)pick;
  spot->forms[side] = (uint8_t)form;
}

/* The two pairs of n and form that the model predicts to be best; a race confirms them. */
static void add_predicted(sluice_grouping_t* g, sluice_search_t* s, sluice_grouping_spot_t* spot, int64_t rows) {
  const int32_t mode = sluice_pick_wgrad(spot->picks[0]) * SLUICE_SEARCH_SIZES;
  const double single = sluice_search_predicted(s, &s->spots[sluice_search_bucket(rows)], spot->picks[0]);
  double least[2] = {INFINITY, INFINITY};
  int32_t best[2] = {-1, -1}, form_of[2] = {0, 0};
  const int32_t num_sizes = s->config.max_size - s->config.min_size + 1;
  for (int32_t i = 0; i < g->config.num_forms * num_sizes; ++i) {
    const sluice_grouping_form_t* form = &g->config.forms[i / num_sizes];
    const int32_t size = s->config.min_size + i % num_sizes;
    if (!has_chunks(form, s, size)) continue;
    const double seconds = predicted(g, s, rows, size + mode, form->form);
    if (seconds < least[0]) {
      least[1] = least[0], best[1] = best[0], form_of[1] = form_of[0];
      least[0] = seconds, best[0] = size + mode, form_of[0] = form->form;
    } else if (seconds < least[1]) {
      least[1] = seconds, best[1] = size + mode, form_of[1] = form->form;
    }
  }
  if (single <= 0 || best[0] < 0) return;
  set_side(spot, 1, best[0], form_of[0]);
  if (best[1] >= 0) set_side(spot, 2, best[1], form_of[1]);
  while (spot->num_sides <= 2 && least[spot->num_sides - 1] <= FASTER * single) ++spot->num_sides;
}

/* The same n and the next larger one: more chunks leave more pairs in flight, or hide more of a second hop. */
static void add_larger(const sluice_grouping_t* g, const sluice_search_t* s, sluice_grouping_spot_t* spot) {
  const sluice_grouping_form_t* form = &g->config.forms[0];
  const int32_t pick = spot->picks[0], hi = s->config.max_size;
  int32_t size = sluice_pick_size(pick);
  for (; size <= hi && spot->num_sides < SLUICE_GROUPING_SIDES;
       size = sluice_search_next_size(size, 1, s->config.min_size, hi)) {
    const int32_t other = pick - sluice_pick_size(pick) + size;
    if (has_chunks(form, s, other)) set_side(spot, spot->num_sides++, other, form->form);
  }
}

/* The side that a decision is compared with: the plain form, or the best alternative; 0: there is none. */
static int32_t other_of(const sluice_grouping_spot_t* spot, int32_t winner) {
  if (winner > 0) return 0;
  if (spot->num_sides == 1) return spot->forms[1] != 0;
  int32_t best = 1;
  for (int32_t k = 2; k < spot->num_sides; ++k) {
    const float time = spot->sides[k].best_ns_per_row;
    if (time > 0 && time < spot->sides[best].best_ns_per_row) best = k;
  }
  return best;
}

/* Seconds of a step; of the plain form also those that the search measured. 0: unknown. */
static double measured(const sluice_search_t* s, const sluice_grouping_spot_t* spot, int64_t rows, int32_t side) {
  double time = (double)spot->sides[side].best_ns_per_row;
  if (side == 0 && time <= 0) time = sluice_spot_time(&s->spots[sluice_search_bucket(rows)], spot->picks[0]);
  return time < INFINITY ? time * (double)rows * 1e-9 : 0;
}

/* Predicted seconds of a side; 0: no model. */
static double predicted_side(const sluice_grouping_t* g, const sluice_search_t* s, const sluice_grouping_spot_t* spot,
                             int64_t rows, int32_t side) {
  if (g->config.predict == NULL) return 0;
  const double seconds = predicted(g, s, rows, spot->picks[side], spot->forms[side]);
  return seconds < INFINITY ? seconds : 0;
}

static void tell(const sluice_grouping_t* g, const sluice_search_t* s, sluice_grouping_spot_t* spot, int64_t rows,
                 int32_t why) {
  const int32_t winner = spot->winner, other = other_of(spot, winner);
  const int32_t is_raced = why == SLUICE_WHY_RACED || why == SLUICE_WHY_QUESTIONED;
  const int has_other = other != winner;
  const sluice_grouping_decision_t decision = {
      .rows = rows,
      .pick = spot->picks[winner],
      .form = spot->forms[winner],
      .other_pick = has_other ? spot->picks[other] : -1,
      .other_form = has_other ? spot->forms[other] : 0,
      .why = why,
      .num_raced = is_raced ? spot->num_sides : 0,
      .seconds = measured(s, spot, rows, winner),
      .predicted_seconds = predicted_side(g, s, spot, rows, winner),
      .other_seconds = has_other ? measured(s, spot, rows, other) : 0,
      .other_predicted_seconds = has_other ? predicted_side(g, s, spot, rows, other) : 0,
  };
  spot->told = winner > 0 ? TOLD_ALTERNATIVE : TOLD_PLAIN;
  if (g->config.decided != NULL) g->config.decided(g->config.user, &decision);
}

/* Without tells_plain the plain form is only reported if it replaces an alternative: the search has reported it. */
static int is_news(const sluice_grouping_t* g, const sluice_grouping_spot_t* spot, int32_t winner, int32_t why) {
  if (winner > 0) return !spot->is_question || winner != spot->winner;
  if (spot->told == TOLD_ALTERNATIVE) return 1;
  return g->config.tells_plain && (spot->told == TOLD_NOTHING || why == SLUICE_WHY_RACED);
}

static void decide(const sluice_grouping_t* g, const sluice_search_t* s, sluice_grouping_spot_t* spot, int64_t rows,
                   int32_t winner, int32_t why) {
  const int changes = is_news(g, spot, winner, why);
  spot->state = why == SLUICE_WHY_ONE_LEFT && !spot->is_question ? GIVEN_UP : DECIDED;
  spot->winner = (uint8_t)winner;
  spot->steps = 0;
  spot->question_after = (uint16_t)(!spot->is_question || changes            ? FIRST_QUESTION
                                    : spot->question_after < LATEST_QUESTION ? 2 * spot->question_after
                                                                             : LATEST_QUESTION);
  if (changes) tell(g, s, spot, rows, why);
}

static int may_question(const sluice_grouping_t* g, const sluice_search_t* s, const sluice_grouping_spot_t* spot) {
  return (spot->state == DECIDED || spot->state == GIVEN_UP) && spot->num_sides > 1 &&
         g->config.mode != SLUICE_TUNER_MODEL && spot->steps >= spot->question_after && sluice_search_may_spend(s);
}

/* The same sides race again, so that one unlucky race is not final. */
static void question(sluice_grouping_spot_t* spot) {
  spot->state = RACING;
  spot->is_question = 1;
  spot->asked = 0;
  memset(spot->sides, 0, sizeof spot->sides);
}

static void begin(sluice_grouping_t* g, sluice_search_t* s, sluice_grouping_spot_t* spot, int64_t rows, double skew,
                  int32_t pick) {
  *spot = (sluice_grouping_spot_t){.state = RACING, .num_sides = 1, .skew = (float)skew, .told = spot->told};
  set_side(spot, 0, pick, 0);
  if (g->config.predict != NULL && g->config.mode != SLUICE_TUNER_PROFILE) {
    add_predicted(g, s, spot, rows);
  } else if (g->config.mode != SLUICE_TUNER_MODEL && !g->config.forms[0].needs_model &&
             skew >= g->config.forms[0].least_skew) {
    add_larger(g, s, spot);
  }
  if (g->config.mode == SLUICE_TUNER_MODEL || spot->num_sides == 1)
    decide(g, s, spot, rows, spot->num_sides > 1, SLUICE_WHY_PREDICTED);
}

/* ---- the race ---- */

static int is_for(const sluice_grouping_spot_t* spot, double skew, int32_t pick) {
  if (spot->state == NOTHING || spot->picks[0] != pick) return 0;
  if (spot->state == RACING || spot->state == IMPORTED || spot->steps < STEADY) return 1;
  return skew < DRIFTED * (double)spot->skew && skew * DRIFTED > (double)spot->skew;
}

static int32_t least_run(const sluice_grouping_spot_t* spot) {
  int32_t least = 0;
  for (int32_t k = 1; k < spot->num_sides; ++k) {
    if (spot->sides[k].count < spot->sides[least].count) least = k;
  }
  return least;
}

/* The cost of a race beyond the time of its best side. */
static void count_race(const sluice_grouping_spot_t* spot, sluice_search_t* s, int64_t rows, int32_t best) {
  for (int32_t k = 0; k < spot->num_sides; ++k) {
    const double more = (double)(spot->sides[k].best_ns_per_row - spot->sides[best].best_ns_per_row);
    if (more > 0) s->stats.excess_seconds += more * spot->sides[k].count * (double)rows * 1e-9;
  }
}

static void settle(const sluice_grouping_t* g, sluice_search_t* s, sluice_grouping_spot_t* spot, int64_t rows) {
  int32_t best = 0;
  double time = FASTER * (double)spot->sides[0].best_ns_per_row;
  for (int32_t k = 1; k < spot->num_sides; ++k) {
    if ((double)spot->sides[k].best_ns_per_row <= time) best = k, time = (double)spot->sides[k].best_ns_per_row;
  }
  count_race(spot, s, rows, best);
  decide(g, s, spot, rows, best, spot->is_question ? SLUICE_WHY_QUESTIONED : SLUICE_WHY_RACED);
}

int32_t sluice_grouping_next(sluice_grouping_t* g, sluice_search_t* s, int64_t rows, double skew, int32_t pick,
                             int32_t* inout_why, int32_t* out_form) {
  *out_form = 0;
  if (g->config.num_forms == 0 || rows < 1) return pick;
  if (*inout_why == SLUICE_WHY_ON_TRIAL || *inout_why == SLUICE_WHY_NOTHING_YET) return pick;
  sluice_grouping_spot_t* spot = &g->spots[sluice_search_bucket(rows)];
  if (!is_for(spot, skew, pick)) begin(g, s, spot, rows, skew, pick);
  if (may_question(g, s, spot)) question(spot);
  if (spot->state == RACING) {
    const int32_t side = least_run(spot);
    if (spot->sides[side].count >= STEPS) {
      settle(g, s, spot, rows);
    } else if (++spot->asked > MOST_ASKED) {
      decide(g, s, spot, rows, spot->is_question ? spot->winner : 0, SLUICE_WHY_ONE_LEFT);
    } else {
      *inout_why = SLUICE_WHY_ON_TRIAL;
      *out_form = spot->forms[side];
      return spot->picks[side];
    }
  }
  ++spot->steps;
  *out_form = spot->forms[spot->winner];
  return spot->picks[spot->winner];
}

int32_t sluice_grouping_peek(const sluice_grouping_t* g, int64_t rows, int32_t pick, int32_t* out_form) {
  *out_form = 0;
  if (g->config.num_forms == 0 || rows < 1) return pick;
  const sluice_grouping_spot_t* spot = &g->spots[sluice_search_bucket(rows)];
  if (spot->state == NOTHING || spot->picks[0] != pick) return pick;
  const int32_t side = spot->state == RACING ? least_run(spot) : spot->winner;
  *out_form = spot->forms[side];
  return spot->picks[side];
}

int32_t sluice_grouping_answer_of(const sluice_grouping_t* g, int64_t rows, int32_t pick, int32_t* out_form) {
  *out_form = 0;
  const sluice_grouping_spot_t* spot = &g->spots[sluice_search_bucket(rows)];
  const int is_questioned = spot->state == RACING && spot->is_question;
  if ((spot->state != DECIDED && spot->state != IMPORTED && !is_questioned) || spot->picks[0] != pick) return -1;
  *out_form = spot->forms[spot->winner];
  return spot->picks[spot->winner];
}

int sluice_grouping_has(const sluice_grouping_t* g, int32_t form) {
  int found = form == 0;
  for (int32_t i = 0; i < g->config.num_forms; ++i) found |= g->config.forms[i].form == form;
  return found;
}

void sluice_grouping_answer(sluice_grouping_t* g, const sluice_search_t* s, int64_t rows, int32_t pick, int32_t form) {
  sluice_grouping_spot_t* spot = &g->spots[sluice_search_bucket(rows)];
  *spot = (sluice_grouping_spot_t){.state = IMPORTED, .num_sides = 1};
  set_side(spot, 0, pick, 0);
  set_side(spot, 1, pick, form);
  spot->winner = form != 0;
  tell(g, s, spot, rows, SLUICE_WHY_IMPORTED);
}

void sluice_grouping_observe(sluice_grouping_t* g, int32_t direction, int32_t pick, int32_t form, int64_t rows,
                             uint64_t ns) {
  if (rows < 1 || ns == 0) return;
  sluice_grouping_spot_t* spot = &g->spots[sluice_search_bucket(rows)];
  const float ns_per_row = (float)((double)ns / (double)rows);
  for (int32_t k = 0; k < spot->num_sides && spot->state == RACING; ++k) {
    sluice_grouping_side_t* side = &spot->sides[k];
    if (spot->picks[k] != pick || spot->forms[k] != form) continue;
    if (direction == SLUICE_FORWARD) {
      side->forward_ns_per_row = ns_per_row;
      continue;
    }
    if (side->forward_ns_per_row <= 0) continue;
    const float step = side->forward_ns_per_row + ns_per_row;
    side->forward_ns_per_row = 0;
    spot->asked = 0;
    if (++side->count == 1) continue; /* the first step allocates slots and templates */
    if (side->best_ns_per_row == 0 || step < side->best_ns_per_row) side->best_ns_per_row = step;
  }
}
