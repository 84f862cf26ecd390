// SPDX-License-Identifier: Apache-2.0
/* Primitives with 4 lanes in the compiler's vector extensions, for processors without AVX2 and for other
 * architectures. */
#include "backend/device/cpu/kernels_paths.h"

#include <string.h>

#include "backend/base/dtype.h"

#define LANES  4
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
typedef uint32_t vu __attribute__((vector_size(16)));

/* kernels_avx512.c documents each of these. */
INLINE vf vf_set1(float x) { return (vf){x, x, x, x}; }

INLINE vf vf_fma(vf a, vf b, vf c) {
  vf out = {0};
  for (int i = 0; i < LANES; ++i) {
#if defined(__FP_FAST_FMAF)
    out[i] = __builtin_fmaf(a[i], b[i], c[i]);
#else
    /* The product is exact; the sum is rounded twice, which differs from one rounding in rare last bits. */
    out[i] = (float)((double)a[i] * (double)b[i] + (double)c[i]);
#endif
  }
  return out;
}

INLINE vf select_lanes(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }
INLINE vf vf_max(vf a, vf b) { return select_lanes((vi)(a > b), a, b); }
INLINE vf vf_min(vf a, vf b) { return select_lanes((vi)(a < b), a, b); }
INLINE vf vf_pick_negative(vf x, vf a, vf b) { return select_lanes((vi)x >> 31, a, b); }
INLINE vf vf_step(vf x) {
  vi one = (vi)vf_set1(1);
  return (vf)(((vi)(x > 0.0f) & one) | ((vi)(x != x) & (vi)x));
}

INLINE vf vf_load(int32_t dtype, const void* data, int64_t i) {
  vf x = {0};
  uint16_t half[LANES];
  if (dtype == SLUICE_DTYPE_F32) {
    memcpy(&x, (const char*)data + i * 4, sizeof x);
    return x;
  }
  memcpy(half, (const char*)data + i * 2, sizeof half);
  for (int lane = 0; lane < LANES; ++lane) {
    x[lane] = dtype == SLUICE_DTYPE_BF16 ? sluice_bf16_to_f32(half[lane]) : sluice_f16_to_f32(half[lane]);
  }
  return x;
}

INLINE void vf_store(int32_t dtype, void* data, int64_t i, vf x) {
  uint16_t half[LANES];
  if (dtype == SLUICE_DTYPE_F32) {
    memcpy((char*)data + i * 4, &x, sizeof x);
    return;
  }
  for (int lane = 0; lane < LANES; ++lane) {
    half[lane] = dtype == SLUICE_DTYPE_BF16 ? sluice_f32_to_bf16(x[lane]) : sluice_f32_to_f16(x[lane]);
  }
  memcpy((char*)data + i * 2, half, sizeof half);
}

#include "backend/device/cpu/kernels_part.inc.h"
#include "backend/device/cpu/kernels_transcendental.inc.h"
#include "backend/device/cpu/kernels_rows.inc.h"
#include "backend/device/cpu/kernels_activation.inc.h"
#include "backend/device/cpu/kernels_table.inc.h"

const sluice_kernels_t* sluice_cpu_kernels_portable(void) { return &table; }
