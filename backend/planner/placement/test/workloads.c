// SPDX-License-Identifier: Apache-2.0
#include "backend/planner/placement/test/workloads.h"

enum { ROWS = 4096, HEAT = 6 };

static uint64_t next(random_t* random) { /* splitmix64 */
  uint64_t z = random->state += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

double random_unit(random_t* random) { return (double)(next(random) >> 11) / 9007199254740992.0; }
int32_t random_below(random_t* random, int32_t count) { return (int32_t)(random_unit(random) * count); }

/* Random choices made once for all steps. */
typedef struct draw_s {
  random_t of_run;
  int32_t step, num_experts, num_ranks, local;
  double* heat;
} draw_t;

static void heat_set(draw_t* d, int32_t count, int32_t first) {
  for (int32_t i = 0; i < count; ++i)
    d->heat[(first + random_below(&d->of_run, d->num_experts)) % d->num_experts] = HEAT;
}

static void balanced(draw_t* d) { (void)d; }
static void hot_set(draw_t* d) { heat_set(d, d->local, 0); }
static void rotating(draw_t* d) { heat_set(d, d->local, d->step * d->local); }

static void hot_rank(draw_t* d) {
  const int32_t rank = random_below(&d->of_run, d->num_ranks);
  for (int32_t i = 0; i < d->local; ++i) d->heat[rank * d->local + i] = HEAT;
}

static void spread(draw_t* d) {
  const int32_t first = random_below(&d->of_run, d->num_ranks);
  for (int32_t i = 0; i < d->local; ++i) d->heat[(first + i) % d->num_ranks * d->local] = HEAT;
}

/* Half of the rows of each source go to its own set of four experts, and source r has r + 1 shares of all rows. */
static void ragged(draw_t* d) {
  const double shares = 0.5 * d->num_ranks * (d->num_ranks + 1);
  for (int32_t r = 0; r < d->num_ranks; ++r) {
    for (int32_t i = 0; i < 4; ++i) {
      d->heat[random_below(&d->of_run, d->num_experts)] += 0.125 * d->num_experts * (r + 1) / shares;
    }
  }
}

static void zeros(draw_t* d) {
  for (int32_t r = 0; r < d->num_ranks; ++r) {
    const int is_rank = random_below(&d->of_run, 4) == 0;
    for (int32_t i = 0; i < d->local; ++i) {
      if (is_rank || random_below(&d->of_run, 8) == 0) d->heat[r * d->local + i] = 0;
    }
  }
}

static void burst(draw_t* d) {
  if (d->step % 8 == 5) hot_set(d);
}

void workload_draw(int32_t workload, uint64_t seed, int32_t step, int32_t num_experts, int32_t num_ranks,
                   uint64_t* out_loads) {
  static void (*const heats[NUM_WORKLOADS])(draw_t*) = {balanced, hot_set, hot_rank, spread,
                                                        ragged,   zeros,   rotating, burst};
  double heat[4096];
  draw_t d = {{seed * NUM_WORKLOADS + (uint64_t)workload}, step, num_experts, num_ranks, num_experts / num_ranks, heat};
  for (int32_t e = 0; e < num_experts; ++e) heat[e] = 1;
  heats[workload](&d);
  random_t of_step = {(seed << 20) + ((uint64_t)step << 4) + (uint64_t)workload};
  for (int32_t e = 0; e < num_experts; ++e) {
    out_loads[e] = (uint64_t)(ROWS * heat[e] * (0.9 + 0.2 * random_unit(&of_step)));
  }
}
