// SPDX-License-Identifier: Apache-2.0
/* Records the steps of a race in order and compares two candidates on a machine whose speed changes.
 *
 * A process on the other hyperthread makes everything take 1.7 times as long, for one step or for hundreds. Since noise
 * only adds, the shortest time of each candidate is the best estimate at constant speed; if one candidate ran before a
 * change of speed and the other after it, the shortest times mislead. So candidates alternate, and each step is also
 * compared with its neighbours: the nearest steps of the other candidate before and after it.
 *
 * Source: ours.
 */
#pragma once

#include <stdint.h>

#define SLUICE_RACE_LOG 24 /* steps that are kept */

#define SLUICE_FLIP     1.75 /* factor in time that a change of the machine's speed may explain */
#define SLUICE_UNSTEADY 1.3  /* steps of one candidate that differ by more ran at different speeds */

typedef struct sluice_race_step_s {
  float ns_per_row; /* forward and backward */
  uint8_t pick;
  uint8_t is_warm_up;
} sluice_race_step_t;

typedef struct sluice_race_log_s {
  int32_t count;
  sluice_race_step_t steps[SLUICE_RACE_LOG];
} sluice_race_log_t;

/* Drops the oldest step if the log is full. */
void sluice_race_log_add(sluice_race_log_t* log, int32_t pick, double ns_per_row, int is_warm_up);
/* Forgets all steps but the newest, and the newest too unless it is a step of `pick`. */
void sluice_race_log_restart(sluice_race_log_t* log, int32_t pick);

/* Number of counted steps in which `pick` took more than `limit` times as long as the slower of its two neighbours of
 * `other`. A step that no change of speed explains counts twice, even if it has only one neighbour so far. */
int32_t sluice_race_log_losses(const sluice_race_log_t* log, int32_t pick, int32_t other, double limit);

/* Longest over shortest counted step of a candidate; 1 if there is none. */
double sluice_race_log_spread(const sluice_race_log_t* log, int32_t pick);

/* Time of `pick` over that of `other`; 0 if one of them has no step. out_is_clear is 0 if the speed changed and the
 * steps contradict each other, so that more steps should run. */
double sluice_race_log_ratio(const sluice_race_log_t* log, int32_t pick, int32_t other, int* out_is_clear);

/* Sum over all steps of the time beyond their nearest step of `best`, in ns per row. */
double sluice_race_log_excess(const sluice_race_log_t* log, int32_t best);
