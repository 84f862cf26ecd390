/* A window of a race: candidates that run in turns, who is out early, and what their steps say in the end. Private to
 * backend/tune/search. */
#ifndef SLUICE_BACKEND_TUNE_SEARCH_SEARCH_WINDOWS_H_
#define SLUICE_BACKEND_TUNE_SEARCH_SEARCH_WINDOWS_H_

#include "backend/tune/search/search_state.h"

#define SLUICE_BOOTSTRAP_HOPELESS \
  1.15 /* times the others' steps: out of a window that a bootstrap model said to look in */

/* The size's window; where all are taken, the one that was used longest ago makes room and forgets its steps. */
sluice_window_t* sluice_search_window(sluice_search_t* search, const sluice_spot_t* spot);
/* A window: those of the set run in turns, and with them the best so far, if any, unless they run alone. */
void sluice_search_enter(sluice_search_t* search, sluice_spot_t* spot, uint32_t set, uint8_t stage, int alone);
/* Forgets what ran at a size. */
void sluice_search_clear(sluice_search_t* search, sluice_spot_t* spot);
/* Passes of each direction that a candidate runs in its window, and whether it has; who is out before; whether the
 * anchor runs again after all. */
int32_t sluice_search_wanted(const sluice_search_t* search, const sluice_spot_t* spot);
int sluice_search_is_done(const sluice_search_t* search, const sluice_spot_t* spot, int32_t pick);
void sluice_search_drop_hopeless(const sluice_search_t* search, sluice_spot_t* spot, const sluice_window_t* window);
void sluice_search_recall_anchor(sluice_spot_t* spot, sluice_window_t* window);
/* Nonzero: all is said. Zero: the machine flipped and steps contradict each other, so that the window runs on. */
int sluice_search_close_window(sluice_search_t* search, sluice_spot_t* spot, sluice_window_t* window);

#endif /* SLUICE_BACKEND_TUNE_SEARCH_SEARCH_WINDOWS_H_ */
