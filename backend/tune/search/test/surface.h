// SPDX-License-Identifier: Apache-2.0
/* Simulated machines for the tests of the search: the time of a layer at each n, with and without noise. */
#pragma once

#include "backend/tune/search/search.h"
#include "sluice/context.h"
#include "sluice/moe.h"

/* A machine and a layer: start-up and rate of an exchange, and GEMMs with a start-up whose time grows in steps of
 * `tile` rows. */
typedef struct surface_s {
  double alpha, beta;             /* exchange: seconds, seconds per row */
  double gemm_startup, gemm_rate; /* seconds, seconds per row */
  double tile;
  double per_chunk_wgrad; /* seconds that per-chunk weight gradients cost beyond deferred ones, per chunk */
  int32_t no_overlap;     /* concurrent lanes gain nothing, and no lane time shows it */
  /* Two assumptions of the papers that a machine may break. `hill`: at this n everything takes longer by this share, so
   * time over n has several valleys. `growth`: the start-up of an exchange grows with rows to this power; above 1 the
   * best n decreases with the batch. `jumps`: the start-up changes by up to this factor from size to size. */
  double hill[SLUICE_SEARCH_SIZES];
  double growth, jumps;
} surface_t;

uint32_t next_random(uint32_t* seed);
double uniform(uint32_t* seed, double lo, double hi);
double log_uniform(uint32_t* seed, double lo, double hi);
surface_t random_surface(uint32_t* seed);

/* Seconds of a pass. */
double truth(const surface_t* s, int64_t rows, int32_t n, int32_t wgrad, int32_t direction);
/* The lane times that the pass reports: the maximum over all ranks. */
sluice_lanes_t lanes_of(const surface_t* s, int64_t rows, int32_t n, int32_t direction);
/* Seconds of forward plus backward with this pick, and with the best pick that a search considers. */
double whole(const surface_t* s, int64_t rows, int32_t pick);
double exhaustive(const surface_t* s, int64_t rows, const sluice_search_config_t* config);
/* Whether a search considers this pick: with a model any n, otherwise those of sluice_chunk_counts. */
int is_considered(const sluice_search_config_t* config, int32_t pick);
/* Noise is positive: often small, rarely large. */
uint64_t noisy_ns(double seconds, uint32_t* seed, double noise);

/* A model whose rates differ from the machine's by up to `wrong`. */
typedef struct model_s {
  surface_t surface;
} model_t;
model_t wrong_model(const surface_t* s, uint32_t* seed, double wrong);
double predict(void* model, int64_t rows, int32_t n, int32_t wgrad, int32_t direction);

/* Every n open, weight gradients deferred, no machine. */
sluice_search_config_t config_of(int32_t mode);
/* Runs and observes the candidate that the search asks for. */
void run_step(sluice_search_t* s, const surface_t* surface, int64_t rows, uint32_t* seed, double noise);

/* The same with lanes; the time of a step arrives after the next has begun, as in headers. */
typedef struct late_s {
  int32_t pick; /* -1: none */
  uint64_t ns[2];
  sluice_lanes_t lanes[2];
} late_t;
/* Returns the seconds that the step would take without noise. */
double run_late_step(sluice_search_t* s, const surface_t* surface, int64_t rows, uint32_t* seed, double noise,
                     late_t* late);
