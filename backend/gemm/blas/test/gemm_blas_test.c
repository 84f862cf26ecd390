// SPDX-License-Identifier: Apache-2.0
/* GEMMs through a BLAS with a fake symbol table: arguments, cutting of large GEMMs, missing symbols. */
#include <string.h>

#include "backend/base/dtype.h"
#include "backend/base/test/refused.h"
#include "backend/gemm/blas/gemm_blas.h"

typedef struct call_s {
  char trans_a, trans_b;
  int64_t m, n, k, lda, ldb, ldc;
  const float* a;
  const float* b;
  float* c;
  float beta;
} call_t;

static call_t calls[16];
static int num_calls;

/* Reads 32-bit ints, as most BLAS do. */
static void fake_sgemm(const char* trans_a, const char* trans_b, const void* m, const void* n, const void* k,
                       const float* alpha, const float* a, const void* lda, const float* b, const void* ldb,
                       const float* beta, float* c, const void* ldc) {
  assert_true(num_calls < 16);
  assert_true(*alpha == 1.0f);
  calls[num_calls++] = (call_t){*trans_a,
                                *trans_b,
                                *(const int32_t*)m,
                                *(const int32_t*)n,
                                *(const int32_t*)k,
                                *(const int32_t*)lda,
                                *(const int32_t*)ldb,
                                *(const int32_t*)ldc,
                                a,
                                b,
                                c,
                                *beta};
}

static const sluice_blas_symbols_t fake = {.sgemm_ = fake_sgemm};
static sluice_gemm_t* gemm;

static int set_up(void** state) {
  (void)state;
  num_calls = 0;
  return sluice_gemm_blas_create_from(&fake, "fake", sluice_process_allocator(), &gemm);
}

static int tear_down(void** state) {
  (void)state;
  sluice_gemm_destroy(gemm);
  return 0;
}

static sluice_status_t multiply(sluice_gemm_problem_t problem, float beta) {
  sluice_grouped_gemm_t list = {&problem, 1, SLUICE_DTYPE_F32, SLUICE_DTYPE_F32, beta};
  return sluice_gemm_run(gemm, &list);
}

TEST(Blas_RowMajor_OperandsSwapped) {
  float a[1], b[1], c[1];
  assert_string_equal(gemm->name, "blas (fake)");
  assert_int_equal(multiply((sluice_gemm_problem_t){2, 3, 4, {a, 9, 1}, {b, 1, 8}, {c, 7, 1}}, 1), SLUICE_OK);
  assert_int_equal(num_calls, 1);
  const call_t* call = &calls[0];
  assert_int_equal(call->trans_a, 'T');
  assert_int_equal(call->trans_b, 'N');
  assert_int_equal(call->m, 3);
  assert_int_equal(call->n, 2);
  assert_int_equal(call->k, 4);
  assert_ptr_equal(call->a, b);
  assert_ptr_equal(call->b, a);
  assert_int_equal(call->lda, 8);
  assert_int_equal(call->ldb, 9);
  assert_int_equal(call->ldc, 7);
  assert_true(call->beta == 1.0f);
}

/* BLAS refuses a leading dimension below the width, so the stride of a single row or column must not be passed on. */
TEST(Blas_SizeOne_LeadingDimensionAtLeastWidth) {
  float a[1], b[1], c[1];
  assert_int_equal(multiply((sluice_gemm_problem_t){1, 5, 6, {a, 0, 1}, {b, 5, 1}, {c, 0, 1}}, 0), SLUICE_OK);
  assert_int_equal(multiply((sluice_gemm_problem_t){4, 1, 1, {a, 1, 0}, {b, 0, 0}, {c, 1, 99}}, 0), SLUICE_OK);
  assert_int_equal(num_calls, 2);
  for (int i = 0; i < num_calls; ++i) {
    const call_t* call = &calls[i];
    assert_true(call->lda >= (call->trans_a == 'N' ? call->m : call->k) && call->lda >= 1);
    assert_true(call->ldb >= (call->trans_b == 'N' ? call->k : call->n) && call->ldb >= 1);
    assert_true(call->ldc >= call->m);
  }
}

TEST(Blas_NothingToDo_NoCall) {
  float a[1], b[1], c[6] = {1, 2, 3, 4, 5, 6};
  assert_int_equal(multiply((sluice_gemm_problem_t){0, 3, 4, {a, 4, 1}, {b, 3, 1}, {c, 3, 1}}, 0), SLUICE_OK);
  assert_int_equal(multiply((sluice_gemm_problem_t){2, 2, 0, {a, 0, 1}, {b, 2, 1}, {c, 3, 1}}, 0), SLUICE_OK);
  assert_int_equal(num_calls, 0);
  const float expected[6] = {0, 0, 3, 0, 0, 6};
  assert_memory_equal(c, expected, sizeof expected);
}

/* The fake only records these addresses and does not access them. */
TEST(Blas_LargerThanAnInt_CutInPieces) {
  const int64_t piece = (int64_t)1 << 30;
  const int64_t large = 2 * piece + 5;
  float* const base = (float*)(uintptr_t)0x1000;
  for (int of_k = 0; of_k < 2; ++of_k) { /* parts of k add up in C */
    num_calls = 0;
    const sluice_gemm_problem_t many_rows = {large, 4, 3, {base, 3, 1}, {base, 4, 1}, {base, 4, 1}};
    const sluice_gemm_problem_t deep = {2, 4, large, {base, 1, 2}, {base, 4, 1}, {base, 4, 1}};
    assert_int_equal(multiply(of_k ? deep : many_rows, 0), SLUICE_OK);
    assert_int_equal(num_calls, 3);
    for (int i = 0; i < 3; ++i) {
      const int64_t at = i * piece;
      assert_int_equal(of_k ? calls[i].k : calls[i].n, i < 2 ? piece : 5);
      assert_ptr_equal(calls[i].b, base + at * (of_k ? 2 : 3));
      assert_ptr_equal(calls[i].a, base + at * (of_k ? 4 : 0));
      assert_ptr_equal(calls[i].c, base + at * (of_k ? 0 : 4));
      assert_true(calls[i].beta == (of_k && i > 0 ? 1.0f : 0.0f));
    }
  }

  /* A leading dimension cannot be cut. */
  sluice_gemm_problem_t p = {2, 4, 3, {base, (int64_t)INT32_MAX + 1, 1}, {base, 4, 1}, {base, 4, 1}};
  sluice_grouped_gemm_t list = {&p, 1, SLUICE_DTYPE_F32, SLUICE_DTYPE_F32, 0};
  assert_false(sluice_gemm_supports(gemm, &list));
}

TEST(Blas_NoBf16Symbol_NotSupported) {
  uint16_t x[4] = {0};
  sluice_gemm_problem_t p = {2, 2, 2, {x, 2, 1}, {x, 2, 1}, {x, 2, 1}};
  sluice_grouped_gemm_t list = {&p, 1, SLUICE_DTYPE_BF16, SLUICE_DTYPE_BF16, 0};
  assert_false(sluice_gemm_supports(gemm, &list));
}

TEST(Blas_LibraryWithoutSgemm_NotFoundNamesSymbol) {
  sluice_gemm_t* none = gemm;
  REFUSED(sluice_gemm_blas_create("libm.so.6", sluice_process_allocator(), &none), SLUICE_E_NOT_FOUND, "sgemm_");
  assert_null(none);
  assert_non_null(strstr(last_message(), "libm.so.6"));
}

int main(void) { return run_cases_each(set_up, tear_down); }
