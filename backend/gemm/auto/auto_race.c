// SPDX-License-Identifier: Apache-2.0
#include "backend/gemm/auto/auto_race.h"

#include <math.h>

/* The share of a call's time that measurements may add. The first calls of a class belong to the first step of a model,
 * which also waits for page faults, so they add less. */
static const double SHARE = 0.25, SHARE_AT_FIRST = 0.125;
enum { AT_FIRST = 32 };
/* One run is not reliable on a busy machine: no kind leaves for its speed, and none is chosen, before LEAST rounds
 * count. After that, the race ends when ENOUGH seconds have been spent, or after MOST rounds. */
enum { MOST = 8, LEAST = 3 };
static const double ENOUGH = 0.128;
/* A kind leaves if it takes more than this many times as long as the fastest. */
static const double TOO_SLOW = 2;

static int is_racing(const sluice_gemm_race_t* race, int kind) { return (race->racing >> kind & 1) != 0; }

/* Advances `turn` to the next kind that is racing, and begins a new round at the end of one. */
static void settle_turn(sluice_gemm_race_t* race) {
  if (race->racing == 0) return;
  while (!is_racing(race, race->turn)) {
    if (++race->turn < SLUICE_RACE_KINDS) continue;
    race->turn = 0;
    ++race->round;
  }
}

void sluice_gemm_race_start(sluice_gemm_race_t* race, uint32_t kinds) {
  *race = (sluice_gemm_race_t){.racing = kinds, .own = race->own, .credit = race->credit, .calls = race->calls};
  for (int kind = 0; kind < SLUICE_RACE_KINDS; ++kind) race->best[kind] = INFINITY;
  settle_turn(race);
}

void sluice_gemm_race_earn(sluice_gemm_race_t* race, double seconds, double flop) {
  race->credit += (race->calls < AT_FIRST ? SHARE_AT_FIRST : SHARE) * seconds;
  ++race->calls;
  const double rate = seconds / flop;
  race->own = race->own == 0 ? rate : 0.5 * (race->own + rate);
}

int sluice_gemm_race_next(const sluice_gemm_race_t* race, double flop) {
  if (race->own == 0 || race->racing == 0 || sluice_gemm_race_is_over(race)) return -1;
  const double best = race->best[race->turn];
  return race->credit >= flop * (isfinite(best) ? best : race->own) ? race->turn : -1;
}

static void leave_behind(sluice_gemm_race_t* race) {
  double fastest = INFINITY;
  for (int kind = 0; kind < SLUICE_RACE_KINDS; ++kind) {
    if (is_racing(race, kind) && race->best[kind] < fastest) fastest = race->best[kind];
  }
  for (int kind = 0; kind < SLUICE_RACE_KINDS; ++kind) {
    if (race->best[kind] > TOO_SLOW * fastest) race->racing &= ~(1u << kind);
  }
}

void sluice_gemm_race_ran(sluice_gemm_race_t* race, int kind, double seconds, double flop) {
  if (!isfinite(seconds)) {
    race->racing &= ~(1u << kind);
    race->best[kind] = INFINITY;
  } else {
    race->credit -= seconds;
    if (race->round > 0) {
      race->spent += seconds;
      race->best[kind] = fmin(race->best[kind], seconds / flop);
    }
  }
  const int round = race->round;
  race->turn = kind + 1;
  if (race->turn == SLUICE_RACE_KINDS) {
    race->turn = 0;
    ++race->round;
  }
  settle_turn(race);
  if (race->round > round && round >= LEAST) {
    leave_behind(race);
    settle_turn(race);
  }
}

int sluice_gemm_race_is_over(const sluice_gemm_race_t* race) {
  const int is_alone = (race->racing & (race->racing - 1)) == 0;
  return race->racing == 0 || (is_alone && race->round > 1) ||
         (race->round > LEAST && (race->spent > ENOUGH || race->round > MOST));
}
