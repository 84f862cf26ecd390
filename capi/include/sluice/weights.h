// SPDX-License-Identifier: Apache-2.0
/* Frozen expert weights in 4 or 8 bits (weight_format of a layer's config).
 *
 * A weight W [out, in] (w1 and w3: [H, M], w2: [M, H]) is stored as codes, row by row, and scales, one for each block
 * of W. The layer computes with
 *
 *   dtype(f32(code) * f32(scale))
 *
 * which is rounded once in the product and once to the layer's dtype, as transformers decodes such checkpoints. With
 * gemm "ref" and "native", a GEMM decodes the rows that it is about to read, and outputs and input gradients have the
 * bits of a layer with the decoded weights. The other libraries get decoded parts in scratch memory. On CUDA codes and
 * scales are device memory (scales begin at a multiple of their size). A kernel decodes the weights of as many experts
 * as 64 MiB hold, at least of one, into slots that plans count, and cuBLAS reads the slots. The functions below take
 * host memory.
 *
 *   format   codes                                       scales
 *   MXFP4    u8 [out, in / 2], e2m1, `in` even           u8 [out, in / 32], 2^(scale - 127); `in` a multiple of 32
 *   FP8      u8 [out, in], e4m3 without infinities       f32 [ceil(out / 128), ceil(in / 128)]
 *   INT8     i8 or u8 [out, in]                          bf16 [out, ceil(in / block)]
 *   INT4     u8 [out, in / 2], two's complement          bf16 [out, ceil(in / block)]; `in` even
 *
 * If a byte holds two codes, its low half is the even column. Columns of codes and of scales are contiguous; rows may
 * have any stride. If the rows of w3 follow those of w1, in codes and in scales, both matrices are computed in one
 * GEMM, as with weights that are not packed. */
#ifndef SLUICE_WEIGHTS_H_
#define SLUICE_WEIGHTS_H_

#include "sluice/base.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
  SLUICE_WEIGHTS_PLAIN = 0, /* in the layer's dtype */
  SLUICE_WEIGHTS_MXFP4 = 1,
  SLUICE_WEIGHTS_FP8 = 2,
  SLUICE_WEIGHTS_INT8 = 3,
  SLUICE_WEIGHTS_INT4 = 4
};

/* Returns the bytes of the codes and of the scales of a weight W [out, in] in a format, without padding. PLAIN: out *
 * in elements of `dtype` (SLUICE_DTYPE_*), and no scales; other formats ignore dtype. block: as weight_block in the
 * config of a layer. Pure, any thread. Errors: INVALID_ARGUMENT (names the problem: the format, or a block or width
 * that the format does not support). */
SLUICE_API sluice_status_t sluice_weights_bytes(int32_t format, int32_t block, int32_t dtype, int64_t num_out,
                                                int64_t num_in, uint64_t* out_codes, uint64_t* out_scales);

/* Quantises a weight: computes its codes and scales.
 *
 *   format  MXFP4, FP8, INT8 or INT4
 *   block   as weight_block of a layer's config: INT8 and INT4 a multiple of 32, or 0 for 128; other formats 0
 *   weight  in   [out, in] f32, bf16, f16 or f64 (rounded to f32 first), unit column stride
 *   codes   out  and
 *   scales  out  as above; rows without overlap
 *
 * Codes are rounded to the nearest, ties to even. The largest magnitude a of a block determines its scale:
 *   MXFP4  2^(floor(log2(a)) - 2); values above 6 scales become 6 scales [OCP Microscaling 1.0, section 6.3]
 *   FP8    a / 448
 *   INT8   a / 127 rounded to bf16, INT4 a / 7 rounded to bf16; no code is -128 or -8
 * A block of zeros has codes of 0. Quantising decoded MXFP4 weights gives codes with the same values.
 *
 * Local to a rank; deterministic; one thread. Threads: thread-safe. Errors, without effect: INVALID_ARGUMENT (also for
 * NaN and infinity in weight, with row and column). */
SLUICE_API sluice_status_t sluice_weights_quantise(int32_t format, int32_t block, const sluice_tensor_t* weight,
                                                   const sluice_tensor_t* codes, const sluice_tensor_t* scales);

/* Decodes a weight as a layer does. weight [out, in]: written; f32, bf16, f16 or f64, unit column stride, rows without
 * overlap. Codes and scales of NaN give NaN. Threads, errors: as sluice_weights_quantise. */
SLUICE_API sluice_status_t sluice_weights_dequantise(int32_t format, int32_t block, const sluice_tensor_t* codes,
                                                     const sluice_tensor_t* scales, const sluice_tensor_t* weight);

/* Checks that no code and no scale is NaN or infinite (codes 0x7f and 0xff in FP8, a scale of 255 in MXFP4, floats).
 * Layers do not check this, because they would have to read all weights in each step: call it once after a checkpoint
 * was read. Threads: thread-safe. Errors: INVALID_ARGUMENT, with row and column. */
SLUICE_API sluice_status_t sluice_weights_check(int32_t format, int32_t block, const sluice_tensor_t* codes,
                                                const sluice_tensor_t* scales);

#ifdef __cplusplus
}
#endif

#endif /* SLUICE_WEIGHTS_H_ */
