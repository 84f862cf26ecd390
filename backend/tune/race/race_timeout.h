// SPDX-License-Identifier: Apache-2.0
/* The timeout of a race, counted in laps without a pass that advances it. A lap ends when the layer that began it runs
 * again.
 *
 * Layers of one kind share a race, and the result of a candidate arrives two forwards of that layer later. By then each
 * of the other layers has run as well: with 65 layers, 130 forwards may bring no result although the race continues. */
#pragma once

#include <stdint.h>

#define SLUICE_RACE_TIMEOUT_LAPS 128 /* in a row, without a pass that advances the race */

/* The layer that began a lap may no longer exist, or run batches of another size: after this many other layers, the
 * next lap begins with another layer. */
#define SLUICE_RACE_TIMEOUT_OTHERS 1024

typedef struct sluice_race_timeout_s {
  int32_t layer;  /* first layer of the lap */
  int16_t others; /* layers that waited in this lap; negative: no lap has begun */
  int16_t laps;
} sluice_race_timeout_t;

static inline void sluice_race_timeout_begin(sluice_race_timeout_t* p) { *p = (sluice_race_timeout_t){.others = -1}; }

/* A pass advanced the race. */
static inline void sluice_race_timeout_renew(sluice_race_timeout_t* p) { p->laps = 0; }

/* A layer (its layer_id, which all ranks share) waits once more. Nonzero: this begins a lap. */
static inline int sluice_race_timeout_wait(sluice_race_timeout_t* p, int32_t layer) {
  if (p->others >= 0 && p->layer != layer && ++p->others < SLUICE_RACE_TIMEOUT_OTHERS) return 0;
  p->layer = layer, p->others = 0;
  if (p->laps <= SLUICE_RACE_TIMEOUT_LAPS) ++p->laps;
  return 1;
}

static inline int sluice_race_timeout_is_over(const sluice_race_timeout_t* p) {
  return p->laps > SLUICE_RACE_TIMEOUT_LAPS;
}
