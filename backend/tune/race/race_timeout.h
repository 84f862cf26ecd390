/* How long a race waits for passes that bring it forward, counted in laps: a lap is over when the layer that began it
 * comes again.
 *
 * Layers of one kind share a race, and what one is told to run is reported two of its forwards later. By then each of
 * the others has asked as well, so that of 65 layers 130 forwards tell nothing new and the race goes on all the same.
 */
#ifndef SLUICE_BACKEND_TUNE_RACE_RACE_TIMEOUT_H_
#define SLUICE_BACKEND_TUNE_RACE_RACE_TIMEOUT_H_

#include <stdint.h>

#define SLUICE_RACE_TIMEOUT_LAPS 128 /* in a row, without one that brings the race forward */

/* The layer that began a lap may be gone, or run batches of another size: then another one begins the next. */
#define SLUICE_RACE_TIMEOUT_OTHERS 1024

typedef struct sluice_race_timeout_s {
  int32_t layer;  /* that began the lap */
  int16_t others; /* that waited in it; below 0: there is none yet */
  int16_t laps;
} sluice_race_timeout_t;

static inline void sluice_race_timeout_begin(sluice_race_timeout_t* p) { *p = (sluice_race_timeout_t){.others = -1}; }

/* Something was brought forward. */
static inline void sluice_race_timeout_renew(sluice_race_timeout_t* p) { p->laps = 0; }

/* A layer (its layer_id, which is the same on all ranks) waits once more. Nonzero: a lap begins by that. */
static inline int sluice_race_timeout_wait(sluice_race_timeout_t* p, int32_t layer) {
  if (p->others >= 0 && p->layer != layer && ++p->others < SLUICE_RACE_TIMEOUT_OTHERS) return 0;
  p->layer = layer, p->others = 0;
  if (p->laps <= SLUICE_RACE_TIMEOUT_LAPS) ++p->laps;
  return 1;
}

static inline int sluice_race_timeout_is_over(const sluice_race_timeout_t* p) {
  return p->laps > SLUICE_RACE_TIMEOUT_LAPS;
}

#endif /* SLUICE_BACKEND_TUNE_RACE_RACE_TIMEOUT_H_ */
