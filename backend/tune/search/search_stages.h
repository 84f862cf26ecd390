// SPDX-License-Identifier: Apache-2.0
/* The stages of a race: which candidates run against each other next, until there is an answer. Private to
 * backend/tune/search. */
#pragma once

#include "backend/tune/search/search_state.h"

void sluice_search_start(sluice_search_t* search, int32_t bucket);
/* Called after each counted pass: opens the next window once this one is complete. */
void sluice_search_advance(sluice_search_t* search, int32_t bucket);
/* Ends the race with the times measured so far. */
void sluice_search_give_up(sluice_search_t* search, int32_t bucket);
/* Whether the answer may race its neighbours again: only while races have used less than their share. */
int sluice_search_may_question(const sluice_search_t* search, const sluice_spot_t* spot);
void sluice_search_question(sluice_search_t* search, int32_t bucket);
