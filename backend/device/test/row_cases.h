// SPDX-License-Identifier: Apache-2.0
/* The row kernels whose results have the same bits in every version, against the plain version: a case for each entry,
 * run by the tests of each version over their dtypes, widths and numbers of rows. Outputs start as NaN, and the guard
 * elements after every output must survive. */
#pragma once

#include "backend/device/kernels.h"
#include "backend/device/test/kernel_buffers.h"

static const sluice_kernels_t* ref;

typedef void (*case_fn_t)(const sluice_kernels_t* kernels, int32_t dtype, int64_t rows, int64_t width);

static void gather_case(const sluice_kernels_t* kernels, int32_t dtype, int64_t rows, int64_t width) {
  static const int64_t gaps[] = {0, 3, 4, 8};
  int32_t index[80];
  for (int g = 0; g < 4; ++g) {
    const int64_t stride = width + gaps[g];
    buffer_t src = random_buffer(dtype, 7 * stride), want = buffer(dtype, rows * width), got = copy_of(&want);
    for (int64_t i = 0; i < rows; ++i) index[i] = (int32_t)(random_bits() % 8) - 1;
    ref->gather_rows(NULL, dtype, rows, width, src.data, stride, index, want.data);
    kernels->gather_rows(NULL, dtype, rows, width, src.data, stride, index, got.data);
    for (int64_t i = 0; i < rows * width; ++i) {
      int64_t row = index[i / width];
      double expected = row < 0 ? 0 : get_element(src.data, row * stride + i % width, dtype);
      assert_true(same(get_element(want.data, i, dtype), expected));
    }
    assert_same(&want, &got, "gather_rows");
    release(&src), release(&want), release(&got);
  }
}

/* Runs of 0 to 2 rows, more of them than a launch takes. */
static void move_case(const sluice_kernels_t* kernels, int32_t dtype, int64_t rows, int64_t width) {
  sluice_row_run_t runs[300];
  int64_t num_runs = rows * 4, total = 0, row_bytes = width * (int64_t)sluice_dtype_bytes(dtype);
  for (int64_t r = 0; r < num_runs; ++r) {
    runs[r] = (sluice_row_run_t){.src_row = (int64_t)(random_bits() % 5), .dst_row = total, .rows = r % 3};
    total += r % 3;
  }
  buffer_t src = random_buffer(dtype, 8 * width), want = buffer(dtype, total * width), got = copy_of(&want);
  ref->move_rows(NULL, row_bytes, runs, num_runs, src.data, want.data);
  kernels->move_rows(NULL, row_bytes, runs, num_runs, src.data, got.data);
  for (int64_t r = 0; r < num_runs; ++r) {
    for (int64_t i = 0; i < runs[r].rows * width; ++i) {
      assert_true(get_element(want.data, runs[r].dst_row * width + i, dtype) ==
                  get_element(src.data, runs[r].src_row * width + i, dtype));
    }
  }
  assert_same(&want, &got, "move_rows");
  release(&src), release(&want), release(&got);
}

/* gap: elements between the rows of the result. */
static void combine_into(const sluice_kernels_t* kernels, int32_t dtype, int64_t rows, int64_t width, int64_t top_k,
                         int64_t gap) {
  enum { ROWS_IN = 8, MOST = 80 * 4 };
  int32_t position[MOST];
  float scale[MOST], major[MOST];
  buffer_t in = random_buffer(dtype, ROWS_IN * width);
  for (int64_t j = 0; j < width; ++j) set_element(in.data, j, dtype, NAN); /* row 0 is never read */
  for (int64_t i = 0; i < rows * top_k; ++i) {
    position[i] = random_bits() % 4 == 0 ? -1 : (int32_t)(1 + random_bits() % (ROWS_IN - 1));
    scale[i] = position[i] < 0 ? NAN : (float)random_real();
  }
  for (int64_t k = 0; rows > 1 && k < top_k; ++k) position[top_k + k] = -1;
  for (int with_scale = 0; with_scale < 3; ++with_scale) {
    buffer_t want = buffer(dtype, rows * (width + gap)), got = buffer(dtype, rows * (width + gap));
    /* Token-major, then k-major scales, then none. */
    int64_t scale_t = with_scale == 2 ? 1 : top_k, scale_k = with_scale == 2 ? rows : 1;
    for (int64_t i = 0; i < rows * top_k; ++i) major[i / top_k * scale_t + i % top_k * scale_k] = scale[i];
    const float* s = with_scale == 0 ? NULL : major;
    ref->combine_rows(NULL, dtype, rows, top_k, width, in.data, position, s, scale_t, scale_k, want.data, width + gap);
    kernels->combine_rows(NULL, dtype, rows, top_k, width, in.data, position, s, scale_t, scale_k, got.data,
                          width + gap);
    assert_same(&want, &got, "combine_rows");
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < width + gap; ++j) {
        double x = get_element(got.data, i * (width + gap) + j, dtype);
        assert_int_equal(j >= width, isnan(x) != 0); /* -1 contributes no NaN, and padding between rows is unchanged */
        if (i == 1 && j < width) assert_true(x == 0);
      }
    }
    release(&want), release(&got);
  }
  release(&in);
}

static void combine_case(const sluice_kernels_t* kernels, int32_t dtype, int64_t rows, int64_t width) {
  combine_into(kernels, dtype, rows, width, 1, 8);
  combine_into(kernels, dtype, rows, width, 3, 5);
  combine_into(kernels, dtype, rows, width, 4, 8);
}

static void scale_case(const sluice_kernels_t* kernels, int32_t dtype, int64_t rows, int64_t width) {
  buffer_t src = random_buffer(dtype, rows * width), want = buffer(dtype, rows * width),
           got = buffer(dtype, rows * width);
  buffer_t w = random_buffer(SLUICE_DTYPE_F32, rows);
  if (rows > 2) ((float*)w.data)[2] = INFINITY;
  ref->scale_rows(NULL, dtype, rows, width, src.data, w.data, want.data);
  kernels->scale_rows(NULL, dtype, rows, width, src.data, w.data, got.data);
  assert_same(&want, &got, "scale_rows");
  kernels->scale_rows(NULL, dtype, rows, width, src.data, w.data, src.data); /* in place */
  assert_same(&want, &src, "scale_rows in place");
  release(&src), release(&want), release(&got), release(&w);
}

static void bias_case(const sluice_kernels_t* kernels, int32_t dtype, int64_t rows, int64_t width) {
  buffer_t want = random_buffer(dtype, rows * width), got = copy_of(&want), bias = random_buffer(dtype, width);
  ref->add_bias(NULL, dtype, rows, width, want.data, bias.data);
  kernels->add_bias(NULL, dtype, rows, width, got.data, bias.data);
  assert_same(&want, &got, "add_bias");
  release(&want), release(&got), release(&bias);
}

static void dot_case(const sluice_kernels_t* kernels, int32_t dtype, int64_t rows, int64_t width) {
  buffer_t a = random_buffer(dtype, rows * width), b = random_buffer(dtype, rows * (width + 1) + width);
  const int64_t strides[] = {width + 1, 0, width};
  for (int mode = 0; mode < 6; ++mode) {
    const int64_t stride = strides[mode % 3];
    const int accumulate = mode / 3;
    buffer_t want = accumulate ? random_buffer(SLUICE_DTYPE_F32, rows) : buffer(SLUICE_DTYPE_F32, rows),
             got = copy_of(&want);
    buffer_t part = copy_of(&want);
    ref->dot_rows(NULL, dtype, rows, width, a.data, b.data, stride, accumulate, want.data);
    kernels->dot_rows(NULL, dtype, rows, width, a.data, b.data, stride, accumulate, got.data);
    assert_same(&want, &got, "dot_rows");
    /* Row by row: the bits do not depend on the number of rows in a call. */
    size_t bytes = sluice_dtype_bytes(dtype);
    for (int64_t i = 0; i < rows; ++i) {
      kernels->dot_rows(NULL, dtype, 1, width, (char*)a.data + (size_t)(i * width) * bytes,
                        (char*)b.data + (size_t)(i * stride) * bytes, stride, accumulate, (float*)part.data + i);
    }
    assert_same(&want, &part, "dot_rows, row by row");
    for (int64_t i = 0; i < rows && !(accumulate); ++i) {
      /* 32 partial sums of w/32 terms each: error below (w/32 + 6) * 2^-24 of the sum of magnitudes. */
      double sum = 0, sizes = 0;
      for (int64_t j = 0; j < width; ++j) {
        double problem = get_element(a.data, i * width + j, dtype) * get_element(b.data, i * stride + j, dtype);
        sum += problem, sizes += fabs(problem);
      }
      assert_true(fabs((double)((float*)got.data)[i] - sum) <= sizes * ((double)width / 32 + 6) * 0x1p-24);
    }
    release(&want), release(&got), release(&part);
  }
  release(&a), release(&b);
}

static void columns_case(const sluice_kernels_t* kernels, int32_t dtype, int64_t rows, int64_t width) {
  buffer_t data = random_buffer(dtype, rows * (width + 3)), w = random_buffer(SLUICE_DTYPE_F32, rows);
  for (int mode = 0; mode < 8; ++mode) {
    const int64_t stride = width + 2 + (mode & 1);
    int32_t dtype_out = mode & 4 ? SLUICE_DTYPE_F32 : dtype;
    buffer_t want = mode & 2 ? random_buffer(dtype_out, width) : buffer(dtype_out, width), got = copy_of(&want);
    const float* weight = mode & 1 ? w.data : NULL;
    ref->sum_columns(NULL, dtype, rows, width, data.data, stride, weight, mode & 2, dtype_out, want.data);
    kernels->sum_columns(NULL, dtype, rows, width, data.data, stride, weight, mode & 2, dtype_out, got.data);
    assert_same(&want, &got, "sum_columns");
    release(&want), release(&got);
  }
  release(&data), release(&w);
}

static void round_case(const sluice_kernels_t* kernels, int32_t dtype, int64_t rows, int64_t width) {
  buffer_t sums = random_buffer(SLUICE_DTYPE_F32, rows * width);
  for (int accumulate = 0; accumulate < 2; ++accumulate) {
    buffer_t want = random_buffer(dtype, rows * (width + 3)), got = copy_of(&want);
    ref->round_rows(NULL, dtype, rows, width, sums.data, accumulate, want.data, width + 3);
    kernels->round_rows(NULL, dtype, rows, width, sums.data, accumulate, got.data, width + 3);
    assert_same(&want, &got, "round_rows");
    release(&want), release(&got);
  }
  release(&sums);
}
