/* Made-up machines for the tests of the search: what a layer takes on them at each n, with and without noise. */
#ifndef SLUICE_BACKEND_TUNE_SEARCH_TEST_SURFACE_H_
#define SLUICE_BACKEND_TUNE_SEARCH_TEST_SURFACE_H_

#include "backend/tune/search/search.h"
#include "sluice/context.h"
#include "sluice/moe.h"

/* A machine and a layer: start-up and rate of an exchange, and GEMMs that reach their rate in steps of `tile` rows
 * with a start-up of their own. */
typedef struct surface_s {
  double alpha, beta;             /* exchange: seconds, seconds per row */
  double gemm_startup, gemm_rate; /* seconds, seconds per row */
  double tile;
  double per_chunk_wgrad; /* seconds that a chunk's own weight gradient costs more than its part of a deferred one */
  int32_t no_overlap;     /* lanes that run beside each other gain nothing, and no lane shows it */
} surface_t;

uint32_t next_random(uint32_t* seed);
double uniform(uint32_t* seed, double lo, double hi);
double log_uniform(uint32_t* seed, double lo, double hi);
surface_t random_surface(uint32_t* seed);

/* Seconds of a pass. */
double truth(const surface_t* s, int64_t rows, int32_t n, int32_t wgrad, int32_t direction);
/* What its lanes would show: the fullest measure of all ranks. */
sluice_lanes_t lanes_of(const surface_t* s, int64_t rows, int32_t n, int32_t direction);
/* Seconds of both passes with this pick, and with the best of the first `num_picks`. */
double whole(const surface_t* s, int64_t rows, int32_t pick);
double exhaustive(const surface_t* s, int64_t rows, int32_t num_picks);
/* Noise only adds: a little often, much now and then. */
uint64_t noisy_ns(double seconds, uint32_t* seed, double noise);

/* A model of another machine than the one it runs on: off by `wrong` in each of its rates. */
typedef struct model_s {
  surface_t surface;
} model_t;
model_t wrong_model(const surface_t* s, uint32_t* seed, double wrong);
double predict(void* model, int64_t rows, int32_t n, int32_t wgrad, int32_t direction);

/* Every n open, weight gradients deferred, no machine. */
sluice_search_config_t config_of(int32_t mode);
/* What the search asks for, run and observed. */
void run_step(sluice_search_t* s, const surface_t* surface, int64_t rows, uint32_t* seed, double noise);

/* The same with lanes; what a step took is known only after the next has begun, as in headers. */
typedef struct late_s {
  int32_t pick; /* -1: none */
  uint64_t ns[2];
  sluice_lanes_t lanes[2];
} late_t;
/* Returns the seconds that the step would take without noise. */
double run_late_step(sluice_search_t* s, const surface_t* surface, int64_t rows, uint32_t* seed, double noise,
                     late_t* late);

#endif /* SLUICE_BACKEND_TUNE_SEARCH_TEST_SURFACE_H_ */
