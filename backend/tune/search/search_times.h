// SPDX-License-Identifier: Apache-2.0
/* Measured and predicted times of candidates: from races, from a machine, from a bootstrap model. Private to
 * backend/tune. */
#ifndef SLUICE_BACKEND_TUNE_SEARCH_SEARCH_TIMES_H_
#define SLUICE_BACKEND_TUNE_SEARCH_SEARCH_TIMES_H_

#include "backend/tune/search/search_state.h"

/* The time of its race, ns per row; infinite if it has not finished one. */
double sluice_spot_time(const sluice_spot_t* spot, int32_t pick);
/* Shortest forward plus backward of the present window, ns per row; 0 if one is missing. */
double sluice_spot_shortest(const sluice_spot_t* spot, int32_t pick);
/* The best of a set by time, the first of equal ones; -1: none was timed. */
int32_t sluice_spot_best(const sluice_spot_t* spot, uint32_t set);
/* Whether ADAPTIVE builds its own model from lane times, because no machine is known. */
int sluice_search_bootstraps(const sluice_search_t* search);
/* Predicted seconds of a step from the lane times of candidates that ran at this size; 0 if none did. */
double sluice_search_bootstrapped(const sluice_search_t* search, const sluice_spot_t* spot, int32_t pick);
/* Seconds of a step by the machine or the bootstrap model; 0: neither exists. */
double sluice_search_predicted(sluice_search_t* search, const sluice_spot_t* spot, int32_t pick);
/* The candidate of a size with the mode that is tried first; whether a candidate is allowed. */
int32_t sluice_search_pick_of(const sluice_search_t* search, int32_t size);
int sluice_search_is_open(const sluice_search_t* search, int32_t pick);
/* The best prediction among open candidates outside `set`, times `correction` by size (may be NULL); -1 if there is
 * none. */
int32_t sluice_search_best_predicted(sluice_search_t* search, const sluice_spot_t* spot, uint32_t set,
                                     const double* correction);
/* Measured over predicted time at each n: that of the raced candidate whose n is nearest. out [SLUICE_SEARCH_SIZES]. */
void sluice_search_corrections(sluice_search_t* search, const sluice_spot_t* spot, double* out);

#endif /* SLUICE_BACKEND_TUNE_SEARCH_SEARCH_TIMES_H_ */
