/* What candidates took and what they should take: of races, of a machine, of a bootstrap model. Private to
 * backend/tune. */
#ifndef SLUICE_BACKEND_TUNE_SEARCH_SEARCH_TIMES_H_
#define SLUICE_BACKEND_TUNE_SEARCH_SEARCH_TIMES_H_

#include "backend/tune/search/search_state.h"

/* What its race says, ns per row; infinite where it has not run to the end of one. */
double sluice_spot_time(const sluice_spot_t* spot, int32_t pick);
/* Shortest forward and backward of the present window, ns per row; 0 where one is missing. */
double sluice_spot_shortest(const sluice_spot_t* spot, int32_t pick);
/* The best of a set by time; the first of equal ones. -1: none was timed. */
int32_t sluice_spot_best(const sluice_spot_t* spot, uint32_t set);
/* Without a machine ADAPTIVE makes a model of its own from what lanes took. */
int sluice_search_bootstraps(const sluice_search_t* search);
/* Seconds of a step by the lanes of those that ran here; 0 where none did. */
double sluice_search_bootstrapped(const sluice_search_t* search, const sluice_spot_t* spot, int32_t pick);
/* Seconds of a step by the machine or the bootstrap model; 0: neither. */
double sluice_search_predicted(sluice_search_t* search, const sluice_spot_t* spot, int32_t pick);
/* A size with the mode that is tried first; whether a candidate may be chosen at all. */
int32_t sluice_search_pick_of(const sluice_search_t* search, int32_t size);
int sluice_search_is_open(const sluice_search_t* search, int32_t pick);
/* The best prediction among open candidates outside `set`, by size times `correction` (may be NULL); -1. */
int32_t sluice_search_best_predicted(sluice_search_t* search, const sluice_spot_t* spot, uint32_t set,
                                     const double* correction);
/* Measured over predicted at each n: of the raced candidate whose n is nearest. out [SLUICE_SEARCH_SIZES]. */
void sluice_search_corrections(sluice_search_t* search, const sluice_spot_t* spot, double* out);

#endif /* SLUICE_BACKEND_TUNE_SEARCH_SEARCH_TIMES_H_ */
