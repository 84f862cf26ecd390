// SPDX-License-Identifier: Apache-2.0
/* The words of the drop counters that forwards with a capacity update: 64-bit integers, in the memory of rows. Kernels
 * include this file, so it has only this enum. */
#ifndef SLUICE_BACKEND_DEVICE_DROP_COUNTERS_H_
#define SLUICE_BACKEND_DEVICE_DROP_COUNTERS_H_

enum {
  SLUICE_DROP_COUNTER_FORWARDS = 0,
  SLUICE_DROP_COUNTER_ROUTES,  /* kept routes */
  SLUICE_DROP_COUNTER_DROPPED, /* those beyond a capacity */
  SLUICE_DROP_COUNTER_MOST,    /* the maximum number of rows of one slot in one chunk, times 2^32, plus the slot */
  SLUICE_DROP_COUNTER_BAD,     /* 1 + a route t * K + k with an invalid id, of the last such chunk; 0: none */
  SLUICE_NUM_DROP_COUNTERS = 8
};

#endif /* SLUICE_BACKEND_DEVICE_DROP_COUNTERS_H_ */
