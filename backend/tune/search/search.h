/* The online search for n (and for the weight-gradient mode, where that is open): one table for layers that are alike.
 *
 * Candidates run as ordinary training steps, because results do not depend on them; what is tried is decided from
 * numbers that all ranks have in common (the slowest rank's time of a pass, the most rows that any rank received), so
 * all ranks do the same without another exchange.
 *
 * The table has one *spot* per size q of the batch, in steps of 2^(1/4). A spot without an answer
 *   - between two answers that agree takes theirs: q lies inside the range of that n;
 *   - else races candidates between the n of the nearest answer below and above (hypothesis: the best n grows with q).
 * A race gives each candidate a warm-up step and then k counted steps in turns with the best so far, and takes the
 * shortest time of each direction, since noise only adds; where the machine's speed flips meanwhile, what neighbouring
 * steps say of each other (race_log.h). With a model the race begins with the
 * few best by prediction; what they took corrects the model, and whatever the corrected model then likes better is
 * raced too. Where no machine is known, ADAPTIVE makes a bootstrap model from lane times of the first passes, which run
 * the fewest chunks (bootstrap_model.h), and races what that likes best against them; there a candidate is out after
 * two counted steps that are clearly slower than those beside them. PROFILE begins with both ends and the middle and
 * walks from the best one to the bottom of its valley. An answer is questioned again now and then by racing it against
 * its neighbours, as long as all races together stay under a share of the time. A race whose candidates' passes do not
 * come (batches of other sizes run what was chosen for this one, ranks run passes differently, directions go untimed)
 * is given up: what ran decides, or the nearest answer, or the model.
 *
 * Source: MPipeMoE Alg. 1 and MPMoE Alg. 1, made one: ranges are the runs of evidence
 * with one n, so that they are disjoint, and new evidence inside another's range shrinks it, without bookkeeping.
 */
#ifndef SLUICE_BACKEND_TUNE_SEARCH_SEARCH_H_
#define SLUICE_BACKEND_TUNE_SEARCH_SEARCH_H_

#include "backend/tune/search/search_state.h"

void sluice_search_init(sluice_search_t* search, const sluice_search_config_t* config);
/* What a pass of `rows` received rows (of the fullest rank) should do next; 0 rows: not known yet. out_why (may be
 * NULL): SLUICE_WHY_*. */
int32_t sluice_search_next(sluice_search_t* search, int64_t rows, int32_t* out_why);
/* What a pass of that size would do next, and nothing changes: its answer, that of a size nearby, or a candidate on
 * trial; -1: nothing is known. */
int32_t sluice_search_peek(const sluice_search_t* search, int64_t rows);
/* A pass that all ranks ran with the same pick: `ns` of the slowest, and what its lanes took in ns, or NULL. */
void sluice_search_observe(sluice_search_t* search, int32_t direction, int32_t pick, int64_t rows, uint64_t ns,
                           const sluice_lanes_t* lanes);
/* A pass of `seconds` in a form that the search does not compare. */
void sluice_search_count_pass(sluice_search_t* search, double seconds);
/* A training step of `layer` has run since its last forward, timed or not, and the next one will be asked for `rows`: a
 * race that no pass brings forward for long is given up. */
void sluice_search_wait(sluice_search_t* search, int64_t rows, int32_t layer);
/* `seconds` that a first pass after a switch took, before it is observed: what it took beyond the candidate's usual
 * time is counted, where that is known. Single passes vary, so what one took less counts as well. */
void sluice_search_count_switch(sluice_search_t* search, int32_t direction, int32_t pick, int64_t rows, double seconds);
/* An answer from elsewhere for this size. */
void sluice_search_answer(sluice_search_t* search, int64_t rows, int32_t pick);

#endif /* SLUICE_BACKEND_TUNE_SEARCH_SEARCH_H_ */
