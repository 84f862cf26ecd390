/* What the files for processors with AVX-512 share: a register's worth of any dtype as f32, and a transposition.
 * Included by each after it has named its target. Internal to backend/gemm/native. */

#define INLINE static inline __attribute__((always_inline))

enum { LANES = 16 };
typedef __m512 vf;
typedef __mmask16 lanes_t;

/* ---- elements of any dtype as f32 ------------------------------------------------------------------------------ */

INLINE __m512 from_bf16(__m256i h) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16)); }

#ifdef ROUNDS_BY_INSTRUCTION /* the same, but that subnormal numbers become zeros */
INLINE __m256i to_bf16(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
#else
INLINE __m256i to_bf16(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_epi32(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i even = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i wide = _mm512_mask_or_epi32(even, nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(wide, 16));
}
#endif

/* Lanes outside the mask are neither read nor written; they read as 0. */
INLINE vf load(int32_t dtype, const void* at, lanes_t mask) {
  switch (dtype) {
    case SLUICE_DTYPE_BF16: return from_bf16(_mm256_maskz_loadu_epi16(mask, at));
    case SLUICE_DTYPE_F16: return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, at));
    default: return _mm512_maskz_loadu_ps(mask, at);
  }
}

INLINE void store(int32_t dtype, void* at, lanes_t mask, vf x) {
  switch (dtype) {
    case SLUICE_DTYPE_BF16: _mm256_mask_storeu_epi16(at, mask, to_bf16(x)); break;
    case SLUICE_DTYPE_F16:
      _mm256_mask_storeu_epi16(at, mask, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
      break;
    default: _mm512_mask_storeu_ps(at, mask, x); break;
  }
}

INLINE lanes_t first_lanes(int64_t count) {
  return count >= LANES ? (lanes_t)0xffff : count <= 0 ? (lanes_t)0 : (lanes_t)((1u << count) - 1u);
}

/* Transposes 16 x 16: r[i] lane k becomes r[k] lane i. */
INLINE void transpose(__m512 r[LANES]) {
  __m512 t[LANES];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512d x0 = _mm512_castps_pd(t[4 * i]), x1 = _mm512_castps_pd(t[4 * i + 1]);
    const __m512d x2 = _mm512_castps_pd(t[4 * i + 2]), x3 = _mm512_castps_pd(t[4 * i + 3]);
    r[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(x0, x2));
    r[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x0, x2));
    r[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(x1, x3));
    r[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(x1, x3));
  }
  /* r[4 g + c] holds, in its quarter q, column 4 q + c of rows 4 g .. 4 g + 3. */
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512 x0 = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x88), x1 = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x88);
    const __m512 y0 = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xdd), y1 = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xdd);
    t[c] = _mm512_shuffle_f32x4(x0, x1, 0x88);
    t[8 + c] = _mm512_shuffle_f32x4(x0, x1, 0xdd);
    t[4 + c] = _mm512_shuffle_f32x4(y0, y1, 0x88);
    t[12 + c] = _mm512_shuffle_f32x4(y0, y1, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i) r[i] = t[i];
}
