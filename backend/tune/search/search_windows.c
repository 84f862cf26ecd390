// SPDX-License-Identifier: Apache-2.0
/* A window of a race: candidates that alternate, early elimination, and the times that result. */
#include <math.h>
#include <string.h>

#include "backend/tune/search/search_state.h"
#include "backend/tune/search/search_times.h"

#define HOPELESS        1.5  /* factor over neighbouring steps that eliminates a candidate after two counted steps */
#define BOOTSTRAP_TRUST 1.25 /* factor: a first step this close to its prediction ran at the same speed */
#define DRIFT           1.2  /* factor: an anchor whose time changed by more ran at another speed of the machine */

sluice_window_t* sluice_search_window(sluice_search_t* s, const sluice_spot_t* spot) {
  int32_t bucket = (int32_t)(spot - s->spots);
  sluice_window_t* oldest = &s->windows[0];
  for (int32_t i = 0; i < SLUICE_SEARCH_WINDOWS; ++i) {
    sluice_window_t* w = &s->windows[i];
    if (w->used_at > 0 && w->bucket == bucket) return w;
    if (w->used_at < oldest->used_at) oldest = w;
  }
  *oldest = (sluice_window_t){.bucket = bucket, .used_at = (uint32_t)s->stats.race_passes + 1};
  return oldest;
}

/* The anchor runs again with new candidates: its samples restart. */
static void lift_anchor(sluice_spot_t* spot, sluice_window_t* window) {
  for (int32_t direction = SLUICE_FORWARD; direction <= SLUICE_BACKWARD; ++direction) {
    sluice_sample_t* sample = sluice_spot_sample(spot, direction, spot->anchor);
    window->before[direction] = *sample;
    *sample = (sluice_sample_t){.count = 1};
  }
}

/* If any candidate has a time already, the best of them is the anchor and runs too, unless the new candidates run
 * alone. */
void sluice_search_enter(sluice_search_t* s, sluice_spot_t* spot, uint32_t set, uint8_t stage, int alone) {
  int32_t best = sluice_spot_best(spot, spot->raced);
  sluice_window_t* window = sluice_search_window(s, spot);
  memset(window->before, 0, sizeof window->before);
  spot->state = SLUICE_SPOT_RACING;
  spot->stage = stage;
  spot->anchor = (int8_t)(best >= 0 ? best : set >> spot->pick & 1 ? spot->pick : __builtin_ctz(set));
  spot->is_extended = 0;
  sluice_race_timeout_begin(&spot->timeout);
  sluice_race_log_restart(&window->log, spot->anchor);
  if (best >= 0 && !alone) {
    set |= 1u << best;
    lift_anchor(spot, window);
  }
  spot->racing = set;
  spot->window = set | 1u << spot->anchor;
  spot->raced |= spot->window;
  for (int32_t p = 0; p < SLUICE_SEARCH_PICKS; ++p) {
    if ((spot->window >> p & 1) && !sluice_spot_add(spot, p)) spot->racing &= ~(1u << p), spot->window &= ~(1u << p);
  }
}

void sluice_search_clear(sluice_search_t* s, sluice_spot_t* spot) {
  sluice_window_t* window = sluice_search_window(s, spot);
  spot->num_places = 0;
  memset(spot->forward, 0, sizeof spot->forward);
  memset(spot->backward, 0, sizeof spot->backward);
  memset(spot->time, 0, sizeof spot->time);
  memset(spot->startup, 0, sizeof spot->startup);
  window->log.count = 0;
  window->step_ns_per_row = 0;
  spot->raced = 0;
  spot->is_unsteady = 0;
  spot->race_passes = 0;
}

int32_t sluice_search_wanted(const sluice_search_t* s, const sluice_spot_t* spot) {
  return spot->stage == SLUICE_STAGE_FIRST ? 2 : s->config.repeats * (1 + spot->is_extended) + 1;
}

int sluice_search_is_done(const sluice_search_t* s, const sluice_spot_t* spot, int32_t pick) {
  int32_t wanted = sluice_search_wanted(s, spot);
  return sluice_spot_count(spot, SLUICE_FORWARD, pick) >= wanted &&
         sluice_spot_count(spot, SLUICE_BACKWARD, pick) >= wanted;
}

/* Eliminates candidates after two steps that were slower than their neighbours, or after one that no change of speed
 * explains. */
void sluice_search_drop_hopeless(const sluice_search_t* s, sluice_spot_t* spot, const sluice_window_t* window) {
  int is_early =
      spot->stage == SLUICE_STAGE_BOOTSTRAPPED || (spot->stage == SLUICE_STAGE_WGRAD && sluice_search_bootstraps(s));
  double hopeless = is_early ? SLUICE_BOOTSTRAP_HOPELESS : HOPELESS;
  for (int32_t p = 0; p < SLUICE_SEARCH_PICKS; ++p) {
    if (!(spot->racing >> p & 1)) continue;
    int lost = 0;
    for (int32_t other = 0; other < SLUICE_SEARCH_PICKS && !lost; ++other) {
      if (other == p || !(spot->window >> other & 1)) continue;
      lost = sluice_race_log_losses(&window->log, p, other, hopeless) >= 2;
    }
    if (lost) spot->racing &= ~(1u << p);
  }
}

/* A new candidate runs alone if it should beat the anchor by far. If its first step contradicts that, the speed of the
 * machine may have changed, and the anchor runs with it. */
void sluice_search_recall_anchor(sluice_spot_t* spot, sluice_window_t* window) {
  if (spot->stage != SLUICE_STAGE_BOOTSTRAPPED || (spot->racing >> spot->anchor & 1) || window->before[0].count > 0)
    return;
  int32_t newcomer = __builtin_ctz(spot->window & ~(1u << spot->anchor));
  if (sluice_spot_count(spot, SLUICE_BACKWARD, newcomer) != 2) return;
  int is_clear = 0;
  double ratio = sluice_race_log_ratio(&window->log, newcomer, spot->anchor, &is_clear) / (double)spot->expected;
  if (ratio > 1 / BOOTSTRAP_TRUST && ratio < BOOTSTRAP_TRUST) return;
  lift_anchor(spot, window);
  spot->racing |= 1u << spot->anchor;
}

static double scale_of(float before, float now) { return before > 0 && now > 0 ? (double)before / (double)now : 1; }

/* Converts a sample to the speed at which the anchor ran before: the pass by `scale`, each lane by the anchor's
 * lane. */
static void rescale(sluice_sample_t* x, double scale, const sluice_sample_t* before, const sluice_sample_t* now) {
  x->best_ns_per_row *= (float)scale;
  x->compute *= (float)scale_of(before->compute, now->compute);
  double comm = scale_of(before->comm, now->comm);
  x->comm *= (float)comm, x->comm_cpu *= (float)comm;
}

/* Sets the times of the window's candidates. If the machine kept its speed over all windows, the shortest times.
 * Otherwise the anchor's time stands, and those of the others follow from their ratio to it. */
static void take_times(sluice_spot_t* spot, const sluice_window_t* window, const double* ratio) {
  sluice_sample_t* samples[] = {sluice_spot_sample(spot, SLUICE_FORWARD, spot->anchor),
                                sluice_spot_sample(spot, SLUICE_BACKWARD, spot->anchor)};
  sluice_sample_t now[] = {*samples[0], *samples[1]};
  double time_before = sluice_spot_time(spot, spot->anchor);
  int has_before =
      window->before[0].count > 0 && time_before<INFINITY, has_now = sluice_spot_shortest(spot, spot->anchor)> 0;
  if (has_before && has_now) {
    double drift = sluice_spot_shortest(spot, spot->anchor) / time_before;
    if (drift > DRIFT || drift < 1 / DRIFT) spot->is_unsteady = 1;
  }
  for (int32_t p = 0; p < SLUICE_SEARCH_PICKS; ++p) {
    if ((spot->window >> p & 1) && sluice_race_log_spread(&window->log, p) > SLUICE_UNSTEADY) spot->is_unsteady = 1;
  }
  for (int32_t direction = 0; has_before && direction < 2; ++direction) {
    const sluice_sample_t* before = &window->before[direction];
    float best = samples[direction]->best_ns_per_row;
    if (spot->is_unsteady || best <= 0 || best > before->best_ns_per_row) *samples[direction] = *before;
    if (samples[direction]->count < 2) samples[direction]->count = 2;
  }
  if (!has_before || !spot->is_unsteady)
    sluice_spot_set_time(spot, spot->anchor, sluice_spot_shortest(spot, spot->anchor));
  for (int32_t p = 0; p < SLUICE_SEARCH_PICKS; ++p) {
    double raw = sluice_spot_shortest(spot, p);
    if (!(spot->window >> p & 1) || p == spot->anchor || raw <= 0) continue;
    const double anchored = ratio[p] * sluice_spot_time(spot, spot->anchor);
    double time = spot->is_unsteady && ratio[p] > 0 ? (isfinite(anchored) ? anchored : 0) : raw;
    sluice_spot_set_time(spot, p, time);
    if (!has_before || !spot->is_unsteady || sluice_pick_size(p) == sluice_pick_size(spot->anchor)) continue;
    rescale(sluice_spot_sample(spot, SLUICE_FORWARD, p), time / raw, &window->before[0], &now[0]);
    rescale(sluice_spot_sample(spot, SLUICE_BACKWARD, p), time / raw, &window->before[1], &now[1]);
  }
}

int sluice_search_close_window(sluice_search_t* s, sluice_spot_t* spot, sluice_window_t* window) {
  double ratio[SLUICE_SEARCH_PICKS] = {0};
  int is_clear = 1;
  for (int32_t p = 0; p < SLUICE_SEARCH_PICKS; ++p) {
    int clear = 1;
    if (!(spot->window >> p & 1) || p == spot->anchor) continue;
    ratio[p] = sluice_race_log_ratio(&window->log, p, spot->anchor, &clear);
    if (spot->racing >> p & 1) is_clear &= clear;
  }
  if (!is_clear && !spot->is_extended && spot->stage != SLUICE_STAGE_FIRST) {
    if (window->before[0].count == 0 && sluice_spot_time(spot, spot->anchor) < INFINITY) lift_anchor(spot, window);
    spot->racing |= 1u << spot->anchor;
    spot->is_extended = 1;
    return 0;
  }
  take_times(spot, window, ratio);
  int32_t best = sluice_spot_best(spot, spot->window);
  if (best >= 0) {
    s->stats.excess_seconds += sluice_race_log_excess(&window->log, best) * (double)spot->rows * 1e-9;
  }
  return 1;
}
