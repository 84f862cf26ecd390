// SPDX-License-Identifier: Apache-2.0
#include "backend/cost/bootstrap_model.h"

#include <math.h>

#include "backend/schedule/uneven_chunks.h"
#include "sluice/context.h"

#define HALF_ROWS     16.0 /* per expert: where GEMMs reach half of their rate */
#define CHUNK_OPS     5.0  /* on the compute lane, per chunk */
#define WEIGHTS_SHARE 0.5  /* of a backward's GEMMs, after the last chunk */

/* ---- lanes as functions of n ---- */

typedef double (*lane_of_fn_t)(const sluice_bootstrap_point_t* point);
static double compute_of(const sluice_bootstrap_point_t* p) { return p->lanes.compute; }
static double comm_of(const sluice_bootstrap_point_t* p) { return p->lanes.comm; }

static double slope_of(const sluice_bootstrap_point_t* a, const sluice_bootstrap_point_t* b, lane_of_fn_t lane) {
  return (lane(b) - lane(a)) / (b->num_chunks - a->num_chunks);
}

/* Linear between points and extrapolated from the nearest two outside; `prior` is the slope if there is only one
 * point. */
static double lane_at(const sluice_bootstrap_point_t* points, int32_t count, lane_of_fn_t lane, double prior,
                      int32_t n) {
  int32_t i = 0;
  while (i + 2 < count && points[i + 1].num_chunks < n) ++i;
  double slope = count < 2 ? prior : slope_of(&points[i], &points[i + 1], lane);
  int is_outside = n < points[0].num_chunks || n > points[count - 1].num_chunks;
  if (is_outside && slope < 0) slope = 0; /* noise: more chunks never mean less work */
  double value = lane(&points[i]) + slope * (n - points[i].num_chunks);
  return value > 0 ? value : 0;
}

/* ---- priors ---- */

static double work_per_chunk(const sluice_bootstrap_point_t* p, int32_t direction, double rows_per_expert, double op) {
  double chunked = p->lanes.compute * (direction == SLUICE_FORWARD ? 1 : 1 - WEIGHTS_SHARE);
  return chunked * HALF_ROWS / (rows_per_expert + p->num_chunks * HALF_ROWS) + CHUNK_OPS * op;
}

static double startups_per_chunk(const sluice_bootstrap_point_t* p, double op) {
  double startup = p->lanes.startup > 0 ? p->lanes.startup : op;
  return 2 * fmin(startup, p->lanes.comm / (2 * p->num_chunks));
}

/* ---- the pass ---- */

/* Models a pass that keeps everything: all chunks arrive before the first one returns, and the weight gradients of a
 * backward follow its last chunk. `exchange`: of all chunks, one way. */
static double arrivals_first(int32_t n, int32_t uneven_chunks, double exchange, double chunked, double weights) {
  double arrived = 0, computed = 0, returned = exchange;
  for (int32_t i = 0; i < n; ++i) {
    const double part = uneven_chunks ? sluice_uneven_chunk_share(i, n) : 1.0 / n;
    arrived += exchange * part;
    computed = fmax(computed, arrived) + chunked * part;
    returned = fmax(returned, computed) + exchange * part;
  }
  return fmax(returned, computed + weights);
}

static double model(const sluice_bootstrap_point_t* points, int32_t count, int32_t direction,
                    const sluice_bootstrap_work_t* work, int32_t n) {
  const sluice_bootstrap_point_t* first = &points[0];
  double per_chunk = work_per_chunk(first, direction, work->rows_per_expert, work->op);
  double compute = lane_at(points, count, compute_of, per_chunk, n);
  double comm = lane_at(points, count, comm_of, startups_per_chunk(first, work->op), n);
  double stolen = first->lanes.comm > 0 ? fmin(1, first->lanes.comm_cpu / first->lanes.comm) : 0;
  double weights = direction == SLUICE_FORWARD ? 0 : WEIGHTS_SHARE * first->lanes.compute;
  double chunked = fmax(0, compute - weights) + stolen * comm * (n - 1) / n;
  return arrivals_first(n, work->uneven_chunks, comm / 2, chunked, weights);
}

double sluice_bootstrap_pass(const sluice_bootstrap_point_t* points, int32_t count, int32_t direction,
                             const sluice_bootstrap_work_t* work, int32_t num_chunks) {
  const sluice_bootstrap_point_t* first = &points[0];
  double rest = first->pass - model(points, count, direction, work, first->num_chunks);
  return model(points, count, direction, work, num_chunks) + rest;
}
