// SPDX-License-Identifier: Apache-2.0
/* Compares row kernels and activations with the plain ones. */
#include <stdio.h>
#include <stdlib.h>

#include "backend/base/dtype.h"
#include "backend/cts/gpu/gpu_array.h"
#include "backend/cts/gpu/gpu_parts.h"
#include "backend/cts/gpu/gpu_rig.h"
#include "backend/device/device.h"

static const int32_t DTYPES[] = {SLUICE_DTYPE_F32, SLUICE_DTYPE_BF16, SLUICE_DTYPE_F16, SLUICE_DTYPE_F64};

static void moving(int32_t dtype, int64_t rows, int64_t width) {
  const sluice_kernels_t *ref = sluice_cpu_kernels_ref(), *gpu = gpu_rig.device->kernels;
  int64_t bytes = (int64_t)sluice_dtype_bytes(dtype);
  gpu_array_t src = gpu_randoms(dtype, rows * width), dst = gpu_randoms(dtype, rows * width),
              index = gpu_array(rows * 4 * 2), scale = gpu_randoms(SLUICE_DTYPE_F32, rows * 2),
              out = gpu_randoms(dtype, rows * width);
  sluice_row_run_t* runs = calloc((size_t)rows, sizeof *runs);
  for (int64_t i = 0; i < 2 * rows; ++i) ((int32_t*)index.host)[i] = (int32_t)(gpu_random_bits() % (uint32_t)rows);
  gpu_send(&index);
  for (int64_t i = 0; i < rows; ++i) runs[i] = (sluice_row_run_t){(i * 7) % rows, i, 1};
  gpu_enter();
  ref->gather_rows(NULL, dtype, rows, width, src.host, width, index.host, dst.host);
  gpu->gather_rows(NULL, dtype, rows, width, src.there, width, index.there, dst.there);
  gpu_report("gather_rows", gpu_differs(&dst, dtype, 0, 0));
  /* Odd rows from the other tensor, which is the same one. */
  for (int64_t i = 1; i < rows; i += 2) ((int32_t*)index.host)[i] = -2 - ((int32_t*)index.host)[i];
  gpu_send(&index);
  gpu->gather_rows_of_two(NULL, dtype, rows, width, src.there, width, src.there, width, index.there, dst.there);
  gpu_report("gather_rows_of_two", gpu_differs(&dst, dtype, 0, 0));
  /* Of its two positions, each token writes one. The result is that of a gather by the inverse permutation. */
  for (int64_t i = 0; i < rows; ++i) {
    ((int32_t*)index.host)[2 * i] = -1;
    ((int32_t*)index.host)[2 * i + 1] = (int32_t)(rows - 1 - i);
  }
  gpu_send(&index);
  gpu->scatter_rows(NULL, dtype, rows, 2, width, src.there, width, index.there, rows, rows, dst.there);
  for (int64_t i = 0; i < rows; ++i) runs[i] = (sluice_row_run_t){rows - 1 - i, i, 1};
  ref->move_rows(NULL, width * bytes, runs, rows, src.host, dst.host);
  gpu_report("scatter_rows", gpu_differs(&dst, dtype, 0, 0));
  for (int64_t i = 0; i < rows; ++i) runs[i] = (sluice_row_run_t){(i * 7) % rows, i, 1};
  ref->move_rows(NULL, width * bytes, runs, rows, src.host, dst.host);
  gpu->move_rows(NULL, width * bytes, runs, rows, src.there, dst.there);
  gpu_report("move_rows", gpu_differs(&dst, dtype, 0, 0));
  ((int32_t*)index.host)[0] = -1;
  gpu_send(&index);
  ref->combine_rows(NULL, dtype, rows, 2, width, src.host, index.host, scale.host, 2, 1, out.host, width);
  gpu->combine_rows(NULL, dtype, rows, 2, width, src.there, index.there, scale.there, 2, 1, out.there, width);
  gpu_report("combine_rows", gpu_differs(&out, dtype, 0, 0));
  ref->scale_rows(NULL, dtype, rows, width, src.host, scale.host, out.host);
  gpu->scale_rows(NULL, dtype, rows, width, src.there, scale.there, out.there);
  gpu_report("scale_rows", gpu_differs(&out, dtype, 0, 0));
  ref->add_bias(NULL, dtype, rows, width, out.host, src.host);
  gpu->add_bias(NULL, dtype, rows, width, out.there, src.there);
  gpu_report("add_bias", gpu_differs(&out, dtype, 0, 0));
  ref->dot_rows(NULL, dtype, rows, width, src.host, dst.host, width, 1, scale.host);
  gpu->dot_rows(NULL, dtype, rows, width, src.there, dst.there, width, 1, scale.there);
  gpu_report("dot_rows", gpu_differs(&scale, SLUICE_DTYPE_F32, 0, 0));
  ref->sum_columns(NULL, dtype, rows, width, src.host, width, scale.host, 0, dtype, out.host);
  gpu->sum_columns(NULL, dtype, rows, width, src.there, width, scale.there, 0, dtype, out.there);
  gpu_report("sum_columns", gpu_differs(&out, dtype, 0, 0));
  int64_t rounded = width < 2 ? rows : rows * 2; /* what both arrays hold */
  ref->round_rows(NULL, dtype, 1, rounded, scale.host, 1, out.host, rounded);
  gpu->round_rows(NULL, dtype, 1, rounded, scale.there, 1, out.there, rounded);
  gpu_report("round_rows", gpu_differs(&out, dtype, 0, 0));
  ref->round_rows(NULL, dtype, 1, rounded, scale.host, 0, out.host, rounded);
  gpu->pack_matrices(NULL, dtype, SLUICE_DTYPE_F32, 1, rounded, scale.there, rounded, 1, 1, out.there, 0);
  gpu_report("pack_matrices, of f32", gpu_differs(&out, dtype, 0, 0));
  const int64_t half = width / 2; /* two matrices [half, rows], whose values alternate along each row of src */
  for (int64_t i = 0; i < rows * half * 2; ++i) {
    const int64_t row = i / (half * 2), at = i % (half * 2);
    memcpy((char*)dst.host + ((at % 2 * half + at / 2) * rows + row) * bytes,
           (const char*)src.host + (row * width + at) * bytes, (size_t)bytes);
  }
  gpu->pack_matrices(NULL, dtype, dtype, half, rows, src.there, 2, width, 2, dst.there, half * rows);
  gpu_report("pack_matrices", gpu_differs(&dst, dtype, 0, 0));
  for (int64_t i = 0; i < rows; ++i) ((float*)scale.host)[i] = 0.75f;
  ref->scale_rows(NULL, dtype, rows, width, dst.host, scale.host, dst.host);
  gpu->scale_columns(NULL, dtype, rows, width, dst.there, width, 0.75f);
  gpu_report("scale_columns", gpu_differs(&dst, dtype, 0, 0));
  gpu_leave();
  free(runs);
  gpu_drop(&src), gpu_drop(&dst), gpu_drop(&index), gpu_drop(&scale), gpu_drop(&out);
}

/* The plain version evaluates in f64, the kernels in f32: a few ulps, and one more rounding to bf16 or f16. */
static const double ulp[] = {0, 0x1p-23, 0x1p-7, 0x1p-10, 0x1p-52};
static const double term[] = {0, 0x1p-20, 0x1p-7, 0x1p-7, 0x1p-50};
static double f32_ulp(int32_t dtype) { return dtype == SLUICE_DTYPE_F64 ? 0x1p-52 : 0x1p-23; }

/* Of the number-th unit: the activations without parameters, alone and gated in halves, then `others`: squared ReLU,
 * an interleaved SiLU, and the clamped SwiGLU in halves and interleaved, with limits that half of the elements pass. */
static const sluice_unit_t others[] = {{SLUICE_ACTIVATION_RELU2, SLUICE_GATED_NO, 1, 1, 0},
                                       {SLUICE_ACTIVATION_RELU2, SLUICE_GATED_INTERLEAVED, 1, 1, 0},
                                       {SLUICE_ACTIVATION_SILU, SLUICE_GATED_INTERLEAVED, 1, 1, 0},
                                       {SLUICE_ACTIVATION_SWIGLU, SLUICE_GATED_HALVES, 1.702f, 1.5f, 1},
                                       {SLUICE_ACTIVATION_SWIGLU, SLUICE_GATED_INTERLEAVED, 1.702f, 1.5f, 1}};
enum { NUM_PLAIN = 2 * (SLUICE_ACTIVATION_SILU + 1), NUM_UNITS = NUM_PLAIN + sizeof others / sizeof others[0] };

static void units(int32_t dtype, int64_t rows, int64_t width) {
  const sluice_kernels_t *ref = sluice_cpu_kernels_ref(), *gpu = gpu_rig.device->kernels;
  const double f32 = 16 * f32_ulp(dtype);
  for (int n = 0; n < NUM_UNITS; ++n) {
    char name[64];
    const int is_plain = n < NUM_PLAIN;
    const sluice_unit_t unit = is_plain ? (sluice_unit_t){n / 2, n % 2, 1, 1, 0} : others[n - NUM_PLAIN];
    const int64_t wide = rows * width * (unit.gated ? 2 : 1);
    const int halves = !is_plain && unit.gated == SLUICE_GATED_HALVES; /* both halves have a bias */
    gpu_array_t pre = gpu_randoms(dtype, wide), act = gpu_randoms(dtype, rows * width),
                dact = gpu_randoms(dtype, rows * width), weight = gpu_randoms(SLUICE_DTYPE_F32, rows),
                dpre = gpu_randoms(dtype, wide), dw = gpu_randoms(SLUICE_DTYPE_F32, rows),
                b1 = gpu_randoms(dtype, 2 * width), b3 = gpu_randoms(dtype, width);
    gpu_enter();
    ref->unit_forward(NULL, dtype, &unit, rows, width, pre.host, b1.host, halves ? b3.host : NULL, act.host);
    gpu->unit_forward(NULL, dtype, &unit, rows, width, pre.there, b1.there, halves ? b3.there : NULL, act.there);
    snprintf(name, sizeof name, "unit_forward %d gated %d", unit.activation, unit.gated);
    gpu_report(name, gpu_differs(&pre, dtype, 0, 0));
    gpu_report(name, gpu_differs(&act, dtype, ulp[dtype], (is_plain ? 27 : 36) * f32));
    ref->unit_backward(NULL, dtype, &unit, rows, width, pre.host, dact.host, weight.host, dpre.host, act.host, dw.host);
    gpu->unit_backward(NULL, dtype, &unit, rows, width, pre.there, dact.there, weight.there, dpre.there, act.there,
                       dw.there);
    snprintf(name, sizeof name, "unit_backward %d gated %d", unit.activation, unit.gated);
    gpu_report(name, gpu_differs(&dpre, dtype, ulp[dtype], (is_plain ? 27 : 9 * 36) * f32));
    /* act is rounded, then its product */
    gpu_report(name, gpu_differs(&act, dtype, 2 * ulp[dtype], (is_plain ? 27 : 3 * 36) * f32));
    /* An activation that is rounded the other way changes a term of the sum. */
    if (is_plain) gpu_report(name, gpu_differs(&dw, SLUICE_DTYPE_F32, 0x1p-22, term[dtype] * 0.5 * (double)width));
    gpu_leave();
    gpu_drop(&pre), gpu_drop(&act), gpu_drop(&dact), gpu_drop(&weight);
    gpu_drop(&dpre), gpu_drop(&dw), gpu_drop(&b1), gpu_drop(&b3);
  }
}

/* Route weights out and gate scalars back, with strides, and with gaps between them that must not be written. */
static void scalars(int k_major) {
  enum { T = 41, K = 3, PAD = 2, ROOM = (T + PAD) * (K + PAD) };
  const sluice_kernels_t *ref = sluice_cpu_kernels_ref(), *gpu = gpu_rig.device->kernels;
  const int64_t stride_t = k_major ? 1 : K + PAD, stride_k = k_major ? T + PAD : 1;
  gpu_array_t in = gpu_randoms(SLUICE_DTYPE_F32, ROOM), back = gpu_randoms(SLUICE_DTYPE_F32, ROOM),
              rows = gpu_zeros(T * K * 4), route = gpu_array(T * K * 4), position = gpu_array(T * K * 4);
  int32_t *routes = route.host, *positions = position.host, count = 0;
  for (int32_t r = T * K - 1; r >= 0; --r) {
    positions[r] = r % 5 == 4 ? -1 : count;
    if (positions[r] >= 0) routes[count++] = r;
  }
  routes[count] = -1;
  gpu_send(&route), gpu_send(&position);
  gpu_enter();
  ref->gather_scalars(NULL, count + 1, K, in.host, stride_t, stride_k, route.host, rows.host);
  gpu->gather_scalars(NULL, count + 1, K, in.there, stride_t, stride_k, route.there, rows.there);
  gpu_report("gather_scalars", gpu_differs(&rows, SLUICE_DTYPE_F32, 0, 0));
  ref->spread_scalars(NULL, T, K, rows.host, position.host, back.host, stride_t, stride_k);
  gpu->spread_scalars(NULL, T, K, rows.there, position.there, back.there, stride_t, stride_k);
  gpu_report("spread_scalars", gpu_differs(&back, SLUICE_DTYPE_F32, 0, 0));
  gpu_leave();
  gpu_drop(&in), gpu_drop(&back), gpu_drop(&rows), gpu_drop(&route), gpu_drop(&position);
}

void gpu_part_kernels(void) {
  static const int64_t widths[] = {1, 33, 64, 250, 2048},
                       unit_shapes[][2] = {{20, 264}, {9, 37}, {3, 513}, {2, 8}, {5, 1}};
  for (int d = 0; d < 4; ++d) {
    for (gpu_misaligned = 0; gpu_misaligned < 2; ++gpu_misaligned) {
      for (size_t w = 0; w < sizeof widths / sizeof widths[0]; ++w) moving(DTYPES[d], 150, widths[w]);
      for (size_t i = 0; i < sizeof unit_shapes / sizeof unit_shapes[0]; ++i) {
        units(DTYPES[d], unit_shapes[i][0], unit_shapes[i][1]);
      }
    }
    gpu_misaligned = 0;
  }
  scalars(0);
  scalars(1);
  gpu_decode();
}
