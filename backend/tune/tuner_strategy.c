// SPDX-License-Identifier: Apache-2.0
#include "backend/tune/tuner_strategy.h"

#include <math.h>

#include "backend/model/restore.h"
#include "backend/moe/layer/layer.h"
#include "backend/tune/search/search.h"
#include "backend/tune/search/search_times.h"

#define WINDOW     4            /* consecutive steps: a warm-up and three counted ones */
#define MOST_STEPS (4 * WINDOW) /* steps of strategies close to the best */
#define CLOSE      1.12         /* factor of the best time */
#define WITHIN     1.25         /* factor of the best prediction of all strategies */

int sluice_tuner_is_joint(const sluice_moe_t* moe) { return moe->shape.config.reuse && !sluice_makes_plans(moe); }

int sluice_tuner_allows(const sluice_moe_t* moe, int32_t restore_set) {
  const sluice_moe_config_t* c = &moe->shape.config;
  const sluice_restore_set_t* set = &sluice_restore_sets[restore_set];
  if (sluice_restore_is_kept(set->restore_input) || sluice_restore_is_kept(set->restore_pre_activation)) return 0;
  return (c->restore_input < 0 || c->restore_input == set->restore_input) &&
         (c->restore_pre_activation < 0 || c->restore_pre_activation == set->restore_pre_activation);
}

static int32_t index_of(const sluice_tuner_strategy_t* joint, int32_t restore_set) {
  for (int32_t k = 0; k < joint->count; ++k) {
    if (joint->tables[k]->restore_set == restore_set) return k;
  }
  return -1;
}

sluice_tuner_table_t* sluice_tuner_strategy_table(const sluice_tuner_strategy_t* joint, int32_t restore_set) {
  const int32_t k = index_of(joint, restore_set);
  return k < 0 ? NULL : joint->tables[k];
}

/* ---- predictions ---- */

/* The best prediction of a strategy's model for this many rows; INFINITY: none. */
static double best_predicted(const sluice_search_t* s, int64_t rows) {
  const sluice_search_config_t* c = &s->config;
  double best = INFINITY;
  for (int32_t size = c->min_size; c->predict != NULL && size <= c->max_size; ++size) {
    double seconds = 0;
    for (int32_t direction = SLUICE_FORWARD; direction <= SLUICE_BACKWARD; ++direction) {
      seconds += c->predict(c->user, rows, sluice_search_chunks(s, size), c->wgrad_mode, direction);
    }
    if (seconds > 0 && seconds < best) best = seconds;
  }
  return best;
}

/* Strategies worth a try, one bit each. Without a machine, all of them. */
static uint32_t find_worth_a_try(const sluice_tuner_strategy_t* joint, int64_t rows) {
  const sluice_search_config_t* c = &joint->tables[0]->search.config;
  const uint32_t all = (1u << joint->count) - 1;
  if (c->predict == NULL || c->mode != SLUICE_TUNER_ADAPTIVE) return all;
  double predicted[SLUICE_JOINT_STRATEGIES], best = INFINITY;
  for (int32_t k = 0; k < joint->count; ++k) {
    predicted[k] = best_predicted(&joint->tables[k]->search, rows);
    best = fmin(best, predicted[k]);
  }
  uint32_t set = 0;
  for (int32_t k = 0; k < joint->count; ++k) set |= (uint32_t)(predicted[k] <= WITHIN * best) << k;
  return best == INFINITY ? all : set;
}

/* Computed once per size: dozens of predictions take milliseconds. */
static uint32_t worth_a_try(sluice_tuner_strategy_t* joint, int64_t rows) {
  uint8_t* tried = &joint->tried[sluice_search_bucket(rows)];
  if (*tried == 0) *tried = (uint8_t)find_worth_a_try(joint, rows);
  return *tried;
}

/* ---- the comparison ---- */

/* The steps of a strategy's current answer. */
static sluice_joint_step_t steps_of(const sluice_tuner_strategy_t* joint, int32_t bucket, int32_t k) {
  const sluice_joint_step_t* steps = &joint->steps[bucket][k];
  const uint8_t pick = (uint8_t)joint->tables[k]->search.spots[bucket].pick;
  return steps->pick == pick ? *steps : (sluice_joint_step_t){.pick = pick};
}

/* Shortest step in seconds; INFINITY: none was counted. */
static double measured(const sluice_tuner_strategy_t* joint, int32_t bucket, int32_t k) {
  const sluice_joint_step_t steps = steps_of(joint, bucket, k);
  const int64_t rows = joint->tables[k]->search.spots[bucket].rows;
  return steps.count < 2 ? INFINITY : (double)steps.best_ns_per_row * 1e-9 * (double)rows;
}

static int is_by_model(const sluice_tuner_strategy_t* joint) {
  return joint->tables[0]->search.config.mode == SLUICE_TUNER_MODEL;
}

static double time_of(sluice_tuner_strategy_t* joint, int32_t bucket, int32_t k) {
  sluice_search_t* s = &joint->tables[k]->search;
  if (is_by_model(joint)) return sluice_search_predicted(s, &s->spots[bucket], s->spots[bucket].pick);
  return measured(joint, bucket, k);
}

/* The tried strategy with the shortest step. */
static int32_t best_of(sluice_tuner_strategy_t* joint, int32_t bucket, uint32_t tried) {
  int32_t best = -1;
  for (int32_t k = 0; k < joint->count; ++k) {
    if (!(tried >> k & 1)) continue;
    if (best < 0 || time_of(joint, bucket, k) < time_of(joint, bucket, best)) best = k;
  }
  return best;
}

/* The strategy that a comparison runs next, one window at a time; -1: the comparison is complete. */
static int32_t next_compared(const sluice_tuner_strategy_t* joint, int32_t bucket, uint32_t tried) {
  if (joint->is_through[bucket] || is_by_model(joint) || (tried & (tried - 1)) == 0) return -1;
  double best = INFINITY;
  for (int32_t k = 0; k < joint->count; ++k) {
    if (tried >> k & 1) best = fmin(best, measured(joint, bucket, k));
  }
  int32_t least = -1, least_count = 0, num_close = 0;
  for (int32_t k = 0; k < joint->count; ++k) {
    if (!(tried >> k & 1)) continue;
    const int32_t count = steps_of(joint, bucket, k).count;
    if (count % WINDOW != 0) return k;
    const int is_close = measured(joint, bucket, k) <= CLOSE * best;
    num_close += is_close;
    if (count > 0 && (!is_close || count >= MOST_STEPS)) continue;
    if (least < 0 || count < least_count) least = k, least_count = count;
  }
  return least_count == 0 || num_close > 1 ? least : -1;
}

static sluice_racing_plan_t choice_of(const sluice_tuner_strategy_t* joint, int32_t bucket, int32_t k) {
  const sluice_tuner_table_t* table = joint->tables[k];
  const int32_t pick = table->search.spots[bucket].pick;
  const sluice_restore_set_t* set = &sluice_restore_sets[table->restore_set];
  return (sluice_racing_plan_t){sluice_search_chunks(&table->search, pick), set->restore_input,
                                set->restore_pre_activation, sluice_pick_wgrad(pick)};
}

/* The time of a step of a strategy; 0: unknown. If only one is tried, the time comes from the race of its search. */
static double told_seconds(const sluice_tuner_strategy_t* joint, int32_t bucket, int32_t k) {
  const double compared = measured(joint, bucket, k);
  if (isfinite(compared)) return compared;
  const sluice_spot_t* spot = &joint->tables[k]->search.spots[bucket];
  const double raced = sluice_spot_time(spot, spot->pick);
  return isfinite(raced) ? raced * 1e-9 * (double)spot->rows : 0;
}

/* A strategy without a comparison has the reason of its n. */
static int32_t why_told(const sluice_tuner_strategy_t* joint, int32_t bucket, int32_t num_tried, int32_t best) {
  if (is_by_model(joint)) return SLUICE_WHY_PREDICTED;
  if (num_tried == 1) return joint->tables[best]->search.spots[bucket].why;
  return joint->told[bucket] != 0 ? SLUICE_WHY_QUESTIONED : SLUICE_WHY_RACED;
}

static void tell(sluice_tuner_strategy_t* joint, int32_t bucket, uint32_t tried, int32_t best) {
  const sluice_tuner_table_t* table = joint->tables[best];
  const sluice_spot_t* spot = &table->search.spots[bucket];
  if (joint->told[bucket] == best + 1) return;
  const double seconds = is_by_model(joint) ? 0 : told_seconds(joint, bucket, best);
  const double predicted = table->search.config.predict == NULL
                               ? 0
                               : sluice_search_predicted(&joint->tables[best]->search, spot, spot->pick);
  int32_t second = -1, count = 0;
  for (int32_t k = 0; k < joint->count; ++k) {
    count += (int32_t)(tried >> k & 1);
    if (k == best || !(tried >> k & 1)) continue;
    if (second < 0 || time_of(joint, bucket, k) < time_of(joint, bucket, second)) second = k;
  }
  sluice_decision_t d = {
      .layer = table->layer,
      .work = table->work,
      .what = {.rows = spot->rows,
               .why = why_told(joint, bucket, count, best),
               .seconds = seconds,
               .predicted_seconds = predicted,
               .runner_up = -1,
               .num_raced = seconds > 0 ? count : 0},
      .chosen = choice_of(joint, bucket, best),
  };
  d.kept_chunks = d.chosen.num_chunks;
  if (second >= 0) d.second = choice_of(joint, bucket, second);
  if (second >= 0 && seconds > 0) d.what.runner_up_seconds = told_seconds(joint, bucket, second);
  joint->told[bucket] = (uint8_t)(best + 1);
  sluice_tuner_record(table->tuner, &d);
}

/* ---- what comes next ---- */

static int is_answered(const sluice_search_t* s, int32_t bucket) {
  return s->spots[bucket].state == SLUICE_SPOT_ANSWERED;
}

/* The first strategy whose n is still being searched at this size, with the candidate of that search; NULL: all have
 * answers. */
static sluice_tuner_table_t* next_searched(sluice_tuner_strategy_t* joint, int64_t rows, uint32_t tried,
                                           int32_t* out_pick) {
  const int32_t bucket = sluice_search_bucket(rows);
  for (int32_t k = 0; k < joint->count; ++k) {
    sluice_search_t* s = &joint->tables[k]->search;
    if (!(tried >> k & 1) || is_answered(s, bucket)) continue;
    int32_t why = 0;
    *out_pick = sluice_search_next(s, rows, &why); /* this may find the answer at once */
    if (!is_answered(s, bucket)) return joint->tables[k];
  }
  return NULL;
}

sluice_tuner_table_t* sluice_tuner_strategy_next(sluice_tuner_strategy_t* joint, int64_t rows, int32_t* out_pick,
                                                 int32_t* out_why) {
  sluice_tuner_table_t* last = joint->tables[joint->count - 1]; /* the strategy that stores least, by default */
  *out_why = SLUICE_WHY_NOTHING_YET;
  if (rows < 1) {
    *out_pick = sluice_search_next(&last->search, 0, NULL);
    return last;
  }
  const int32_t bucket = sluice_search_bucket(rows);
  const uint32_t tried = worth_a_try(joint, rows);
  *out_why = SLUICE_WHY_ON_TRIAL;
  sluice_tuner_table_t* searched = next_searched(joint, rows, tried, out_pick);
  if (searched != NULL) return searched;
  for (int32_t k = 0; k < joint->count; ++k) {
    if (tried >> k & 1) joint->tables[k]->search.spots[bucket].rows = rows;
  }
  const int32_t compared = next_compared(joint, bucket, tried);
  if (compared >= 0) {
    *out_pick = joint->tables[compared]->search.spots[bucket].pick;
    return joint->tables[compared];
  }
  if (!joint->is_through[bucket]) tell(joint, bucket, tried, best_of(joint, bucket, tried));
  joint->is_through[bucket] = 1;
  const int32_t best = joint->told[bucket] - 1;
  *out_pick = sluice_search_next(&joint->tables[best]->search, rows, out_why);
  return joint->tables[best];
}

const sluice_tuner_table_t* sluice_tuner_strategy_peek(const sluice_tuner_strategy_t* joint, int64_t rows,
                                                       int32_t* out_pick) {
  if (rows < 1) return NULL;
  const int32_t bucket = sluice_search_bucket(rows);
  const uint32_t tried = joint->tried[bucket];
  for (int32_t k = 0; k < joint->count; ++k) {
    const sluice_search_t* s = &joint->tables[k]->search;
    if (!(tried >> k & 1) || is_answered(s, bucket)) continue;
    if (s->spots[bucket].state == SLUICE_SPOT_NOTHING) return NULL; /* its search has not begun */
    *out_pick = sluice_search_peek(s, rows);
    return joint->tables[k];
  }
  int32_t next = next_compared(joint, bucket, tried);
  if (next < 0) next = joint->told[bucket] - 1;
  if (next < 0) return NULL;
  *out_pick = joint->tables[next]->search.spots[bucket].pick;
  return joint->tables[next];
}

void sluice_tuner_strategy_observe(sluice_tuner_strategy_t* joint, int32_t restore_set, int32_t direction, int32_t pick,
                                   int64_t rows, uint64_t ns) {
  const int32_t k = index_of(joint, restore_set), bucket = sluice_search_bucket(rows);
  if (k < 0 || rows < 1 || ns == 0 || !is_answered(&joint->tables[k]->search, bucket)) return;
  sluice_joint_step_t* steps = &joint->steps[bucket][k];
  const float ns_per_row = (float)((double)ns / (double)rows);
  if (joint->tables[k]->search.spots[bucket].pick != pick) return;
  if (steps->pick != pick) { /* another answer */
    *steps = (sluice_joint_step_t){.pick = (uint8_t)pick};
    joint->is_through[bucket] = 0;
  }
  if (direction == SLUICE_FORWARD) {
    steps->forward_ns_per_row = ns_per_row;
    return;
  }
  if (steps->forward_ns_per_row <= 0) return;
  const float step = steps->forward_ns_per_row + ns_per_row;
  steps->forward_ns_per_row = 0;
  /* steps of other layers may still be in flight */
  if (joint->is_through[bucket] || steps->count == MOST_STEPS) return;
  if (steps->count++ % WINDOW == 0) return; /* the first step allocates slots and templates */
  if (steps->best_ns_per_row == 0 || step < steps->best_ns_per_row) steps->best_ns_per_row = step;
}
