// SPDX-License-Identifier: Apache-2.0
/* A coarse model of one layer from observed passes: from the lane times at a few n it predicts those of other n.
 *
 * One pass at n = 1 shows the seconds of the compute lane and of the exchanges; the header that opened it shows the
 * cost of an almost empty exchange. The cost of more chunks is a prior until a second n has run: a start-up per
 * exchange, GEMMs at half speed at HALF_ROWS rows per expert, and a constant per op. From two n on, lanes are linear in
 * n, between and beyond the measured points.
 *
 * On a CPU the communication lane takes processor time from the compute lane while both run; that share is measured,
 * too.
 *
 * Source: MPMoE's phases in the order of our schedule, in which all arrivals precede all returns; linear growth of
 * lanes in n follows from "alpha + beta * bytes" for exchanges, and from GEMMs whose seconds are linear in rows.
 */
#pragma once

#include <stdint.h>

/* Times of one pass, over all ranks. Any unit of time, the same for all. */
typedef struct sluice_lanes_s {
  double compute;  /* of the rank that computed longest */
  double comm;     /* of the rank that waited least for others */
  double comm_cpu; /* processor time of the communication lane, at most comm */
  double startup;  /* of one almost empty exchange; 0: unknown */
} sluice_lanes_t;

/* An observed pass of n chunks: its lanes, and the whole. num_chunks 0: none. */
typedef struct sluice_bootstrap_point_s {
  int32_t num_chunks;
  double pass;
  sluice_lanes_t lanes;
} sluice_bootstrap_point_t;

/* Quantities that do not change with n. */
typedef struct sluice_bootstrap_work_s {
  double rows_per_expert; /* of the whole pass */
  double op;              /* cost of one op beyond its work, in the unit of the points */
  int32_t
      /* the first and the last chunk have half the rows of the others (backend/schedule/uneven_chunks.h) */
      uneven_chunks;
} sluice_bootstrap_work_t;

/* Predicted time of a pass of `num_chunks`, from points [count >= 1] in ascending n, in their unit. */
double sluice_bootstrap_pass(const sluice_bootstrap_point_t* points, int32_t count, int32_t direction,
                             const sluice_bootstrap_work_t* work, int32_t num_chunks);
