// SPDX-License-Identifier: Apache-2.0
/* GEMMs of bf16 on processors with AVX512-BF16 and without AMX; other dtypes go to the kernels for AVX-512.
 *
 * VDPBF16PS multiplies pairs of bf16, of an even k and of the odd k after it, and adds both products to a sum in f32:
 * twice the multiply-adds of an instruction for f32, from half the bytes. So the driver and the tiles of gemm_native.c
 * work with pairs in place of floats. If k is contiguous, pairs are packed without a conversion.
 *
 * Numbers: an element of C is one chain over the pairs of k, ascending, from the beginning of k, that starts from zero
 * (beta 0) or from C (beta 1). If the number of k is odd, the second element of the last pair is zero. A pair adds the
 * product of its odd k, then that of its even k, each by a fused multiply-add that rounds to nearest even in f32. The
 * instruction takes subnormal operands and results as zeros and ignores the rounding mode. The sum is rounded once to
 * C's dtype. It depends on nothing else, so a row has the same bits in every chunking. These are not the bits of the
 * other kernels.
 */
#include "backend/gemm/native/native_kernels.h"

#include <stddef.h>

#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>
#include <pthread.h>

#include "backend/base/dtype.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c,prfchw"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c,prfchw")
#endif

enum { MAX_ROWS = 14, UNIT = 2, BF16_BYTES = 2 };
#define EACH_ROW(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13)
#define READS_RAW   0
#define ROUNDS_BY_INSTRUCTION

#include "backend/gemm/native/native_zmm.inc.h"

INLINE vf vf_zero(void) { return _mm512_setzero_ps(); }
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
INLINE vf vf_load(const float* at) { return _mm512_load_ps(at); }
INLINE void vf_store(float* at, vf x) { _mm512_store_ps(at, x); }

#include "backend/gemm/native/native_tile.inc.h"

/* ---- packing --------------------------------------------------------------------------------------------------- */

/* Loads the next 16 pairs of a row, with zeros past `left` of k. */
INLINE vf load_pairs(const void* at, int64_t left) {
  const __mmask32 words = left >= LANES * UNIT ? 0xffffffffu : (1u << left) - 1u;
  return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(words, at));
}

static void pack_rows(const void* in, int64_t in_ld, int32_t dtype, int64_t count, int64_t depth, float* out,
                      int64_t out_ld) {
  (void)dtype; /* always bf16 */
  const char* at = in;
  for (; depth > 0; depth -= LANES * UNIT) {
    __m512 r[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) {
      r[i] = i < count ? load_pairs(at + i * in_ld * BF16_BYTES, depth) : _mm512_setzero_ps();
    }
    transpose(r);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) {
      if (i * UNIT < depth) _mm512_storeu_ps(out + i * out_ld, r[i]);
    }
    at += LANES * UNIT * BF16_BYTES;
    out += LANES * out_ld;
  }
}

static void pack_columns(const void* in, int64_t in_ld, int32_t dtype, int64_t count, int64_t depth, float* out,
                         int64_t out_ld) {
  (void)dtype;
  const __mmask16 lanes = first_lanes(count);
  const char* at = in;
  for (; depth > 0; depth -= UNIT) {
    const __m512i even = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, at));
    __m512i odd = _mm512_setzero_si512();
    if (depth > 1) odd = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, at + in_ld * BF16_BYTES));
    _mm512_storeu_si512(out, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
    at += UNIT * in_ld * BF16_BYTES;
    out += out_ld;
  }
}

INLINE void pack_along_as(const int32_t format, const sluice_gemm_form_t* f, int64_t row, int64_t count, int64_t k0,
                          int64_t depth, float* out, int64_t out_ld) {
  packed_row_t rows[LANES];
  for (int64_t i = 0; i < LANES; ++i) rows[i] = packed_row(&f->packed, f->b, f->ldb, row + (i < count ? i : 0));
  for (int64_t k = 0; k < depth; k += LANES * UNIT, out += LANES * out_ld) {
    __m512 r[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) r[i] = decode_pairs(format, &rows[i], k0 + k, depth - k);
    transpose(r);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) {
      if (k + i * UNIT < depth) _mm512_storeu_ps(out + i * out_ld, r[i]);
    }
  }
}

/* Decodes two rows, and interleaves them to pairs. */
INLINE void pack_across_as(const int32_t format, const sluice_gemm_form_t* f, int64_t k0, int64_t depth, int64_t j0,
                           int64_t cols, float* out) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                       5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(LANES));
  const int64_t panel = (depth + UNIT - 1) / UNIT * WIDTH;
  for (int64_t k = 0; k < depth; k += UNIT, out += WIDTH) {
    const int has_odd = k + 1 < depth;
    const packed_row_t even = packed_row(&f->packed, f->b, f->ldb, k0 + k);
    const packed_row_t odd = packed_row(&f->packed, f->b, f->ldb, k0 + k + has_odd);
    float* to = out;
    for (int64_t j = 0; j < cols; j += WIDTH, to += panel) {
      const __m512i x = _mm512_castps_si512(decode_pairs(format, &even, j0 + j, cols - j));
      const __m512i y = _mm512_castps_si512(decode_pairs(format, &odd, j0 + j, has_odd ? cols - j : 0));
      _mm512_store_si512(to, _mm512_permutex2var_epi16(x, low, y));
      _mm512_store_si512(to + LANES, _mm512_permutex2var_epi16(x, high, y));
    }
  }
}

#define PACK_FORMAT(way, ...)                                               \
  switch (f->packed.format) {                                               \
    case SLUICE_PACKED_MXFP4: way(SLUICE_PACKED_MXFP4, __VA_ARGS__); break; \
    case SLUICE_PACKED_FP8: way(SLUICE_PACKED_FP8, __VA_ARGS__); break;     \
    case SLUICE_PACKED_INT8: way(SLUICE_PACKED_INT8, __VA_ARGS__); break;   \
    default: way(SLUICE_PACKED_INT4, __VA_ARGS__); break;                   \
  }

static void pack_codes_along(const sluice_gemm_form_t* f, int32_t dtype, int64_t row, int64_t count, int64_t k0,
                             int64_t depth, float* out, int64_t out_ld) {
  (void)dtype;
  PACK_FORMAT(pack_along_as, f, row, count, k0, depth, out, out_ld)
}

static void pack_codes_across(const sluice_gemm_form_t* f, int32_t dtype, int64_t k0, int64_t depth, int64_t j0,
                              int64_t cols, float* out) {
  (void)dtype;
  PACK_FORMAT(pack_across_as, f, k0, depth, j0, cols, out)
}

INLINE vf thin_load(int32_t dtype, const void* at, int64_t left) {
  (void)dtype;
  return load_pairs(at, left);
}

INLINE vf thin_unpack(const int32_t format, int32_t dtype, const packed_row_t* row, int64_t k, int64_t left) {
  (void)dtype;
  return decode_pairs(format, row, k, left);
}

#define THIN_BF16_ALONE 1
#include "backend/gemm/native/native_thin.inc.h"

static const sluice_native_thin_t thin = {.takes = thin_takes, .room = thin_room, .problem = thin_gemm};

static const sluice_native_kernels_t pairs = {
    .name = "avx512_bf16",
    .max_rows = MAX_ROWS,
    .width = WIDTH,
    .unit = UNIT,
    .tile = run_tile,
    .pack_rows = pack_rows,
    .pack_columns = pack_columns,
    .decode = decode,
    .pack_codes_along = pack_codes_along,
    .pack_codes_across = pack_codes_across,
    .thin = &thin,
};

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

static sluice_native_kernels_t kernels;
static const sluice_native_kernels_t* found;

static void look(void) {
  enum { AVX512_BF16 = 1 << 5 };
  unsigned a, b, c, d;
  const sluice_native_kernels_t* others = sluice_native_avx512();
  if (others == NULL || !__get_cpuid_count(7, 1, &a, &b, &c, &d) || (a & AVX512_BF16) == 0) return;
  kernels = *others;
  kernels.name = "avx512_bf16";
  kernels.pairs = &pairs;
  found = &kernels;
}

const sluice_native_kernels_t* sluice_native_avx512_bf16(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, look);
  return found;
}

#else

const sluice_native_kernels_t* sluice_native_avx512_bf16(void) { return NULL; }

#endif
