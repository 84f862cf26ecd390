// SPDX-License-Identifier: Apache-2.0
/* Launches kernels that decode packed weights. */
#include <assert.h>

#include "backend/base/dtype.h"
#include "backend/base/math.h"
#include "backend/device/cuda/cuda_launch.h"
#include "sluice/weights.h"

static_assert((int)SLUICE_CUDA_MXFP4 == (int)SLUICE_WEIGHTS_MXFP4 && (int)SLUICE_CUDA_FP8 == (int)SLUICE_WEIGHTS_FP8 &&
                  (int)SLUICE_CUDA_INT8 == (int)SLUICE_WEIGHTS_INT8 &&
                  (int)SLUICE_CUDA_INT4 == (int)SLUICE_WEIGHTS_INT4,
              "kernels have names of their own for the formats");

static const int32_t kernels[] = {0, SLUICE_CUDA_decode_mxfp4_f32, SLUICE_CUDA_decode_fp8_f32,
                                  SLUICE_CUDA_decode_int8_f32, SLUICE_CUDA_decode_int4_f32};

/* Returns whether lanes may read the codes of eight elements at once. */
static int is_wide(const sluice_cuda_packed_t* w, int32_t format, int64_t cols) {
  enum { PACK = 8 };
  const uint64_t bytes = format == SLUICE_WEIGHTS_MXFP4 || format == SLUICE_WEIGHTS_INT4 ? PACK / 2 : PACK;
  return cols % PACK == 0 && ((uint64_t)(uintptr_t)w->codes | (uint64_t)w->row_bytes) % bytes == 0;
}

static void launch(sluice_stream_t stream, int32_t dtype, sluice_decode_args_t* args, int wide) {
  const int32_t of_dtype = dtype - SLUICE_DTYPE_F32; /* f32, bf16, f16, f64 */
  sluice_cuda_launch((wide ? kernels[args->format] : SLUICE_CUDA_decode_any) + of_dtype, stream, args, args->units);
  args->units = args->num_weights = 0;
}

sluice_status_t sluice_cuda_decode(sluice_stream_t stream, int32_t format, int64_t block_cols, int64_t cols,
                                   int32_t dtype, const sluice_cuda_packed_t* weights, int64_t count) {
  const int64_t places = block_cols / SLUICE_CUDA_LEAST_BLOCK, all = INT64_C(1) << SLUICE_CUDA_PER_BLOCK_BITS;
  if (cols / SLUICE_CUDA_LEAST_BLOCK * places >= all) {
    return SLUICE_FAIL(SLUICE_E_UNSUPPORTED,
                       "cuda: a packed weight is %lld columns wide, in blocks of %lld: too wide for the kernels that "
                       "decode it; give plain weights",
                       (long long)cols, (long long)block_cols);
  }
  sluice_decode_args_t args = {.cols = (int32_t)cols,
                               .block_cols = (int32_t)block_cols,
                               .per_block = (uint32_t)sluice_ceil_div(all, places),
                               .format = format};
  int all_wide = dtype != SLUICE_DTYPE_F64;
  for (int64_t i = 0; i < count; ++i) {
    const sluice_cuda_packed_t* w = &weights[i];
    args.units += w->rows;
    all_wide &= is_wide(w, format, cols);
    args.weights[args.num_weights++] = (sluice_decode_weight_t){.codes = w->codes,
                                                                .scales = w->scales,
                                                                .out = w->out,
                                                                .row_bytes = w->row_bytes,
                                                                .end = (int32_t)args.units,
                                                                .scales_ld = (int32_t)w->scales_ld,
                                                                .half = (int32_t)w->half};
    if (args.num_weights < SLUICE_CUDA_DECODED && i + 1 < count) continue;
    launch(stream, dtype, &args, all_wide);
    all_wide = dtype != SLUICE_DTYPE_F64;
  }
  return sluice_cuda_launch_status();
}
