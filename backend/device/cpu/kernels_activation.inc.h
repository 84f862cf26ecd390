/* Activations, block by block: a block is loaded to f32, worked on in the first-level cache, and stored. Blocks are
 * filled up with zeros to whole groups of PARTIALS floats, so that only loads and stores know the odd end of a row. */

enum { BLOCK = 512 };

typedef float block_t[BLOCK] __attribute__((aligned(64)));

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

/* What a store followed by a load gives. */
static void round_block(int32_t dtype, int64_t n, float* block) {
  uint16_t cell[LANES];
  if (dtype == SLUICE_DTYPE_F32) return;
  for (int64_t j = 0; j < n; j += LANES) {
    FOR_DTYPE(dtype, (vf_store(type, cell, 0, vf_load(SLUICE_DTYPE_F32, block, j)),
                      vf_store(SLUICE_DTYPE_F32, block, j, vf_load(type, cell, 0))));
  }
}

/* One loop per activation: the body is compiled in. `at` is the vector's place in every block. */
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
    default: FOR_VECTORS(n) STORE(slope, vf_set1(1)); break;
  }
#undef BOTH
}

INLINE int64_t whole(int64_t n) { return (n + PARTIALS - 1) / PARTIALS * PARTIALS; }

/* pre[0:n] += bias, kept in it as rounded; x = what was kept. */
static void load_biased(int32_t dtype, int64_t n, void* pre, const void* bias, int64_t bias_at, float* x) {
  load_block(dtype, pre, n, x);
  if (bias == NULL) return;
  block_t b;
  load_block(dtype, row_at(dtype, bias, bias_at), n, b);
  FOR_VECTORS(n) STORE(x, LOAD(x) + LOAD(b));
  round_block(dtype, n, x);
  store_block(dtype, x, n, pre);
}

static void activation_forward(sluice_stream_t stream, int32_t dtype, int32_t activation, int32_t gated, int64_t rows,
                               int64_t hidden, void* pre, const void* b1, const void* b3, void* act) {
  if (dtype == SLUICE_DTYPE_F64) {
    sluice_cpu_kernels_ref()->activation_forward(stream, dtype, activation, gated, rows, hidden, pre, b1, b3, act);
    return;
  }
  int64_t width = gated ? 2 * hidden : hidden;
  block_t x, up;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t h = 0; h < hidden; h += BLOCK) {
      int64_t n = hidden - h < BLOCK ? hidden - h : BLOCK;
      load_biased(dtype, n, row_at_mut(dtype, pre, i * width + h), b1, h, x);
      values(activation, n, x);
      if (gated) {
        load_biased(dtype, n, row_at_mut(dtype, pre, i * width + hidden + h), b3, h, up);
        FOR_VECTORS(n) STORE(x, LOAD(x) * LOAD(up));
      }
      store_block(dtype, x, n, row_at_mut(dtype, act, i * hidden + h));
    }
  }
}

/* The blocks of one piece of a row on the way back. */
typedef struct {
  block_t x, up, d, slope, act;
} backward_t;

/* act = what forward stored, sums += d * act */
static void backward_act(int32_t dtype, int32_t gated, int64_t n, backward_t* b, partials_t* sums) {
  if (gated) {
    FOR_VECTORS(n) STORE(b->act, LOAD(b->x) * LOAD(b->up));
  } else {
    FOR_VECTORS(n) STORE(b->act, LOAD(b->x));
  }
  round_block(dtype, n, b->act);
  for (int64_t j = 0; j < n; j += PARTIALS) {
#pragma GCC unroll 8
    for (int v = 0; v < ACCS; ++v) {
      int64_t at = j + v * LANES;
      sums->acc[v] += LOAD(b->d) * LOAD(b->act);
    }
  }
}

static void activation_backward(sluice_stream_t stream, int32_t dtype, int32_t activation, int32_t gated, int64_t rows,
                                int64_t hidden, const void* pre, const void* dact, const float* weight, void* dpre,
                                void* act_w, float* dweight) {
  if (dtype == SLUICE_DTYPE_F64) {
    sluice_cpu_kernels_ref()->activation_backward(stream, dtype, activation, gated, rows, hidden, pre, dact, weight,
                                                  dpre, act_w, dweight);
    return;
  }
  int64_t width = gated ? 2 * hidden : hidden;
  backward_t b;
  for (int64_t i = 0; i < rows; ++i) {
    vf w = vf_set1(weight[i]);
    partials_t sums = {{{0}}};
    for (int64_t h = 0; h < hidden; h += BLOCK) {
      int64_t n = hidden - h < BLOCK ? hidden - h : BLOCK, full = whole(n);
      load_block(dtype, row_at(dtype, pre, i * width + h), n, b.x);
      load_block(dtype, row_at(dtype, dact, i * hidden + h), n, b.d);
      if (gated) load_block(dtype, row_at(dtype, pre, i * width + hidden + h), n, b.up);
      values_and_slopes(activation, full, b.x, b.slope);
      backward_act(dtype, gated, full, &b, &sums);
      if (act_w != NULL) {
        FOR_VECTORS(n) STORE(b.act, w * LOAD(b.act));
        store_block(dtype, b.act, n, row_at_mut(dtype, act_w, i * hidden + h));
      }
      FOR_VECTORS(n) STORE(b.d, w * LOAD(b.d));
      if (gated) {
        FOR_VECTORS(n) STORE(b.x, LOAD(b.d) * LOAD(b.x));
        store_block(dtype, b.x, n, row_at_mut(dtype, dpre, i * width + hidden + h));
        FOR_VECTORS(n) STORE(b.d, LOAD(b.d) * LOAD(b.up));
      }
      FOR_VECTORS(n) STORE(b.d, LOAD(b.d) * LOAD(b.slope));
      store_block(dtype, b.d, n, row_at_mut(dtype, dpre, i * width + h));
    }
    dweight[i] = partials_fold(&sums);
  }
}
