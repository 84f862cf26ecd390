// SPDX-License-Identifier: Apache-2.0
#include "backend/tune/search/test/surface.h"

#include <math.h>

#include "backend/cost/closed_forms.h"

uint32_t next_random(uint32_t* seed) { return (*seed = *seed * 1664525u + 1013904223u) >> 8; }
double uniform(uint32_t* seed, double lo, double hi) { return lo + (hi - lo) * next_random(seed) / 16777216.0; }
double log_uniform(uint32_t* seed, double lo, double hi) { return lo * pow(hi / lo, uniform(seed, 0, 1)); }

surface_t random_surface(uint32_t* seed) {
  surface_t s = {0};
  s.gemm_rate = 1e-6;
  s.beta = log_uniform(seed, 0.05, 3) * 1e-6;
  s.alpha = log_uniform(seed, 1e-6, 2e-3);
  s.gemm_startup = log_uniform(seed, 1e-6, 2e-4);
  s.tile = next_random(seed) % 2 ? 1 : 64;
  s.per_chunk_wgrad = uniform(seed, -1e-5, 3e-4);
  return s;
}

static double startup_of(const surface_t* s, int64_t rows) {
  const double grown = s->alpha * (s->growth > 0 ? pow((double)rows / 1024, s->growth) : 1);
  if (s->jumps <= 1) return grown;
  uint32_t seed = 977u * (uint32_t)sluice_search_bucket(rows);
  (void)next_random(&seed);
  return grown * log_uniform(&seed, 1 / s->jumps, s->jumps);
}

double truth(const surface_t* s, int64_t rows, int32_t n, int32_t wgrad, int32_t direction) {
  double chunk = (double)rows / n, tiles = ceil(chunk / s->tile) * s->tile;
  double exchange = startup_of(s, rows) + s->beta * chunk, gemm = s->gemm_startup + s->gemm_rate * tiles;
  const sluice_chunk_times_t t = {exchange, gemm, exchange, 0};
  const sluice_alphas_t alone = sluice_no_interference();
  double seconds =
      s->no_overlap ? n * (2 * exchange + gemm) : sluice_mpmoe_pass(SLUICE_PARADIGM_NO_COPIES, n, t, &alone);
  if (direction == SLUICE_BACKWARD) seconds += s->gemm_rate * (double)rows + (wgrad ? n * s->per_chunk_wgrad : 0);
  return seconds * (1 + s->hill[sluice_search_size_of(n)]);
}

sluice_lanes_t lanes_of(const surface_t* s, int64_t rows, int32_t n, int32_t direction) {
  double tiles = ceil((double)rows / n / s->tile) * s->tile;
  const double slower = 1 + s->hill[sluice_search_size_of(n)], alpha = startup_of(s, rows);
  double compute = n * (s->gemm_startup + s->gemm_rate * tiles), comm = 2 * (n * alpha + s->beta * (double)rows);
  if (direction == SLUICE_BACKWARD) compute += s->gemm_rate * (double)rows;
  return (sluice_lanes_t){slower * compute * 1e9, slower * comm * 1e9, 0, alpha * 1e9};
}

double whole(const surface_t* s, int64_t rows, int32_t pick) {
  int32_t n = sluice_pick_chunks(pick), wgrad = sluice_pick_wgrad(pick);
  return truth(s, rows, n, wgrad, SLUICE_FORWARD) + truth(s, rows, n, wgrad, SLUICE_BACKWARD);
}

int is_considered(const sluice_search_config_t* config, int32_t pick) {
  if (sluice_pick_wgrad(pick) != 0 && !config->open_wgrad) return 0;
  int is_listed = config->predict != NULL && config->mode != SLUICE_TUNER_PROFILE;
  for (int32_t i = 0; i < SLUICE_NUM_CHUNK_COUNTS; ++i) is_listed |= sluice_chunk_counts[i] == sluice_pick_chunks(pick);
  return is_listed;
}

double exhaustive(const surface_t* s, int64_t rows, const sluice_search_config_t* config) {
  double best = INFINITY;
  for (int32_t p = 0; p < SLUICE_SEARCH_PICKS; ++p) {
    if (is_considered(config, p)) best = fmin(best, whole(s, rows, p));
  }
  return best;
}

double predict(void* user, int64_t rows, int32_t n, int32_t wgrad, int32_t direction) {
  return truth(&((model_t*)user)->surface, rows, n, wgrad, direction);
}

model_t wrong_model(const surface_t* s, uint32_t* seed, double wrong) {
  model_t m = {*s};
  m.surface.alpha *= uniform(seed, 1 - wrong, 1 + wrong);
  m.surface.beta *= uniform(seed, 1 - wrong, 1 + wrong);
  m.surface.gemm_startup *= uniform(seed, 1 - wrong, 1 + wrong);
  m.surface.gemm_rate *= uniform(seed, 1 - wrong, 1 + wrong);
  return m;
}

uint64_t noisy_ns(double seconds, uint32_t* seed, double noise) {
  double factor = 1 + noise * -log(uniform(seed, 1e-6, 1));
  if (noise > 0 && next_random(seed) % 20 == 0) factor += 5 * noise;
  return (uint64_t)(seconds * factor * 1e9);
}

void run_step(sluice_search_t* s, const surface_t* surface, int64_t rows, uint32_t* seed, double noise) {
  int32_t pick = sluice_search_next(s, rows, NULL);
  for (int32_t d = SLUICE_FORWARD; d <= SLUICE_BACKWARD; ++d) {
    double seconds = truth(surface, rows, sluice_pick_chunks(pick), sluice_pick_wgrad(pick), d);
    sluice_search_observe(s, d, pick, rows, noisy_ns(seconds, seed, noise), NULL);
  }
}

double run_late_step(sluice_search_t* s, const surface_t* surface, int64_t rows, uint32_t* seed, double noise,
                     late_t* late) {
  int32_t pick = sluice_search_next(s, late->pick < 0 ? 0 : rows, NULL);
  for (int32_t d = SLUICE_FORWARD; d <= SLUICE_BACKWARD && late->pick >= 0; ++d) {
    sluice_search_observe(s, d, late->pick, rows, late->ns[d], &late->lanes[d]);
  }
  late->pick = pick;
  for (int32_t d = SLUICE_FORWARD; d <= SLUICE_BACKWARD; ++d) {
    int32_t n = sluice_pick_chunks(pick);
    double seconds = truth(surface, rows, n, sluice_pick_wgrad(pick), d);
    late->ns[d] = noisy_ns(seconds, seed, noise);
    double slower = (double)late->ns[d] * 1e-9 / seconds;
    late->lanes[d] = lanes_of(surface, rows, n, d);
    late->lanes[d].compute *= slower, late->lanes[d].comm *= slower;
  }
  return whole(surface, rows, pick);
}

sluice_search_config_t config_of(int32_t mode) {
  return (sluice_search_config_t){.mode = mode, .max_size = SLUICE_SEARCH_SIZES - 1};
}
