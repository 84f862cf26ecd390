// SPDX-License-Identifier: Apache-2.0
/* Distributes the panels of a list of GEMMs among threads, with work stealing. Internal to backend/gemm/native.
 *
 * The panels of a list are numbered, GEMM after GEMM, and divided into one run for each thread. A thread takes pieces
 * from the front of its own run; when that is empty, from the back of the longest run. The time of a piece is not known
 * in advance: experts with few rows wait for memory, those with many compute, and other processes slow down some
 * threads but not others. A piece is whole panels, so its bits do not depend on the thread that computes it. */
#pragma once

#include <stdatomic.h>
#include <stdint.h>

typedef struct sluice_run_s {
  _Alignas(64) _Atomic uint64_t ends; /* first remaining panel << 32 | last remaining panel + 1 */
} sluice_run_t;

typedef struct sluice_runs_s {
  int64_t num_gemms;
  const int64_t* begins; /* [num_gemms + 1]: the first panel of each GEMM, then the number of panels, below 2^32 */
  const int64_t* least;  /* [num_gemms]: the fewest panels that a piece should have */
  int num_runs;
  sluice_run_t* runs;
} sluice_runs_t;

/* Panels [first, last) of a GEMM, and the next panel of the same run. */
typedef struct sluice_piece_s {
  int64_t problem, first, last;
  int64_t next_gemm, next_first; /* next_gemm -1: none */
} sluice_piece_t;

/* Sets run `index` to panels [first, last). Call it before any thread takes a piece. */
void sluice_runs_set(const sluice_runs_t* runs, int index, int64_t first, int64_t last);

/* Takes the next piece for the thread of run `index`; returns 0 if all panels are taken. Thread-safe. */
int sluice_runs_take(const sluice_runs_t* runs, int index, sluice_piece_t* out_piece);
