// SPDX-License-Identifier: Apache-2.0
/* Stores answers by size and checks the two hypotheses of the papers against them. Private to backend/tune. */
#pragma once

#include "backend/tune/search/search_state.h"

#define SLUICE_SEARCH_NEAR 4 /* buckets, one octave: a race begins at the n of an answer this close */

/* The nearest answer below (step -1) or above (1), at any distance or within this many buckets; NULL if there is
 * none. */
const sluice_spot_t* sluice_search_answer_near(const sluice_search_t* search, int32_t bucket, int32_t step);
const sluice_spot_t* sluice_search_answer_within(const sluice_search_t* search, int32_t bucket, int32_t step,
                                                 int32_t distance);
void sluice_search_decide(sluice_search_t* search, int32_t bucket, int32_t pick, int32_t why);
/* Whether a spot's pick should be written for later runs, which would not race it again: also while it is under
 * question, but not the result of a race without timed passes. */
int sluice_spot_is_worth_keeping(const sluice_spot_t* spot);
