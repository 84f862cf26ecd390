// SPDX-License-Identifier: Apache-2.0
/* The closed forms of the papers: the memory of a layer, and, as named second opinions next to the predictor, the time
 * of a pass. Seconds; n >= 1. */
#pragma once

#include "sluice/plan.h"

/* MPipeMoE equations 1 to 6: the device memory of one layer, in elements. rows: B, the rows of one pass; the other
 * sizes are M, H, E and n. sluice_paper_footprint_t names the equation of each member. */
void sluice_footprint(int64_t rows, int64_t model_width, int64_t hidden_width, int32_t num_experts, int32_t num_chunks,
                      sluice_paper_footprint_t* out);

/* One chunk's dispatch, compute, combine and copy, each alone. */
typedef struct sluice_chunk_times_s {
  double dispatch, compute, combine, copy;
} sluice_chunk_times_t;

/* The papers' streams, and all of them together. */
enum { SLUICE_STREAM_COMM = 0, SLUICE_STREAM_COMP = 1, SLUICE_STREAM_MEM = 2, SLUICE_STREAM_ALL = 3 };

/* alpha[y][x], MPMoE's alpha(y, x): the share of its speed that stream y keeps while x runs, in (0, 1]; alpha[y][y] is
 * 1. MPipeMoE calls those of communication, computation and copies mu_x, sigma_x and eta_x [MPMoE II-C, MPipeMoE
 * III-E]. */
typedef struct sluice_alphas_s {
  double alpha[3][4];
} sluice_alphas_t;

/* Streams that do not slow each other down. */
sluice_alphas_t sluice_no_interference(void);

/* MPMoE's paradigms [Fig. 8, its phases reconstructed from IV-B]: */
enum {
  SLUICE_PARADIGM_NO_COPIES = 1,  /* none, S4 */
  SLUICE_PARADIGM_COPY_AFTER = 2, /* forward of S1 to S3: copy-out follows compute */
  SLUICE_PARADIGM_COPY_BEFORE = 3 /* backward of S1 to S3: copy-in precedes compute */
};

/* Seconds of one pass: five phases P0 + P1 + (n - 2) P2 + P3 + P4. A phase takes as long as its slowest stream, each
 * stretched by the alpha of the streams in that phase. Exact for paradigm 1 with reused slots and no interference. */
double sluice_mpmoe_pass(int32_t paradigm, int32_t n, sluice_chunk_times_t times, const sluice_alphas_t* alphas);

/* MPipeMoE eq. 10, first line, with its misprints corrected: n times the longest of (S + R) / mu, C / sigma and
 * X / eta. With copies, mu, sigma and eta are those while all streams run; without, those while communication and
 * computation run [Table II]. */
double sluice_mpipemoe_pass(int32_t n, sluice_chunk_times_t times, const sluice_alphas_t* alphas);
