// SPDX-License-Identifier: Apache-2.0
/* Who multiplies which panels of a list of GEMMs. Internal to backend/gemm/native.
 *
 * The panels of a list lie in a row, GEMM after GEMM, cut into one run for each thread. A thread takes pieces
 * from the front of its own run; when that is used up, from the back of the longest one that is left. What a piece
 * takes is not known before: experts with few rows wait for memory, those with many compute, and others of the machine
 * take time from one thread and not from the other. A piece is whole panels, so who takes it changes no bit. */
#ifndef SLUICE_BACKEND_GEMM_NATIVE_NATIVE_RUNS_H_
#define SLUICE_BACKEND_GEMM_NATIVE_NATIVE_RUNS_H_

#include <stdatomic.h>
#include <stdint.h>

typedef struct sluice_run_s {
  _Alignas(64) _Atomic uint64_t ends; /* the first panel that is left << 32 | that after the last */
} sluice_run_t;

typedef struct sluice_runs_s {
  int64_t num_gemms;
  const int64_t* begins; /* [num_gemms + 1]: the first panel of each GEMM, then their number, below 2^32 */
  const int64_t* least;  /* [num_gemms]: panels of a piece that is worth taking */
  int num_runs;
  sluice_run_t* runs;
} sluice_runs_t;

/* Panels [first, last) of a GEMM, and what lies behind them in the same run. */
typedef struct sluice_piece_s {
  int64_t problem, first, last;
  int64_t next_gemm, next_first; /* next_gemm -1: nothing */
} sluice_piece_t;

/* Where run `index` begins and ends, of all panels. Before any thread takes. */
void sluice_runs_set(const sluice_runs_t* runs, int index, int64_t first, int64_t last);

/* The next piece for the thread of run `index`; 0: all panels are taken. By any number of threads at a time. */
int sluice_runs_take(const sluice_runs_t* runs, int index, sluice_piece_t* out_piece);

#endif /* SLUICE_BACKEND_GEMM_NATIVE_NATIVE_RUNS_H_ */
