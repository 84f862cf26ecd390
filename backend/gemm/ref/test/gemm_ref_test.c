// SPDX-License-Identifier: Apache-2.0
/* The promises of "ref" alone: the order of its sums, whatever the strides. */

#include "backend/base/dtype.h"
#include "backend/gemm/gemm.h"
#include "third_party/bazel/test.h"

enum { M = 70, N = 75, K = 150 };

static sluice_gemm_t* gemm;
static float a[M * K], b[K * N], whole[M * N], parts[M * N];

static int set_up(void** state) {
  (void)state;
  uint32_t x = 1;
  for (int i = 0; i < M * K; ++i) a[i] = (float)((x = x * 1664525u + 1013904223u) >> 8) / 8388608.0f - 1;
  for (int i = 0; i < K * N; ++i) b[i] = (float)((x = x * 1664525u + 1013904223u) >> 8) / 8388608.0f - 1;
  return sluice_gemm_ref_create(sluice_process_allocator(), &gemm);
}

static int tear_down(void** state) {
  (void)state;
  sluice_gemm_destroy(gemm);
  return 0;
}

static void multiply(sluice_gemm_problem_t problem, float beta) {
  sluice_grouped_gemm_t list = {&problem, 1, SLUICE_DTYPE_F32, SLUICE_DTYPE_F32, beta};
  assert_int_equal(sluice_gemm_run(gemm, &list), SLUICE_OK);
}

TEST(GemmRef_OtherStrides_SameBits) {
  static float a_columns[M * K], b_columns[K * N], c_columns[M * N];
  for (int i = 0; i < M; ++i) {
    for (int l = 0; l < K; ++l) a_columns[l * M + i] = a[i * K + l];
  }
  for (int l = 0; l < K; ++l) {
    for (int j = 0; j < N; ++j) b_columns[j * K + l] = b[l * N + j];
  }
  multiply((sluice_gemm_problem_t){M, N, K, {a, K, 1}, {b, N, 1}, {whole, N, 1}}, 0);
  multiply((sluice_gemm_problem_t){M, N, K, {a_columns, 1, M}, {b_columns, 1, K}, {c_columns, 1, M}}, 0);
  for (int i = 0; i < M; ++i) {
    for (int j = 0; j < N; ++j) assert_memory_equal(&c_columns[j * M + i], &whole[i * N + j], sizeof(float));
  }
}

/* The equation, one element at a time, in the order that gemm_ref.c states. */
TEST(GemmRef_Sums_InTheStatedOrder) {
  for (int i = 0; i < M * N; ++i) whole[i] = parts[i] = (float)i / 7;
  multiply((sluice_gemm_problem_t){M, N, K, {a, K, 1}, {b, N, 1}, {whole, N, 1}}, 1);
  for (int i = 0; i < M; ++i) {
    for (int j = 0; j < N; ++j) {
      float sum = 0;
      for (int l = 0; l < K; ++l) sum += a[i * K + l] * b[l * N + j];
      sum += parts[i * N + j];
      assert_memory_equal(&sum, &whole[i * N + j], sizeof sum);
    }
  }
}

int main(void) { return run_cases(set_up, tear_down); }
