// SPDX-License-Identifier: Apache-2.0
/* Who is measured next, and when it is enough: measuring one class of GEMMs, spread over its calls. Plain data, without
 * a clock or a thread. Internal to backend/gemm/auto.
 *
 * The calls themselves go by the order of kinds until the race is over. Each earns a part of what it took, and from
 * that runs of the candidates are paid, in turns, so that a disturbance of the machine meets them alike. So no step
 * takes much longer than one without measuring. What takes more than was expected is paid back by later calls. */
#ifndef SLUICE_BACKEND_GEMM_AUTO_AUTO_RACE_H_
#define SLUICE_BACKEND_GEMM_AUTO_AUTO_RACE_H_

#include <stdint.h>

enum { SLUICE_RACE_KINDS = 4 };

typedef struct sluice_gemm_race_s {
  uint32_t racing;                /* bit per kind that takes part still */
  int32_t round, turn;            /* round 0, which may start threads and make code, does not count */
  int64_t calls;                  /* that have earned */
  double best[SLUICE_RACE_KINDS]; /* seconds per flop of the shortest run that counts; INFINITY: none */
  double own;                     /* seconds per flop of the calls; 0: none so far */
  double credit;                  /* seconds; negative: to be paid back */
  double spent;                   /* seconds, of rounds that count */
} sluice_gemm_race_t;

/* kinds: a bit for each candidate. */
void sluice_gemm_race_start(sluice_gemm_race_t* race, uint32_t kinds);

/* A call of the class that took so long. */
void sluice_gemm_race_earn(sluice_gemm_race_t* race, double seconds, double flop);

/* The kind whose turn it is, if the credit pays for a run of so many flop as it is expected to take; else -1. */
int sluice_gemm_race_next(const sluice_gemm_race_t* race, double flop);

/* What a run of `kind`, whose turn it was, has taken. INFINITY: it failed, and leaves. */
void sluice_gemm_race_ran(sluice_gemm_race_t* race, int kind, double seconds, double flop);

/* Whether `best` decides. */
int sluice_gemm_race_is_over(const sluice_gemm_race_t* race);

#endif /* SLUICE_BACKEND_GEMM_AUTO_AUTO_RACE_H_ */
