/* The steps of a race in their order, and what they say of two candidates on a machine whose speed flips.
 *
 * A neighbour on the other hyperthread makes everything take 1.7 times as long for one step or for hundreds. The
 * shortest time of each candidate is the best estimate where nothing flips, since noise only adds; where one candidate
 * ran before a flip and the other behind it, it is nonsense. So candidates run in turns, and each step is also compared
 * with its neighbours: the steps of the other candidate just before and just behind it.
 *
 * Source: ours.
 */
#ifndef SLUICE_BACKEND_TUNE_RACE_RACE_LOG_H_
#define SLUICE_BACKEND_TUNE_RACE_RACE_LOG_H_

#include <stdint.h>

#define SLUICE_RACE_LOG 24 /* steps that are kept */

#define SLUICE_FLIP     1.75 /* times: what a flip of the machine's speed may explain */
#define SLUICE_UNSTEADY 1.3  /* times: steps of one candidate that differ by more saw different machines */

typedef struct sluice_race_step_s {
  float ns_per_row; /* forward and backward */
  uint8_t pick;
  uint8_t is_warm_up;
} sluice_race_step_t;

typedef struct sluice_race_log_s {
  int32_t count;
  sluice_race_step_t steps[SLUICE_RACE_LOG];
} sluice_race_log_t;

/* The oldest falls out where there is no room. */
void sluice_race_log_add(sluice_race_log_t* log, int32_t pick, double ns_per_row, int is_warm_up);
/* Forgets all but the newest step, and that too unless it is `pick`'s. */
void sluice_race_log_restart(sluice_race_log_t* log, int32_t pick);

/* Counted steps in which `pick` took more than `limit` times what the slower of its two neighbours of `other` took. One
 * that no flip explains counts twice, also where it has one neighbour yet. */
int32_t sluice_race_log_losses(const sluice_race_log_t* log, int32_t pick, int32_t other, double limit);

/* Longest over shortest counted step of a candidate; 1 where it has none. */
double sluice_race_log_spread(const sluice_race_log_t* log, int32_t pick);

/* Time of `pick` over that of `other`; 0: one of them has no step. out_is_clear: 0 where the machine flipped and the
 * steps contradict each other, so that more should run. */
double sluice_race_log_ratio(const sluice_race_log_t* log, int32_t pick, int32_t other, int* out_is_clear);

/* Sum over steps of what each took beyond its nearest step of `best`, in ns per row. */
double sluice_race_log_excess(const sluice_race_log_t* log, int32_t best);

#endif /* SLUICE_BACKEND_TUNE_RACE_RACE_LOG_H_ */
