/* What the files of the search share. Private to backend/tune.
 *
 * search.c has the calls of every step, search_stages.c the course of a race, search_windows.c one window of it,
 * search_times.c what candidates took or should take, search_answers.c what becomes of it.
 */
#ifndef SLUICE_BACKEND_TUNE_SEARCH_PARTS_H_
#define SLUICE_BACKEND_TUNE_SEARCH_PARTS_H_

#include "backend/tune/search.h"
#include "sluice/context.h"

/* Stages of a race. */
enum { ENDS = 0, WALK, FIRST, SKETCHED, FEW, MORE, WGRAD, DUEL, QUESTION };

#define SKETCH_HOPELESS 1.15 /* as HOPELESS, where a sketch said where to look */
#define NEAR            4    /* buckets, one octave: so near an answer a race begins at its n */

static inline int sluice_pick_size(int32_t pick) { return pick % SLUICE_SEARCH_SIZES; }

/* ---- times (search_times.c) ---- */

/* What its race says, ns per row; infinite where it has not run to the end of one. */
double sluice_spot_time(const sluice_spot_t* spot, int32_t pick);
/* Shortest forward and backward of the present window, ns per row; 0 where one is missing. */
double sluice_spot_shortest(const sluice_spot_t* spot, int32_t pick);
/* The best of a set by time; the first of equal ones. -1: none was timed. */
int32_t sluice_spot_best(const sluice_spot_t* spot, uint32_t set);
/* Without a machine ADAPTIVE makes a model of its own from what lanes took. */
int sluice_search_makes_sketches(const sluice_search_t* search);
/* Seconds of a step by the lanes of those that ran here; 0 where none did. */
double sluice_search_sketched(const sluice_search_t* search, const sluice_spot_t* spot, int32_t pick);
/* Seconds of a step by the machine or the sketch; 0: neither. */
double sluice_search_predicted(sluice_search_t* search, const sluice_spot_t* spot, int32_t pick);
/* A size with the mode that is tried first; whether a candidate may be chosen at all. */
int32_t sluice_search_pick_of(const sluice_search_t* search, int32_t size);
int sluice_search_is_open(const sluice_search_t* search, int32_t pick);
/* The best prediction among open candidates outside `set`, by size times `correction` (may be NULL); -1. */
int32_t sluice_search_best_predicted(sluice_search_t* search, const sluice_spot_t* spot, uint32_t set,
                                     const double* correction);
/* Measured over predicted at each n: of the raced candidate whose n is nearest. out [SLUICE_SEARCH_SIZES]. */
void sluice_search_corrections(sluice_search_t* search, const sluice_spot_t* spot, double* out);

/* Seconds that races have cost so far: candidates that were slower than the answer, and changing between them. */
static inline double sluice_search_spent(const sluice_search_t* search) {
  return search->stats.excess_seconds + search->stats.race_switch_seconds;
}

/* ---- answers (search_answers.c) ---- */

/* The nearest answer below (step -1) or above (1), at all or within so many buckets; NULL. */
const sluice_spot_t* sluice_search_answer_near(const sluice_search_t* search, int32_t bucket, int32_t step);
const sluice_spot_t* sluice_search_answer_within(const sluice_search_t* search, int32_t bucket, int32_t step,
                                                 int32_t distance);
void sluice_search_decide(sluice_search_t* search, int32_t bucket, int32_t pick, int32_t why);
/* Whether a spot's pick is worth keeping for later runs, where it would not be questioned: also while it is here, not
 * that of a race in which nothing was timed. */
int sluice_spot_is_worth_keeping(const sluice_spot_t* spot);

/* ---- windows (search_windows.c) ---- */

/* The size's window; where all are taken, the one that was used longest ago makes room and forgets its steps. */
sluice_window_t* sluice_search_window(sluice_search_t* search, const sluice_spot_t* spot);
/* A window: those of the set run in turns, and with them the best so far, if any, unless they run alone. */
void sluice_search_enter(sluice_search_t* search, sluice_spot_t* spot, uint32_t set, uint8_t stage, int alone);
/* Forgets what ran at a size. */
void sluice_search_clear(sluice_search_t* search, sluice_spot_t* spot);
/* Passes of each direction that a candidate runs in its window, and whether it has; who is out before; whether the
 * anchor runs again after all. */
int32_t sluice_search_wanted(const sluice_search_t* search, const sluice_spot_t* spot);
int sluice_search_is_done(const sluice_search_t* search, const sluice_spot_t* spot, int32_t pick);
void sluice_search_drop_hopeless(const sluice_search_t* search, sluice_spot_t* spot, const sluice_window_t* window);
void sluice_search_recall_anchor(sluice_spot_t* spot, sluice_window_t* window);
/* Nonzero: all is said. Zero: the machine flipped and steps contradict each other, so that the window runs on. */
int sluice_search_close_window(sluice_search_t* search, sluice_spot_t* spot, sluice_window_t* window);

/* ---- stages (search_stages.c) ---- */

void sluice_search_start(sluice_search_t* search, int32_t bucket);
/* After each counted pass: the next window, once this one is through. */
void sluice_search_advance(sluice_search_t* search, int32_t bucket);
/* The race ends as it stands. */
void sluice_search_give_up(sluice_search_t* search, int32_t bucket);
/* Only as long as races have cost less than their share; then the answer races its neighbours. */
int sluice_search_may_question(const sluice_search_t* search, const sluice_spot_t* spot);
void sluice_search_question(sluice_search_t* search, int32_t bucket);

#endif /* SLUICE_BACKEND_TUNE_SEARCH_PARTS_H_ */
