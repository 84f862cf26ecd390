// SPDX-License-Identifier: Apache-2.0
/* The online search for n (and for the weight-gradient mode, if it is open). Layers of the same kind share one table.
 *
 * Candidates run as ordinary training steps, because they do not change results. Choices depend only on numbers that
 * all ranks share (the time of a pass on the slowest rank, the most rows that any rank received), so all ranks choose
 * the same without another exchange.
 *
 * The table has one *spot* per size q of the batch, in steps of 2^(1/4). A spot without an answer
 *   - takes the answer of its neighbours if the nearest ones below and above agree: q lies inside the range of that n;
 *   - else races candidates between the n of the nearest answers below and above (hypothesis: the best n grows with q).
 *     Each candidate runs a warm-up step and k counted steps, alternating with the best so far. The shortest time of
 *     each direction counts, since noise only adds; if the speed of the machine changes meanwhile, neighbouring steps
 *     are compared (race_log.h). With a model each n from 1 to 16 is predicted, and the race begins with the few best
 *     predictions that are not all about the same n. Their times correct the model, and candidates that the corrected
 *     model prefers race too. Races without a model try the few counts of sluice_chunk_counts. If no machine is known,
 *     ADAPTIVE builds a bootstrap model from the lane times of the first passes, which run the fewest chunks
 *     (bootstrap_model.h), and races its favourites against them; such a candidate is out after two counted steps that
 *     are clearly slower than the neighbouring steps. PROFILE begins with both ends and the middle and walks from the
 *     best of them to the bottom of its valley. An answer is raced again now and then, against its neighbours and one
 *     candidate that no race of this size has tried (the hypothesis, the valley and the model may be wrong), as long as
 *     all races together stay within their share of the time. A race whose passes do not arrive (batches of other sizes
 *     run the choice that was made for this one, ranks run passes differently, directions are not timed) is given up:
 *     the measured times decide, or else the nearest answer, or the model.
 *
 * Source: MPipeMoE Alg. 1 and MPMoE Alg. 1, combined: ranges are runs of evidence with the same n. They are disjoint,
 * and new evidence inside another range shrinks that range without bookkeeping.
 */
#pragma once

#include "backend/tune/search/search_state.h"

void sluice_search_init(sluice_search_t* search, const sluice_search_config_t* config);
/* The candidate that the next pass of `rows` received rows (of the fullest rank) should run; 0 rows: not known yet.
 * out_why (may be NULL): SLUICE_WHY_*. */
int32_t sluice_search_next(sluice_search_t* search, int64_t rows, int32_t* out_why);
/* The candidate that a pass of that size would run next; changes nothing. Its answer, that of a nearby size, or a
 * candidate on trial; -1: nothing is known. */
int32_t sluice_search_peek(const sluice_search_t* search, int64_t rows);
/* Observes a pass that all ranks ran with the same pick: `ns` of the slowest rank, and the times of its lanes in ns, or
 * NULL. */
void sluice_search_observe(sluice_search_t* search, int32_t direction, int32_t pick, int64_t rows, uint64_t ns,
                           const sluice_lanes_t* lanes);
/* Counts a pass of `seconds` whose form the search does not compare. */
void sluice_search_count_pass(sluice_search_t* search, double seconds);
/* Call for each training step of `layer` since its last forward, timed or not; the next step will ask for `rows`. A
 * race that no pass advances for long is given up. */
void sluice_search_wait(sluice_search_t* search, int64_t rows, int32_t layer);
/* Counts the first pass after a switch, which took `seconds`, before it is observed: the difference to the usual time
 * of the candidate, if that is known. Single passes vary, so negative differences count as well. */
void sluice_search_count_switch(sluice_search_t* search, int32_t direction, int32_t pick, int64_t rows, double seconds);
/* Imports an answer for this size. */
void sluice_search_answer(sluice_search_t* search, int64_t rows, int32_t pick);
