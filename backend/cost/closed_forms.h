/* Closed forms: the papers', as named second opinions beside the predictor, and one of ours. Seconds; n >= 1. */
#ifndef SLUICE_BACKEND_COST_CLOSED_FORMS_H_
#define SLUICE_BACKEND_COST_CLOSED_FORMS_H_

#include <stdint.h>

/* One chunk's dispatch, compute, combine and copy. */
typedef struct sluice_chunk_times_s {
  double dispatch, compute, combine, copy;
} sluice_chunk_times_t;

/* MPMoE's paradigms [Fig. 8, its phases reconstructed]: */
enum {
  SLUICE_PARADIGM_NO_COPIES = 1,  /* none, S4 */
  SLUICE_PARADIGM_COPY_AFTER = 2, /* forward of S1 to S3: copy-out follows compute */
  SLUICE_PARADIGM_COPY_BEFORE = 3 /* backward of S1 to S3: copy-in precedes compute */
};

/* Seconds of one pass: five phases P0 + P1 + (n - 2) P2 + P3 + P4. Exact for paradigm 1 with slots reused. */
double sluice_mpmoe_pass(int32_t paradigm, int32_t n, sluice_chunk_times_t times);

/* MPipeMoE eq. 10 with its slips mended: n times the longest of the three sums, by lane. */
double sluice_mpipemoe_pass(int32_t n, sluice_chunk_times_t times);

#endif /* SLUICE_BACKEND_COST_CLOSED_FORMS_H_ */
