// SPDX-License-Identifier: Apache-2.0
/* Parts of GEMMs: the number of parts in a run, and the memory that is evicted before they are measured. */

#include "backend/base/cache.h"
#include "backend/gemm/auto/auto_parts.h"
#include "backend/gemm/gemm_form.h"
#include "third_party/bazel/test.h"

enum { M = 96, N = 80, K = 8, GAP = 16, EXPERTS = 2 };

/* The memory that was evicted since the last check. */
static uint64_t evicted_bytes;
static const char *evicted_from, *evicted_to;

static void note(const void* data, uint64_t bytes) {
  const char* at = data;
  if (evicted_bytes == 0 || at < evicted_from) evicted_from = at;
  if (evicted_bytes == 0 || at + bytes > evicted_to) evicted_to = at + bytes;
  evicted_bytes += bytes;
}

static float x[EXPERTS][K * M], y[EXPERTS][K * N], c[EXPERTS][M * (N + GAP)];
static sluice_gemm_problem_t problems[EXPERTS];

/* dW = dY^T X for each expert, with rows of dW `ld` apart; with trans_a = 0, a GEMM over rows of dY. */
static sluice_grouped_gemm_t list_of(int trans_a, int64_t ld, float beta) {
  for (int e = 0; e < EXPERTS; ++e) {
    problems[e] = (sluice_gemm_problem_t){.m = M, .n = N, .k = K};
    problems[e].a = trans_a ? (sluice_matrix_t){x[e], 1, M} : (sluice_matrix_t){x[e], K, 1};
    problems[e].b = (sluice_matrix_t){y[e], N, 1};
    problems[e].c = (sluice_matrix_t){c[e], ld, 1};
  }
  return (sluice_grouped_gemm_t){problems, EXPERTS, SLUICE_DTYPE_F32, SLUICE_DTYPE_F32, beta, NULL};
}

static sluice_gemm_parts_t begin_with(const sluice_grouped_gemm_t* list, int threads, double most_flop,
                                      uint64_t most_bytes) {
  sluice_gemm_form_t form;
  sluice_gemm_parts_t parts;
  assert_true(sluice_gemm_form(&problems[0], &form));
  sluice_gemm_parts_begin(&parts, list, &form, threads, most_flop, most_bytes);
  assert_true(parts.evict == sluice_cache_evict);
  parts.evict = note;
  return parts;
}

static sluice_gemm_parts_t begin(const sluice_grouped_gemm_t* list, double most_flop) {
  return begin_with(list, 1, most_flop, UINT64_MAX);
}

/* The whole result of a part is evicted each time, in its own place or in reused scratch memory. */
TEST(Next_WeightGradient_ItsWholeResultComesFromMemory) {
  for (int adds = 0; adds < 2; ++adds) {
    const sluice_grouped_gemm_t list = list_of(1, N, (float)adds);
    sluice_gemm_parts_t parts = begin(&list, 1.0 * M * N * K); /* half a GEMM */
    float* scratch = adds ? malloc(sluice_gemm_parts_result_bytes(&parts)) : NULL;
    assert_true(adds == (sluice_gemm_parts_result_bytes(&parts) > 0));
    for (int run = 0; run < 6; ++run) {
      evicted_bytes = 0;
      const sluice_gemm_problem_t* p = sluice_gemm_parts_next(&parts, scratch);
      const uint64_t bytes = (uint64_t)(p->m * p->n) * sizeof(float);
      assert_int_equal(p->m * p->n * 2, M * N);
      assert_int_equal(evicted_bytes, bytes);
      assert_ptr_equal(evicted_from, p->c.data);
      assert_int_equal(evicted_to - evicted_from, bytes);
      assert_true((p->c.data == scratch) == adds);
    }
    free(scratch);
  }
}

/* The pages of a gradient are touched before it is measured. A result that the call adds to is never touched. */
TEST(Next_OwnResult_TouchedOnlyWhereItIsOverwritten) {
  for (int adds = 0; adds < 2; ++adds) {
    memset(c, 0xff, sizeof c);
    const sluice_grouped_gemm_t list = list_of(1, N + GAP, (float)adds);
    sluice_gemm_parts_t parts = begin(&list, 2.0 * M * N * K);
    float* scratch = adds ? calloc(1, sluice_gemm_parts_result_bytes(&parts)) : NULL;
    (void)sluice_gemm_parts_next(&parts, scratch);
    for (int i = 0; i < M; ++i) {
      const unsigned char* row = (const unsigned char*)(c[0] + i * (N + GAP));
      assert_int_equal(row[0], adds ? 0xff : 0);
      for (size_t j = N * sizeof(float); j < (N + GAP) * sizeof(float); ++j) assert_int_equal(row[j], 0xff);
    }
    free(scratch);
  }
}

TEST(Next_ResultWithGaps_WhatLiesBetweenItsRowsStays) {
  const sluice_grouped_gemm_t list = list_of(1, N + GAP, 0);
  sluice_gemm_parts_t parts = begin(&list, 2.0 * M * N * K);
  evicted_bytes = 0;
  const sluice_gemm_problem_t* p = sluice_gemm_parts_next(&parts, NULL);
  assert_ptr_equal(evicted_from, p->c.data);
  assert_int_equal(evicted_bytes, (uint64_t)M * N * sizeof(float));
  assert_int_equal(evicted_to - evicted_from, ((M - 1) * (N + GAP) + N) * (int64_t)sizeof(float));
}

/* In a pass, too, rows that were just written or are read next are in a cache. */
TEST(Next_GemmOfRows_NothingIsEvicted) {
  const sluice_grouped_gemm_t list = list_of(0, N, 0);
  sluice_gemm_parts_t parts = begin(&list, 2.0 * M * N * K);
  evicted_bytes = 0;
  (void)sluice_gemm_parts_next(&parts, c[0]);
  assert_int_equal(evicted_bytes, 0);
}

/* Threads may compute the parts of a run concurrently. */
TEST(Next_PartsOfARun_AreDistinctAndShareNoResult) {
  const double problem = 2.0 * M * N * K;
  for (int adds = 0; adds < 2; ++adds) {
    const sluice_grouped_gemm_t list = list_of(1, N, (float)adds);
    for (int threads = 1; threads <= 3; ++threads) {
      sluice_gemm_parts_t parts = begin_with(&list, threads, problem / 2, UINT64_MAX);
      assert_int_equal(parts.in_run, threads); /* each thread may compute half a GEMM */
      const uint64_t bytes = sluice_gemm_parts_result_bytes(&parts);
      float* scratch = bytes > 0 ? calloc(1, bytes) : NULL;
      const sluice_gemm_problem_t* run = sluice_gemm_parts_next(&parts, scratch);
      for (int64_t i = 0; i < parts.in_run; ++i) {
        for (int64_t j = 0; j < i; ++j) {
          assert_true(run[i].a.data != run[j].a.data);
          const int64_t apart = (float*)run[i].c.data - (float*)run[j].c.data;
          assert_true(llabs(apart) >= M * N / 2);
        }
        if (!adds) continue;
        assert_true((float*)run[i].c.data >= scratch);
        assert_true((float*)run[i].c.data + M * N / 2 <= scratch + bytes / sizeof(float));
      }
      free(scratch);
    }
  }
}

TEST(Begin_PartsOfARun_NoMoreThanThereAreOrFit) {
  const double problem = 2.0 * M * N * K;
  sluice_grouped_gemm_t list = list_of(0, N, 0);
  assert_int_equal(begin_with(&list, 1, 100 * problem, UINT64_MAX).in_run, EXPERTS);
  assert_int_equal(begin_with(&list, 8, problem, UINT64_MAX).in_run, EXPERTS);
  assert_int_equal(begin_with(&list, 2, problem / 2, UINT64_MAX).in_run, 2);
  assert_int_equal(begin_with(&list, 1, 2 * problem, M * N * sizeof(float)).in_run, 1);
  assert_int_equal(begin_with(&list, 1, 2 * problem, 2 * M * N * sizeof(float)).in_run, 2);
  problems[1].m = M / 2; /* too few rows for a part */
  assert_int_equal(begin_with(&list, 8, problem, UINT64_MAX).in_run, 1);
}
