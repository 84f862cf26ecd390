/* What forwards under ceilings leave behind: words of a tally of 64-bit integers in the memory of rows. Read by
 * kernels, so nothing but this enum. */
#ifndef SLUICE_BACKEND_DEVICE_TALLY_H_
#define SLUICE_BACKEND_DEVICE_TALLY_H_

enum {
  SLUICE_TALLY_FORWARDS = 0,
  SLUICE_TALLY_ROUTES,  /* kept ones */
  SLUICE_TALLY_DROPPED, /* of them, those beyond a ceiling */
  SLUICE_TALLY_MOST,    /* the most rows for one place in one chunk, times 2^32, plus the place */
  SLUICE_TALLY_BAD,     /* 1 + a route t * K + k whose id is no expert's, of the last such chunk; 0: none */
  SLUICE_TALLY_WORDS = 8
};

#endif /* SLUICE_BACKEND_DEVICE_TALLY_H_ */
