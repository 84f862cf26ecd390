// SPDX-License-Identifier: Apache-2.0
/* The CUDA kernels, run on the CPU from the same source through the fake driver, against the plain kernels.
 *
 * Every entry gives the same bits as the plain version for every dtype, width and alignment; only activations in f32,
 * bf16 and f16, which the kernels evaluate in f32, differ within the tolerance at `close_enough`. This checks the
 * arguments of the launchers, index arithmetic and element arithmetic; it does not check how a GPU's approximate
 * instructions round. Outputs start as NaN, and the guard elements after every output must survive. The suite for a GPU
 * (backend/cts/gpu), which also runs on the fake driver, compares every activation, scalars, and packed matrices. */
#include <stdlib.h>

#include "backend/base/math.h"
#include "backend/base/test/refused.h"
#include "backend/device/cuda/cuda_launch.h"
#include "backend/device/cuda/fake/fake_cuda.h"
#include "backend/device/test/row_cases.h"

/* ---- the device ------------------------------------------------------------------------------------------------ */

static sluice_allocator_t allocator;
static sluice_device_t* device;
static const sluice_kernels_t* cuda;

static int set_up(void** state) {
  (void)state;
  sluice_fake_cuda_reset();
  sluice_allocator_init(&allocator, NULL, NULL, NULL);
  ref = sluice_cpu_kernels_ref();
  if (sluice_fake_cuda_device(&allocator, &device) != 0) {
    return -1;
  }
  cuda = device->kernels;
  return sluice_cuda_enter(device) == SLUICE_OK ? 0 : -1;
}

static int tear_down(void** state) {
  char live[200];
  (void)state;
  int failed = sluice_cuda_leave(device) != SLUICE_OK;
  device->vtable->destroy(device);
  failed |= sluice_fake_cuda_live(live, sizeof live) != 0 || allocator.num_live != 0;
  sluice_allocator_deinit(&allocator);
  return failed ? -1 : 0;
}

static void sweep(case_fn_t run) {
  static const int64_t widths[] = {0, 1, 2, 7, 8, 16, 31, 32, 33, 64, 96, 127, 256, 264, 513};
  static const int64_t rows[] = {0, 1, 3, 9, 70};
  for (shift = 0; shift < 2; ++shift) {
    for (int d = 0; d < 4; ++d) {
      for (size_t w = 0; w < sizeof widths / sizeof widths[0]; ++w) {
        for (size_t r = 0; r < sizeof rows / sizeof rows[0]; ++r) run(cuda, DTYPES[d], rows[r], widths[w]);
      }
    }
  }
  assert_true(sluice_fake_cuda_launches() > 100);
}

/* ---- rows ------------------------------------------------------------------------------------------------------ */

/* Each row of the result equals its token's row, as gather_rows copies it. Skipped positions are left out. */
static void scatter_case(const sluice_kernels_t* kernels, int32_t dtype, int64_t rows, int64_t width) {
  enum { TOP_K = 3 };
  const int64_t stride = width + 8, most = rows * TOP_K, skipped = most / 4, first = most / 3;
  buffer_t src = random_buffer(dtype, (rows + 1) * stride), want = buffer(dtype, most * width), got = copy_of(&want);
  int32_t* position = malloc((size_t)(most + 1) * sizeof *position);
  int32_t* token = malloc((size_t)(most + 1) * sizeof *token);
  int64_t placed = 0;
  for (int64_t i = 0; i < most; ++i) position[i] = i % 5 == 4 ? -1 : (int32_t)placed++;
  for (int64_t i = 0; i < most; ++i) { /* reversed: positions and tokens differ in order */
    if (position[i] < 0) continue;
    position[i] = (int32_t)(placed - 1) - position[i];
    if (position[i] >= first && position[i] < first + skipped) continue;
    token[position[i] < first ? position[i] : position[i] - skipped] = (int32_t)(i / TOP_K);
  }
  ref->gather_rows(NULL, dtype, sluice_max(placed - skipped, 0), width, src.data, stride, token, want.data);
  kernels->scatter_rows(NULL, dtype, rows, TOP_K, width, src.data, stride, position, first, first + skipped, got.data);
  assert_same(&want, &got, "scatter_rows");
  free(position), free(token);
  release(&src), release(&want), release(&got);
}

TEST(RowKernels_AnyDtypeWidthAlignment_SameBits) {
  const case_fn_t cases[] = {gather_case, scatter_case, move_case,    combine_case, scale_case,
                             bias_case,   dot_case,     columns_case, round_case};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) sweep(cases[i]);
}

/* Whole batches of rows, one row less, one row more: the order of the sum is that of all rows. */
TEST(SumColumns_BatchesAndTheirEnds_SameBits) {
  static const int64_t rows[] = {31, 32, 33, 63, 64, 65, 1000};
  for (int d = 0; d < 4; ++d) {
    for (size_t r = 0; r < sizeof rows / sizeof rows[0]; ++r) columns_case(cuda, DTYPES[d], rows[r], 37);
  }
}

/* ---- activations ----------------------------------------------------------------------------------------------- */

/* The plain version evaluates in f64 and rounds; the kernels evaluate in f32 with functions accurate to a few ulps.
 * GELU's tail loses relative digits when its argument is rounded, which the absolute part allows for. Each of the
 * `roundings` to bf16 or f16 may go to the neighbouring value. */
static int close_enough(int32_t dtype, double want, double got, double size, double roundings) {
  static const double ulp[] = {0, 0x1p-23, 0x1p-7, 0x1p-10, 0x1p-52}; /* at most: one unit in the last place */
  if (same(want, got)) return 1;
  double f32 = dtype == SLUICE_DTYPE_F64 ? 0x1p-52 : 0x1p-23;
  return fabs(want - got) <= roundings * ulp[dtype] * fabs(want) + 16 * f32 * size;
}

static void assert_close(const buffer_t* want, const buffer_t* got, double size, double roundings, const char* what) {
  for (int64_t i = 0; i < want->count; ++i) {
    double x = get_element(want->data, i, want->dtype), y = get_element(got->data, i, got->dtype);
    if (!close_enough(want->dtype, x, y, size, roundings)) {
      fail_msg("%s, %s: element %lld is %.9g, want %.9g", what, sluice_dtype_name(want->dtype), (long long)i, y, x);
    }
  }
}

/* The largest numbers: a square or a cube of x is infinite there and is multiplied by a factor of 0. */
TEST(Units_AtTheEndsOfTheRange_Close) {
  static const int32_t dtypes[] = {SLUICE_DTYPE_F32, SLUICE_DTYPE_BF16, SLUICE_DTYPE_F16};
  static const double ends[] = {3.3e38, 2.1e38, 1e30, 1.9e19, 1e13, 6e4, 300, 90, 20, 5, 0.75, 1e-3, 1e-30, 0};
  enum { NUM_ENDS = sizeof ends / sizeof ends[0], WIDTH = 2 * NUM_ENDS };
  for (int i = 0; i < 3; ++i) {
    for (int32_t activation = SLUICE_ACTIVATION_IDENTITY; activation <= SLUICE_ACTIVATION_SWIGLU; ++activation) {
      const int is_gated = activation == SLUICE_ACTIVATION_SWIGLU;
      const sluice_unit_t unit = {activation, is_gated ? SLUICE_GATED_HALVES : SLUICE_GATED_NO, 1.702f, 7, 0};
      const int32_t dtype = dtypes[i];
      buffer_t pre = buffer(dtype, WIDTH * (is_gated + 1)), dact = buffer(dtype, WIDTH), want = buffer(dtype, WIDTH),
               weight = buffer(SLUICE_DTYPE_F32, 1), want_dw = buffer(SLUICE_DTYPE_F32, 1);
      for (int k = 0; k < WIDTH; ++k) {
        set_element(pre.data, k, dtype, k % 2 ? ends[k / 2] : -ends[k / 2]); /* infinite in f16 above its range */
        if (is_gated) set_element(pre.data, WIDTH + k, dtype, 1);
        set_element(dact.data, k, dtype, 1);
      }
      set_element(weight.data, 0, SLUICE_DTYPE_F32, 1);
      buffer_t got = copy_of(&want), want_dpre = copy_of(&pre), got_dpre = copy_of(&pre), got_dw = copy_of(&want_dw);
      ref->unit_forward(NULL, dtype, &unit, 1, WIDTH, pre.data, NULL, NULL, want.data);
      cuda->unit_forward(NULL, dtype, &unit, 1, WIDTH, pre.data, NULL, NULL, got.data);
      assert_close(&want, &got, 6, 1, "unit_forward at the ends");
      ref->unit_backward(NULL, dtype, &unit, 1, WIDTH, pre.data, dact.data, weight.data, want_dpre.data, want.data,
                         want_dw.data);
      cuda->unit_backward(NULL, dtype, &unit, 1, WIDTH, pre.data, dact.data, weight.data, got_dpre.data, got.data,
                          got_dw.data);
      assert_close(&want_dpre, &got_dpre, 6, 1, "unit_backward's dpre at the ends");
      assert_close(&want, &got, 6, 2, "unit_backward's act_w at the ends");
      release(&pre), release(&dact), release(&want), release(&weight), release(&want_dw), release(&got);
      release(&want_dpre), release(&got_dpre), release(&got_dw);
    }
  }
}

/* Where act is exact, so are the sums of dweight, which all versions add in the same order. */
static void sum_case(const sluice_kernels_t* kernels, int32_t dtype, int64_t rows, int64_t width) {
  static const sluice_unit_t units[] = {{SLUICE_ACTIVATION_RELU, SLUICE_GATED_NO, 1, 1, 0},
                                        {SLUICE_ACTIVATION_IDENTITY, SLUICE_GATED_HALVES, 1, 1, 0},
                                        {SLUICE_ACTIVATION_RELU2, SLUICE_GATED_INTERLEAVED, 1, 1, 0}};
  for (size_t n = 0; n < sizeof units / sizeof units[0]; ++n) {
    int64_t wide = rows * width * (units[n].gated ? 2 : 1);
    buffer_t pre = random_buffer(dtype, wide), dact = random_buffer(dtype, rows * width), dpre = buffer(dtype, wide),
             weight = random_buffer(SLUICE_DTYPE_F32, rows), want = buffer(SLUICE_DTYPE_F32, rows),
             got = copy_of(&want);
    ref->unit_backward(NULL, dtype, &units[n], rows, width, pre.data, dact.data, weight.data, dpre.data, NULL,
                       want.data);
    kernels->unit_backward(NULL, dtype, &units[n], rows, width, pre.data, dact.data, weight.data, dpre.data, NULL,
                           got.data);
    assert_same(&want, &got, "dweight");
    release(&pre), release(&dact), release(&dpre), release(&weight), release(&want), release(&got);
  }
}
TEST(ActivationBackward_ExactValues_SumsOfSameBits) { sweep(sum_case); }

/* The experts exceed a launch's limit, some have no rows, and tensors are those of a chunk or of the pass (with rows of
 * two other chunks around every expert's rows). The bits are those of one call per expert. */
enum { NUM_EXPERTS = 2 * SLUICE_CUDA_UNIT_EXPERTS + 9, MOST_ROWS = 3, EXPERTS_WIDTH = 24 };

static void experts_case(int is_biased, int first_in_pass, int factor, int wanted_launches) {
  const sluice_unit_t unit = {SLUICE_ACTIVATION_SILU, SLUICE_GATED_HALVES, 1, 1, 0};
  const int32_t dtype = SLUICE_DTYPE_BF16;
  int64_t rows[NUM_EXPERTS], in_pass[NUM_EXPERTS], total = 0, pass = 0;
  for (int e = 0; e < NUM_EXPERTS; ++e) {
    rows[e] = e % (MOST_ROWS + 1), in_pass[e] = first_in_pass ? pass + 1 : total;
    total += rows[e], pass += rows[e] + 2;
  }
  enum { W = EXPERTS_WIDTH };
  buffer_t pre = random_buffer(dtype, pass * 2 * W), each_pre = copy_of(&pre), act = buffer(dtype, total * W),
           each_act = copy_of(&act), dact = random_buffer(dtype, factor * pass * W), each_dact = copy_of(&dact),
           weight = random_buffer(SLUICE_DTYPE_F32, pass), dpre = buffer(dtype, pass * 2 * W),
           each_dpre = copy_of(&dpre), dweight = buffer(SLUICE_DTYPE_F32, total), each_dweight = copy_of(&dweight),
           bias = random_buffer(dtype, NUM_EXPERTS * 2 * W);
  sluice_tensor_t b1[NUM_EXPERTS], b3[NUM_EXPERTS];
  uint16_t *p = each_pre.data, *a = each_act.data, *d = each_dact.data, *g = each_dpre.data, *b = bias.data;
  memset(b1, 0, sizeof b1), memset(b3, 0, sizeof b3);
  for (int64_t e = 0, row = 0; e < NUM_EXPERTS; row += rows[e++]) {
    b1[e].data = b + 2 * e * W, b3[e].data = b + (2 * e + 1) * W;
    uint16_t *own_pre = p + in_pass[e] * 2 * W, *own_d = d + in_pass[e] * factor * W;
    cuda->unit_forward(NULL, dtype, &unit, rows[e], W, own_pre, is_biased ? b1[e].data : NULL,
                       is_biased ? b3[e].data : NULL, a + row * W);
    cuda->unit_backward(NULL, dtype, &unit, rows[e], W, own_pre, own_d, (float*)weight.data + in_pass[e],
                        g + in_pass[e] * 2 * W, own_d, (float*)each_dweight.data + row);
  }
  const sluice_expert_rows_t all = {NUM_EXPERTS, rows, in_pass};
  const int32_t of_pass = first_in_pass;
  const int64_t home = factor * W * 2;
  const uint64_t before = sluice_fake_cuda_launches();
  cuda->experts_forward(NULL, dtype, &unit, &all, W, (sluice_rows_at_t){pre.data, of_pass, 0}, is_biased ? b1 : NULL,
                        is_biased ? b3 : NULL, (sluice_rows_at_t){act.data, 0, 0});
  assert_int_equal(sluice_fake_cuda_launches() - before, wanted_launches);
  cuda->experts_backward(NULL, dtype, &unit, &all, W, (sluice_rows_at_t){pre.data, of_pass, 0},
                         (sluice_rows_at_t){dact.data, of_pass, home}, (sluice_rows_at_t){weight.data, of_pass, 0},
                         (sluice_rows_at_t){dpre.data, of_pass, 0}, (sluice_rows_at_t){dact.data, of_pass, home},
                         (sluice_rows_at_t){dweight.data, 0, 0});
  assert_int_equal(sluice_fake_cuda_launches() - before, wanted_launches + (of_pass || factor > 1 ? 2 : 1));
  assert_same(&each_pre, &pre, "pre"), assert_same(&each_act, &act, "act"), assert_same(&each_dact, &dact, "act_w");
  assert_same(&each_dpre, &dpre, "dpre"), assert_same(&each_dweight, &dweight, "dweight");
  release(&pre), release(&each_pre), release(&act), release(&each_act), release(&dact), release(&each_dact);
  release(&weight), release(&dpre), release(&each_dpre), release(&dweight), release(&each_dweight), release(&bias);
}
TEST(Experts_ManyAtOnce_AreOneByOne) {
  for (shift = 0; shift < 2; ++shift) {
    experts_case(0, 0, 1, 1);
    experts_case(1, 0, 1, 2);
    experts_case(0, 1, 1, 2);
    experts_case(1, 1, 1, 2);
    experts_case(0, 0, 2, 1); /* dact in rows of pre's width */
    experts_case(1, 1, 2, 2);
  }
}

TEST(ActivationBackward_WithoutWeights_LeavesActW) {
  float pre[4] = {1, -2, 3, 0.5f}, dact[4] = {1, 1, 1, 1}, dpre[4], weight[1] = {2}, dweight[1];
  const sluice_unit_t unit = {SLUICE_ACTIVATION_RELU, SLUICE_GATED_NO, 1, 1, 0};
  cuda->unit_backward(NULL, SLUICE_DTYPE_F32, &unit, 1, 4, pre, dact, weight, dpre, NULL, dweight);
  assert_true(dweight[0] == 4.5f && dpre[0] == 2 && dpre[1] == 0 && dpre[3] == 2);
}

/* ---- launching ------------------------------------------------------------------------------------------------- */

TEST(Launch_Fails_IsReportedByLeaveOnce) {
  float x[2] = {1, 2}, b[1] = {1};
  sluice_fake_cuda_fail_call(0, 719);
  cuda->add_bias(NULL, SLUICE_DTYPE_F32, 2, 1, x, b); /* before its look-up */
  cuda->add_bias(NULL, SLUICE_DTYPE_F32, 2, 1, x, b); /* nothing is launched after a failure */
  assert_true(x[0] == 1 && x[1] == 2);
  assert_int_equal(sluice_cuda_leave(device), SLUICE_E_EXTERNAL);
  assert_int_equal(last_error()->native_code, 719);
  assert_non_null(strstr(last_message(), "sluice_add_bias_f32"));
  assert_int_equal(sluice_cuda_enter(device), SLUICE_OK);
  cuda->add_bias(NULL, SLUICE_DTYPE_F32, 2, 1, x, b);
  assert_true(x[0] == 2 && x[1] == 3);
}

/* A look-up whose launch failed has not loaded the kernel. */
TEST(Launch_FirstFails_IsLookedUpAgain) {
  float x[1] = {1}, b[1] = {1};
  sluice_fake_cuda_fail_call(2, 719); /* after the state of the stream and the look-up */
  cuda->add_bias(NULL, SLUICE_DTYPE_F32, 1, 1, x, b);
  assert_int_equal(sluice_cuda_leave(device), SLUICE_E_EXTERNAL);
  assert_int_equal(sluice_cuda_enter(device), SLUICE_OK);
  void* stream = sluice_fake_cuda_open_stream(0);
  sluice_fake_graph_t* graph = NULL;
  sluice_fake_cuda_begin_capture(stream);
  cuda->add_bias(stream, SLUICE_DTYPE_F32, 1, 1, x, b);
  assert_int_equal(sluice_cuda_leave(device), SLUICE_E_STATE);
  assert_int_equal(sluice_cuda_enter(device), SLUICE_OK);
  assert_int_equal(sluice_fake_cuda_end_capture(stream, &graph), 0);
  sluice_fake_cuda_destroy_graph(graph);
  sluice_fake_cuda_close_stream(stream);
}

TEST(Image_OfThisBuild_HasKernelsOrSaysSo) {
  sluice_cuda_image_t image = sluice_cuda_image();
  if (image.bytes == 0) {
    sluice_device_t* none = NULL;
    print_message("built without nvcc: the image is empty\n");
    REFUSED(sluice_cuda_device_create_from(sluice_fake_cuda_driver(), image, 0, &allocator, &none), SLUICE_E_NOT_FOUND,
            "without nvcc");
    return;
  }
  assert_memory_equal(image.data, "\x50\xed\x55\xba", 4); /* magic number of a fatbin */
  print_message("image of %llu bytes\n", (unsigned long long)image.bytes);
  assert_in_range(image.bytes, 100000, 4 << 20);
}

int main(void) { return run_cases_each(set_up, tear_down); }
