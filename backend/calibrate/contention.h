/* What exchanges and GEMMs do to each other when they run at the same time, by the size of the exchange.
 *
 * On a core that is busy with GEMMs, the communication lane and the transport's threads wait for the scheduler at
 * each message: milliseconds that an exchange of few rows does not have when it is timed alone, and that do not grow
 * with its bytes. One share for all sizes cannot say both this and what large exchanges lose.
 *
 * Exchanges run alone and then beside GEMMs, size after size, in rounds. A size's contention is the median over
 * rounds of what an exchange took longer beside GEMMs than alone just before, so that a few disturbed rounds count
 * for nothing; over ranks the longest. A larger exchange never takes less in all (least squares over pooled
 * neighbours).
 *
 * Source: ours; MPMoE's alpha(y, x) is one number for all sizes.
 */
#ifndef SLUICE_BACKEND_CALIBRATE_CONTENTION_H_
#define SLUICE_BACKEND_CALIBRATE_CONTENTION_H_

#include "backend/cost/machine.h"

/* Of one exchange, in seconds. */
typedef struct sluice_contention_sample_s {
  double alone, beside; /* it takes */
  double lost;          /* GEMMs lose beside it; below 0 by noise */
} sluice_contention_sample_t;

/* Where samples come from: a machine, or a test. */
typedef struct sluice_contention_source_s {
  /* Exchanges of `bytes` for about `seconds` alone and beside GEMMs; num_second of next to nothing are under way
   * with each. Collective. */
  sluice_status_t (*sample)(void* user, int64_t bytes, int32_t num_second, double seconds,
                            sluice_contention_sample_t* out);
  /* The longest of all ranks, in place. */
  sluice_status_t (*longest)(void* user, double* seconds, int32_t count);
  void* user;
} sluice_contention_source_t;

/* Fills in exchange_contention, compute_contention and second_* of a machine that has its exchange and world_size;
 * takes about `seconds`, leaving out sizes that would take too long. Errors: those of the source. */
sluice_status_t sluice_contention_measure(const sluice_contention_source_t* source, double seconds,
                                          sluice_machine_t* machine);

#endif /* SLUICE_BACKEND_CALIBRATE_CONTENTION_H_ */
