// SPDX-License-Identifier: Apache-2.0
/* Activations, block by block: a block is loaded to f32, computed in the L1 cache, and stored. Blocks are padded with
 * zeros to whole groups of PARTIALS floats, so that only loads and stores handle the end of a row. */

enum { BLOCK = 512 };

typedef float block_t[BLOCK] __attribute__((aligned(64)));
typedef float pair_t[2 * BLOCK] __attribute__((aligned(64))); /* x and u alternate */

INLINE void load_typed(int32_t dtype, const void* src, int64_t n, float* block) {
  int64_t j = 0;
  for (; j + LANES <= n; j += LANES) vf_store(SLUICE_DTYPE_F32, block, j, vf_load(dtype, src, j));
  if (j < n) {
    vf_store(SLUICE_DTYPE_F32, block, j, vf_load_part(dtype, src, j, n - j));
    j += LANES;
  }
  for (; j % PARTIALS != 0; j += LANES) vf_store(SLUICE_DTYPE_F32, block, j, vf_set1(0));
}

static void load_block(int32_t dtype, const void* src, int64_t n, float* block) {
  FOR_DTYPE(dtype, load_typed(type, src, n, block));
}

INLINE void store_typed(int32_t dtype, const float* block, int64_t n, void* dst) {
  int64_t j = 0;
  for (; j + LANES <= n; j += LANES) vf_store(dtype, dst, j, vf_load(SLUICE_DTYPE_F32, block, j));
  if (j < n) vf_store_part(dtype, dst, j, n - j, vf_load(SLUICE_DTYPE_F32, block, j));
}

static void store_block(int32_t dtype, const float* block, int64_t n, void* dst) {
  FOR_DTYPE(dtype, store_typed(type, block, n, dst));
}

/* The result of a store followed by a load. */
static void round_block(int32_t dtype, int64_t n, float* block) {
  uint16_t cell[LANES];
  if (dtype == SLUICE_DTYPE_F32) return;
  for (int64_t j = 0; j < n; j += LANES) {
    FOR_DTYPE(dtype, (vf_store(type, cell, 0, vf_load(SLUICE_DTYPE_F32, block, j)),
                      vf_store(SLUICE_DTYPE_F32, block, j, vf_load(type, cell, 0))));
  }
}

/* One loop per activation, with the activation inlined. `at` is the offset of the vector in every block. */
#define FOR_VECTORS(n)  for (int64_t at = 0; at < (n); at += LANES)
#define LOAD(block)     vf_load(SLUICE_DTYPE_F32, (block), at)
#define STORE(block, x) vf_store(SLUICE_DTYPE_F32, (block), at, (x))

/* x = f(x) */
static void values(int32_t activation, int64_t n, float* x) {
  switch (activation) {
    case SLUICE_ACTIVATION_RELU: FOR_VECTORS(n) STORE(x, relu(LOAD(x))); break;
    case SLUICE_ACTIVATION_GELU: FOR_VECTORS(n) STORE(x, gelu(LOAD(x))); break;
    case SLUICE_ACTIVATION_GELU_TANH: FOR_VECTORS(n) STORE(x, gelu_tanh(LOAD(x))); break;
    case SLUICE_ACTIVATION_SILU: FOR_VECTORS(n) STORE(x, silu(LOAD(x))); break;
    case SLUICE_ACTIVATION_RELU2: FOR_VECTORS(n) STORE(x, relu2(LOAD(x))); break;
    default: break;
  }
}

/* slope = f'(x), x = f(x), with the same bits as `values` */
static void values_and_slopes(int32_t activation, int64_t n, float* x, float* slope) {
#define BOTH(function)                      \
  FOR_VECTORS(n) {                          \
    vf value, derivative;                   \
    function(LOAD(x), &value, &derivative); \
    STORE(x, value);                        \
    STORE(slope, derivative);               \
  }
  switch (activation) {
    case SLUICE_ACTIVATION_RELU: BOTH(relu_both); break;
    case SLUICE_ACTIVATION_GELU: BOTH(gelu_both); break;
    case SLUICE_ACTIVATION_GELU_TANH: BOTH(gelu_tanh_both); break;
    case SLUICE_ACTIVATION_SILU: BOTH(silu_both); break;
    case SLUICE_ACTIVATION_RELU2: BOTH(relu2_both); break;
    default: FOR_VECTORS(n) STORE(slope, vf_set1(1)); break;
  }
#undef BOTH
}

INLINE int64_t whole(int64_t n) { return (n + PARTIALS - 1) / PARTIALS * PARTIALS; }

/* pre[0:n] += bias, stored rounded; x = the stored values. n may be the width of a pair. */
static void load_biased(int32_t dtype, int64_t n, void* pre, const void* bias, int64_t bias_at, float* x) {
  load_block(dtype, pre, n, x);
  if (bias == NULL) return;
  pair_t b;
  load_block(dtype, row_at(dtype, bias, bias_at), n, b);
  FOR_VECTORS(n) STORE(x, LOAD(x) + LOAD(b));
  round_block(dtype, n, x);
  store_block(dtype, x, n, pre);
}

/* Sets columns n to whole(n) to zero, as load_block does. */
static void split_pair(int64_t n, const float* pair, float* x, float* up) {
  for (int64_t j = 0; j < n; ++j) {
    x[j] = pair[2 * j];
    up[j] = pair[2 * j + 1];
  }
  for (int64_t j = n; j < whole(n); ++j) x[j] = up[j] = 0;
}

static void join_pair(int64_t n, const float* x, const float* up, float* pair) {
  for (int64_t j = 0; j < n; ++j) {
    pair[2 * j] = x[j];
    pair[2 * j + 1] = up[j];
  }
}

INLINE swiglu_t swiglu_of(const sluice_unit_t* unit) {
  return (swiglu_t){vf_set1(unit->alpha), vf_set1(unit->limit), vf_set1(unit->offset), vf_set1(120 / unit->alpha)};
}

/* x = f(x), up = v(up) */
static void unit_values(const sluice_unit_t* unit, int64_t n, float* x, float* up) {
  if (unit->activation != SLUICE_ACTIVATION_SWIGLU) {
    values(unit->activation, n, x);
    return;
  }
  swiglu_t s = swiglu_of(unit);
  FOR_VECTORS(n) {
    STORE(x, swiglu_gate(s, LOAD(x)));
    STORE(up, swiglu_up(s, LOAD(up)));
  }
}

static void unit_forward(sluice_stream_t stream, int32_t dtype, const sluice_unit_t* unit, int64_t rows, int64_t hidden,
                         void* pre, const void* b1, const void* b3, void* act) {
  if (dtype == SLUICE_DTYPE_F64) {
    sluice_cpu_kernels_ref()->unit_forward(stream, dtype, unit, rows, hidden, pre, b1, b3, act);
    return;
  }
  int64_t width = unit->gated ? 2 * hidden : hidden;
  block_t x, up;
  pair_t pair;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t h = 0; h < hidden; h += BLOCK) {
      int64_t n = hidden - h < BLOCK ? hidden - h : BLOCK;
      if (unit->gated == SLUICE_GATED_INTERLEAVED) {
        load_biased(dtype, 2 * n, row_at_mut(dtype, pre, i * width + 2 * h), b1, 2 * h, pair);
        split_pair(n, pair, x, up);
      } else {
        load_biased(dtype, n, row_at_mut(dtype, pre, i * width + h), b1, h, x);
        if (unit->gated) load_biased(dtype, n, row_at_mut(dtype, pre, i * width + hidden + h), b3, h, up);
      }
      unit_values(unit, n, x, up);
      if (unit->gated) {
        FOR_VECTORS(n) STORE(x, LOAD(x) * LOAD(up));
      }
      store_block(dtype, x, n, row_at_mut(dtype, act, i * hidden + h));
    }
  }
}

/* The blocks for one piece of a row in backward. */
typedef struct {
  block_t x, up, d, slope, up_slope, act;
  pair_t pair;
} backward_t;

/* The partial sums of dweight: column h in partial h mod 256. A narrow row uses only the first `used`. */
enum { UNIT_PARTIALS = 256 };

static int64_t partials_used(int64_t hidden) {
  int64_t used = PARTIALS;
  while (used < hidden && used < UNIT_PARTIALS) used *= 2;
  return used;
}

/* Folds by halves, as in kernels_ref.c; unused partial sums would add 0. */
static float unit_fold(int64_t used, float* sums) {
  for (int64_t half = used / 2; half >= PARTIALS; half /= 2) {
    for (int64_t at = 0; at < half; at += LANES) STORE(sums, LOAD(sums) + LOAD(sums + half));
  }
  partials_t last;
  memcpy(last.acc, sums, sizeof last.acc);
  return partials_fold(&last);
}

/* act = what forward stored, sums += d * act */
static void backward_act(int32_t dtype, int32_t gated, int64_t n, backward_t* b, float* sums) {
  if (gated) {
    FOR_VECTORS(n) STORE(b->act, LOAD(b->x) * LOAD(b->up));
  } else {
    FOR_VECTORS(n) STORE(b->act, LOAD(b->x));
  }
  round_block(dtype, n, b->act);
  for (int64_t j = 0; j < n; j += UNIT_PARTIALS) {
    int64_t end = n - j < UNIT_PARTIALS ? n - j : UNIT_PARTIALS;
    for (int64_t p = 0; p < end; p += LANES) {
      vf term = vf_load(SLUICE_DTYPE_F32, b->d, j + p) * vf_load(SLUICE_DTYPE_F32, b->act, j + p);
      vf_store(SLUICE_DTYPE_F32, sums, p, vf_load(SLUICE_DTYPE_F32, sums, p) + term);
    }
  }
}

/* x = f(x), slope = f'(x), up = v(up), up_slope = v'(up) */
static void unit_values_and_slopes(const sluice_unit_t* unit, int64_t n, backward_t* b) {
  if (unit->activation != SLUICE_ACTIVATION_SWIGLU) {
    values_and_slopes(unit->activation, n, b->x, b->slope);
    return;
  }
  swiglu_t s = swiglu_of(unit);
  FOR_VECTORS(n) {
    vf value, slope, up, up_slope;
    swiglu_both(s, LOAD(b->x), LOAD(b->up), &value, &slope, &up, &up_slope);
    STORE(b->x, value);
    STORE(b->slope, slope);
    STORE(b->up, up);
    STORE(b->up_slope, up_slope);
  }
}

/* x = du, d = dx, from d = weight * dact */
static void gated_gradients(const sluice_unit_t* unit, int64_t n, backward_t* b) {
  FOR_VECTORS(n) {
    vf d = LOAD(b->d), du = d * LOAD(b->x);
    if (unit->activation == SLUICE_ACTIVATION_SWIGLU) du = du * LOAD(b->up_slope);
    STORE(b->x, du);
    STORE(b->d, d * LOAD(b->up) * LOAD(b->slope));
  }
}

static void store_gradients(int32_t dtype, const sluice_unit_t* unit, int64_t n, int64_t hidden, backward_t* b,
                            void* dpre, int64_t row, int64_t h) {
  if (unit->gated == SLUICE_GATED_INTERLEAVED) {
    join_pair(n, b->d, b->x, b->pair);
    store_block(dtype, b->pair, 2 * n, row_at_mut(dtype, dpre, row + 2 * h));
    return;
  }
  if (unit->gated) store_block(dtype, b->x, n, row_at_mut(dtype, dpre, row + hidden + h));
  store_block(dtype, b->d, n, row_at_mut(dtype, dpre, row + h));
}

static void unit_backward(sluice_stream_t stream, int32_t dtype, const sluice_unit_t* unit, int64_t rows,
                          int64_t hidden, const void* pre, const void* dact, const float* weight, void* dpre,
                          void* act_w, float* dweight) {
  if (dtype == SLUICE_DTYPE_F64) {
    sluice_cpu_kernels_ref()->unit_backward(stream, dtype, unit, rows, hidden, pre, dact, weight, dpre, act_w, dweight);
    return;
  }
  int64_t width = unit->gated ? 2 * hidden : hidden, used = partials_used(hidden);
  backward_t b;
  float sums[UNIT_PARTIALS] __attribute__((aligned(64)));
  for (int64_t i = 0; i < rows; ++i) {
    vf w = vf_set1(weight[i]);
    memset(sums, 0, (size_t)used * sizeof *sums);
    for (int64_t h = 0; h < hidden; h += BLOCK) {
      int64_t n = hidden - h < BLOCK ? hidden - h : BLOCK, full = whole(n);
      load_block(dtype, row_at(dtype, dact, i * hidden + h), n, b.d);
      if (unit->gated == SLUICE_GATED_INTERLEAVED) {
        load_block(dtype, row_at(dtype, pre, i * width + 2 * h), 2 * n, b.pair);
        split_pair(n, b.pair, b.x, b.up);
      } else {
        load_block(dtype, row_at(dtype, pre, i * width + h), n, b.x);
        if (unit->gated) load_block(dtype, row_at(dtype, pre, i * width + hidden + h), n, b.up);
      }
      unit_values_and_slopes(unit, full, &b);
      backward_act(dtype, unit->gated, full, &b, sums);
      if (act_w != NULL) {
        FOR_VECTORS(n) STORE(b.act, w * LOAD(b.act));
        store_block(dtype, b.act, n, row_at_mut(dtype, act_w, i * hidden + h));
      }
      FOR_VECTORS(n) STORE(b.d, w * LOAD(b.d));
      if (unit->gated) {
        gated_gradients(unit, n, &b);
      } else {
        FOR_VECTORS(n) STORE(b.d, LOAD(b.d) * LOAD(b.slope));
      }
      store_gradients(dtype, unit, n, hidden, &b, dpre, i * width, h);
    }
    dweight[i] = unit_fold(used, sums);
  }
}
