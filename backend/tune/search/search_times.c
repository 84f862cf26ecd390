// SPDX-License-Identifier: Apache-2.0
#include "backend/tune/search/search_times.h"

#include <math.h>
#include <string.h>

#define BOOTSTRAP_OP_NS 5000.0
#define FARTHEST        2 /* times the distance between two raced candidates: the range of their trend */

/* ---- candidates and buckets (search_state.h) ---- */

int32_t sluice_search_size_of(int32_t num_chunks) {
  return num_chunks < 1 ? 0 : num_chunks > SLUICE_SEARCH_SIZES ? SLUICE_SEARCH_SIZES - 1 : num_chunks - 1;
}

static int is_listed(int32_t size) {
  int32_t i = 0;
  while (i < SLUICE_NUM_CHUNK_COUNTS && sluice_search_size_of(sluice_chunk_counts[i]) != size) ++i;
  return i < SLUICE_NUM_CHUNK_COUNTS;
}

int32_t sluice_search_next_size(int32_t size, int32_t step, int32_t lo, int32_t hi) {
  do {
    size += step;
  } while (size > lo && size < hi && !is_listed(size));
  return size;
}

int32_t sluice_search_bucket(int64_t rows) {
  if (rows < 1) return 0;
  int32_t bucket = (int32_t)floor(4 * log2((double)rows) + 0.5);
  return bucket < SLUICE_SEARCH_BUCKETS ? bucket : SLUICE_SEARCH_BUCKETS - 1;
}

/* ---- times ---- */

/* The place of a candidate, or of the first with its n; -1: it has none. */
static int32_t place_of(const sluice_spot_t* spot, int32_t direction, int32_t pick) {
  for (int32_t i = 0; i < spot->num_places; ++i) {
    const int32_t other = spot->places[i];
    if (other == pick || (direction == SLUICE_FORWARD && sluice_pick_size(other) == sluice_pick_size(pick))) return i;
  }
  return -1;
}

static const sluice_sample_t* sample_of(const sluice_spot_t* spot, int32_t direction, int32_t pick) {
  const int32_t place = place_of(spot, direction, pick);
  return place < 0 ? NULL : direction == SLUICE_FORWARD ? &spot->forward[place] : &spot->backward[place];
}

sluice_sample_t* sluice_spot_sample(sluice_spot_t* spot, int32_t direction, int32_t pick) {
  const int32_t place = place_of(spot, direction, pick);
  return place < 0 ? NULL : direction == SLUICE_FORWARD ? &spot->forward[place] : &spot->backward[place];
}

int32_t sluice_spot_count(const sluice_spot_t* spot, int32_t direction, int32_t pick) {
  const sluice_sample_t* x = sample_of(spot, direction, pick);
  return x == NULL ? 0 : x->count;
}

int sluice_spot_add(sluice_spot_t* spot, int32_t pick) {
  if (place_of(spot, SLUICE_BACKWARD, pick) >= 0) return 1;
  if (spot->num_places == SLUICE_SEARCH_RACED) return 0;
  spot->places[spot->num_places++] = (uint8_t)pick;
  return 1;
}

void sluice_spot_set_time(sluice_spot_t* spot, int32_t pick, double ns_per_row) {
  const int32_t place = place_of(spot, SLUICE_BACKWARD, pick);
  if (place >= 0) spot->time[place] = (float)ns_per_row;
}

double sluice_spot_time(const sluice_spot_t* spot, int32_t pick) {
  const int32_t place = place_of(spot, SLUICE_BACKWARD, pick);
  return place >= 0 && spot->time[place] > 0 ? (double)spot->time[place] : INFINITY;
}

double sluice_spot_shortest(const sluice_spot_t* spot, int32_t pick) {
  const sluice_sample_t *f = sample_of(spot, SLUICE_FORWARD, pick), *b = sample_of(spot, SLUICE_BACKWARD, pick);
  if (f == NULL || b == NULL || f->count < 2 || b->count < 2 || f->best_ns_per_row <= 0 || b->best_ns_per_row <= 0)
    return 0;
  return (double)f->best_ns_per_row + (double)b->best_ns_per_row;
}

int sluice_search_bootstraps(const sluice_search_t* s) {
  return s->config.mode == SLUICE_TUNER_ADAPTIVE && s->config.predict == NULL;
}

static int32_t points_of(const sluice_search_t* s, const sluice_spot_t* spot, int32_t direction, int32_t mode,
                         sluice_bootstrap_point_t* points) {
  int32_t count = 0;
  for (int32_t size = 0; size < SLUICE_SEARCH_SIZES; ++size) {
    const sluice_sample_t* x = sample_of(spot, direction, size + SLUICE_SEARCH_SIZES * mode);
    if (x == NULL || x->count < 2 || x->compute <= 0) continue;
    points[count++] = (sluice_bootstrap_point_t){
        sluice_search_chunks(s, size),
        (double)x->best_ns_per_row,
        {(double)x->compute, (double)x->comm, (double)x->comm_cpu, (double)spot->startup[direction]}};
  }
  return count;
}

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

/* Candidates lie between the answers of neighbouring sizes [Algorithm 1]. */
int32_t sluice_search_best_predicted(sluice_search_t* s, const sluice_spot_t* spot, uint32_t set, int is_corrected) {
  int32_t best = -1;
  double least = INFINITY;
  for (int32_t p = 0; p < SLUICE_SEARCH_PICKS; ++p) {
    if (!sluice_search_is_open(s, p) || (set >> p & 1)) continue;
    if (sluice_pick_size(p) < spot->lo || sluice_pick_size(p) > spot->hi) continue;
    double time = sluice_search_predicted(s, spot, p) * (is_corrected ? sluice_search_correction(s, spot, p) : 1);
    if (time < least) least = time, best = p;
  }
  return best;
}

/* Measured over predicted time of a candidate that has raced. */
static double error_of(sluice_search_t* s, const sluice_spot_t* spot, int32_t pick) {
  return sluice_spot_time(spot, pick) * 1e-9 * (double)spot->rows / sluice_search_predicted(s, spot, pick);
}

/* The raced candidate of `mode` with the next n from `size` on in the direction of `step`; -1: none. */
static int32_t raced_from(const sluice_spot_t* spot, int32_t mode, int32_t size, int32_t step) {
  for (; size >= 0 && size < SLUICE_SEARCH_SIZES; size += step) {
    const int32_t pick = size + SLUICE_SEARCH_SIZES * mode;
    if ((spot->raced >> pick & 1) && sluice_spot_time(spot, pick) < INFINITY) return pick;
  }
  return -1;
}

/* The position of `size` between the n of `from` (0) and that of `to` (1), in log n. */
static double way(int32_t from, int32_t to, int32_t size) {
  const double n = sluice_pick_chunks(from);
  return log(sluice_pick_chunks(size) / n) / log(sluice_pick_chunks(to) / n);
}

double sluice_search_correction(sluice_search_t* s, const sluice_spot_t* spot, int32_t pick) {
  const int32_t size = sluice_pick_size(pick);
  int32_t mode = sluice_pick_wgrad(pick);
  if (raced_from(spot, mode, 0, 1) < 0) mode = !mode;
  int32_t from = raced_from(spot, mode, size, -1), to = raced_from(spot, mode, size, 1);
  if (from < 0 && to < 0) return s->scale;
  if (from == to) return error_of(s, spot, from);
  if (from < 0) {
    from = to, to = raced_from(spot, mode, sluice_pick_size(from) + 1, 1);
  } else if (to < 0) {
    to = raced_from(spot, mode, sluice_pick_size(from) - 1, -1);
  }
  const double error = error_of(s, spot, from);
  if (to < 0) return error;
  return error * pow(error_of(s, spot, to) / error, fmax(way(from, to, size), -FARTHEST));
}
