// SPDX-License-Identifier: Apache-2.0
/* Conformance of backend/gemm: every implementation computes these cases, or lists with a reason those that it does not
 * support. A listed case that it does compute fails, so that the lists stay true.
 *
 *   gemm_cts NAME     ref, native, native_amx, native_avx512_bf16, native_avx512, native_avx2, onednn, blas_openblas,
 *                  blas_torch, host, named_host, auto
 *
 * Results are compared with sums in f64. The tolerance is the bound for adding k f32 products in any order, (k + 2) *
 * 2^-24 * sum |a||b| with |c| counted in, plus one rounding to C's dtype; f64 has 2^-53 instead. The sums of AMX and
 * AVX512-BF16 over pairs of bf16 are such orders; that they flush subnormals needs no larger bound, since no sum here
 * is subnormal. If data are small integers, every order gives the same sum, so bits are compared. Memory around C must
 * not change.
 */
#include <dlfcn.h>
#include <glob.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/test/refused.h"
#include "backend/device/cuda/fake/fake_cuda.h"
#include "backend/gemm/cublas/fake/fake_cublas.h"
#include "backend/gemm/gemm.h"
#include "backend/gemm/test/operands.h"

#if defined(__SANITIZE_THREAD__)
#define SANITIZED_THREADS 1
#else
#define SANITIZED_THREADS 0
#endif
#if defined(__SANITIZE_ADDRESS__)
#define SANITIZED_ADDRESSES 1
#else
#define SANITIZED_ADDRESSES 0
#endif

#if defined(__SANITIZE_ADDRESS__)
/* gcc 12's leak checker crashes on the thread-local data of libraries opened at run time (libgomp's); memory that
 * dlerror keeps there then looks lost. */
__attribute__((visibility("default"))) const char* __lsan_default_options(void);
const char* __lsan_default_options(void) { return "use_tls=0:print_suppressions=0"; }
__attribute__((visibility("default"))) const char* __lsan_default_suppressions(void);
const char* __lsan_default_suppressions(void) { return "leak:_dlerror_run\n"; }
#endif

/* ---- cases ----------------------------------------------------------------------------------------------------- */

enum { GUARD = 64 }; /* elements around each matrix */

typedef struct cts_case_s {
  const char* name;
  int64_t m, n, k;
  int a_columns, b_columns, c_columns; /* 1: column-major */
  int64_t padding;                     /* leading dimension beyond the width */
  int64_t gap;                         /* stride of the inner dimension, 0 = 1 */
  int64_t shift;                       /* elements by which the data are misaligned */
  float beta;
  int whole;     /* small whole numbers, bits compared */
  int64_t count; /* GEMMs; with several, the i-th has (i * 7) % (m + 1) rows */
} cts_case_t;

static const cts_case_t cases[] = {
    {.name = "Gemm_NN_MatchesF64", .m = 32, .n = 64, .k = 48},
    {.name = "Gemm_NT_MatchesF64", .m = 32, .n = 64, .k = 48, .b_columns = 1},
    {.name = "Gemm_TN_MatchesF64", .m = 32, .n = 64, .k = 48, .a_columns = 1},
    {.name = "Gemm_TT_MatchesF64", .m = 32, .n = 64, .k = 48, .a_columns = 1, .b_columns = 1},
    {.name = "Gemm_TNBeta1_Accumulates", .m = 64, .n = 96, .k = 40, .a_columns = 1, .beta = 1},
    {.name = "Gemm_ColumnMajorC_MatchesF64", .m = 20, .n = 33, .k = 17, .c_columns = 1},
    {.name = "Gemm_ColumnMajorAll_MatchesF64",
     .m = 20,
     .n = 33,
     .k = 17,
     .a_columns = 1,
     .b_columns = 1,
     .c_columns = 1,
     .beta = 1},
    {.name = "Gemm_OddSizesNN_MatchesF64", .m = 17, .n = 71, .k = 131},
    {.name = "Gemm_OddSizesNT_MatchesF64", .m = 33, .n = 67, .k = 129, .b_columns = 1},
    {.name = "Gemm_OddSizesTN_MatchesF64", .m = 65, .n = 31, .k = 37, .a_columns = 1, .beta = 1},
    {.name = "Gemm_SubMatrixNN_LeavesTheRest", .m = 19, .n = 40, .k = 24, .padding = 5},
    {.name = "Gemm_SubMatrixNT_LeavesTheRest", .m = 19, .n = 40, .k = 24, .padding = 5, .b_columns = 1, .beta = 1},
    {.name = "Gemm_SubMatrixTN_LeavesTheRest", .m = 19, .n = 40, .k = 24, .padding = 5, .a_columns = 1},
    {.name = "Gemm_InnerStrideTwo_MatchesF64", .m = 9, .n = 10, .k = 11, .gap = 2},
    {.name = "Gemm_NoRows_LeavesC", .m = 0, .n = 16, .k = 16, .beta = 1},
    {.name = "Gemm_NoColumns_LeavesC", .m = 16, .n = 0, .k = 16},
    {.name = "Gemm_NoDepthBeta0_ClearsNan", .m = 16, .n = 24, .k = 0, .padding = 3},
    {.name = "Gemm_NoDepthBeta1_KeepsC", .m = 16, .n = 24, .k = 0, .beta = 1},
    {.name = "Gemm_OneRow_MatchesF64", .m = 1, .n = 40, .k = 56},
    {.name = "Gemm_OneColumn_MatchesF64", .m = 40, .n = 1, .k = 56, .b_columns = 1},
    {.name = "Gemm_DepthOne_MatchesF64", .m = 24, .n = 40, .k = 1, .a_columns = 1},
    {.name = "Gemm_AllOnes_MatchesF64", .m = 1, .n = 1, .k = 1, .beta = 1},
    {.name = "Gemm_WholeNumbersNN_Exact", .m = 80, .n = 96, .k = 256, .whole = 1},
    {.name = "Gemm_WholeNumbersNT_Exact", .m = 80, .n = 96, .k = 256, .b_columns = 1, .whole = 1, .beta = 1},
    {.name = "Gemm_WholeNumbersTN_Exact", .m = 256, .n = 96, .k = 80, .a_columns = 1, .whole = 1, .beta = 1},
    {.name = "Gemm_Unaligned_MatchesF64", .m = 21, .n = 48, .k = 32, .shift = 1, .beta = 1},
    {.name = "Gemm_ManyGemms_EachItsOwn", .m = 40, .n = 32, .k = 24, .b_columns = 1, .beta = 1, .count = 24},
    {.name = "Gemm_ManyWeightGradients_EachItsOwn", .m = 40, .n = 32, .k = 24, .a_columns = 1, .count = 24},
    {.name = "Gemm_MoreThanOneTile_MatchesF64", .m = 515, .n = 514, .k = 4, .padding = 2, .beta = 1},
};
enum { NUM_CASES = sizeof cases / sizeof cases[0] };

static const int32_t dtypes[][2] = {
    {SLUICE_DTYPE_F32, SLUICE_DTYPE_F32}, {SLUICE_DTYPE_BF16, SLUICE_DTYPE_F32}, {SLUICE_DTYPE_BF16, SLUICE_DTYPE_BF16},
    {SLUICE_DTYPE_F16, SLUICE_DTYPE_F32}, {SLUICE_DTYPE_F16, SLUICE_DTYPE_F16},  {SLUICE_DTYPE_F64, SLUICE_DTYPE_F64},
};
enum { NUM_DTYPES = sizeof dtypes / sizeof dtypes[0] };

/* ---- implementations ------------------------------------------------------------------------------------------- */

typedef struct cts_implementation_s {
  const char* name;
  sluice_status_t (*create)(sluice_allocator_t* allocator, sluice_gemm_t** out_gemm);
  int foreign;               /* code without sanitizers, with its own threads */
  const char* expected_name; /* part of gemm->name */
} cts_implementation_t;

static const cts_implementation_t* implementation;

typedef struct cts_exception_s {
  const char* of[5];     /* the beginnings of the names of implementations */
  const char* case_part; /* part of the case's name; "" = every case */
  int32_t dtype_ab;      /* 0 = any */
  int by_machine;        /* 1: some machines support it */
  const char* reason;
} cts_exception_t;

static const cts_exception_t exceptions[] = {
    {{"native", "onednn", "blas", "host"}, "", SLUICE_DTYPE_F64, 0, "f64 is for finite differences, with ref"},
    {{"native", "onednn", "blas", "host", "cublas"}, "InnerStrideTwo", 0, 0, "needs a unit stride"},
    {{"onednn"}, "", SLUICE_DTYPE_F16, 0, "oneDNN 2.x has no f16 on a CPU"},
    {{"onednn"}, "", SLUICE_DTYPE_BF16, 1, "oneDNN needs AVX-512 for bf16"},
    {{"blas"}, "", SLUICE_DTYPE_F16, 0, "sgemm_ is f32"},
    {{"blas_openblas"}, "", SLUICE_DTYPE_BF16, 0, "OpenBLAS has no cblas_gemm_bf16bf16f32"},
    {{"blas_torch"}, "", SLUICE_DTYPE_BF16, 1, "a torch without MKL has no cblas_gemm_bf16bf16f32"},
};
enum { NUM_EXCEPTIONS = sizeof exceptions / sizeof exceptions[0] };

static sluice_status_t create_onednn(sluice_allocator_t* allocator, sluice_gemm_t** out_gemm) {
  return sluice_gemm_onednn_create(NULL, allocator, out_gemm);
}

static sluice_status_t create_blas(sluice_allocator_t* allocator, sluice_gemm_t** out_gemm) {
  return sluice_gemm_blas_create(NULL, allocator, out_gemm);
}

/* A process with torch, without Python: its library is loaded as by `import torch`, then found without a path. */
static sluice_status_t create_blas_torch(sluice_allocator_t* allocator, sluice_gemm_t** out_gemm) {
  static int loaded;
  if (!loaded) {
    /* The test's own sources are links into the checkout, whose .venv has torch. */
    char here[PATH_MAX];
    char pattern[PATH_MAX + 64];
    *out_gemm = NULL;
    if (realpath("backend/cts/gemm/BUILD", here) == NULL) return SLUICE_E_NOT_FOUND;
    here[strlen(here) - strlen("backend/cts/gemm/BUILD")] = '\0';
    snprintf(pattern, sizeof pattern, "%s.venv/lib/python3*/site-packages/torch/lib/libtorch_cpu.so", here);
    glob_t found;
    if (glob(pattern, 0, NULL, &found) != 0) {
      print_message("no %s\n", pattern);
      return SLUICE_E_NOT_FOUND;
    }
    loaded = dlopen(found.gl_pathv[0], RTLD_NOW | RTLD_LOCAL) != NULL;
    if (!loaded) print_message("%s\n", dlerror());
    globfree(&found);
    if (!loaded) return SLUICE_E_NOT_FOUND;
  }
  return sluice_gemm_blas_create(NULL, allocator, out_gemm);
}

/* A host that multiplies in f64, declines every third call, and relies on the promised unit stride. */
static int32_t host_gemm(void* user, const sluice_host_gemm_args_t* args) {
  int* calls = user;
  if (calls != NULL && ++*calls % 3 == 0) return 7;
  assert_true(args->a_row_stride == 1 || args->a_col_stride == 1);
  assert_true(args->b_row_stride == 1 || args->b_col_stride == 1);
  assert_true(args->c_row_stride == 1 || args->c_col_stride == 1);
  for (int64_t i = 0; i < args->m; ++i) {
    for (int64_t j = 0; j < args->n; ++j) {
      int64_t at = i * args->c_row_stride + j * args->c_col_stride;
      double sum = args->beta != 0 ? get_element(args->c, at, args->dtype_c) : 0;
      for (int64_t l = 0; l < args->k; ++l) {
        sum += get_element(args->a, i * args->a_row_stride + l * args->a_col_stride, args->dtype_ab) *
               get_element(args->b, l * args->b_row_stride + j * args->b_col_stride, args->dtype_ab);
      }
      set_element(args->c, at, args->dtype_c, sum);
    }
  }
  return 0;
}

static sluice_status_t create_host(sluice_allocator_t* allocator, sluice_gemm_t** out_gemm) {
  return sluice_gemm_host_create(host_gemm, NULL, allocator, out_gemm);
}

/* "auto" or "named_host", with a host that declines some calls. */
static sluice_status_t create_named(sluice_allocator_t* allocator, sluice_gemm_t** out_gemm) {
  static int calls;
  const char* name = strcmp(implementation->name, "auto") == 0 ? "auto" : "host";
  const sluice_gemm_options_t options = {.name = name, .host_gemm = host_gemm, .host_gemm_user = &calls};
  return sluice_gemm_create(&options, allocator, out_gemm);
}

/* "native_" and a set of kernels. */
static sluice_status_t create_native(sluice_allocator_t* allocator, sluice_gemm_t** out_gemm) {
  setenv("SLUICE_NATIVE", implementation->name + strlen("native_"), 1);
  sluice_status_t status = sluice_gemm_native_create(allocator, out_gemm);
  return status == SLUICE_E_UNSUPPORTED ? SLUICE_E_NOT_FOUND : status; /* the processor lacks it */
}

/* A fake that multiplies on the CPU replaces cuBLAS: this checks forms, types, grouping, k = 0. */
static sluice_status_t create_cublas(sluice_allocator_t* for_gemm, sluice_gemm_t** out_gemm) {
  static sluice_device_t* device;
  *out_gemm = NULL;
  if (device == NULL) {
    sluice_fake_cuda_reset();
    SLUICE_TRY(sluice_fake_cuda_device(sluice_process_allocator(), &device));
  }
  sluice_cublas_symbols_t symbols = sluice_fake_cublas(strcmp(implementation->name, "cublas_single") != 0);
  sluice_cublaslt_symbols_t lt = sluice_fake_cublaslt();
  int is_lt = strcmp(implementation->name, "cublas_lt") == 0;
  const sluice_gemm_cublas_options_t options = {.device = device,
                                                .memory = for_gemm,
                                                .symbols = &symbols,
                                                .lt_symbols = &lt,
                                                .how = is_lt ? SLUICE_CUBLAS_LT : SLUICE_CUBLAS_BY_RULE,
                                                .workspace_bytes = 4096};
  return sluice_gemm_cublas_create(&options, for_gemm, out_gemm);
}

static const cts_implementation_t implementations[] = {
    {"ref", sluice_gemm_ref_create, 0, "ref"},
    {"native", sluice_gemm_native_create, 0, "native ("},
    {"native_amx", create_native, 0, "native (amx)"},
    {"native_avx512_bf16", create_native, 0, "native (avx512_bf16)"},
    {"native_avx512", create_native, 0, "native (avx512)"},
    {"native_avx2", create_native, 0, "native (avx2)"},
    {"onednn", create_onednn, 1, "onednn ("},
    {"blas_openblas", create_blas, 1, "blas (libopenblas)"},
    {"blas_torch", create_blas_torch, 1, "blas (libtorch_cpu)"},
    {"host", create_host, 0, "host"},
    {"named_host", create_named, 0, "host"},
    {"auto", create_named, 1, "auto"},
    {"cublas", create_cublas, 0, "cublas (13.0.2)"},
    {"cublas_single", create_cublas, 0, "cublas (13.0.2)"},
    {"cublas_lt", create_cublas, 0, "cublas (13.0.2)"},
};

static int missing; /* its library */
static sluice_allocator_t allocator;

static const cts_exception_t* exception_for(const char* name, int32_t dtype_ab) {
  for (const cts_exception_t* e = exceptions; e < exceptions + NUM_EXCEPTIONS; ++e) {
    if (strstr(name, e->case_part) == NULL || (e->dtype_ab != 0 && e->dtype_ab != dtype_ab)) continue;
    for (int i = 0; i < 5 && e->of[i] != NULL; ++i) {
      if (strncmp(implementation->name, e->of[i], strlen(e->of[i])) == 0) return e;
    }
  }
  return NULL;
}

/* ---- one case -------------------------------------------------------------------------------------------------- */

static uint32_t random_state = 1;

static double random_value(int whole) {
  random_state = random_state * 1664525u + 1013904223u;
  if (whole) return (double)((random_state >> 24) % 9) - 4; /* 256 GEMMs of these stay below 2^12 */
  return (double)(random_state >> 8) / (1 << 23) - 1;
}

typedef struct cts_operand_s {
  sluice_matrix_t matrix;
  int64_t elements; /* with guards */
  void* block;
  void* before; /* a copy */
} cts_operand_t;

static cts_operand_t make_operand(const cts_case_t* c, int64_t rows, int64_t cols, int columns, int32_t dtype) {
  cts_operand_t o = {0};
  int64_t inner = columns ? rows : cols;
  int64_t outer = columns ? cols : rows;
  int64_t step = c->gap > 0 ? c->gap : 1;
  int64_t leading = (inner > 0 ? inner : 1) * step + c->padding;
  uint64_t bytes = sluice_dtype_bytes(dtype);
  o.elements = leading * outer + 2 * GUARD;
  uint64_t size = sluice_align_up((uint64_t)o.elements * bytes);
  o.block = aligned_alloc(64, size);
  o.before = malloc(size);
  assert_non_null(o.block);
  assert_non_null(o.before);
  for (int64_t i = 0; i < o.elements; ++i) set_element(o.block, i, dtype, random_value(c->whole));
  o.matrix.data = (char*)o.block + (uint64_t)(GUARD / 2 + c->shift) * bytes;
  o.matrix.row_stride = columns ? step : leading;
  o.matrix.col_stride = columns ? leading : step;
  memcpy(o.before, o.block, (uint64_t)o.elements * bytes);
  return o;
}

static void free_operand(cts_operand_t* o) {
  free(o->block);
  free(o->before);
}

static void check_gemm(const cts_case_t* c, int32_t dtype_ab, int32_t dtype_c, const sluice_gemm_problem_t* p,
                       const cts_operand_t* out) {
  const double unit = dtype_ab == SLUICE_DTYPE_F64 ? 0x1p-53 : 0x1p-24;
  double last = 0; /* one rounding to C's dtype; f32 and f64 sums already end there */
  if (dtype_c == SLUICE_DTYPE_BF16) last = 0x1p-8;
  if (dtype_c == SLUICE_DTYPE_F16) last = 0x1p-11;
  const uint64_t bytes = sluice_dtype_bytes(dtype_c);
  const int64_t first = ((const char*)p->c.data - (const char*)out->block) / (int64_t)bytes;
  char* written = calloc((size_t)out->elements, 1);
  assert_non_null(written);
  for (int64_t i = 0; i < p->m; ++i) {
    for (int64_t j = 0; j < p->n; ++j) {
      int64_t at = first + i * p->c.row_stride + j * p->c.col_stride;
      written[at] = 1;
      double sum = 0;
      double size = 0;
      for (int64_t l = 0; l < p->k; ++l) {
        double x = get_element(p->a.data, i * p->a.row_stride + l * p->a.col_stride, dtype_ab) *
                   get_element(p->b.data, l * p->b.row_stride + j * p->b.col_stride, dtype_ab);
        sum += x;
        size += fabs(x);
      }
      if (c->beta != 0) {
        double x = get_element(out->before, at, dtype_c);
        sum += x;
        size += fabs(x);
      }
      double got = get_element(out->block, at, dtype_c);
      double tolerance = (double)(p->k + 2) * unit * size;
      tolerance += last * (fabs(sum) + tolerance);
      if (dtype_c == SLUICE_DTYPE_F16) tolerance += 0x1p-25; /* half a step of its subnormals */
      int good = fabs(got - sum) <= tolerance;
      if (c->whole) {
        double rounded[1];
        set_element(rounded, 0, dtype_c, sum);
        good = memcmp(rounded, (const char*)out->block + (uint64_t)at * bytes, bytes) == 0;
      }
      if (!good) {
        fail_msg("%s, %s -> %s: C[%lld][%lld] is %.9g, expected %.9g within %.3g", c->name, sluice_dtype_name(dtype_ab),
                 sluice_dtype_name(dtype_c), (long long)i, (long long)j, got, sum, c->whole ? 0.0 : tolerance);
      }
    }
  }
  for (int64_t at = 0; at < out->elements; ++at) {
    if (written[at]) continue;
    if (memcmp((const char*)out->block + (uint64_t)at * bytes, (const char*)out->before + (uint64_t)at * bytes,
               bytes) != 0) {
      fail_msg("%s, %s -> %s: element %lld outside C was written", c->name, sluice_dtype_name(dtype_ab),
               sluice_dtype_name(dtype_c), (long long)(at - first));
    }
  }
  free(written);
}

static void run_dtype(sluice_gemm_t* gemm, const cts_case_t* c, int32_t dtype_ab, int32_t dtype_c) {
  enum { MOST = 32 };
  int64_t count = c->count > 0 ? c->count : 1;
  assert_true(count <= MOST);
  sluice_gemm_problem_t problems[MOST];
  cts_operand_t operands[MOST][3];
  for (int64_t i = 0; i < count; ++i) {
    sluice_gemm_problem_t* p = &problems[i];
    p->m = c->m;
    p->n = c->n;
    p->k = c->k;
    /* The rows of an expert: m, or k in a weight gradient. */
    if (c->count > 0 && c->a_columns) p->k = i * 7 % (c->k + 1);
    if (c->count > 0 && !c->a_columns) p->m = i * 7 % (c->m + 1);
    operands[i][0] = make_operand(c, p->m, p->k, c->a_columns, dtype_ab);
    operands[i][1] = make_operand(c, p->k, p->n, c->b_columns, dtype_ab);
    operands[i][2] = make_operand(c, p->m, p->n, c->c_columns, dtype_c);
    p->a = operands[i][0].matrix;
    p->b = operands[i][1].matrix;
    p->c = operands[i][2].matrix;
    for (int64_t r = 0; c->beta == 0 && r < p->m; ++r) {
      for (int64_t s = 0; s < p->n; ++s) {
        set_element(p->c.data, r * p->c.row_stride + s * p->c.col_stride, dtype_c, (double)NAN);
      }
    }
  }
  sluice_grouped_gemm_t list = {problems, count, dtype_ab, dtype_c, c->beta};
  const cts_exception_t* exception = exception_for(c->name, dtype_ab);
  int taken = sluice_gemm_supports(gemm, &list);
  if (exception != NULL && taken && !exception->by_machine) {
    fail_msg("%s takes %s, %s -> %s, though listed (%s): strike it from the list", implementation->name, c->name,
             sluice_dtype_name(dtype_ab), sluice_dtype_name(dtype_c), exception->reason);
  }
  if (exception == NULL && !taken) {
    fail_msg("%s does not take %s, %s -> %s, and does not say why", implementation->name, c->name,
             sluice_dtype_name(dtype_ab), sluice_dtype_name(dtype_c));
  }
  if (taken) {
    uint64_t live = allocator.num_live;
    sluice_status_t status = sluice_gemm_run(gemm, &list);
    if (status != SLUICE_OK) fail_msg("%s: %s", c->name, last_message());
    assert_int_equal(allocator.num_live, live);
    for (int64_t i = 0; i < count; ++i) check_gemm(c, dtype_ab, dtype_c, &problems[i], &operands[i][2]);
  } else {
    print_message("not taken: %s -> %s: %s\n", sluice_dtype_name(dtype_ab), sluice_dtype_name(dtype_c),
                  exception->reason);
    assert_int_equal(sluice_gemm_run(gemm, &list), SLUICE_E_UNSUPPORTED);
  }
  for (int64_t i = 0; i < count; ++i) {
    for (int j = 0; j < 3; ++j) free_operand(&operands[i][j]);
  }
}

static void skip_when_missing(void) {
  const char* name = implementation->name;
  if (implementation->foreign && SANITIZED_THREADS) skip_because("ThreadSanitizer: it does not see inside %s", name);
  if (strcmp(name, "blas_torch") == 0 && SANITIZED_ADDRESSES) skip_because("AddressSanitizer: torch is not loaded");
  if (missing && strncmp(name, "native", 6) == 0) skip_because("this processor has no %s", name);
  if (missing) skip_because("the library of %s is not installed", name);
}

static void run_case(void** state) {
  skip_when_missing();
  allocator.num_live = 0; /* a case that failed has left some */
  sluice_gemm_t* gemm = NULL;
  assert_int_equal(implementation->create(&allocator, &gemm), SLUICE_OK);
  assert_non_null(strstr(gemm->name, implementation->expected_name));
  for (int i = 0; i < NUM_DTYPES; ++i) run_dtype(gemm, *state, dtypes[i][0], dtypes[i][1]);
  sluice_gemm_destroy(gemm);
  assert_int_equal(allocator.num_live, 0);
}

TEST(Gemm_NthAllocationFails_LeaksNothing) {
  skip_when_missing();
  allocator.num_live = allocator.current_bytes = 0; /* a case that failed has left some */
  for (int32_t dtype = 0; dtype < 2; ++dtype) {
    int64_t nth = 0;
    for (int done = 0; !done; ++nth) {
      uint16_t a[6] = {0};
      uint16_t b[6] = {0};
      uint16_t c[4];
      float a32[6] = {0};
      float b32[6] = {0};
      float c32[4];
      sluice_gemm_problem_t p = {2, 2, 3, {a32, 3, 1}, {b32, 2, 1}, {c32, 2, 1}};
      sluice_grouped_gemm_t list = {&p, 1, SLUICE_DTYPE_F32, SLUICE_DTYPE_F32, 0};
      if (dtype == 1) {
        p.a.data = a;
        p.b.data = b;
        p.c.data = c;
        list.dtype_ab = list.dtype_c = SLUICE_DTYPE_BF16;
      }
      assert_true(nth < 100);
      allocator.fail_after = nth;
      sluice_gemm_t* gemm = NULL;
      sluice_status_t status = implementation->create(&allocator, &gemm);
      if (status == SLUICE_OK && sluice_gemm_supports(gemm, &list)) status = sluice_gemm_run(gemm, &list);
      assert_true(status == SLUICE_OK || status == SLUICE_E_NO_MEMORY);
      done = allocator.fail_after >= 0; /* no allocation was left to fail */
      if (done) assert_int_equal(status, SLUICE_OK);
      allocator.fail_after = -1;
      sluice_gemm_destroy(gemm);
      assert_int_equal(allocator.num_live, 0);
      assert_int_equal(allocator.current_bytes, 0);
    }
    assert_true(nth > 1);
  }
}

TEST(Gemm_UnknownDtypeOrBeta_Refused) {
  skip_when_missing();
  float x[1] = {1};
  sluice_gemm_problem_t p = {1, 1, 1, {x, 1, 1}, {x, 1, 1}, {x, 1, 1}};
  sluice_grouped_gemm_t list = {&p, 1, SLUICE_DTYPE_I64, SLUICE_DTYPE_F32, 0};
  sluice_gemm_t* gemm = NULL;
  assert_int_equal(implementation->create(&allocator, &gemm), SLUICE_OK);
  assert_int_equal(sluice_gemm_run(gemm, &list), SLUICE_E_UNSUPPORTED);
  list.dtype_ab = SLUICE_DTYPE_F32;
  list.beta = 0.5f;
  assert_int_equal(sluice_gemm_run(gemm, &list), SLUICE_E_INVALID_ARGUMENT);
  list.beta = 0;
  p.k = -1;
  assert_int_equal(sluice_gemm_run(gemm, &list), SLUICE_E_INVALID_ARGUMENT);
  list.count = 0;
  assert_int_equal(sluice_gemm_run(gemm, &list), SLUICE_OK);
  sluice_gemm_destroy(gemm);
}

int main(int argc, char** argv) {
  for (size_t i = 0; i < sizeof implementations / sizeof implementations[0]; ++i) {
    if (argc > 1 && strcmp(argv[1], implementations[i].name) == 0) implementation = &implementations[i];
  }
  if (implementation == NULL) {
    fprintf(stderr, "usage: gemm_cts ref|native|onednn|blas_openblas|blas_torch|host|named_host|auto\n");
    return 2;
  }
  unsetenv("SLUICE_GEMM");
  sluice_allocator_init(&allocator, NULL, NULL, NULL);
  sluice_gemm_t* gemm = NULL;
  int sanitized = (implementation->foreign && SANITIZED_THREADS) ||
                  (strcmp(implementation->name, "blas_torch") == 0 && SANITIZED_ADDRESSES);
  if (!sanitized) {
    missing = implementation->create(&allocator, &gemm) == SLUICE_E_NOT_FOUND;
    sluice_gemm_destroy(gemm);
  }
  struct CMUnitTest rows[NUM_CASES];
  for (int i = 0; i < NUM_CASES; ++i) {
    const struct CMUnitTest row = {.name = cases[i].name, .test_func = run_case, .initial_state = (void*)&cases[i]};
    rows[i] = row;
  }
  const int failed = RUN_CASES_AFTER(rows);
  sluice_allocator_deinit(&allocator);
  return failed;
}
