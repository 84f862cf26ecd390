// SPDX-License-Identifier: Apache-2.0
/* Tests what "native" promises beyond the conformance suite, for each set of kernels that this processor can run. For
 * all sizes an element is one chain of fused multiply-adds over k, or the result of the processor's tiles or pairs, so
 * its bits are known exactly. Nothing outside the operands is read or written. The workspace is bounded. */
#include <dlfcn.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/test/fake_pool.h"
#include "backend/gemm/gemm.h"
#include "backend/gemm/native/gemm_native.h"
#include "backend/gemm/native/native_kernels.h"
#include "backend/gemm/test/operands.h"

static sluice_allocator_t allocator;
static const char* set_name; /* of the kernels under test */
static sluice_gemm_t* gemm;  /* NULL: this processor cannot run them */

static int set_up(void** state) {
  (void)state;
  sluice_allocator_init(&allocator, NULL, NULL, NULL);
  setenv("SLUICE_NATIVE", set_name, 1);
  sluice_status_t status = sluice_gemm_native_create(&allocator, &gemm);
  if (status == SLUICE_OK && strstr(gemm->name, set_name) == NULL) return 1;
  return status != SLUICE_OK && status != SLUICE_E_UNSUPPORTED;
}

static int tear_down(void** state) {
  (void)state;
  sluice_gemm_destroy(gemm);
  int leaked = allocator.num_live != 0;
  sluice_allocator_deinit(&allocator);
  return leaked;
}

static void skip_when_missing(void) {
  if (gemm == NULL) skip_because("this processor has no %s", set_name);
}

static float get(const void* data, int64_t at, int32_t dtype) { return (float)get_element(data, at, dtype); }

static uint32_t seed = 1;
static float next_value(void) {
  seed = seed * 1664525u + 1013904223u;
  return (float)(int32_t)(seed >> 8) / (1 << 23) - 1;
}

typedef struct shape_s {
  int64_t m, n, k;
  int trans_a, trans_b;
  float beta;
} shape_t;

static int by_tiles(int32_t dtype_ab) { return strcmp(set_name, "amx") == 0 && dtype_ab == SLUICE_DTYPE_BF16; }

static int by_pairs(int32_t dtype_ab) { return strcmp(set_name, "avx512_bf16") == 0 && dtype_ab == SLUICE_DTYPE_BF16; }

/* Whether subnormal bf16 are flushed to zero. */
static int flushes(void) { return by_tiles(SLUICE_DTYPE_BF16) || by_pairs(SLUICE_DTYPE_BF16); }

static float normal_or_zero(float x) { return fpclassify(x) == FP_SUBNORMAL ? copysignf(0, x) : x; }

/* Adds to a row of C as VDPBF16PS does: the odd k of each pair first, with subnormal numbers as zero at each step. */
static void add_by_pairs(const shape_t* s, const sluice_gemm_problem_t* p, int64_t i, float* out) {
  for (int64_t j = 0; j < s->n; ++j) {
    float sum = normal_or_zero(out[j]);
    for (int64_t k0 = 0; k0 < s->k; k0 += 2) {
      for (int64_t k = k0 + 1; k >= k0; --k) {
        float x = 0, y = 0;
        if (k < s->k) {
          x = get(p->a.data, i * p->a.row_stride + k * p->a.col_stride, SLUICE_DTYPE_BF16);
          y = get(p->b.data, k * p->b.row_stride + j * p->b.col_stride, SLUICE_DTYPE_BF16);
        }
        sum = normal_or_zero(fmaf(normal_or_zero(x), normal_or_zero(y), sum));
      }
    }
    out[j] = sum;
  }
}

/* out[j] += the sum over k of a[k] * b[k][j] as the tiles of AMX compute it: for each 32 k, one chain of the even k and
 * one of the odd k; C is added last. No value here is subnormal. */
static void add_by_tiles(const shape_t* s, const sluice_gemm_problem_t* p, int64_t i, float* out) {
  for (int64_t j = 0; j < s->n; ++j) {
    float sum = 0;
    for (int64_t k0 = 0; k0 < s->k; k0 += 32) {
      float chains[2] = {0, 0};
      for (int64_t k = k0; k < s->k && k < k0 + 32; ++k) {
        float x = get(p->a.data, i * p->a.row_stride + k * p->a.col_stride, SLUICE_DTYPE_BF16);
        float y = get(p->b.data, k * p->b.row_stride + j * p->b.col_stride, SLUICE_DTYPE_BF16);
        chains[k & 1] = fmaf(x, y, chains[k & 1]);
      }
      sum += chains[0] + chains[1];
    }
    out[j] += sum;
  }
}

/* Compares the GEMM of `shape` bit by bit with the chain. Each operand is fenced. */
static void check_bits(const shape_t* s, int32_t dtype_ab, int32_t dtype_c) {
  const int64_t m = s->m, n = s->n, k = s->k;
  const int64_t bytes = (int64_t)sluice_dtype_bytes(dtype_ab), bytes_c = (int64_t)sluice_dtype_bytes(dtype_c);
  fenced_t a = fenced(m * k * bytes), b = fenced(k * n * bytes), c = fenced(m * n * bytes_c);
  for (int64_t i = 0; i < m * k; ++i) set_element(a.data, i, dtype_ab, next_value());
  for (int64_t i = 0; i < k * n; ++i) set_element(b.data, i, dtype_ab, next_value());
  float* wanted = malloc((size_t)(m * n) * sizeof *wanted);
  assert_non_null(wanted);
  for (int64_t i = 0; i < m * n; ++i) {
    set_element(c.data, i, dtype_c, s->beta != 0 ? next_value() : NAN);
    wanted[i] = s->beta != 0 ? get(c.data, i, dtype_c) : 0;
  }
  sluice_gemm_problem_t p = {m, n, k, {a.data, k, 1}, {b.data, n, 1}, {c.data, n, 1}};
  if (s->trans_a) p.a = (sluice_matrix_t){a.data, 1, m};
  if (s->trans_b) p.b = (sluice_matrix_t){b.data, 1, k};
  for (int64_t i = 0; i < m; ++i) {
    if (by_tiles(dtype_ab)) {
      add_by_tiles(s, &p, i, wanted + i * n);
      continue;
    }
    if (by_pairs(dtype_ab)) {
      add_by_pairs(s, &p, i, wanted + i * n);
      continue;
    }
    for (int64_t l = 0; l < k; ++l) {
      float x = get(a.data, i * p.a.row_stride + l * p.a.col_stride, dtype_ab);
      for (int64_t j = 0; j < n; ++j) {
        wanted[i * n + j] = fmaf(x, get(b.data, l * p.b.row_stride + j * p.b.col_stride, dtype_ab), wanted[i * n + j]);
      }
    }
  }
  sluice_grouped_gemm_t list = {&p, 1, dtype_ab, dtype_c, s->beta};
  assert_int_equal(sluice_gemm_run(gemm, &list), SLUICE_OK);
  for (int64_t i = 0; i < m * n; ++i) {
    char rounded[8]; /* for any type */
    set_element(rounded, 0, dtype_c, wanted[i]);
    if (memcmp(rounded, (const char*)c.data + i * bytes_c, (size_t)bytes_c) == 0) continue;
    fail_msg("[%lld, %lld, %lld] %s%s beta %g, %s -> %s: C[%lld][%lld] is %.9g, expected %.9g", (long long)m,
             (long long)n, (long long)k, s->trans_a ? "T" : "N", s->trans_b ? "T" : "N", (double)s->beta,
             sluice_dtype_name(dtype_ab), sluice_dtype_name(dtype_c), (long long)(i / n), (long long)(i % n),
             (double)get(c.data, i, dtype_c), (double)get(rounded, 0, dtype_c));
  }
  free(wanted);
  unfence(&a);
  unfence(&b);
  unfence(&c);
}

static const int32_t dtypes[][2] = {{SLUICE_DTYPE_F32, SLUICE_DTYPE_F32},
                                    {SLUICE_DTYPE_BF16, SLUICE_DTYPE_BF16},
                                    {SLUICE_DTYPE_BF16, SLUICE_DTYPE_F32},
                                    {SLUICE_DTYPE_F16, SLUICE_DTYPE_F16},
                                    {SLUICE_DTYPE_F16, SLUICE_DTYPE_F32}};
enum { NUM_DTYPES = 5 };

TEST(Native_EveryTileHeight_IsTheChainOfFusedAdds) {
  skip_when_missing();
  for (int64_t m = 1; m <= 30; ++m) {
    for (int d = 0; d < NUM_DTYPES; ++d) {
      shape_t s = {m, 1 + m * 5 % 67, 1 + m * 11 % 83, (int)m & 1, (int)m >> 1 & 1, (float)(m >> 2 & 1)};
      check_bits(&s, dtypes[d][0], dtypes[d][1]);
    }
  }
}

/* The first tile over each panel packs a row-by-row B in f32: tiles of every height, alone and before others. */
TEST(Native_TilesThatPack_AreTheChainOfFusedAdds) {
  skip_when_missing();
  for (int64_t m = 1; m <= 60; m += m == 14 ? 29 : 1) {
    shape_t s = {m, 1 + m * 7 % 75, 1 + m * 13 % 150, 0, 0, (float)(m & 1)};
    check_bits(&s, SLUICE_DTYPE_F32, SLUICE_DTYPE_F32);
  }
}

/* GEMMs of few rows with contiguous k use kernels that do not pack B: every height, remainders of columns and of k, and
 * k so large that C holds sums between blocks. */
TEST(Native_FewRowsAlongK_AreTheChainOfFusedAdds) {
  skip_when_missing();
  for (int64_t m = 1; m <= 33; ++m) {
    for (int d = 0; d < NUM_DTYPES; ++d) {
      shape_t s = {m, 1 + (m * 7 + d * 5) % 53, 1 + (m * 11 + d * 23) % 67, 0, 1, (float)((m + d) & 1)};
      check_bits(&s, dtypes[d][0], dtypes[d][1]);
      s.n += 48, s.k = 64;
      check_bits(&s, dtypes[d][0], dtypes[d][1]);
    }
  }
  for (int d = 0; d < NUM_DTYPES; ++d) {
    const shape_t one = {3, 29, 16400, 0, 1, (float)(d & 1)}, two = {30, 29, 8203, 0, 1, (float)(d & 1)};
    check_bits(&one, dtypes[d][0], dtypes[d][1]);
    check_bits(&two, dtypes[d][0], dtypes[d][1]);
  }
}

/* Sizes at which each kind of block is cut, and sizes one larger or smaller. */
TEST(Native_EveryCut_IsTheChainOfFusedAdds) {
  skip_when_missing();
  static const shape_t shapes[] = {
      {3, 40, 1025, 0, 1, 0},  {20, 65, 2049, 0, 1, 1},  {17, 33, 513, 0, 0, 0},  {30, 70, 1500, 0, 0, 1},
      {9, 300, 700, 0, 0, 0},  {130, 31, 1024, 0, 1, 0}, {257, 33, 520, 0, 0, 1}, {300, 40, 1030, 0, 1, 0},
      {520, 70, 40, 1, 0, 1},  {70, 1100, 64, 1, 0, 0},  {33, 2100, 70, 1, 0, 1}, {40, 40, 600, 1, 1, 0},
      {1, 600, 1100, 0, 1, 0}, {2, 130, 3000, 0, 0, 1},  {513, 1, 1027, 0, 1, 1}, {290, 600, 530, 0, 0, 0},
  };
  for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; ++i) {
    check_bits(&shapes[i], SLUICE_DTYPE_F32, SLUICE_DTYPE_F32);
    int d = 1 + (int)i % (NUM_DTYPES - 1); /* sums outside of C are cut the same way for all 16-bit types */
    check_bits(&shapes[i], dtypes[d][0], dtypes[d][1]);
    check_bits(&shapes[i], SLUICE_DTYPE_BF16, SLUICE_DTYPE_BF16);
  }
}

/* Sizes at which the tiles of AMX are cut: sums kept between blocks of k, stripes, several blocks of rows. */
TEST(Native_EveryCutOfBf16_BitsAreKnown) {
  skip_when_missing();
  static const shape_t shapes[] = {
      {250, 530, 1056, 0, 1, 0}, {5, 70, 16420, 0, 1, 1},  {40, 33, 5500, 0, 1, 0},
      {20, 530, 300, 0, 0, 1},   {270, 530, 290, 1, 0, 1}, {270, 530, 31, 1, 0, 0},
      {61, 100, 290, 1, 1, 1},   {150, 600, 500, 1, 0, 1}, {40, 530, 1060, 1, 0, 0},
  };
  for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; ++i) {
    check_bits(&shapes[i], SLUICE_DTYPE_BF16, i % 2 ? SLUICE_DTYPE_BF16 : SLUICE_DTYPE_F32);
  }
}

/* Tiles and pairs take and return subnormal numbers as zeros; a chain of fused multiply-adds keeps them. */
TEST(Native_SubnormalBf16_ZeroOnlyInTilesAndPairs) {
  skip_when_missing();
  uint16_t tiny = 0x0008, large = sluice_f32_to_bf16(0x1p100f); /* 2^-130 */
  float c = NAN;
  sluice_gemm_problem_t p = {1, 1, 1, {&tiny, 1, 1}, {&large, 1, 1}, {&c, 1, 1}};
  sluice_grouped_gemm_t list = {&p, 1, SLUICE_DTYPE_BF16, SLUICE_DTYPE_F32, 0};
  assert_int_equal(sluice_gemm_run(gemm, &list), SLUICE_OK);
  assert_true(c == (flushes() ? 0 : 0x1p-30f));
}

/* All ways to store tiles round in the same way (adjacent or single tiles, transposed or not): ties, overflow, NaN, and
 * subnormal numbers, which tiles and pairs flush to zero. */
TEST(Native_Bf16AtItsLimits_RoundedAlikeInEveryColumn) {
  skip_when_missing();
  enum { M = 18, N = 75, LIMITS = 7 };
  const uint16_t zeros = flushes() ? 0xff80 : 0xffff;                /* the bits that a subnormal number keeps */
  const uint16_t negative = by_pairs(SLUICE_DTYPE_BF16) ? 0 : zeros; /* pairs start from -0 and add 0 */
  const struct {
    uint16_t c;
    float x; /* added to it */
    uint16_t wanted;
  } limits[LIMITS] = {
      {0x3f80, 0x1p-8f, 0x3f80},                               /* ties go to even */
      {0x3f81, 0x1p-8f, 0x3f82},   {0x7f7f, 0x1p119f, 0x7f80}, /* above the largest number: infinity */
      {0x7f80, 1, 0x7f80},         {0x7fc1, 1, 0x7fc1},
      {0x0003, 0, 0x0003 & zeros}, {0x8003, 0, 0x8003 & negative},
  };
  for (int trans_b = 0; trans_b < 2; ++trans_b) {
    uint16_t a[M * 2], b[N * 2] = {0}, c[M * N];
    for (int i = 0; i < M; ++i) a[2 * i] = 0x3f80, a[2 * i + 1] = 0;
    for (int j = 0; j < N; ++j) b[trans_b ? 2 * j : j] = sluice_f32_to_bf16(limits[j % LIMITS].x);
    for (int i = 0; i < M * N; ++i) c[i] = limits[i % N % LIMITS].c;
    sluice_gemm_problem_t p = {M, N, 2, {a, 2, 1}, {b, N, 1}, {c, N, 1}};
    if (trans_b) p.b = (sluice_matrix_t){b, 1, 2};
    sluice_grouped_gemm_t list = {&p, 1, SLUICE_DTYPE_BF16, SLUICE_DTYPE_BF16, 1};
    assert_int_equal(sluice_gemm_run(gemm, &list), SLUICE_OK);
    for (int i = 0; i < M * N; ++i) {
      if (c[i] == limits[i % N % LIMITS].wanted) continue;
      fail_msg("trans_b %d, column %d: %04x, expected %04x", trans_b, i % N, c[i], limits[i % N % LIMITS].wanted);
    }
  }
}

TEST(Native_NanAndInfinity_TravelAsInArithmetic) {
  skip_when_missing();
  for (int d = 0; d < NUM_DTYPES; ++d) {
    char a[8 * 3], b[8 * 3], c[8 * 3]; /* for any type */
    for (int i = 0; i < 3; ++i) set_element(a, i, dtypes[d][0], i == 1 ? NAN : i == 2 ? INFINITY : 1);
    set_element(b, 0, dtypes[d][0], 2);
    sluice_gemm_problem_t p = {3, 1, 1, {a, 1, 1}, {b, 1, 1}, {c, 1, 1}};
    sluice_grouped_gemm_t list = {&p, 1, dtypes[d][0], dtypes[d][1], 0};
    assert_int_equal(sluice_gemm_run(gemm, &list), SLUICE_OK);
    assert_true(get(c, 0, dtypes[d][1]) == 2);
    assert_true(isnan(get(c, 1, dtypes[d][1])));
    assert_true(isinf(get(c, 2, dtypes[d][1])));
  }
}

/* ---- threads ---------------------------------------------------------------------------------------------------- */

enum { PROBLEMS = 5, MOST = 90 * 500 };

/* Runs GEMMs of uneven sizes, one of them empty, into `c`, which is filled with NaN before. */
static void run_uneven(sluice_gemm_t* by, int32_t dtype, const float* x, float c[PROBLEMS][MOST]) {
  static const int64_t sizes[PROBLEMS][3] = {{90, 500, 70}, {1, 333, 300}, {0, 64, 64}, {33, 31, 0}, {7, 450, 1100}};
  sluice_gemm_problem_t problems[PROBLEMS];
  for (int i = 0; i < PROBLEMS; ++i) {
    const int64_t m = sizes[i][0], n = sizes[i][1], k = sizes[i][2];
    for (int j = 0; j < MOST; ++j) c[i][j] = NAN;
    problems[i] =
        (sluice_gemm_problem_t){m, n, k, {(void*)x, k > 0 ? k : 1, 1}, {(void*)x, 1, k > 0 ? k : 1}, {c[i], n, 1}};
  }
  sluice_grouped_gemm_t list = {problems, PROBLEMS, dtype, SLUICE_DTYPE_F32, 0};
  assert_int_equal(sluice_gemm_run(by, &list), SLUICE_OK);
}

static void any_number_of_threads(int32_t dtype) {
  static float x[500000], one[PROBLEMS][MOST], many[PROBLEMS][MOST];
  char why[256];
  for (int i = 0; i < 500000; ++i) set_element(x, i, dtype, next_value());
  pool_max = 1;
  pool_fewer = 0;
  sluice_gemm_t* pooled = NULL;
  assert_int_equal(sluice_gemm_native_create_with(&fake_pool, &allocator, &pooled, why, sizeof why), SLUICE_OK);
  run_uneven(pooled, dtype, x, one);
  for (int threads = 2; threads <= 40; threads += threads < 8 ? 1 : 8) {
    for (pool_fewer = 0; pool_fewer < 2; ++pool_fewer) {
      pool_max = threads;
      pool_asked = 0;
      uint64_t before = allocator.current_bytes;
      sluice_allocator_reset_peak(&allocator);
      run_uneven(pooled, dtype, x, many);
      assert_memory_equal(one, many, sizeof one);
      assert_true(pool_asked > 1 && pool_asked <= threads);
      assert_int_equal(allocator.current_bytes, before);
      assert_true(allocator.peak_bytes - before <= SLUICE_GEMM_THREAD_BYTES * (uint64_t)threads);
    }
  }
  pool_inside = 1; /* the host calls from its own parallel region */
  pool_asked = 0;
  run_uneven(pooled, dtype, x, many);
  assert_int_equal(pool_asked, 0);
  assert_memory_equal(one, many, sizeof one);
  pool_inside = 0;
  float y[4] = {1, 2, 3, 4};
  sluice_gemm_problem_t p = {2, 1, 2, {y, 2, 1}, {y, 1, 1}, {y, 1, 1}};
  sluice_grouped_gemm_t small = {&p, 1, SLUICE_DTYPE_F32, SLUICE_DTYPE_F32, 0};
  assert_int_equal(sluice_gemm_run(pooled, &small), SLUICE_OK); /* too little for a second thread */
  assert_int_equal(pool_asked, 0);
  sluice_gemm_destroy(pooled);
}

TEST(Native_AnyNumberOfThreads_SameBits) {
  skip_when_missing();
  any_number_of_threads(SLUICE_DTYPE_F32);
  any_number_of_threads(SLUICE_DTYPE_BF16);
}

#if !defined(__SANITIZE_THREAD__)
/* An OpenMP runtime that the process has loaded with RTLD_GLOBAL, as `import torch` does. */
TEST(Native_RealOpenmp_FoundAndSameBits) {
  skip_when_missing();
  void* openmp = dlopen("libgomp.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (openmp == NULL) skip_because("no libgomp.so.1");
  void (*set_threads)(int);
  *(void**)&set_threads = dlsym(openmp, "omp_set_num_threads");
  static float x[500000], one[PROBLEMS][MOST], many[PROBLEMS][MOST];
  for (int i = 0; i < 500000; ++i) set_element(x, i, SLUICE_DTYPE_BF16, next_value());
  sluice_gemm_t* pooled = NULL;
  assert_int_equal(sluice_gemm_native_create(&allocator, &pooled), SLUICE_OK);
  for (int threads = 1; threads <= 5; threads += 2) {
    set_threads(threads);
    sluice_threads_t pool = sluice_threads_find();
    assert_int_equal(sluice_threads_available(&pool), threads);
    run_uneven(pooled, SLUICE_DTYPE_BF16, x, threads == 1 ? one : many);
    if (threads > 1) assert_memory_equal(one, many, sizeof one);
  }
  set_threads(1);
  sluice_gemm_destroy(pooled);
}
#endif

/* At most half of the memory that gemm.h allows, since "auto" may use the other half at the same time. */
TEST(Native_LargeGemms_WorkspaceIsBounded) {
  skip_when_missing();
  static const shape_t shapes[] = {{600, 8200, 24, 0, 1, 0}, {8200, 40, 600, 0, 0, 0}, {40, 40, 8200, 0, 1, 0}};
  for (int i = 0; i < 3; ++i) {
    const shape_t* s = &shapes[i];
    void* a = calloc((size_t)(s->m * s->k), 2);
    void* b = calloc((size_t)(s->k * s->n), 2);
    void* c = calloc((size_t)(s->m * s->n), 2);
    sluice_gemm_problem_t p = {s->m, s->n, s->k, {a, s->k, 1}, {b, s->n, 1}, {c, s->n, 1}};
    if (s->trans_b) p.b = (sluice_matrix_t){b, 1, s->k};
    sluice_grouped_gemm_t list = {&p, 1, SLUICE_DTYPE_BF16, SLUICE_DTYPE_BF16, 0};
    uint64_t before = allocator.current_bytes;
    sluice_allocator_reset_peak(&allocator);
    assert_int_equal(sluice_gemm_run(gemm, &list), SLUICE_OK);
    assert_int_equal(allocator.current_bytes, before);
    assert_true(allocator.peak_bytes > before);
    assert_true(allocator.peak_bytes - before <= SLUICE_GEMM_SCRATCH_BYTES / 2);
    free(a);
    free(b);
    free(c);
  }
}

int main(void) {
  sluice_native_set_t sets[SLUICE_NATIVE_SETS];
  int failed = 0;
  for (int i = 0, count = sluice_native_sets(sets); i < count; ++i) {
    set_name = sets[i].name;
    print_message("%s\n", set_name);
    failed += run_cases_each(set_up, tear_down);
  }
  return failed;
}
