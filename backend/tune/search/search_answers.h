/* Answers by size, and the papers' two hypotheses told from them. Private to backend/tune. */
#ifndef SLUICE_BACKEND_TUNE_SEARCH_SEARCH_ANSWERS_H_
#define SLUICE_BACKEND_TUNE_SEARCH_SEARCH_ANSWERS_H_

#include "backend/tune/search/search_state.h"

#define SLUICE_SEARCH_NEAR 4 /* buckets, one octave: so near an answer a race begins at its n */

/* The nearest answer below (step -1) or above (1), at all or within so many buckets; NULL. */
const sluice_spot_t* sluice_search_answer_near(const sluice_search_t* search, int32_t bucket, int32_t step);
const sluice_spot_t* sluice_search_answer_within(const sluice_search_t* search, int32_t bucket, int32_t step,
                                                 int32_t distance);
void sluice_search_decide(sluice_search_t* search, int32_t bucket, int32_t pick, int32_t why);
/* Whether a spot's pick is worth keeping for later runs, where it would not be questioned: also while it is here, not
 * that of a race in which nothing was timed. */
int sluice_spot_is_worth_keeping(const sluice_spot_t* spot);

#endif /* SLUICE_BACKEND_TUNE_SEARCH_SEARCH_ANSWERS_H_ */
