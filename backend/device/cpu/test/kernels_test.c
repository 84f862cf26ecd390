// SPDX-License-Identifier: Apache-2.0
/* The vectorised kernels against the plain ones.
 *
 * Every entry gives the same bits as the plain version, for every dtype, width and stride, except activations, whose
 * tolerance is stated at `close_enough`. Data has random values of mixed magnitudes, outputs start as NaN, and the
 * guard elements after every output must survive. */
#include "backend/device/cpu/kernels_paths.h"
#include "backend/device/test/row_cases.h"

static const int64_t ROWS[] = {0, 3, 1, 5, 9};

/* Runs a case for every version of the kernels and dtype: all widths with two rows, some widths with other numbers of
 * rows. f64 is the plain version itself and runs once. `few` skips most wide widths. */
static void sweep_over(case_fn_t run, int few) {
  const sluice_kernels_t* paths[] = {sluice_cpu_kernels_avx512(), sluice_cpu_kernels_avx2(),
                                     sluice_cpu_kernels_portable()};
  static const int64_t wide[] = {129, 513, 1056, 96, 127, 128, 511, 512, 1023, 2051}, some[] = {0, 1, 33, 67};
  ref = sluice_cpu_kernels_ref();
  for (int p = 0; p < 3; ++p) {
    if (paths[p] == NULL) {
      print_message("skipped: this processor lacks the instructions of path %d\n", p);
      continue;
    }
    for (int d = 0; d < 4; ++d) {
      for (int64_t width = 0; width <= 67; ++width) {
        if (DTYPES[d] != SLUICE_DTYPE_F64 || width < 4) run(paths[p], DTYPES[d], 2, width);
      }
      for (int w = 0; w < (few ? 2 : 10); ++w) run(paths[p], DTYPES[d], 2, wide[w]);
      for (int r = 0; r < (few ? 2 : 5); ++r) {
        for (int w = 0; w < 4; ++w) run(paths[p], DTYPES[d], ROWS[r], some[w]);
      }
    }
  }
}
/* ---- rows ----------------------------------------------------------------------------------------------------- */

TEST(RowKernels_EveryDtypeAndWidth_SameBitsAsPlain) {
  const case_fn_t cases[] = {gather_case, move_case, combine_case, scale_case,
                             bias_case,   dot_case,  columns_case, round_case};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) sweep_over(cases[i], 0);
}

TEST(CombineRows_NanAndInfinity_PassThrough) {
  const sluice_kernels_t* kernels = sluice_cpu_kernels();
  float rows[2 * 3] = {1, INFINITY, NAN, 4, 5, 6}, out[3];
  int32_t position[2] = {0, 1};
  float scale[2] = {2, 0.5f};
  kernels->combine_rows(NULL, SLUICE_DTYPE_F32, 1, 2, 3, rows, position, scale, 2, 1, out, 3);
  assert_true(out[0] == 4 && isinf(out[1]) && isnan(out[2]));
  scale[1] = NAN;
  kernels->combine_rows(NULL, SLUICE_DTYPE_F32, 1, 2, 3, rows, position, scale, 2, 1, out, 3);
  assert_true(isnan(out[0]) && isnan(out[1]) && isnan(out[2]));
}

TEST(SumColumns_AccumulatedInPieces_SameBitsAsWhole) {
  enum { N = 23, W = 37 };
  const sluice_kernels_t* kernels = sluice_cpu_kernels();
  buffer_t data = random_buffer(SLUICE_DTYPE_BF16, N * W), whole = buffer(SLUICE_DTYPE_F32, W),
           pieces = buffer(SLUICE_DTYPE_F32, W);
  kernels->sum_columns(NULL, SLUICE_DTYPE_BF16, N, W, data.data, W, NULL, 0, SLUICE_DTYPE_F32, whole.data);
  for (int64_t i = 0; i < N; i += 5) {
    int64_t n = N - i < 5 ? N - i : 5;
    kernels->sum_columns(NULL, SLUICE_DTYPE_BF16, n, W, (uint16_t*)data.data + i * W, W, NULL, i > 0, SLUICE_DTYPE_F32,
                         pieces.data);
  }
  assert_same(&whole, &pieces, "sum_columns in pieces");
  release(&data), release(&whole), release(&pieces);
}

/* ---- activations ---------------------------------------------------------------------------------------------- */

/* Relative to `size`, the sum of the magnitudes of the terms of the equation: 8 * 2^-24 for the activation (its errors
 * are in kernels_accuracy_test.c) and the few products around it, then one rounding to dtype: a value next to a tie may
 * round to either side, a difference of one ulp, at most 2^-7 of it in bf16 and 2^-10 in f16. Subnormal f16 results are
 * exact to 2^-24. */
static int close_enough(int32_t dtype, double got, double want, double size) {
  double tolerance = 8 * 0x1p-24;
  if (dtype == SLUICE_DTYPE_F64) tolerance = 0;
  if (dtype == SLUICE_DTYPE_BF16) tolerance = 0x1p-7;
  if (dtype == SLUICE_DTYPE_F16) tolerance = 0x1p-10;
  if (same(got, want)) return 1;
  return fabs(got - want) <= tolerance * size + (dtype == SLUICE_DTYPE_F16 ? 0x1p-24 : 0);
}

static void assert_close(const buffer_t* want, const buffer_t* got, double roundings, double slack, const char* what) {
  for (int64_t i = 0; i < want->count; ++i) {
    double x = get_element(want->data, i, want->dtype), y = get_element(got->data, i, got->dtype);
    if (!close_enough(want->dtype, y, x, roundings * fmax(fabs(x), slack))) {
      fail_msg("%s, %s: element %lld is %.9g, want %.9g", what, sluice_dtype_name(want->dtype), (long long)i, y, x);
    }
  }
}

/* Adds edge cases to the random values. */
static void sprinkle(buffer_t* b) {
  static const double edges[] = {0, -0.0, INFINITY, -INFINITY, NAN, -0.7517916, 60000, -60000, -20, 1e-7};
  if (b->count < 40) return;
  for (int i = 0; i < 10; ++i) set_element(b->data, (int64_t)(random_bits() % (uint32_t)b->count), b->dtype, edges[i]);
}

static const sluice_unit_t OTHERS[] = {{SLUICE_ACTIVATION_RELU2, SLUICE_GATED_NO, 1, 1, 0},
                                       {SLUICE_ACTIVATION_RELU2, SLUICE_GATED_HALVES, 1, 1, 0},
                                       {SLUICE_ACTIVATION_SILU, SLUICE_GATED_INTERLEAVED, 1, 1, 0},
                                       {SLUICE_ACTIVATION_SWIGLU, SLUICE_GATED_HALVES, 1.702f, 2.25f, 1},
                                       {SLUICE_ACTIVATION_SWIGLU, SLUICE_GATED_INTERLEAVED, 1.702f, 2.25f, 1},
                                       {SLUICE_ACTIVATION_SWIGLU, SLUICE_GATED_INTERLEAVED, 0.25f, 3.4e38f, 0}};
/* Plain units come first; the others have more parameters or another layout. */
enum { NUM_PLAIN = 2 * (SLUICE_ACTIVATION_SILU + 1), NUM_UNITS = NUM_PLAIN + sizeof OTHERS / sizeof OTHERS[0] };

static sluice_unit_t unit_of(int i) {
  return i < NUM_PLAIN ? (sluice_unit_t){i / 2, i % 2, 1, 1, 0} : OTHERS[i - NUM_PLAIN];
}

static void forward_case(const sluice_kernels_t* kernels, int32_t dtype, int64_t rows, int64_t hidden) {
  for (int mode = 0; mode < NUM_UNITS * 3; ++mode) {
    const sluice_unit_t unit = unit_of(mode / 3);
    const int is_plain = mode / 3 < NUM_PLAIN, bias = mode % 3, gated = unit.gated;
    buffer_t pre = random_buffer(dtype, rows * hidden * (gated ? 2 : 1)), b1 = random_buffer(dtype, 2 * hidden),
             b3 = random_buffer(dtype, hidden);
    sprinkle(&pre);
    buffer_t pre2 = copy_of(&pre), pre3 = copy_of(&pre), act = buffer(dtype, rows * hidden), act2 = copy_of(&act);
    const void* p1 = bias >= 1 ? b1.data : NULL;
    const void* p3 = bias == 2 && gated == SLUICE_GATED_HALVES ? b3.data : NULL;
    ref->unit_forward(NULL, dtype, &unit, rows, hidden, pre.data, p1, p3, act.data);
    kernels->unit_forward(NULL, dtype, &unit, rows, hidden, pre2.data, p1, p3, act2.data);
    if (!gated) {
      kernels->unit_forward(NULL, dtype, &unit, rows, hidden, pre3.data, p1, p3, pre3.data);
      assert_same(&act2, &pre3, "forward: act over pre");
    }
    assert_same(&pre, &pre2, "forward: pre");
    assert_close(&act, &act2, 1, is_plain ? 0 : 1e-6, "forward: act");
    release(&pre3);
    release(&pre), release(&pre2), release(&act), release(&act2), release(&b1), release(&b3);
  }
}

TEST(Forward_EveryUnit_CloseToPlain) { sweep_over(forward_case, 1); }

static void backward_case(const sluice_kernels_t* kernels, int32_t dtype, int64_t rows, int64_t hidden) {
  for (int mode = 0; mode < NUM_UNITS * 2; ++mode) {
    const sluice_unit_t unit = unit_of(mode / 2);
    const int is_plain = mode / 2 < NUM_PLAIN, want_act = mode % 2;
    const int64_t width = unit.gated ? 2 * hidden : hidden;
    buffer_t pre = random_buffer(dtype, rows * width), dact = random_buffer(dtype, rows * hidden);
    buffer_t w = random_buffer(SLUICE_DTYPE_F32, rows);
    buffer_t dpre = buffer(dtype, rows * width), act = buffer(dtype, rows * hidden),
             dw = buffer(SLUICE_DTYPE_F32, rows);
    buffer_t dpre2 = copy_of(&dpre), act2 = copy_of(&act), dw2 = copy_of(&dw);
    ref->unit_backward(NULL, dtype, &unit, rows, hidden, pre.data, dact.data, w.data, dpre.data,
                       want_act ? act.data : NULL, dw.data);
    kernels->unit_backward(NULL, dtype, &unit, rows, hidden, pre.data, dact.data, w.data, dpre2.data,
                           want_act ? act2.data : NULL, dw2.data);
    /* The largest product of factors below 3 is 3 * 3 * 3 * 1.2, and more with the parameters of other units; a slope
     * near 0 is compared with its terms, below half of it. */
    assert_close(&dpre, &dpre2, 1, is_plain ? 3 * 3 * 3 * 0.5 : 12 * 12 * 3 * 3 * 0.5, "backward: dpre");
    /* act_w is rounded twice: act, then its product with the weight. */
    assert_close(&act, &act2, 2, is_plain ? 0 : 1e-6, "backward: act_w");
    if (unit.activation <= SLUICE_ACTIVATION_RELU) assert_same(&dw, &dw2, "backward: dweight of exact values");
    for (int64_t i = 0; i < rows && is_plain; ++i) {
      /* Each act may differ by one rounding of dtype: |dact| <= 3, |act| <= 9. */
      double unit_of = dtype == SLUICE_DTYPE_BF16 ? 0x1p-7 : dtype == SLUICE_DTYPE_F16 ? 0x1p-10 : 0x1p-21;
      assert_true(fabs((double)((float*)dw.data)[i] - (double)((float*)dw2.data)[i]) <=
                  27.0 * (double)hidden * unit_of);
    }
    /* In place, as kernels.h allows: dpre over dact without a gate, dpre over pre, act_w over dact with a gate. */
    buffer_t pre3 = copy_of(&pre), dact3 = copy_of(&dact), dact4 = copy_of(&dact);
    kernels->unit_backward(NULL, dtype, &unit, rows, hidden, pre3.data, dact3.data, w.data, pre3.data,
                           want_act ? dact3.data : NULL, dw2.data);
    assert_same(&dpre2, &pre3, "backward: dpre over pre");
    if (want_act) assert_same(&act2, &dact3, "backward: act_w over dact");
    if (!unit.gated) {
      kernels->unit_backward(NULL, dtype, &unit, rows, hidden, pre.data, dact4.data, w.data, dact4.data, NULL,
                             dw2.data);
      assert_same(&dpre2, &dact4, "backward: dpre over dact");
    }
    release(&pre3), release(&dact3), release(&dact4), release(&pre), release(&dact), release(&w);
    release(&dpre), release(&act), release(&dw), release(&dpre2), release(&act2), release(&dw2);
  }
}

TEST(Backward_EveryUnit_CloseToPlain) { sweep_over(backward_case, 1); }

/* The order of the kernels' sum: 256 partial sums, folded by halves. */
static float sum_of_products(int32_t dtype, int64_t width, int64_t first, const void* a, const void* b) {
  float partial[256] = {0};
  for (int64_t h = 0; h < width; ++h) {
    const float product = (float)get_element(a, first + h, dtype) * (float)get_element(b, first + h, dtype);
    partial[h % 256] += product;
  }
  for (int half = 128; half > 0; half /= 2) {
    for (int p = 0; p < half; ++p) partial[p] += partial[p + half];
  }
  return partial[0];
}

/* The sum of dweight and act_w use the bits of act that forward stored. */
TEST(ActivationBackward_RecomputedAct_IsForwardsToTheBit) {
  enum { R = 3 };
  const sluice_kernels_t* kernels = sluice_cpu_kernels();
  for (int mode = 0; mode < 5 * 2 * 3 * 2; ++mode) {
    const sluice_unit_t unit = unit_of(mode % 10);
    const int32_t gated = unit.gated, dtype = DTYPES[mode / 10 % 3];
    const int64_t H = mode < 30 ? 77 : 1333; /* 77: some of the 256 partial sums; 1333: several turns and blocks */
    buffer_t pre = random_buffer(dtype, R * H * (gated ? 2 : 1)), dact = random_buffer(dtype, R * H);
    buffer_t act = buffer(dtype, R * H), act_w = buffer(dtype, R * H), dpre = copy_of(&pre);
    float one[R] = {1, 1, 1}, dw[R], want[R];
    kernels->unit_forward(NULL, dtype, &unit, R, H, pre.data, NULL, NULL, act.data);
    kernels->unit_backward(NULL, dtype, &unit, R, H, pre.data, dact.data, one, dpre.data, act_w.data, dw);
    for (int i = 0; i < R; ++i) want[i] = sum_of_products(dtype, H, i * H, dact.data, act.data);
    assert_same(&act, &act_w, "act_w with weight 1");
    assert_memory_equal(dw, want, sizeof dw);
    release(&pre), release(&dact), release(&act), release(&act_w), release(&dpre);
  }
}

/* One row per call, and every instruction set with fused multiply-add, give the same bits as one call. */
TEST(Activations_ChunksAndInstructionSets_SameBits) {
  enum { R = 7, H = 601 };
  const sluice_kernels_t *fast = sluice_cpu_kernels(), *avx2 = sluice_cpu_kernels_avx2();
  for (int mode = 0; mode < 5 * 2 * 3; ++mode) {
    const sluice_unit_t unit = unit_of(mode % 10);
    const int32_t dtype = DTYPES[mode / 10];
    int64_t g = unit.gated ? 2 : 1;
    size_t bytes = sluice_dtype_bytes(dtype);
    buffer_t pre = random_buffer(dtype, R * H * g), dact = random_buffer(dtype, R * H),
             w = random_buffer(SLUICE_DTYPE_F32, R);
    buffer_t act = buffer(dtype, R * H), dpre = buffer(dtype, R * H * g), dw = buffer(SLUICE_DTYPE_F32, R);
    buffer_t act2 = copy_of(&act), dpre2 = copy_of(&dpre), dw2 = copy_of(&dw);
    fast->unit_forward(NULL, dtype, &unit, R, H, pre.data, NULL, NULL, act.data);
    for (int64_t i = 0; i < R; ++i) {
      fast->unit_forward(NULL, dtype, &unit, 1, H, (char*)pre.data + (size_t)(i * H * g) * bytes, NULL, NULL,
                         (char*)act2.data + (size_t)(i * H) * bytes);
    }
    assert_same(&act, &act2, "forward, row by row");
    fast->unit_backward(NULL, dtype, &unit, R, H, pre.data, dact.data, w.data, dpre.data, act.data, dw.data);
    if (avx2 != NULL) {
      avx2->unit_backward(NULL, dtype, &unit, R, H, pre.data, dact.data, w.data, dpre2.data, act2.data, dw2.data);
      assert_same(&dpre, &dpre2, "dpre, avx2"), assert_same(&act, &act2, "act_w, avx2"),
          assert_same(&dw, &dw2, "dweight, avx2");
    }
    for (int64_t i = 0; i < R; ++i) {
      fast->unit_backward(NULL, dtype, &unit, 1, H, (char*)pre.data + (size_t)(i * H * g) * bytes,
                          (char*)dact.data + (size_t)(i * H) * bytes, (float*)w.data + i,
                          (char*)dpre2.data + (size_t)(i * H * g) * bytes, (char*)act2.data + (size_t)(i * H) * bytes,
                          (float*)dw2.data + i);
    }
    assert_same(&dpre, &dpre2, "dpre, row by row"), assert_same(&act, &act2, "act_w, row by row");
    assert_same(&dw, &dw2, "dweight, row by row");
    release(&pre), release(&dact), release(&w), release(&act), release(&dpre), release(&dw);
    release(&act2), release(&dpre2), release(&dw2);
  }
}

int main(void) {
  shift = 1; /* buffers start one element after a boundary of 64 bytes */
  return run_cases(NULL, NULL);
}
