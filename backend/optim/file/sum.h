// SPDX-License-Identifier: Apache-2.0
/* A checksum of consecutive floats, in parts of any size [own; rounds as xxHash has them]. It costs
 * a small part of what it takes to read or write them. Eight words are taken at once, each into a lane of its own, by
 * rounds that can be undone: what damages one lane alone is always found, and anything else but for one time in 2^64.
 */
#ifndef SLUICE_BACKEND_OPTIM_FILE_SUM_H_
#define SLUICE_BACKEND_OPTIM_FILE_SUM_H_

#include <stdint.h>

enum { SLUICE_STATE_SUM_LANES = 8, SLUICE_STATE_SUM_STRIPE = 16 }; /* words; floats */

typedef struct sluice_state_sum_s {
  uint64_t lanes[SLUICE_STATE_SUM_LANES];
  float rest[SLUICE_STATE_SUM_STRIPE]; /* the last count % STRIPE elements */
  int64_t count;                       /* elements so far */
} sluice_state_sum_t;

void sluice_state_sum_begin(sluice_state_sum_t* sum);
void sluice_state_sum_add(sluice_state_sum_t* sum, const float* data, int64_t count);
/* Of all that was added, in this order. It does not depend on the parts that it came in. */
uint64_t sluice_state_sum_end(const sluice_state_sum_t* sum);

#endif /* SLUICE_BACKEND_OPTIM_FILE_SUM_H_ */
