// SPDX-License-Identifier: Apache-2.0
#include "backend/tune/search/search_times.h"

#include <math.h>
#include <string.h>

#define BOOTSTRAP_OP_NS 5000.0

/* The time of its race, ns per row; infinite if it has not finished one. */
double sluice_spot_time(const sluice_spot_t* spot, int32_t pick) {
  return spot->time[pick] > 0 ? (double)spot->time[pick] : INFINITY;
}

/* Shortest forward plus backward of the present window, ns per row; 0 if one is missing. */
double sluice_spot_shortest(const sluice_spot_t* spot, int32_t pick) {
  const sluice_sample_t *f = &spot->forward[sluice_pick_size(pick)], *b = &spot->backward[pick];
  if (f->count < 2 || b->count < 2 || f->best_ns_per_row <= 0 || b->best_ns_per_row <= 0) return 0;
  return (double)f->best_ns_per_row + (double)b->best_ns_per_row;
}

/* Without a machine, ADAPTIVE builds its own model from lane times. */
int sluice_search_bootstraps(const sluice_search_t* s) {
  return s->config.mode == SLUICE_TUNER_ADAPTIVE && s->config.predict == NULL;
}

static int32_t points_of(const sluice_search_t* s, const sluice_spot_t* spot, int32_t direction, int32_t mode,
                         sluice_bootstrap_point_t* points) {
  int32_t count = 0;
  for (int32_t size = 0; size < SLUICE_SEARCH_SIZES; ++size) {
    const sluice_sample_t* x =
        direction == SLUICE_FORWARD ? &spot->forward[size] : &spot->backward[size + SLUICE_SEARCH_SIZES * mode];
    if (x->count < 2 || x->compute <= 0) continue;
    points[count++] = (sluice_bootstrap_point_t){
        sluice_search_chunks(s, size),
        (double)x->best_ns_per_row,
        {(double)x->compute, (double)x->comm, (double)x->comm_cpu, (double)spot->startup[direction]}};
  }
  return count;
}

/* Predicted seconds of a step from the lane times of candidates that ran at this size; 0 if none did. */
double sluice_search_bootstrapped(const sluice_search_t* s, const sluice_spot_t* spot, int32_t pick) {
  sluice_bootstrap_point_t points[SLUICE_SEARCH_SIZES];
  double ns_per_row = 0, rows = (double)spot->rows;
  for (int32_t direction = SLUICE_FORWARD; direction <= SLUICE_BACKWARD; ++direction) {
    int32_t count = points_of(s, spot, direction, sluice_pick_wgrad(pick), points);
    if (count == 0) return 0;
    const sluice_bootstrap_work_t work = {rows / (s->config.num_local > 0 ? s->config.num_local : 1),
                                          BOOTSTRAP_OP_NS / rows, s->config.uneven_chunks};
    ns_per_row += sluice_bootstrap_pass(points, count, direction, &work, sluice_search_chunks(s, pick));
  }
  return ns_per_row > 0 ? ns_per_row * rows * 1e-9 : 0;
}

/* Predictions are made once, for the rows at the start of the spot's race, and scaled by rows. */
double sluice_search_predicted(sluice_search_t* s, const sluice_spot_t* spot, int32_t pick) {
  const sluice_search_config_t* c = &s->config;
  if (sluice_search_bootstraps(s)) return sluice_search_bootstrapped(s, spot, pick);
  if (c->predict == NULL || spot->at < 1) return 0;
  if (s->cached_at != spot->at) {
    memset(s->cached, 0, sizeof s->cached);
    s->cached_at = spot->at;
  }
  if (s->cached[pick] == 0) {
    for (int32_t direction = SLUICE_FORWARD; direction <= SLUICE_BACKWARD; ++direction) {
      s->cached[pick] +=
          c->predict(c->user, spot->at, sluice_search_chunks(s, pick), sluice_pick_wgrad(pick), direction);
    }
  }
  return s->cached[pick] * (double)spot->rows / (double)spot->at;
}

/* The best of a set by time, the first of equal ones; -1: none was timed. */
int32_t sluice_spot_best(const sluice_spot_t* spot, uint32_t set) {
  int32_t best = -1;
  for (int32_t p = 0; p < SLUICE_SEARCH_PICKS; ++p) {
    if (!(set >> p & 1) || sluice_spot_time(spot, p) == INFINITY) continue;
    if (best < 0 || sluice_spot_time(spot, p) < sluice_spot_time(spot, best)) best = p;
  }
  return best;
}

static int32_t default_mode(const sluice_search_t* s) { return s->config.open_wgrad ? 0 : s->config.wgrad_mode; }

int32_t sluice_search_pick_of(const sluice_search_t* s, int32_t size) {
  return size + SLUICE_SEARCH_SIZES * default_mode(s);
}

int sluice_search_is_open(const sluice_search_t* s, int32_t pick) {
  int size = sluice_pick_size(pick);
  if (size < s->config.min_size || size > s->config.max_size) return 0;
  if (!s->config.open_wgrad) return sluice_pick_wgrad(pick) == s->config.wgrad_mode;
  return size > 0 || sluice_pick_wgrad(pick) == 0; /* with one chunk both modes are the same */
}

/* The best prediction among open candidates outside `set`, between the answers of neighbouring sizes [Algorithm 1]; -1
 * if there is none.
 */
int32_t sluice_search_best_predicted(sluice_search_t* s, const sluice_spot_t* spot, uint32_t set,
                                     const double* correction) {
  int32_t best = -1;
  double least = INFINITY;
  for (int32_t p = 0; p < SLUICE_SEARCH_PICKS; ++p) {
    if (!sluice_search_is_open(s, p) || (set >> p & 1)) continue;
    if (sluice_pick_size(p) < spot->lo || sluice_pick_size(p) > spot->hi) continue;
    double time = sluice_search_predicted(s, spot, p) * (correction == NULL ? 1 : correction[sluice_pick_size(p)]);
    if (time < least) least = time, best = p;
  }
  return best;
}

/* Measured over predicted time at each n: that of the raced candidate whose n is nearest. */
void sluice_search_corrections(sluice_search_t* s, const sluice_spot_t* spot, double* out) {
  for (int32_t size = 0; size < SLUICE_SEARCH_SIZES; ++size) {
    int32_t nearest = 2 * SLUICE_SEARCH_SIZES;
    out[size] = s->scale;
    for (int32_t p = 0; p < SLUICE_SEARCH_PICKS; ++p) {
      int32_t distance = sluice_pick_size(p) > size ? sluice_pick_size(p) - size : size - sluice_pick_size(p);
      if (!(spot->raced >> p & 1) || sluice_spot_time(spot, p) == INFINITY || distance >= nearest) continue;
      nearest = distance;
      out[size] = sluice_spot_time(spot, p) * 1e-9 * (double)spot->rows / sluice_search_predicted(s, spot, p);
    }
  }
}
