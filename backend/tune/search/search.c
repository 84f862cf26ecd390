// SPDX-License-Identifier: Apache-2.0
#include "backend/tune/search/search.h"

#include <math.h>
#include <string.h>

#include "backend/tune/search/search_times.h"

#define REPEATS      3
#define BUDGET_SHARE 0.002
#define USUAL_OVER   16 /* passes in the running mean */
#define USUAL_MOST   2  /* times the mean: the most that a slow pass adds to it */
#define EXPENSIVE    10 /* times the budget of races: from there on new sizes take the nearest answer */

const char* sluice_tuner_why_name(int32_t why) {
  static const char* const names[SLUICE_WHY_COUNT] = {"nothing timed yet", "on trial", "inside the range",
                                                      "the only one left", "raced",    "predicted",
                                                      "raced again",       "imported"};
  return why >= 0 && why < SLUICE_WHY_COUNT ? names[why] : "unknown";
}

void sluice_search_init(sluice_search_t* s, const sluice_search_config_t* config) {
  memset(s, 0, sizeof *s);
  s->config = *config;
  s->scale = 1;
  if (s->config.repeats == 0) s->config.repeats = REPEATS;
  if (s->config.budget_share == 0) s->config.budget_share = BUDGET_SHARE;
  if (!s->config.open_wgrad && s->config.wgrad_mode < 0) s->config.wgrad_mode = 0;
}

void sluice_search_answer(sluice_search_t* s, int64_t rows, int32_t pick) {
  int32_t bucket = sluice_search_bucket(rows);
  s->spots[bucket].rows = rows;
  s->spots[bucket].stage = 0;
  sluice_search_decide(s, bucket, pick, SLUICE_WHY_IMPORTED);
}

static int races_are_expensive(const sluice_search_t* s) {
  return s->stats.timed_passes > 1000 &&
         sluice_search_spent(s) > EXPENSIVE * s->config.budget_share * s->stats.total_seconds;
}

int32_t sluice_search_next(sluice_search_t* s, int64_t rows, int32_t* out_why) {
  int32_t ignored;
  int32_t* why = out_why != NULL ? out_why : &ignored;
  *why = SLUICE_WHY_NOTHING_YET;
  if (rows < 1) return sluice_search_pick_of(s, s->config.min_size);
  int32_t bucket = sluice_search_bucket(rows);
  sluice_spot_t* spot = &s->spots[bucket];
  spot->rows = rows;
  if (spot->state == SLUICE_SPOT_NOTHING) {
    const sluice_spot_t* near =
        races_are_expensive(s) ? sluice_search_answer_within(s, bucket, -1, SLUICE_SEARCH_NEAR) : NULL;
    if (near == NULL && races_are_expensive(s)) near = sluice_search_answer_within(s, bucket, 1, SLUICE_SEARCH_NEAR);
    if (near != NULL) {
      *why = SLUICE_WHY_INSIDE_RANGE;
      return near->pick;
    }
    sluice_search_start(s, bucket);
  }
  if (spot->state == SLUICE_SPOT_ANSWERED && sluice_search_may_question(s, spot)) sluice_search_question(s, bucket);
  *why = spot->state == SLUICE_SPOT_ANSWERED ? spot->why : SLUICE_WHY_ON_TRIAL;
  if (spot->state == SLUICE_SPOT_ANSWERED) return spot->pick;
  /* Candidates alternate: the next of the set after the last one that still lacks steps. */
  int32_t pick = spot->pick;
  for (int32_t i = 0; i < SLUICE_SEARCH_PICKS; ++i) {
    s->turn = (s->turn + 1) % SLUICE_SEARCH_PICKS;
    if (!(spot->racing >> s->turn & 1) || sluice_search_is_done(s, spot, s->turn)) continue;
    pick = s->turn;
    break;
  }
  return pick;
}

int32_t sluice_search_peek(const sluice_search_t* s, int64_t rows) {
  if (rows < 1) return -1;
  const int32_t bucket = sluice_search_bucket(rows);
  const sluice_spot_t* spot = &s->spots[bucket];
  if (spot->state == SLUICE_SPOT_ANSWERED) return spot->pick;
  if (spot->state == SLUICE_SPOT_NOTHING) {
    const sluice_spot_t* near = sluice_search_answer_within(s, bucket, -1, SLUICE_SEARCH_NEAR);
    if (near == NULL) near = sluice_search_answer_within(s, bucket, 1, SLUICE_SEARCH_NEAR);
    return near == NULL ? -1 : near->pick;
  }
  for (int32_t i = 1; i <= SLUICE_SEARCH_PICKS; ++i) {
    const int32_t pick = (s->turn + i) % SLUICE_SEARCH_PICKS;
    if ((spot->racing >> pick & 1) && !sluice_search_is_done(s, spot, pick)) return pick;
  }
  return spot->pick;
}

void sluice_search_wait(sluice_search_t* s, int64_t rows, int32_t layer) {
  if (rows < 1) return;
  int32_t bucket = sluice_search_bucket(rows);
  sluice_spot_t* spot = &s->spots[bucket];
  if (spot->state != SLUICE_SPOT_RACING) return;
  sluice_race_timeout_wait(&spot->timeout, layer);
  if (sluice_race_timeout_is_over(&spot->timeout)) sluice_search_give_up(s, bucket);
}

static void count_race_switch(sluice_search_t* s, double seconds) {
  s->stats.switch_seconds += seconds;
  s->stats.race_switch_seconds += seconds;
}

/* The cost of a warm-up is known once a second pass has run. Seconds. */
static double take_warm_up(sluice_sample_t* sample, double ns_per_row, double rows) {
  if (sample->best_ns_per_row >= 0) return 0;
  double more = -(double)sample->best_ns_per_row - ns_per_row;
  sample->best_ns_per_row = 0;
  return more > 0 ? more * rows * 1e-9 : 0;
}

static void count_sample(sluice_search_t* s, sluice_sample_t* sample, double ns_per_row, double rows,
                         const sluice_lanes_t* lanes) {
  ++sample->count;
  if (sample->count == 1) { /* the first pass allocates slots and templates */
    if (sample->best_ns_per_row == 0) sample->best_ns_per_row = -(float)ns_per_row;
    return;
  }
  count_race_switch(s, take_warm_up(sample, ns_per_row, rows));
  if (sample->best_ns_per_row != 0 && ns_per_row >= (double)sample->best_ns_per_row) return;
  sample->best_ns_per_row = (float)ns_per_row;
  if (lanes == NULL || lanes->compute <= 0) return; /* on a device only the first passes report lanes */
  sample->compute = (float)(lanes->compute / rows), sample->comm = (float)(lanes->comm / rows);
  sample->comm_cpu = (float)(lanes->comm_cpu / rows);
}

void sluice_search_count_switch(sluice_search_t* s, int32_t direction, int32_t pick, int64_t rows, double seconds) {
  sluice_spot_t* spot = &s->spots[sluice_search_bucket(rows)];
  const sluice_sample_t* x = sluice_spot_sample(spot, direction, pick);
  double shortest = x != NULL && x->count > 1 ? (double)x->best_ns_per_row * (double)rows * 1e-9 : 0;
  spot->is_switched[direction] = 1;
  if (spot->state == SLUICE_SPOT_RACING) {
    if (shortest > 0 && seconds > shortest) count_race_switch(s, seconds - shortest);
  } else if (pick == spot->pick && spot->usual[direction] > 0) {
    s->stats.switch_seconds += seconds - (double)spot->usual[direction] * (double)rows * 1e-9;
  } else if (shortest > 0 && seconds > shortest) {
    s->stats.switch_seconds += seconds - shortest;
  }
}

/* A step is a forward and the backward that follows it. */
static void log_step(sluice_window_t* window, int32_t direction, int32_t pick, double ns_per_row, int is_warm_up) {
  if (direction == SLUICE_FORWARD) {
    window->step_ns_per_row = (float)ns_per_row, window->step_pick = pick;
    return;
  }
  if (window->step_ns_per_row > 0 && window->step_pick == pick) {
    sluice_race_log_add(&window->log, pick, (double)window->step_ns_per_row + ns_per_row, is_warm_up);
  }
  window->step_ns_per_row = 0;
}

/* The usual time of an answer's passes outside of races; the cost of a switch is measured against it. */
static void note_usual(sluice_spot_t* spot, int32_t direction, int32_t pick, double ns_per_row) {
  int is_first = spot->is_switched[direction];
  sluice_sample_t* x = sluice_spot_sample(spot, direction, pick);
  float* usual = &spot->usual[direction];
  spot->is_switched[direction] = 0;
  if (pick != spot->pick) return;
  if (x != NULL && x->count > 1 && ns_per_row < (double)x->best_ns_per_row) x->best_ns_per_row = (float)ns_per_row;
  if (is_first) return;
  if (*usual <= 0) *usual = (float)ns_per_row;
  *usual += (float)((fmin(ns_per_row, USUAL_MOST * (double)*usual) - (double)*usual) / USUAL_OVER);
}

void sluice_search_count_pass(sluice_search_t* s, double seconds) {
  ++s->stats.timed_passes;
  s->stats.total_seconds += seconds;
}

void sluice_search_observe(sluice_search_t* s, int32_t direction, int32_t pick, int64_t rows, uint64_t ns,
                           const sluice_lanes_t* lanes) {
  if (rows < 1 || ns == 0) return;
  sluice_spot_t* spot = &s->spots[sluice_search_bucket(rows)];
  if (spot->state == SLUICE_SPOT_NOTHING && sluice_search_bootstraps(s) && !races_are_expensive(s)) {
    spot->rows = rows; /* that pass was the warm-up */
    sluice_search_start(s, sluice_search_bucket(rows));
  }
  double ns_per_row = (double)ns / (double)rows;
  sluice_search_count_pass(s, (double)ns * 1e-9);
  ++spot->passes_since;
  if (spot->state == SLUICE_SPOT_ANSWERED) note_usual(spot, direction, pick, ns_per_row);
  if (spot->state != SLUICE_SPOT_RACING || !(spot->racing >> pick & 1)) return;
  ++s->stats.race_passes;
  ++spot->race_passes;
  sluice_sample_t* sample = sluice_spot_sample(spot, direction, pick);
  if (sample->count < sluice_search_wanted(s, spot)) sluice_race_timeout_renew(&spot->timeout);
  count_sample(s, sample, ns_per_row, (double)rows, lanes);
  float startup = lanes == NULL ? 0 : (float)(lanes->startup / (double)rows);
  if (startup > 0 && (spot->startup[direction] <= 0 || startup < spot->startup[direction])) {
    spot->startup[direction] = startup;
  }
  sluice_window_t* window = sluice_search_window(s, spot);
  window->used_at = (uint32_t)s->stats.race_passes;
  log_step(window, direction, pick, ns_per_row, sample->count == 1);
  sluice_search_advance(s, sluice_search_bucket(rows));
}
