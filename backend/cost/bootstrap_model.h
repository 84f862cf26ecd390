/* A coarse model of one layer from passes that ran: what its lanes took at a few n, and so what other n would take.
 *
 * One pass at n = 1 shows the seconds of the compute lane and of the exchanges; the header that opened it shows what an
 * exchange of next to nothing takes. What more chunks cost on top is a prior until a second n has run: an exchange's
 * start-up for each exchange, GEMMs that are half as fast at HALF_ROWS rows for each expert, and a little for each
 * op. From two n on, lanes are linear in n between and beyond what was measured.
 *
 * On a CPU the communication lane takes processor time from the compute lane while both run; how much is measured, too.
 *
 * Source: MPMoE's phases in the order of our own schedule, whose arrivals go before all returns; the lanes' linear
 * growth in n is that of "alpha + beta * bytes" for exchanges, and GEMMs whose seconds are linear
 * in rows.
 */
#ifndef SLUICE_BACKEND_COST_BOOTSTRAP_MODEL_H_
#define SLUICE_BACKEND_COST_BOOTSTRAP_MODEL_H_

#include <stdint.h>

/* What one pass took, over all ranks. Any unit of time, the same for all. */
typedef struct sluice_lanes_s {
  double compute;  /* of the rank that computed longest */
  double comm;     /* of the rank that waited least for the others */
  double comm_cpu; /* processor time of the communication lane, at most comm */
  double startup;  /* of one exchange of next to nothing; 0: not known */
} sluice_lanes_t;

/* A pass of n chunks that was seen: its lanes, and all of it. num_chunks 0: none. */
typedef struct sluice_bootstrap_point_s {
  int32_t num_chunks;
  double pass;
  sluice_lanes_t lanes;
} sluice_bootstrap_point_t;

/* What does not change with n. */
typedef struct sluice_bootstrap_work_s {
  double rows_per_expert; /* of the whole pass */
  double op;              /* what one op costs beside its work, in the points' unit */
  int32_t
      uneven_chunks; /* the first and the last chunk have half the rows of others (backend/schedule/uneven_chunks.h) */
} sluice_bootstrap_work_t;

/* What a pass of `num_chunks` would take, from points [count >= 1] in ascending n; the unit is theirs. */
double sluice_bootstrap_pass(const sluice_bootstrap_point_t* points, int32_t count, int32_t direction,
                             const sluice_bootstrap_work_t* work, int32_t num_chunks);

#endif /* SLUICE_BACKEND_COST_BOOTSTRAP_MODEL_H_ */
