/* What forwards under a capacity leave behind: words of drop counters, 64-bit integers, in the memory of rows. Read by
 * kernels, so nothing but this enum. */
#ifndef SLUICE_BACKEND_DEVICE_DROP_COUNTERS_H_
#define SLUICE_BACKEND_DEVICE_DROP_COUNTERS_H_

enum {
  SLUICE_DROP_COUNTER_FORWARDS = 0,
  SLUICE_DROP_COUNTER_ROUTES,  /* kept ones */
  SLUICE_DROP_COUNTER_DROPPED, /* of them, those beyond a capacity */
  SLUICE_DROP_COUNTER_MOST,    /* the most rows for one place in one chunk, times 2^32, plus the place */
  SLUICE_DROP_COUNTER_BAD,     /* 1 + a route t * K + k whose id is no expert's, of the last such chunk; 0: none */
  SLUICE_NUM_DROP_COUNTERS = 8
};

#endif /* SLUICE_BACKEND_DEVICE_DROP_COUNTERS_H_ */
