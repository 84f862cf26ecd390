// SPDX-License-Identifier: Apache-2.0
/* GEMMs: one interface, several libraries behind it.
 *
 * A GEMM is C = A * B + beta * C with f32 accumulation (f64 in "ref" when the dtype is f64). A call carries a list
 * of independent GEMMs (the local experts of one chunk), so that an implementation may group or split them as it
 * likes. Matrices are described by element strides; a transposed operand is one with row_stride 1.
 *
 * B may be packed in 4 or 8 bits (packed.h). A and C never are, so a packed weight has no gradient here.
 *
 * `ref` is the plain loop that everything else is compared with. Implementations live in backend/gemm/<name>/ and meet
 * only here. Threads: a gemm is used by one thread at a time (the compute lane); it may use the caller's OpenMP pool.
 */
#ifndef SLUICE_BACKEND_GEMM_GEMM_H_
#define SLUICE_BACKEND_GEMM_GEMM_H_

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
  sluice_stream_t stream; /* the lane's, on which a GPU's GEMMs run in order; NULL on a CPU */
  /* [count], or NULL: no weight is packed. How each B is; strides of a packed one count elements, and the one along the
   * weight's columns is 1. */
  const sluice_packed_t* packed;
  /* Device memory where a GPU's GEMMs decode packed weights: as much as the largest takes, or more. Other
   * implementations borrow theirs. */
  void* scratch;
  uint64_t scratch_bytes;
} sluice_grouped_gemm_t;

typedef struct sluice_gemm_s sluice_gemm_t;

/* What run() may borrow from the allocator at one time beyond the objects made by create: temporaries of "blas",
 * the packed blocks of "native", the result with which "auto" measures, and decoded blocks of packed weights, which
 * have half of it. All of it is given back before run() returns. "native" packs per thread: with more than two threads,
 * each further one may borrow SLUICE_GEMM_THREAD_BYTES on top. */
#define SLUICE_GEMM_SCRATCH_BYTES ((uint64_t)8 << 20)
#define SLUICE_GEMM_THREAD_BYTES  ((uint64_t)7 << 18)

typedef struct sluice_gemm_vtable_s {
  void (*destroy)(sluice_gemm_t* gemm);
  /* Whether run() takes this list: dtypes, strides, sizes. Cheap. */
  int (*supports)(const sluice_gemm_t* gemm, const sluice_grouped_gemm_t* list);
  /* Only called when supports() said yes. Errors: NO_MEMORY, EXTERNAL (with the library's text). */
  sluice_status_t (*run)(sluice_gemm_t* gemm, const sluice_grouped_gemm_t* list);
  /* 1: run() reads packed weights itself; 0: it is given lists whose weights have been decoded. supports() looks at
   * dtypes and strides in both cases. */
  int decodes;
} sluice_gemm_vtable_t;

struct sluice_gemm_s {
  const sluice_gemm_vtable_t* vtable;
  sluice_allocator_t* allocator; /* for temporaries; counted */
  char name[64];                 /* "ref", "blas (libtorch_cpu)", ...; "auto" lists its choices once it made some */
  char made_of[192];             /* as the name was before any choice, of "auto" all that there is; empty: the name */
};

/* Implementation and version, the same for a gemm's whole life: what its speed goes by. */
static inline const char* sluice_gemm_made_of(const sluice_gemm_t* gemm) {
  return gemm->made_of[0] != '\0' ? gemm->made_of : gemm->name;
}

/* What the selector is given; mirrors sluice_context_config_t. */
typedef struct sluice_gemm_options_s {
  const char* name;    /* "auto", "native", "ref", "onednn", "blas", "host"; NULL = "auto" */
  const char* library; /* path or NULL */
  sluice_host_gemm_fn_t host_gemm;
  void* host_gemm_user;
} sluice_gemm_options_t;

/* Opens one by name. "auto" keeps every implementation that opens and, per dtype pair, operand layout and size class,
 * measures them beside the first calls, which take a quarter longer at most in the long run, and remembers the fastest,
 * for later processes too; until then it takes "native". `ref` takes what no other supports.
 * A named one also falls back to `ref` for lists that it does not support. The environment variable SLUICE_GEMM, if set
 * and not empty, replaces options->name: a run with a fixed name repeats its bits, whatever "auto" would have measured.
 * out_gemm: new, sluice_gemm_destroy.
 * Errors: NOT_FOUND (names what was tried and what to install), INVALID_ARGUMENT (unknown name, with the known ones).
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
/* vtable->run() where supports() said yes, for the selector too: an implementation that reads no packed weights gets
 * them decoded, as many columns of C at a time as half of SLUICE_GEMM_SCRATCH_BYTES hold.
 * Errors: run()'s; UNSUPPORTED where not even one column fits. */
sluice_status_t sluice_gemm_run_decoded(sluice_gemm_t* gemm, const sluice_grouped_gemm_t* list);

/* Single implementations, for tests and for the selector. */
sluice_status_t sluice_gemm_ref_create(sluice_allocator_t* allocator, sluice_gemm_t** out_gemm);
sluice_status_t sluice_gemm_onednn_create(const char* library, sluice_allocator_t* allocator, sluice_gemm_t** out_gemm);
/* Errors: NOT_FOUND where the processor has neither AMX, AVX-512 nor AVX2; INVALID_ARGUMENT, UNSUPPORTED where
 * SLUICE_NATIVE names no set of kernels, or one that the processor lacks. */
sluice_status_t sluice_gemm_native_create(sluice_allocator_t* allocator, sluice_gemm_t** out_gemm);
sluice_status_t sluice_gemm_blas_create(const char* library, sluice_allocator_t* allocator, sluice_gemm_t** out_gemm);
sluice_status_t sluice_gemm_host_create(sluice_host_gemm_fn_t fn, void* user, sluice_allocator_t* allocator,
                                        sluice_gemm_t** out_gemm);

#endif /* SLUICE_BACKEND_GEMM_GEMM_H_ */
