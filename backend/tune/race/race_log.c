// SPDX-License-Identifier: Apache-2.0
#include "backend/tune/race/race_log.h"

#include <math.h>
#include <string.h>

#include "backend/cost/fit.h"

#define NEAR 3 /* entries: a step with one neighbour compares only with a neighbour at most this far away */

void sluice_race_log_add(sluice_race_log_t* log, int32_t pick, double ns_per_row, int is_warm_up) {
  if (log->count == SLUICE_RACE_LOG) {
    memmove(log->steps, log->steps + 1, sizeof *log->steps * (SLUICE_RACE_LOG - 1));
    --log->count;
  }
  log->steps[log->count++] = (sluice_race_step_t){(float)ns_per_row, (uint8_t)pick, (uint8_t)(is_warm_up != 0)};
}

void sluice_race_log_restart(sluice_race_log_t* log, int32_t pick) {
  int32_t last = log->count - 1;
  int keeps = last >= 0 && log->steps[last].pick == pick && !log->steps[last].is_warm_up;
  if (keeps) log->steps[0] = log->steps[last];
  log->count = keeps;
}

static int is_of(const sluice_race_step_t* step, int32_t pick) { return step->pick == pick && !step->is_warm_up; }

/* The nearest counted step of `pick` in direction `step` from entry `at`; -1 if there is none. */
static int32_t nearest(const sluice_race_log_t* log, int32_t at, int32_t step, int32_t pick) {
  for (int32_t i = at + step; i >= 0 && i < log->count; i += step) {
    if (is_of(&log->steps[i], pick)) return i;
  }
  return -1;
}

static double time_at(const sluice_race_log_t* log, int32_t i) { return (double)log->steps[i].ns_per_row; }

int32_t sluice_race_log_losses(const sluice_race_log_t* log, int32_t pick, int32_t other, double limit) {
  int32_t losses = 0;
  for (int32_t i = 0; i < log->count; ++i) {
    if (!is_of(&log->steps[i], pick)) continue;
    int32_t before = nearest(log, i, -1, other), after = nearest(log, i, 1, other);
    if (before < 0 && after < 0) continue;
    double slower = fmax(before < 0 ? 0 : time_at(log, before), after < 0 ? 0 : time_at(log, after));
    if (time_at(log, i) > SLUICE_FLIP * limit * slower)
      losses += 2;
    else if (before >= 0 && after >= 0 && time_at(log, i) > limit * slower)
      ++losses;
  }
  return losses;
}

static double shortest(const sluice_race_log_t* log, int32_t pick) {
  double least = INFINITY;
  for (int32_t i = 0; i < log->count; ++i) {
    if (is_of(&log->steps[i], pick)) least = fmin(least, time_at(log, i));
  }
  return least;
}

double sluice_race_log_spread(const sluice_race_log_t* log, int32_t pick) {
  double least = shortest(log, pick), most = 0;
  for (int32_t i = 0; i < log->count; ++i) {
    if (is_of(&log->steps[i], pick)) most = fmax(most, time_at(log, i));
  }
  return most > 0 ? most / least : 1;
}

/* The time of a step over that of its neighbours of `other`, if these ran at the same speed of the machine; else 0. */
static double over_neighbours(const sluice_race_log_t* log, int32_t i, int32_t other) {
  int32_t before = nearest(log, i, -1, other), after = nearest(log, i, 1, other);
  if (before >= 0 && after >= 0) {
    double a = time_at(log, before), b = time_at(log, after);
    return fmax(a, b) > SLUICE_UNSTEADY * fmin(a, b) ? 0 : 2 * time_at(log, i) / (a + b);
  }
  int32_t only = before >= 0 ? before : after;
  return only < 0 || (only > i ? only - i : i - only) > NEAR ? 0 : time_at(log, i) / time_at(log, only);
}

double sluice_race_log_ratio(const sluice_race_log_t* log, int32_t pick, int32_t other, int* out_is_clear) {
  double ratios[SLUICE_RACE_LOG], by_shortest = shortest(log, pick) / shortest(log, other);
  *out_is_clear = 1;
  if (shortest(log, pick) == INFINITY || shortest(log, other) == INFINITY) return 0;
  if (sluice_race_log_spread(log, pick) <= SLUICE_UNSTEADY && sluice_race_log_spread(log, other) <= SLUICE_UNSTEADY) {
    return by_shortest;
  }
  int32_t count = 0;
  for (int32_t i = 0; i < log->count; ++i) {
    double ratio = is_of(&log->steps[i], pick) ? over_neighbours(log, i, other) : 0;
    if (ratio > 0) ratios[count++] = ratio;
  }
  if (count >= 2) {
    double middle = sluice_median(ratios, count); /* the median sorts its input */
    if (ratios[count - 1] <= SLUICE_UNSTEADY * ratios[0]) return middle;
    *out_is_clear = 0;
    if (count >= 5) return middle;
  }
  *out_is_clear = 0;
  return by_shortest;
}

double sluice_race_log_excess(const sluice_race_log_t* log, int32_t best) {
  double excess = 0;
  for (int32_t i = 0; i < log->count; ++i) {
    int32_t before = nearest(log, i, -1, best), after = nearest(log, i, 1, best);
    int32_t other = before < 0 || (after >= 0 && after - i < i - before) ? after : before;
    if (is_of(&log->steps[i], best) || other < 0) continue;
    excess += fmax(0, time_at(log, i) - time_at(log, other));
  }
  return excess;
}
