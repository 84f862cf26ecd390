// SPDX-License-Identifier: Apache-2.0
/* Moves, scales and sums rows, with vectors of LANES floats. Products and sums are rounded separately and in the order
 * of kernels_ref.c, so every version gives the same bits; the work is elementwise, so the bits of a row do not depend
 * on the number of rows in a call. f64 uses the plain version, because it is only for finite differences. */

enum {
  PARTIALS = 32,           /* partial sums along a row, as in kernels_ref.c */
  ACCS = PARTIALS / LANES, /* vectors that hold them */
  COMBINE = 4,             /* vectors of a row that combine_rows sums at once */
  SUM_COLUMNS = 1024       /* columns whose f32 sums sum_columns keeps on the stack */
};

/* Calls `call` with a constant `type`, so that loads and stores are specialised by dtype. */
#define FOR_DTYPE(dtype, call)                 \
  do {                                         \
    if ((dtype) == SLUICE_DTYPE_F32) {         \
      enum { type = SLUICE_DTYPE_F32 };        \
      call;                                    \
    } else if ((dtype) == SLUICE_DTYPE_BF16) { \
      enum { type = SLUICE_DTYPE_BF16 };       \
      call;                                    \
    } else {                                   \
      enum { type = SLUICE_DTYPE_F16 };        \
      call;                                    \
    }                                          \
  } while (0)

INLINE const void* row_at(int32_t dtype, const void* data, int64_t element) {
  return (const char*)data + element * (dtype == SLUICE_DTYPE_F32 ? 4 : 2);
}
INLINE void* row_at_mut(int32_t dtype, void* data, int64_t element) {
  return (char*)data + element * (dtype == SLUICE_DTYPE_F32 ? 4 : 2);
}

static void gather_rows(sluice_stream_t stream, int32_t dtype, int64_t rows, int64_t width, const void* src,
                        int64_t src_stride, const int32_t* index, void* dst) {
  (void)stream;
  size_t bytes = sluice_dtype_bytes(dtype);
  size_t row_bytes = (size_t)width * bytes;
  if (width == 0) return;
  for (int64_t i = 0; i < rows; ++i) {
    if (i + 2 < rows && index[i + 2] >= 0) {
      /* The hardware prefetcher cannot predict the next rows. */
      const char* ahead = (const char*)src + (size_t)(index[i + 2] * src_stride) * bytes;
      for (size_t at = 0; at < row_bytes && at < 512; at += 64) __builtin_prefetch(ahead + at);
    }
    char* to = (char*)dst + (size_t)i * row_bytes;
    if (index[i] < 0) {
      memset(to, 0, row_bytes);
    } else {
      memcpy(to, (const char*)src + (size_t)(index[i] * src_stride) * bytes, row_bytes);
    }
  }
}

static void move_rows(sluice_stream_t stream, int64_t row_bytes, const sluice_row_run_t* runs, int64_t num_runs,
                      const void* src, void* dst) {
  (void)stream;
  for (int64_t r = 0; r < num_runs; ++r) {
    if (runs[r].rows == 0 || row_bytes == 0) continue;
    memcpy((char*)dst + runs[r].dst_row * row_bytes, (const char*)src + runs[r].src_row * row_bytes,
           (size_t)(runs[r].rows * row_bytes));
  }
}

static void gather_scalars(sluice_stream_t stream, int64_t count, int64_t top_k, const float* src, int64_t src_t,
                           int64_t src_k, const int32_t* route, float* dst) {
  (void)stream;
  for (int64_t i = 0; i < count; ++i) {
    dst[i] = route[i] < 0 ? 0.0f : src[route[i] / top_k * src_t + route[i] % top_k * src_k];
  }
}

static void spread_scalars(sluice_stream_t stream, int64_t num_tokens, int64_t top_k, const float* rows,
                           const int32_t* position, float* out, int64_t out_t, int64_t out_k) {
  (void)stream;
  for (int64_t t = 0; t < num_tokens; ++t) {
    for (int64_t k = 0; k < top_k; ++k) {
      int32_t row = position[t * top_k + k];
      out[t * out_t + k * out_k] = row < 0 ? 0.0f : rows[row];
    }
  }
}

/* ---- combine -------------------------------------------------------------------------------------------------- */

INLINE void combine_token(int32_t dtype, int64_t top_k, int64_t width, const void* rows, const int32_t* position,
                          const float* scale, int64_t scale_k, void* out) {
  int64_t j = 0;
  for (; j + COMBINE * LANES <= width; j += COMBINE * LANES) {
    vf s0 = vf_set1(0), s1 = s0, s2 = s0, s3 = s0;
    for (int64_t k = 0; k < top_k; ++k) {
      if (position[k] < 0) continue;
      vf w = vf_set1(scale == NULL ? 1.0f : scale[k * scale_k]);
      const void* row = row_at(dtype, rows, position[k] * width + j);
      s0 += w * vf_load(dtype, row, 0);
      s1 += w * vf_load(dtype, row, LANES);
      s2 += w * vf_load(dtype, row, 2 * LANES);
      s3 += w * vf_load(dtype, row, 3 * LANES);
    }
    vf_store(dtype, out, j, s0);
    vf_store(dtype, out, j + LANES, s1);
    vf_store(dtype, out, j + 2 * LANES, s2);
    vf_store(dtype, out, j + 3 * LANES, s3);
  }
  for (; j < width; j += LANES) {
    int64_t n = width - j;
    vf s = vf_set1(0);
    for (int64_t k = 0; k < top_k; ++k) {
      if (position[k] < 0) continue;
      vf w = vf_set1(scale == NULL ? 1.0f : scale[k * scale_k]);
      const void* row = row_at(dtype, rows, position[k] * width + j);
      s += w * (n < LANES ? vf_load_part(dtype, row, 0, n) : vf_load(dtype, row, 0));
    }
    if (n < LANES) {
      vf_store_part(dtype, out, j, n, s);
    } else {
      vf_store(dtype, out, j, s);
    }
  }
}

static void combine_rows(sluice_stream_t stream, int32_t dtype, int64_t num_tokens, int64_t top_k, int64_t width,
                         const void* rows, const int32_t* position, const float* scale, int64_t scale_t,
                         int64_t scale_k, void* out, int64_t out_stride) {
  if (dtype == SLUICE_DTYPE_F64) {
    sluice_cpu_kernels_ref()->combine_rows(stream, dtype, num_tokens, top_k, width, rows, position, scale, scale_t,
                                           scale_k, out, out_stride);
    return;
  }
  for (int64_t t = 0; t < num_tokens; ++t) {
    const float* s = scale == NULL ? NULL : scale + t * scale_t;
    FOR_DTYPE(dtype, combine_token(type, top_k, width, rows, position + t * top_k, s, scale_k,
                                   row_at_mut(type, out, t * out_stride)));
  }
}

/* ---- one row at a time ---------------------------------------------------------------------------------------- */

INLINE void scale_row(int32_t dtype, int64_t width, const void* src, float weight, void* dst) {
  vf w = vf_set1(weight);
  int64_t j = 0;
  for (; j + LANES <= width; j += LANES) vf_store(dtype, dst, j, w * vf_load(dtype, src, j));
  if (j < width) vf_store_part(dtype, dst, j, width - j, w * vf_load_part(dtype, src, j, width - j));
}

static void scale_rows(sluice_stream_t stream, int32_t dtype, int64_t rows, int64_t width, const void* src,
                       const float* weight, void* dst) {
  if (dtype == SLUICE_DTYPE_F64) {
    sluice_cpu_kernels_ref()->scale_rows(stream, dtype, rows, width, src, weight, dst);
    return;
  }
  for (int64_t i = 0; i < rows; ++i) {
    FOR_DTYPE(dtype, scale_row(type, width, row_at(type, src, i * width), weight[i], row_at_mut(type, dst, i * width)));
  }
}

INLINE void add_bias_row(int32_t dtype, int64_t width, void* data, const void* bias) {
  int64_t j = 0;
  for (; j + LANES <= width; j += LANES) vf_store(dtype, data, j, vf_load(dtype, data, j) + vf_load(dtype, bias, j));
  if (j < width) {
    int64_t n = width - j;
    vf_store_part(dtype, data, j, n, vf_load_part(dtype, data, j, n) + vf_load_part(dtype, bias, j, n));
  }
}

static void add_bias(sluice_stream_t stream, int32_t dtype, int64_t rows, int64_t width, void* data, const void* bias) {
  if (dtype == SLUICE_DTYPE_F64) {
    sluice_cpu_kernels_ref()->add_bias(stream, dtype, rows, width, data, bias);
    return;
  }
  for (int64_t i = 0; i < rows; ++i) {
    FOR_DTYPE(dtype, add_bias_row(type, width, row_at_mut(type, data, i * width), bias));
  }
}

/* ---- sums along a row ----------------------------------------------------------------------------------------- */

typedef struct {
  vf acc[ACCS];
} partials_t;

/* Returns the sum of all partials, folded by halves. */
INLINE float partials_fold(const partials_t* sums) {
  float partial[PARTIALS];
  memcpy(partial, sums->acc, sizeof partial);
  for (int half = PARTIALS / 2; half > 0; half /= 2) {
    for (int p = 0; p < half; ++p) partial[p] += partial[p + half];
  }
  return partial[0];
}

INLINE float dot_row(int32_t dtype, int64_t width, const void* a, const void* b) {
  partials_t sums = {{{0}}};
  int64_t j = 0;
  for (; j + PARTIALS <= width; j += PARTIALS) {
#pragma GCC unroll 8
    for (int v = 0; v < ACCS; ++v) {
      sums.acc[v] += vf_load(dtype, a, j + v * LANES) * vf_load(dtype, b, j + v * LANES);
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < ACCS; ++v) {
    int64_t at = j + v * LANES, n = width - at;
    if (n >= LANES) {
      sums.acc[v] += vf_load(dtype, a, at) * vf_load(dtype, b, at);
    } else if (n > 0) {
      sums.acc[v] += vf_load_part(dtype, a, at, n) * vf_load_part(dtype, b, at, n);
    }
  }
  return partials_fold(&sums);
}

static void dot_rows(sluice_stream_t stream, int32_t dtype, int64_t rows, int64_t width, const void* a, const void* b,
                     int64_t b_stride, int32_t accumulate, float* out) {
  if (dtype == SLUICE_DTYPE_F64) {
    sluice_cpu_kernels_ref()->dot_rows(stream, dtype, rows, width, a, b, b_stride, accumulate, out);
    return;
  }
  for (int64_t i = 0; i < rows; ++i) {
    float sum = 0;
    FOR_DTYPE(dtype, sum = dot_row(type, width, row_at(type, a, i * width), row_at(type, b, i * b_stride)));
    out[i] = (accumulate ? out[i] : 0.0f) + sum;
  }
}

/* ---- sums down the columns ------------------------------------------------------------------------------------ */

/* sums[j] += weight[i] * data[i, j] for `rows` <= 4 consecutive rows in order. */
INLINE void sum_four(int32_t dtype, int64_t rows, int64_t width, const void* data, int64_t stride, const float* weight,
                     float* sums) {
  vf w[4];
  const void* row[4];
  for (int64_t i = 0; i < 4; ++i) {
    w[i] = vf_set1(i >= rows || weight == NULL ? 1.0f : weight[i]);
    row[i] = row_at(dtype, data, (i < rows ? i : 0) * stride);
  }
  int64_t j = 0;
  if (rows == 4) {
    for (; j + LANES <= width; j += LANES) {
      vf s = vf_load(SLUICE_DTYPE_F32, sums, j);
      s += w[0] * vf_load(dtype, row[0], j);
      s += w[1] * vf_load(dtype, row[1], j);
      s += w[2] * vf_load(dtype, row[2], j);
      s += w[3] * vf_load(dtype, row[3], j);
      vf_store(SLUICE_DTYPE_F32, sums, j, s);
    }
  }
  for (; j < width; j += LANES) {
    int64_t n = width - j < LANES ? width - j : LANES;
    vf s = vf_load(SLUICE_DTYPE_F32, sums, j);
    for (int64_t i = 0; i < rows; ++i) {
      s += w[i] * (n < LANES ? vf_load_part(dtype, row[i], j, n) : vf_load(dtype, row[i], j));
    }
    vf_store(SLUICE_DTYPE_F32, sums, j, s);
  }
}

static void sum_load(int32_t dtype, const void* src, int64_t n, float* sums) {
  for (int64_t j = 0; j < n; ++j) {
    if (dtype == SLUICE_DTYPE_F32) {
      sums[j] = ((const float*)src)[j];
    } else {
      uint16_t h = ((const uint16_t*)src)[j];
      sums[j] = dtype == SLUICE_DTYPE_BF16 ? sluice_bf16_to_f32(h) : sluice_f16_to_f32(h);
    }
  }
}

static void sum_store(int32_t dtype, const float* sums, int64_t n, void* dst) {
  int64_t j = 0;
  for (; j + LANES <= n; j += LANES) {
    FOR_DTYPE(dtype, vf_store(type, dst, j, vf_load(SLUICE_DTYPE_F32, sums, j)));
  }
  if (j < n) FOR_DTYPE(dtype, vf_store_part(type, dst, j, n - j, vf_load(SLUICE_DTYPE_F32, sums, j)));
}

static void sum_columns(sluice_stream_t stream, int32_t dtype, int64_t rows, int64_t width, const void* data,
                        int64_t data_stride, const float* weight, int32_t accumulate, int32_t dtype_out, void* out) {
  if (dtype == SLUICE_DTYPE_F64 || dtype_out == SLUICE_DTYPE_F64) {
    sluice_cpu_kernels_ref()->sum_columns(stream, dtype, rows, width, data, data_stride, weight, accumulate, dtype_out,
                                          out);
    return;
  }
  for (int64_t j = 0; j < width; j += SUM_COLUMNS) {
    int64_t n = width - j < SUM_COLUMNS ? width - j : SUM_COLUMNS;
    float sums[SUM_COLUMNS] = {0}; /* whole vectors after n may be read */
    if (accumulate) sum_load(dtype_out, row_at(dtype_out, out, j), n, sums);
    for (int64_t i = 0; i < rows; i += 4) {
      int64_t some = rows - i < 4 ? rows - i : 4;
      const float* w = weight == NULL ? NULL : weight + i;
      FOR_DTYPE(dtype, sum_four(type, some, n, row_at(type, data, i * data_stride + j), data_stride, w, sums));
    }
    sum_store(dtype_out, sums, n, row_at_mut(dtype_out, out, j));
  }
}

INLINE void round_row(int32_t dtype, int64_t width, const float* sums, int32_t accumulate, void* out) {
  int64_t j = 0;
  for (; j + LANES <= width; j += LANES) {
    vf s = vf_load(SLUICE_DTYPE_F32, sums, j);
    vf_store(dtype, out, j, accumulate ? vf_load(dtype, out, j) + s : s);
  }
  if (j == width) return;
  vf s = vf_load_part(SLUICE_DTYPE_F32, sums, j, width - j);
  vf_store_part(dtype, out, j, width - j, accumulate ? vf_load_part(dtype, out, j, width - j) + s : s);
}

static void round_rows(sluice_stream_t stream, int32_t dtype, int64_t rows, int64_t width, const float* sums,
                       int32_t accumulate, void* out, int64_t out_stride) {
  if (dtype == SLUICE_DTYPE_F64) {
    sluice_cpu_kernels_ref()->round_rows(stream, dtype, rows, width, sums, accumulate, out, out_stride);
    return;
  }
  for (int64_t i = 0; i < rows; ++i) {
    FOR_DTYPE(dtype, round_row(type, width, sums + i * width, accumulate, row_at_mut(type, out, i * out_stride)));
  }
}
