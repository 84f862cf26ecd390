#include "backend/tune/tuner_joint.h"

#include <math.h>

#include "backend/model/restore.h"
#include "backend/moe/layer/layer.h"
#include "backend/tune/search/search.h"
#include "backend/tune/search/search_times.h"
#include "backend/tune/tuner_decisions.h"

#define STEPS  4    /* a warm-up and three that count */
#define WITHIN 1.25 /* of the best prediction of all strategies */

int sluice_tuner_is_joint(const sluice_moe_t* moe) { return moe->shape.config.reuse && !sluice_makes_plans(moe); }

int sluice_tuner_allows(const sluice_moe_t* moe, int32_t restore_set) {
  const sluice_moe_config_t* c = &moe->shape.config;
  const sluice_restore_set_t* set = &sluice_restore_sets[restore_set];
  if (sluice_restore_is_kept(set->restore_input) || sluice_restore_is_kept(set->restore_pre_activation)) return 0;
  return (c->restore_input < 0 || c->restore_input == set->restore_input) &&
         (c->restore_pre_activation < 0 || c->restore_pre_activation == set->restore_pre_activation);
}

static int32_t index_of(const sluice_tuner_joint_t* joint, int32_t restore_set) {
  for (int32_t k = 0; k < joint->count; ++k) {
    if (joint->tables[k]->restore_set == restore_set) return k;
  }
  return -1;
}

sluice_tuner_table_t* sluice_tuner_joint_table(const sluice_tuner_joint_t* joint, int32_t restore_set) {
  const int32_t k = index_of(joint, restore_set);
  return k < 0 ? NULL : joint->tables[k];
}

/* ---- predictions ---- */

/* The best that a strategy's model says for so many rows; INFINITY: nothing. */
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

/* Strategies worth a try, a bit each. Without a machine all are. */
static uint32_t worth_a_try(const sluice_tuner_joint_t* joint, int64_t rows) {
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

/* ---- the comparison ---- */

/* Steps count for the answer that stands. */
static sluice_joint_step_t* steps_of(sluice_tuner_joint_t* joint, int32_t bucket, int32_t k) {
  sluice_joint_step_t* steps = &joint->steps[bucket][k];
  const sluice_spot_t* spot = &joint->tables[k]->search.spots[bucket];
  if (steps->pick != spot->pick) *steps = (sluice_joint_step_t){.pick = spot->pick};
  return steps;
}

static double time_of(sluice_tuner_joint_t* joint, int32_t bucket, int32_t k) {
  sluice_search_t* s = &joint->tables[k]->search;
  if (s->config.mode == SLUICE_TUNER_MODEL) return sluice_search_predicted(s, &s->spots[bucket], s->spots[bucket].pick);
  const sluice_joint_step_t* steps = steps_of(joint, bucket, k);
  return steps->count < 2 ? INFINITY : (double)steps->best_ns_per_row * 1e-9 * (double)s->spots[bucket].rows;
}

static sluice_racing_plan_t choice_of(const sluice_tuner_joint_t* joint, int32_t bucket, int32_t k) {
  const sluice_tuner_table_t* table = joint->tables[k];
  const int32_t pick = table->search.spots[bucket].pick;
  const sluice_restore_set_t* set = &sluice_restore_sets[table->restore_set];
  return (sluice_racing_plan_t){sluice_search_chunks(&table->search, pick), set->restore_input,
                                set->restore_pre_activation, sluice_pick_wgrad(pick)};
}

static void tell(sluice_tuner_joint_t* joint, int32_t bucket, uint32_t tried, int32_t best) {
  const sluice_tuner_table_t* table = joint->tables[best];
  const sluice_spot_t* spot = &table->search.spots[bucket];
  if (joint->told[bucket] == best + 1) return;
  const int is_predicted = table->search.config.mode == SLUICE_TUNER_MODEL;
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
               .why = is_predicted               ? SLUICE_WHY_PREDICTED
                      : joint->told[bucket] != 0 ? SLUICE_WHY_QUESTIONED
                                                 : SLUICE_WHY_RACED,
               .seconds = is_predicted ? 0 : time_of(joint, bucket, best),
               .predicted_seconds = predicted,
               .runner_up = -1,
               .num_raced = is_predicted ? 0 : count},
      .chosen = choice_of(joint, bucket, best),
  };
  d.kept_chunks = d.chosen.num_chunks;
  if (second >= 0) d.second = choice_of(joint, bucket, second);
  if (second >= 0 && !is_predicted) d.what.runner_up_seconds = time_of(joint, bucket, second);
  joint->told[bucket] = (uint8_t)(best + 1);
  sluice_tuner_record(table->tuner, &d);
}

/* ---- what comes next ---- */

static int is_answered(const sluice_search_t* s, int32_t bucket) {
  return s->spots[bucket].state == SLUICE_SPOT_ANSWERED;
}

/* The first strategy whose n is still searched for at this size, having asked it; NULL: all have their answers. */
static sluice_tuner_table_t* next_searched(sluice_tuner_joint_t* joint, int64_t rows, uint32_t tried,
                                           int32_t* out_pick) {
  const int32_t bucket = sluice_search_bucket(rows);
  for (int32_t k = 0; k < joint->count; ++k) {
    sluice_search_t* s = &joint->tables[k]->search;
    if (!(tried >> k & 1) || is_answered(s, bucket)) continue;
    int32_t why = 0;
    *out_pick = sluice_search_next(s, rows, &why); /* which may find the answer at once */
    if (!is_answered(s, bucket)) return joint->tables[k];
  }
  return NULL;
}

sluice_tuner_table_t* sluice_tuner_joint_next(sluice_tuner_joint_t* joint, int64_t rows, int32_t* out_pick,
                                              int32_t* out_why) {
  sluice_tuner_table_t* last = joint->tables[joint->count - 1]; /* stores least, until something is known */
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
  int32_t best = -1, least = -1;
  for (int32_t k = 0; k < joint->count; ++k) {
    if (!(tried >> k & 1)) continue;
    joint->tables[k]->search.spots[bucket].rows = rows;
    if (least < 0 || steps_of(joint, bucket, k)->count < steps_of(joint, bucket, least)->count) least = k;
    if (best < 0 || time_of(joint, bucket, k) < time_of(joint, bucket, best)) best = k;
  }
  const int is_compared = joint->tables[best]->search.config.mode == SLUICE_TUNER_MODEL ||
                          steps_of(joint, bucket, least)->count >= STEPS || (tried & (tried - 1)) == 0;
  if (!is_compared) {
    *out_pick = joint->tables[least]->search.spots[bucket].pick;
    return joint->tables[least];
  }
  tell(joint, bucket, tried, best);
  *out_pick = sluice_search_next(&joint->tables[best]->search, rows, out_why);
  return joint->tables[best];
}

const sluice_tuner_table_t* sluice_tuner_joint_peek(const sluice_tuner_joint_t* joint, int64_t rows,
                                                    int32_t* out_pick) {
  if (rows < 1) return NULL;
  const int32_t bucket = sluice_search_bucket(rows);
  int32_t least = -1;
  for (int32_t k = 0; k < joint->count; ++k) {
    const sluice_search_t* s = &joint->tables[k]->search;
    if (s->spots[bucket].state == SLUICE_SPOT_NOTHING) continue; /* not its turn yet, or not worth a try */
    *out_pick = sluice_search_peek(s, rows);
    if (!is_answered(s, bucket)) return joint->tables[k];
    if (least < 0 || joint->steps[bucket][k].count < joint->steps[bucket][least].count) least = k;
  }
  if (joint->told[bucket] != 0) least = joint->told[bucket] - 1;
  if (least < 0) return NULL;
  *out_pick = joint->tables[least]->search.spots[bucket].pick;
  return joint->tables[least];
}

void sluice_tuner_joint_observe(sluice_tuner_joint_t* joint, int32_t restore_set, int32_t direction, int32_t pick,
                                int64_t rows, uint64_t ns) {
  const int32_t k = index_of(joint, restore_set), bucket = sluice_search_bucket(rows);
  if (k < 0 || rows < 1 || ns == 0 || !is_answered(&joint->tables[k]->search, bucket)) return;
  sluice_joint_step_t* steps = steps_of(joint, bucket, k);
  const float ns_per_row = (float)((double)ns / (double)rows);
  if (steps->pick != pick) return;
  if (direction == SLUICE_FORWARD) {
    steps->forward_ns_per_row = ns_per_row;
    return;
  }
  if (steps->forward_ns_per_row <= 0) return;
  const float step = steps->forward_ns_per_row + ns_per_row;
  steps->forward_ns_per_row = 0;
  if (steps->count < STEPS) ++steps->count;
  if (steps->count == 1) return; /* meets new slots and templates */
  if (steps->best_ns_per_row == 0 || step < steps->best_ns_per_row) steps->best_ns_per_row = step;
}
