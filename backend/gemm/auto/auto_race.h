// SPDX-License-Identifier: Apache-2.0
/* A race: decides which candidate of a class of GEMMs is measured next, and when the measurements suffice. They are
 * spread over the calls of the class. Plain data, without a clock or a thread. Internal to backend/gemm/auto.
 *
 * Until the race is over, calls use the default order of kinds. Each call adds a part of its time to a credit, from
 * which runs of the candidates are paid, in turns, so that a disturbance of the machine affects all candidates. Hence
 * no step takes much longer than one without measurements. If a run exceeds its expected time, later calls pay for it.
 */
#pragma once

#include <stdint.h>

enum { SLUICE_RACE_KINDS = 4 };

typedef struct sluice_gemm_race_s {
  uint32_t racing;                /* one bit for each kind that still takes part */
  int32_t round, turn;            /* round 0 does not count: it may start threads and generate code */
  int64_t calls;                  /* calls of the class so far */
  double best[SLUICE_RACE_KINDS]; /* seconds per flop of the fastest run that counts; INFINITY: none */
  double own;                     /* seconds per flop of the calls; 0: none so far */
  double credit;                  /* seconds; negative: later calls pay it back */
  double spent;                   /* seconds of the rounds that count */
} sluice_gemm_race_t;

/* kinds: a bit for each candidate. */
void sluice_gemm_race_start(sluice_gemm_race_t* race, uint32_t kinds);

/* Adds to the credit for a call of the class that took `seconds`. */
void sluice_gemm_race_earn(sluice_gemm_race_t* race, double seconds, double flop);

/* Returns the kind whose turn it is if the credit covers the expected time of a run with `flop`; else -1. */
int sluice_gemm_race_next(const sluice_gemm_race_t* race, double flop);

/* Records the time of a run of `kind`, whose turn it was. INFINITY: the run failed, and `kind` leaves the race. */
void sluice_gemm_race_ran(sluice_gemm_race_t* race, int kind, double seconds, double flop);

/* Whether `best` decides. */
int sluice_gemm_race_is_over(const sluice_gemm_race_t* race);
