// SPDX-License-Identifier: Apache-2.0
/* A window of a race: candidates that alternate, early elimination, and the times that result. Private to
 * backend/tune/search. */
#pragma once

#include "backend/tune/search/search_state.h"

/* Factor over the steps of the others that eliminates a candidate that the bootstrap model chose. */
#define SLUICE_BOOTSTRAP_HOPELESS 1.15

/* The window of the size. If all are in use, the least recently used one is reset and reused. */
sluice_window_t* sluice_search_window(sluice_search_t* search, const sluice_spot_t* spot);
/* Opens a window: the candidates of the set alternate, together with the best so far, if any, unless they run alone. */
void sluice_search_enter(sluice_search_t* search, sluice_spot_t* spot, uint32_t set, uint8_t stage, int alone);
/* Forgets the passes of a size. */
void sluice_search_clear(sluice_search_t* search, sluice_spot_t* spot);
/* The passes of each direction that a candidate runs in its window; whether it has run them. Eliminates candidates;
 * lets the anchor run again. */
int32_t sluice_search_wanted(const sluice_search_t* search, const sluice_spot_t* spot);
int sluice_search_is_done(const sluice_search_t* search, const sluice_spot_t* spot, int32_t pick);
void sluice_search_drop_hopeless(const sluice_search_t* search, sluice_spot_t* spot, const sluice_window_t* window);
void sluice_search_recall_anchor(sluice_spot_t* spot, sluice_window_t* window);
/* Nonzero: the window is complete. Zero: the speed changed and steps contradict each other, so the window continues. */
int sluice_search_close_window(sluice_search_t* search, sluice_spot_t* spot, sluice_window_t* window);
