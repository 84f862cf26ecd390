// SPDX-License-Identifier: Apache-2.0
/* A checksum of consecutive floats, which may be added in parts of any size [own; rounds as in xxHash]. It costs a
 * small part of the time to read or write them. Eight words are processed at once, each in a lane of its own, by
 * invertible rounds. Damage to one lane alone is always detected, and any other damage except with probability
 * 2^-64. */
#pragma once

#include <stdint.h>

enum { SLUICE_STATE_SUM_LANES = 8, SLUICE_STATE_SUM_STRIPE = 16 }; /* in words; in floats */

typedef struct sluice_state_sum_s {
  uint64_t lanes[SLUICE_STATE_SUM_LANES];
  float rest[SLUICE_STATE_SUM_STRIPE]; /* the last count % STRIPE elements */
  int64_t count;                       /* elements so far */
} sluice_state_sum_t;

void sluice_state_sum_begin(sluice_state_sum_t* sum);
void sluice_state_sum_add(sluice_state_sum_t* sum, const float* data, int64_t count);
/* Returns the checksum of all elements in the order in which they were added. It does not depend on the sizes of the
 * parts. */
uint64_t sluice_state_sum_end(const sluice_state_sum_t* sum);
