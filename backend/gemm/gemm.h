// SPDX-License-Identifier: Apache-2.0
/* The interface of GEMMs, which several libraries implement.
 *
 * A GEMM is C = A * B + beta * C with f32 accumulation (f64 if the dtype is f64). A call takes a list of independent
 * GEMMs (the local experts of one chunk), which an implementation may group or split. Matrices are described by element
 * strides; a transposed operand has row_stride 1.
 *
 * B may be packed in 4 or 8 bits (packed.h). A and C are never packed, so no GEMM computes a packed weight's gradient.
 *
 * `ref` is a plain loop, the reference for all other implementations. Each implementation has a folder,
 * backend/gemm/<name>/. Threads: one thread at a time uses a gemm (the compute lane); it may use the caller's OpenMP
 * pool.
 */
#pragma once

#include "backend/base/alloc.h"
#include "backend/base/status.h"
#include "backend/gemm/packed.h"
#include "sluice/context.h"

typedef struct sluice_matrix_s {
  void* data;
  int64_t row_stride; /* elements */
  int64_t col_stride;
} sluice_matrix_t;

typedef struct sluice_gemm_problem_s {
  int64_t m, n, k; /* C [m, n], A [m, k], B [k, n]; any may be 0 (k = 0: C = beta * C) */
  sluice_matrix_t a, b, c;
} sluice_gemm_problem_t;

typedef struct sluice_grouped_gemm_s {
  const sluice_gemm_problem_t* problems;
  int64_t count;
  int32_t dtype_ab;       /* SLUICE_DTYPE_* of A and B */
  int32_t dtype_c;        /* of C: dtype_ab, or f32 */
  float beta;             /* 0 (C may hold NaN) or 1 */
  sluice_stream_t stream; /* the stream of the lane, on which GEMMs on a GPU run in order; NULL on a CPU */
  /* [count]: how each B is packed; NULL: none is. Strides of a packed B count elements, and the stride along the
   * columns of the weight is 1. */
  const sluice_packed_t* packed;
  /* Device memory for decoded weights, for GEMMs on a GPU: at least the size of the largest decoded weight. GEMMs on a
   * CPU take such memory from their allocator. */
  void* scratch;
  uint64_t scratch_bytes;
} sluice_grouped_gemm_t;

typedef struct sluice_gemm_s sluice_gemm_t;

/* The most that run() allocates at one time: temporaries of "blas", packed blocks of "native", results of measurements
 * of "auto", and decoded blocks of packed weights (at most half of it). run() frees all of it before it returns.
 * "native" packs per thread: each thread after the second may allocate another SLUICE_GEMM_THREAD_BYTES. */
#define SLUICE_GEMM_SCRATCH_BYTES ((uint64_t)8 << 20)
#define SLUICE_GEMM_THREAD_BYTES  ((uint64_t)7 << 18)

typedef struct sluice_gemm_vtable_s {
  void (*destroy)(sluice_gemm_t* gemm);
  /* Whether run() accepts the dtypes, strides and sizes of this list. Cheap. */
  int (*supports)(const sluice_gemm_t* gemm, const sluice_grouped_gemm_t* list);
  /* Called only for lists that supports() accepts. Errors: NO_MEMORY, EXTERNAL (with the library's text). */
  sluice_status_t (*run)(sluice_gemm_t* gemm, const sluice_grouped_gemm_t* list);
  /* 1: run() reads packed weights; 0: the caller of run() decodes them first. supports() checks dtypes and strides in
   * both cases. */
  int decodes;
} sluice_gemm_vtable_t;

struct sluice_gemm_s {
  const sluice_gemm_vtable_t* vtable;
  sluice_allocator_t* allocator; /* for temporaries; counted */
  char name[64];                 /* "ref", "blas (libtorch_cpu)", ...; of "auto": the implementations chosen so far */
  char made_of[192];             /* of "auto": all implementations that opened; of others the name; empty: the name */
};

/* Implementation and version, which determine the speed and stay the same for the gemm's whole life. */
static inline const char* sluice_gemm_made_of(const sluice_gemm_t* gemm) {
  return gemm->made_of[0] != '\0' ? gemm->made_of : gemm->name;
}

/* Options of the selector; mirrors sluice_context_config_t. */
typedef struct sluice_gemm_options_s {
  const char* name;    /* "auto", "native", "ref", "onednn", "blas", "host"; NULL = "auto" */
  const char* library; /* path or NULL */
  sluice_host_gemm_fn_t host_gemm;
  void* host_gemm_user;
} sluice_gemm_options_t;

/* Opens a gemm by name. "auto" opens every implementation that it finds. For each dtype pair, operand layout and size
 * class it measures them during the first calls, which adds at most a quarter to their time in the long run. It then
 * uses the fastest, also in later processes; until then it uses "native".
 * Any other name opens that implementation alone. Lists that no opened implementation supports run in `ref`.
 * The environment variable SLUICE_GEMM, if set and not empty, replaces options->name. With a fixed name bits repeat
 * from run to run, as nothing is measured. out_gemm: new, sluice_gemm_destroy. Errors: NOT_FOUND (names what was tried
 * and what to install), INVALID_ARGUMENT (unknown name, with the known ones).
 */
sluice_status_t sluice_gemm_create(const sluice_gemm_options_t* options, sluice_allocator_t* allocator,
                                   sluice_gemm_t** out_gemm);
void sluice_gemm_destroy(sluice_gemm_t* gemm); /* accepts NULL */
/* Errors: INVALID_ARGUMENT, UNSUPPORTED (never from sluice_gemm_create's), and run()'s above. */
sluice_status_t sluice_gemm_run(sluice_gemm_t* gemm, const sluice_grouped_gemm_t* list);
int sluice_gemm_supports(const sluice_gemm_t* gemm, const sluice_grouped_gemm_t* list);
/* Whether B of GEMM `index` is packed. */
static inline int sluice_gemm_is_packed(const sluice_grouped_gemm_t* list, int64_t index) {
  return list->packed != NULL && list->packed[index].format != SLUICE_PACKED_NO;
}
/* Calls vtable->run() for a list that supports() accepts. For an implementation that does not read packed weights, it
 * decodes them, for as many columns of C at a time as half of SLUICE_GEMM_SCRATCH_BYTES holds.
 * Errors: those of run(); UNSUPPORTED if not even one column fits. */
sluice_status_t sluice_gemm_run_decoded(sluice_gemm_t* gemm, const sluice_grouped_gemm_t* list);

/* Single implementations, for tests and for the selector. */
sluice_status_t sluice_gemm_ref_create(sluice_allocator_t* allocator, sluice_gemm_t** out_gemm);
sluice_status_t sluice_gemm_onednn_create(const char* library, sluice_allocator_t* allocator, sluice_gemm_t** out_gemm);
/* Errors: NOT_FOUND if the processor has neither AMX, AVX-512 nor AVX2; INVALID_ARGUMENT if SLUICE_NATIVE names no set
 * of kernels; UNSUPPORTED if the processor cannot run the set that it names. */
sluice_status_t sluice_gemm_native_create(sluice_allocator_t* allocator, sluice_gemm_t** out_gemm);
sluice_status_t sluice_gemm_blas_create(const char* library, sluice_allocator_t* allocator, sluice_gemm_t** out_gemm);
sluice_status_t sluice_gemm_host_create(sluice_host_gemm_fn_t fn, void* user, sluice_allocator_t* allocator,
                                        sluice_gemm_t** out_gemm);
