// SPDX-License-Identifier: Apache-2.0
/* Measured and predicted times of candidates: from races, from a machine, from a bootstrap model. Private to
 * backend/tune. */
#pragma once

#include "backend/tune/search/search_state.h"

/* The sample of a candidate; NULL: it is not in the race. */
sluice_sample_t* sluice_spot_sample(sluice_spot_t* spot, int32_t direction, int32_t pick);
/* Timed passes of a candidate; 0 also if it is not in the race. */
int32_t sluice_spot_count(const sluice_spot_t* spot, int32_t direction, int32_t pick);
/* Gives a candidate its samples. Zero: the race has no place for it. */
int sluice_spot_add(sluice_spot_t* spot, int32_t pick);
void sluice_spot_set_time(sluice_spot_t* spot, int32_t pick, double ns_per_row);
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
/* The best prediction among open candidates outside `set`, corrected or not; -1: none. */
int32_t sluice_search_best_predicted(sluice_search_t* search, const sluice_spot_t* spot, uint32_t set,
                                     int is_corrected);
/* Measured over predicted time, from raced candidates with the same mode if there are any: between two of them it is
 * interpolated in log n, and outside of them their trend continues. */
double sluice_search_correction(sluice_search_t* search, const sluice_spot_t* spot, int32_t pick);
