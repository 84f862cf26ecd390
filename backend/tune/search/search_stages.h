/* The course of a race: who meets whom next, until there is an answer. Private to backend/tune/search. */
#ifndef SLUICE_BACKEND_TUNE_SEARCH_SEARCH_STAGES_H_
#define SLUICE_BACKEND_TUNE_SEARCH_SEARCH_STAGES_H_

#include "backend/tune/search/search_state.h"

void sluice_search_start(sluice_search_t* search, int32_t bucket);
/* After each counted pass: the next window, once this one is through. */
void sluice_search_advance(sluice_search_t* search, int32_t bucket);
/* The race ends as it stands. */
void sluice_search_give_up(sluice_search_t* search, int32_t bucket);
/* Only as long as races have cost less than their share; then the answer races its neighbours. */
int sluice_search_may_question(const sluice_search_t* search, const sluice_spot_t* spot);
void sluice_search_question(sluice_search_t* search, int32_t bucket);

#endif /* SLUICE_BACKEND_TUNE_SEARCH_SEARCH_STAGES_H_ */
