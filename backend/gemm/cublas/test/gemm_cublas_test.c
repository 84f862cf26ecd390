/* cuBLAS behind the interface: finding it, grouping, and every error path, on fake tables. The arithmetic is
 * backend/cts/gemm's. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/device/cuda/fake/fake_cuda.h"
#include "backend/gemm/cublas/fake/fake_cublas.h"

static sluice_allocator_t allocator, memory;
static sluice_device_t* device;

static int set_up(void** state) {
  (void)state;
  sluice_fake_cuda_reset();
  sluice_allocator_init(&allocator, NULL, NULL, NULL);
  sluice_allocator_init(&memory, NULL, NULL, NULL);
  sluice_fake_cublas_set_version(130002);
  return sluice_cuda_device_create_from(sluice_fake_cuda_driver(), sluice_fake_cuda_image(), 0, &allocator, &device);
}
static int tear_down(void** state) {
  char text[200];
  (void)state;
  device->vtable->destroy(device);
  int64_t left = sluice_fake_cuda_live(text, sizeof text) + (int64_t)allocator.num_live + (int64_t)memory.num_live +
                 sluice_fake_cublas_handles();
  sluice_allocator_deinit(&allocator);
  sluice_allocator_deinit(&memory);
  return left == 0 ? 0 : -1;
}

static sluice_status_t create(int with_groups, int32_t tf32, sluice_gemm_t** out_gemm) {
  sluice_cublas_symbols_t symbols = sluice_fake_cublas(with_groups);
  const sluice_gemm_cublas_options_t options = {
      .device = device, .memory = &memory, .symbols = &symbols, .workspace_bytes = 4096, .tf32 = tf32};
  return sluice_gemm_cublas_create(&options, &allocator, out_gemm);
}

static const char* message(void) {
  static sluice_error_info_t why;
  sluice_error_info_init(&why, sizeof why);
  sluice_error_last(&why);
  return why.message;
}

enum { COUNT = 1100 }; /* more than two grouped calls take */

typedef struct lists_s {
  float a[COUNT][6], b[COUNT][6], c[COUNT][4];
  sluice_product_t products[COUNT];
} lists_t;

/* C [2, 2] = A [2, 3] B [3, 2]; every seventh has no rows, every ninth no depth. */
static void fill(lists_t* l) {
  for (int i = 0; i < COUNT; ++i) {
    for (int j = 0; j < 6; ++j) {
      l->a[i][j] = (float)((i + j) % 5);
      l->b[i][j] = (float)((i * j) % 7);
    }
    for (int j = 0; j < 4; ++j) l->c[i][j] = 99;
    l->products[i] = (sluice_product_t){i % 7 == 3 ? 0 : 2, 2, i % 9 == 4 ? 0 : 3, {l->a[i], 3, 1}, {l->b[i], 2, 1},
                                        {l->c[i], 2, 1}};
  }
}
static void check(const lists_t* l) {
  for (int i = 0; i < COUNT; ++i) {
    for (int j = 0; j < 4; ++j) {
      float want = 0;
      for (int64_t k = 0; k < l->products[i].k; ++k) want += l->a[i][j / 2 * 3 + k] * l->b[i][k * 2 + j % 2];
      assert_true(l->c[i][j] == (l->products[i].m == 0 ? 99 : want));
    }
  }
}

static void Groups_ManyProducts_AreFewCallsInStreamOrder(void** state) {
  (void)state;
  lists_t* l = malloc(sizeof *l);
  for (int with_groups = 0; with_groups < 2; ++with_groups) {
    sluice_gemm_t* gemm = NULL;
    void* stream = sluice_fake_cuda_open_stream(0);
    assert_int_equal(create(with_groups, 0, &gemm), SLUICE_OK);
    assert_string_equal(gemm->name, "cublas (13.0.2)");
    fill(l);
    int64_t single = sluice_fake_cublas_single_calls(), grouped = sluice_fake_cublas_grouped_calls();
    const sluice_product_list_t list = {l->products, COUNT, SLUICE_DTYPE_F32, SLUICE_DTYPE_F32, 0, stream};
    assert_int_equal(sluice_gemm_run(gemm, &list), SLUICE_OK);
    assert_true(sluice_fake_cuda_idle(stream));
    check(l);
    single = sluice_fake_cublas_single_calls() - single;
    grouped = sluice_fake_cublas_grouped_calls() - grouped;
    assert_true(with_groups ? (single == 0 && grouped == 2) : (single > 500 && grouped == 0));
    sluice_gemm_destroy(gemm);
    sluice_fake_cuda_close_stream(stream);
  }
  free(l);
}

static void Groups_DeclinedByTheLibrary_RunOneByOneForGood(void** state) {
  (void)state;
  uint16_t a[3][1] = {{0x3f80}, {0x4000}, {0x4040}}, c[3][1]; /* 1, 2, 3 in bf16 */
  sluice_product_t products[3];
  for (int i = 0; i < 3; ++i) products[i] = (sluice_product_t){1, 1, 1, {a[i], 1, 1}, {a[i], 1, 1}, {c[i], 1, 1}};
  const sluice_product_list_t list = {products, 3, SLUICE_DTYPE_BF16, SLUICE_DTYPE_BF16, 0, NULL};
  sluice_gemm_t* gemm = NULL;
  assert_int_equal(create(2, 0, &gemm), SLUICE_OK);
  int64_t grouped = sluice_fake_cublas_grouped_calls(), single = sluice_fake_cublas_single_calls();
  for (int pass = 0; pass < 2; ++pass) assert_int_equal(sluice_gemm_run(gemm, &list), SLUICE_OK);
  assert_int_equal(sluice_fake_cublas_grouped_calls(), grouped);
  assert_int_equal(sluice_fake_cublas_single_calls(), single + 6);
  assert_int_equal(c[2][0], 0x4110); /* 9 */
  sluice_gemm_destroy(gemm);
}

static void Tf32_OnlyByChoice(void** state) {
  (void)state;
  float x[1] = {2};
  const sluice_product_t p = {1, 1, 1, {x, 1, 1}, {x, 1, 1}, {x, 1, 1}};
  const sluice_product_list_t list = {&p, 1, SLUICE_DTYPE_F32, SLUICE_DTYPE_F32, 0, NULL};
  for (int32_t tf32 = 0; tf32 < 2; ++tf32) {
    sluice_gemm_t* gemm = NULL;
    assert_int_equal(create(1, tf32, &gemm), SLUICE_OK);
    assert_int_equal(sluice_gemm_run(gemm, &list), SLUICE_OK);
    assert_int_equal(sluice_fake_cublas_last_compute(), tf32 ? SLUICE_CUBLAS_COMPUTE_TF32 : SLUICE_CUBLAS_COMPUTE_32F);
    sluice_gemm_destroy(gemm);
  }
}

static void Library_MissingOldOrWrong_IsNotFound(void** state) {
  (void)state;
  sluice_gemm_t* gemm = NULL;
  sluice_gemm_cublas_options_t options = {.device = device, .memory = &memory, .library = "libcublas_not_there.so.1"};
  assert_int_equal(sluice_gemm_cublas_create(&options, &allocator, &gemm), SLUICE_E_NOT_FOUND);
  assert_non_null(strstr(message(), "12.0"));
  options.library = "libm.so.6";
  assert_int_equal(sluice_gemm_cublas_create(&options, &allocator, &gemm), SLUICE_E_NOT_FOUND);
  assert_non_null(strstr(message(), "cublasCreate_v2"));
  sluice_fake_cublas_set_version(110901);
  assert_int_equal(create(1, 0, &gemm), SLUICE_E_NOT_FOUND);
  assert_non_null(strstr(message(), "110901"));
  assert_null(gemm);
}

static void Calls_NthFails_LeaksNothingAndSaysSo(void** state) {
  (void)state;
  static const int codes[][2] = {{3, SLUICE_E_NO_MEMORY}, {13, SLUICE_E_FOREIGN}};
  float a[2][1] = {{1}, {2}}, c[2][1];
  sluice_product_t products[2];
  for (int i = 0; i < 2; ++i) products[i] = (sluice_product_t){1, 1, 1, {a[i], 1, 1}, {a[i], 1, 1}, {c[i], 1, 1}};
  const sluice_product_list_t list = {products, 2, SLUICE_DTYPE_F32, SLUICE_DTYPE_F32, 0, NULL};
  for (int driver = 0; driver < 2; ++driver) {
    for (int with_groups = 0; with_groups < 2; ++with_groups) {
      for (int kind = 0; kind < 2; ++kind) {
        int64_t told = 0, nth = 0;
        for (int done = 0; !done; ++nth) {
          sluice_gemm_t* gemm = NULL;
          int driver_code = kind == 0 ? 2 : 719;
          if (driver) {
            sluice_fake_cuda_fail_call(nth, driver_code);
          } else {
            sluice_fake_cublas_fail_call(nth, codes[kind][0]);
          }
          sluice_status_t status = create(with_groups, 0, &gemm);
          if (status == SLUICE_OK) status = sluice_gemm_run(gemm, &list);
          sluice_gemm_destroy(gemm);
          done = driver ? !sluice_fake_cuda_failed() : !sluice_fake_cublas_failed();
          sluice_fake_cuda_fail_call(-1, 0);
          sluice_fake_cublas_fail_call(-1, 0);
          if (status != SLUICE_OK) {
            assert_int_equal(status, codes[kind][1]);
            ++told;
          }
          assert_int_equal(sluice_fake_cublas_handles(), 0);
          assert_int_equal(memory.num_live, 0);
          assert_true(nth < 100);
        }
        assert_in_range(told, 3, nth);
      }
    }
  }
}

int main(void) {
#define CASE(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
  const struct CMUnitTest tests[] = {
      CASE(Groups_ManyProducts_AreFewCallsInStreamOrder),
      CASE(Groups_DeclinedByTheLibrary_RunOneByOneForGood),
      CASE(Tf32_OnlyByChoice),
      CASE(Library_MissingOldOrWrong_IsNotFound),
      CASE(Calls_NthFails_LeaksNothingAndSaysSo),
  };
#undef CASE
  return cmocka_run_group_tests(tests, NULL, NULL);
}
