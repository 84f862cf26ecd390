// SPDX-License-Identifier: Apache-2.0
/* Frozen expert weights in 4 or 8 bits (weight_format of a layer's config).
 *
 * A weight W [out, in] (w1 and w3: [H, M], w2: [M, H]) is codes, row after row, and scales that blocks of it share. The
 * layer computes with
 *
 *   dtype(f32(code) * f32(scale))
 *
 * rounded once in the product and once to the layer's dtype: what transformers makes of such checkpoints. Weights are
 * decoded where a GEMM reads them, a few rows at a time; outputs and input gradients have the bits of a layer with the
 * decoded weights, with gemm "ref" and "native". The other libraries get decoded parts in scratch memory. On CUDA codes
 * and scales are device memory (scales begin at a multiple of their size); a kernel decodes the weights of as many
 * experts as 64 MiB hold, at least of one, into slots that a plan counts, and cuBLAS reads them there. The functions
 * below take host memory.
 *
 *   format   codes                                       scales
 *   MXFP4    u8 [out, in / 2], e2m1, `in` even           u8 [out, in / 32], 2^(scale - 127); `in` a multiple of 32
 *   FP8      u8 [out, in], e4m3 without infinities       f32 [ceil(out / 128), ceil(in / 128)]
 *   INT8     i8 or u8 [out, in]                          bf16 [out, ceil(in / block)]
 *   INT4     u8 [out, in / 2], two's complement          bf16 [out, ceil(in / block)]; `in` even
 *
 * Of two codes in a byte the low half is the even column. Columns of codes and of scales are contiguous; rows may have
 * any distance. Where w3's rows of codes and of scales follow those of w1, both are computed as one matrix, as with
 * weights that are not packed. */
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

/* Returns the bytes of a weight W [out, in] in a format: those of its codes and those of its scales, without padding.
 * PLAIN: out * in elements of `dtype` (SLUICE_DTYPE_*), which is not read for other formats, and no scales. block: as
 * weight_block in the config of a layer. Pure, any thread. Errors: INVALID_ARGUMENT (names what is wrong: the format, a
 * block or a width that the format cannot have). */
SLUICE_API sluice_status_t sluice_weights_bytes(int32_t format, int32_t block, int32_t dtype, int64_t num_out,
                                                int64_t num_in, uint64_t* out_codes, uint64_t* out_scales);

/* Makes codes and scales of a weight.
 *
 *   format  MXFP4, FP8, INT8 or INT4
 *   block   as weight_block of a layer's config: INT8 and INT4 a multiple of 32, or 0 for 128; of the others 0
 *   weight  in   [out, in] f32, bf16, f16 or f64 (rounded to f32 first), unit column stride
 *   codes   out  and
 *   scales  out  as above; rows without overlap
 *
 * Codes are rounded to the nearest, ties to even. The largest magnitude of a block sets its scale:
 *   MXFP4  2^(floor(log2 of it) - 2); what is above 6 scales becomes 6 [OCP Microscaling 1.0, section 6.3]
 *   FP8    a 448th of it
 *   INT8   a 127th, INT4 a 7th of it, rounded to bf16; no code is -128 or -8
 * A block of zeros has codes of 0. Decoded MXFP4 weights give codes of the same values again.
 *
 * Local to a rank; deterministic; one thread. Threads: thread-safe. Errors: INVALID_ARGUMENT, also for NaN and infinity
 * in weight, with their row and column: no effect. */
SLUICE_API sluice_status_t sluice_weights_quantise(int32_t format, int32_t block, const sluice_tensor_t* weight,
                                                   const sluice_tensor_t* codes, const sluice_tensor_t* scales);

/* Writes weight [out, in] (f32, bf16, f16 or f64, unit column stride, rows without overlap), as a layer decodes it.
 * Codes and scales of NaN give NaN. Threads, errors: as above. */
SLUICE_API sluice_status_t sluice_weights_dequantise(int32_t format, int32_t block, const sluice_tensor_t* codes,
                                                     const sluice_tensor_t* scales, const sluice_tensor_t* weight);

/* Checks that no code and no scale stands for NaN or infinity: 0x7f and 0xff in FP8, a scale of 255 in MXFP4, and
 * floats. A layer does not check, since it would have to read all weights in each step: call this once, after a
 * checkpoint was read. Threads: thread-safe. Errors: INVALID_ARGUMENT, with row and column. */
SLUICE_API sluice_status_t sluice_weights_check(int32_t format, int32_t block, const sluice_tensor_t* codes,
                                                const sluice_tensor_t* scales);

#ifdef __cplusplus
}
#endif

#endif /* SLUICE_WEIGHTS_H_ */
