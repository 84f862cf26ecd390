// SPDX-License-Identifier: Apache-2.0
/* GEMMs through oneDNN with a fake symbol table: failures, the limit to one thread, one primitive per weight shape. */
#include <string.h>

#include "backend/base/dtype.h"
#include "backend/base/test/refused.h"
#include "backend/gemm/onednn/gemm_onednn.h"

static int answer;       /* result of the next calls */
static int threads;      /* threads of the fake OpenMP */
static int threads_seen; /* threads during dnnl_sgemm */
static int num_made, num_live;
static int fail_at; /* countdown to a failing call of any function; < 0: none fails */

static const sluice_onednn_version_t* fake_version(void) {
  static const sluice_onednn_version_t version = {2, 99, 0};
  return &version;
}

static int fake_sgemm(char trans_a, char trans_b, int64_t m, int64_t n, int64_t k, float alpha, const float* a,
                      int64_t lda, const float* b, int64_t ldb, float beta, float* c, int64_t ldc) {
  (void)trans_a, (void)trans_b, (void)m, (void)n, (void)k, (void)alpha, (void)a, (void)lda, (void)b, (void)ldb;
  (void)beta, (void)c, (void)ldc;
  threads_seen = threads;
  return answer;
}

static int fake_get_threads(void) { return threads; }
static void fake_set_threads(int n) { threads = n; }

static int step(void) { return fail_at >= 0 && fail_at-- == 0; }
static int make(void** out) {
  if (step()) return 1;
  ++num_live;
  *out = &num_live;
  return 0;
}
static int unmake(void* object) {
  assert_ptr_equal(object, &num_live);
  --num_live;
  return 0;
}
static int fake_engine_create(void** out, int kind, size_t index) {
  assert_int_equal(kind, 1);
  assert_int_equal(index, 0);
  return make(out);
}
static int fake_stream_create(void** out, void* engine, unsigned flags) {
  (void)engine, (void)flags;
  return make(out);
}
static int fake_stream_wait(void* stream) {
  (void)stream;
  return step();
}
static int fake_desc_init(sluice_onednn_memory_desc_t* desc, int ndims, const int64_t* dims, int dtype,
                          const int64_t* strides) {
  (void)desc, (void)ndims, (void)dims, (void)dtype, (void)strides;
  return step();
}
static int fake_memory_create(void** out, const sluice_onednn_memory_desc_t* desc, void* engine, void* data) {
  (void)desc, (void)engine, (void)data;
  return make(out);
}
static int fake_matmul_desc(sluice_onednn_matmul_desc_t* desc, const sluice_onednn_memory_desc_t* a,
                            const sluice_onednn_memory_desc_t* b, const sluice_onednn_memory_desc_t* bias,
                            const sluice_onednn_memory_desc_t* c) {
  (void)desc, (void)a, (void)b, (void)c;
  assert_null(bias);
  return step();
}
static int fake_append_sum(void* ops, float scale) {
  (void)ops;
  assert_true(scale == 1.0f);
  return step();
}
static int fake_set_ops(void* attributes, const void* ops) {
  (void)attributes, (void)ops;
  return step();
}
static int fake_primitive_desc(void** out, const sluice_onednn_matmul_desc_t* desc, const void* attributes,
                               void* engine, const void* hint) {
  (void)desc, (void)attributes, (void)engine, (void)hint;
  return make(out);
}
static int fake_primitive(void** out, const void* desc) {
  (void)desc;
  ++num_made;
  return make(out);
}
static int fake_execute(const void* primitive, void* stream, int count, const sluice_onednn_arg_t* args) {
  (void)primitive, (void)stream, (void)args;
  assert_int_equal(count, 3);
  return step();
}

static const sluice_onednn_symbols_t fake = {
    .dnnl_version = fake_version,
    .dnnl_sgemm = fake_sgemm,
    .dnnl_engine_create = fake_engine_create,
    .dnnl_engine_destroy = unmake,
    .dnnl_stream_create = fake_stream_create,
    .dnnl_stream_destroy = unmake,
    .dnnl_stream_wait = fake_stream_wait,
    .dnnl_memory_desc_init_by_strides = fake_desc_init,
    .dnnl_memory_create = fake_memory_create,
    .dnnl_memory_destroy = unmake,
    .dnnl_matmul_desc_init = fake_matmul_desc,
    .dnnl_post_ops_create = make,
    .dnnl_post_ops_append_sum = fake_append_sum,
    .dnnl_post_ops_destroy = unmake,
    .dnnl_primitive_attr_create = make,
    .dnnl_primitive_attr_set_post_ops = fake_set_ops,
    .dnnl_primitive_attr_destroy = unmake,
    .dnnl_primitive_desc_create = fake_primitive_desc,
    .dnnl_primitive_desc_destroy = unmake,
    .dnnl_primitive_create = fake_primitive,
    .dnnl_primitive_execute = fake_execute,
    .dnnl_primitive_destroy = unmake,
};

static int set_up(void** state) {
  (void)state;
  answer = num_made = num_live = 0;
  threads = 7;
  fail_at = -1;
  return 0;
}

static sluice_gemm_t* create(const sluice_onednn_symbols_t* symbols) {
  sluice_gemm_t* gemm = NULL;
  assert_int_equal(sluice_gemm_onednn_create_from(symbols, sluice_process_allocator(), &gemm), SLUICE_OK);
  return gemm;
}

static float x[4096]; /* operands, which the fakes do not read */

static sluice_status_t multiply(sluice_gemm_t* gemm, int32_t dtype, int64_t m, int64_t n, int64_t k, float beta) {
  sluice_gemm_problem_t p = {m, n, k, {x, k, 1}, {x, n, 1}, {x, n, 1}};
  sluice_grouped_gemm_t list = {&p, 1, dtype, dtype, beta};
  return sluice_gemm_run(gemm, &list);
}

TEST(Onednn_SgemmFails_ExternalWithItsStatus) {
  sluice_gemm_t* gemm = create(&fake);
  assert_string_equal(gemm->name, "onednn (2.99)");
  answer = 5;
  assert_int_equal(multiply(gemm, SLUICE_DTYPE_F32, 2, 2, 2, 0), SLUICE_E_EXTERNAL);
  assert_int_equal(last_error()->native_code, 5);
  assert_non_null(strstr(last_message(), "SLUICE_GEMM"));
  sluice_gemm_destroy(gemm);
  assert_int_equal(num_live, 0);
}

TEST(Onednn_SecondOpenmp_HeldToOneThread) {
  sluice_gemm_t* gemm = create(&fake);
  assert_int_equal(multiply(gemm, SLUICE_DTYPE_F32, 2, 2, 2, 0), SLUICE_OK);
  assert_int_equal(threads_seen, 7);
  sluice_gemm_destroy(gemm);

  sluice_onednn_symbols_t held = fake;
  held.omp_get_max_threads = fake_get_threads;
  held.omp_set_num_threads = fake_set_threads;
  gemm = create(&held);
  assert_int_equal(multiply(gemm, SLUICE_DTYPE_F32, 2, 2, 2, 0), SLUICE_OK);
  assert_int_equal(threads_seen, 1);
  assert_int_equal(threads, 7);
  answer = 3;
  assert_int_equal(multiply(gemm, SLUICE_DTYPE_F32, 2, 2, 2, 0), SLUICE_E_EXTERNAL);
  assert_int_equal(threads, 7);
  sluice_gemm_destroy(gemm);
}

TEST(Onednn_ManyRowCounts_OnePrimitivePerWeight) {
  sluice_gemm_t* gemm = create(&fake);
  num_made = 0;
  for (int64_t m = 2; m < 30; ++m) assert_int_equal(multiply(gemm, SLUICE_DTYPE_BF16, m, 8, 16, 0), SLUICE_OK);
  assert_int_equal(num_made, 1);
  assert_int_equal(multiply(gemm, SLUICE_DTYPE_BF16, 3, 16, 8, 0), SLUICE_OK);
  assert_int_equal(num_made, 2);
  assert_int_equal(multiply(gemm, SLUICE_DTYPE_BF16, 3, 16, 8, 1), SLUICE_OK);
  assert_int_equal(num_made, 3);
  for (int64_t n = 1; n < 60; ++n) assert_int_equal(multiply(gemm, SLUICE_DTYPE_BF16, 3, n, 8, 1), SLUICE_OK);
  sluice_gemm_destroy(gemm);
  assert_int_equal(num_live, 0);
}

TEST(Onednn_NthCallFails_LeaksNothing) {
  int nth = 0;
  for (int done = 0; !done; ++nth) {
    assert_true(nth < 100);
    fail_at = nth;
    sluice_gemm_t* gemm = create(&fake);
    sluice_gemm_problem_t p = {2, 2, 2, {x, 2, 1}, {x, 2, 1}, {x, 2, 1}};
    sluice_grouped_gemm_t list = {&p, 1, SLUICE_DTYPE_BF16, SLUICE_DTYPE_F32, 1};
    int failing = fail_at >= 0;
    if (sluice_gemm_supports(gemm, &list)) {
      sluice_status_t status = sluice_gemm_run(gemm, &list);
      done = fail_at >= 0;
      assert_int_equal(status, done ? SLUICE_OK : SLUICE_E_EXTERNAL);
    } else {
      assert_false(failing);
    }
    fail_at = -1;
    sluice_gemm_destroy(gemm);
    assert_int_equal(num_live, 0);
  }
  assert_true(nth > 20);
}

TEST(Onednn_OtherMajorVersion_NoBf16) {
  sluice_onednn_symbols_t partial = fake;
  partial.dnnl_primitive_execute = NULL;
  sluice_gemm_t* gemm = create(&partial);
  assert_int_equal(multiply(gemm, SLUICE_DTYPE_BF16, 2, 2, 2, 0), SLUICE_E_UNSUPPORTED);
  assert_int_equal(multiply(gemm, SLUICE_DTYPE_F32, 2, 2, 2, 0), SLUICE_OK);
  sluice_gemm_destroy(gemm);
}

int main(void) { return run_cases_each(set_up, NULL); }
