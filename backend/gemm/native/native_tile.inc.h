// SPDX-License-Identifier: Apache-2.0
/* The tiles of "native", over the primitives of an instruction set. A native_*.c defines the names below, includes this
 * file once, and then uses run_tile.
 *
 *   LANES, MAX_ROWS, INLINE       lanes of a register, rows of the highest tile
 *   EACH_ROW(X)                   X(0) ... X(MAX_ROWS - 1)
 *   vf, lanes_t                   a register; a mask of its lanes
 *   first_lanes(count)            lanes [0, count)
 *   load(dtype, at, lanes)        any dtype as f32; lanes outside the mask are not read and are 0
 *   store(dtype, at, lanes, x)    rounded to nearest even; lanes outside the mask are not written
 *   vf_load, vf_store             a whole aligned register of f32
 *   vf_zero, vf_set1, vf_fma(a, b, c) = a * b + c, rounded once; for pairs, twice
 *   READS_RAW                     1: tiles can read B in place
 *
 * A tile is `rows` x 2 registers, or `rows` x 1 if it has few columns (products with one factor of an adapter). Each
 * number of rows has its own functions. */

enum { WIDTH = 2 * LANES, FLOAT_BYTES = 4, WIDTH_BYTES = WIDTH * FLOAT_BYTES, LINE = 64, AHEAD = 8 };

#define ZERO(i)           \
  vf left##i = vf_zero(); \
  vf right##i = vf_zero();
#define LOAD_AS(dtype, i)                                                                \
  if (rows > (i)) {                                                                      \
    left##i = load(dtype, start + (i)*start_bytes, left_lanes);                          \
    if (!narrow) right##i = load(dtype, start + (i)*start_bytes + half_in, right_lanes); \
  }
#define LOAD_F32(i)  LOAD_AS(SLUICE_DTYPE_F32, i)
#define LOAD_BF16(i) LOAD_AS(SLUICE_DTYPE_BF16, i)
#define LOAD_F16(i)  LOAD_AS(SLUICE_DTYPE_F16, i)
#define STORE_AS(dtype, i)                                                            \
  if (rows > (i)) {                                                                   \
    store(dtype, out + (i)*out_bytes, left_lanes, left##i);                           \
    if (!narrow) store(dtype, out + (i)*out_bytes + half_out, right_lanes, right##i); \
  }
#define STORE_F32(i)  STORE_AS(SLUICE_DTYPE_F32, i)
#define STORE_BF16(i) STORE_AS(SLUICE_DTYPE_BF16, i)
#define STORE_F16(i)  STORE_AS(SLUICE_DTYPE_F16, i)
#define MULTIPLY(i)                                  \
  if (rows > (i)) {                                  \
    const vf x = vf_set1(a[i]);                      \
    left##i = vf_fma(x, b0, left##i);                \
    if (!narrow) right##i = vf_fma(x, b1, right##i); \
  }
/* One step of k. With raw, B is packed in the same loop, without a separate pass. Rows of B are often a page apart, so
 * each is prefetched AHEAD steps before its use, from the cache level that the driver's prefetch fills. */
#define STEP                                                                              \
  do {                                                                                    \
    vf b0, b1;                                                                            \
    if (packs) {                                                                          \
      b0 = load(SLUICE_DTYPE_F32, raw, left_lanes);                                       \
      b1 = load(SLUICE_DTYPE_F32, raw + LANES, right_lanes);                              \
      vf_store(b, b0);                                                                    \
      vf_store(b + LANES, b1);                                                            \
      __builtin_prefetch(raw + ahead, 0, 3);                                              \
      if (WIDTH_BYTES > LINE) __builtin_prefetch(raw + ahead + LINE / FLOAT_BYTES, 0, 3); \
      raw += raw_ld;                                                                      \
    } else {                                                                              \
      b0 = vf_load(b);                                                                    \
      b1 = vf_load(b + LANES);                                                            \
    }                                                                                     \
    EACH_ROW(MULTIPLY)                                                                    \
    a += rows;                                                                            \
    b += WIDTH;                                                                           \
  } while (0)

INLINE void tile_of(const int rows, const int packs, const int narrow, const sluice_native_tile_t* t,
                    sluice_native_prefetch_t* prefetch) {
  const lanes_t left_lanes = first_lanes(t->cols);
  const lanes_t right_lanes = first_lanes(t->cols - LANES);
  EACH_ROW(ZERO)
  if (t->start != NULL) {
    const char* start = t->start;
    const int64_t bytes = t->start_dtype == SLUICE_DTYPE_F32 ? 4 : 2;
    const int64_t start_bytes = t->start_ld * bytes;
    const int64_t half_in = LANES * bytes;
    if (t->start_dtype == SLUICE_DTYPE_F32) {
      EACH_ROW(LOAD_F32)
    } else if (t->start_dtype == SLUICE_DTYPE_BF16) {
      EACH_ROW(LOAD_BF16)
    } else {
      EACH_ROW(LOAD_F16)
    }
  }
  const float* a = t->a;
  float* b = t->b;
  const float* raw = t->raw;
  const int64_t raw_ld = t->raw_ld;
  const int64_t ahead = AHEAD * raw_ld;
  const char* next = t->next_out;
  const int64_t next_each = t->next_each, next_bytes = t->next_out_bytes;
  int64_t next_rows = next == NULL ? 0 : rows;
  int64_t k = t->depth;
  /* Local copies, which the compiler keeps in registers: this saves a tenth of the time at 128 rows. */
  const char* at = prefetch->at;
  int64_t inner = prefetch->inner;
  int64_t left = prefetch->left;
  const int64_t per_step = prefetch->per_step;
  for (; k >= SLUICE_NATIVE_STEP; k -= SLUICE_NATIVE_STEP) {
    STEP;
    STEP;
    STEP;
    STEP;
    STEP;
    STEP;
    STEP;
    STEP;
    if (next_rows > 0) {
      int64_t count = next_each;
      next_rows -= count;
      do {
        __builtin_prefetch(next, 1, 3);
        if (WIDTH_BYTES > LINE) __builtin_prefetch(next + LINE, 1, 3);
        next += next_bytes;
      } while (--count > 0);
    }
    if (left > 0) {
      left -= per_step;
      int64_t count = per_step;
      do {
        __builtin_prefetch(at, 0, 2);
        at = sluice_native_next_line(prefetch, at, &inner);
      } while (--count > 0);
    }
  }
  prefetch->at = at;
  prefetch->inner = inner;
  prefetch->left = left;
  for (; k > 0; --k) STEP;
  char* out = t->out;
  const int64_t bytes = t->out_dtype == SLUICE_DTYPE_F32 ? 4 : 2;
  const int64_t out_bytes = t->out_ld * bytes;
  const int64_t half_out = LANES * bytes;
  if (t->out_dtype == SLUICE_DTYPE_F32) {
    EACH_ROW(STORE_F32)
  } else if (t->out_dtype == SLUICE_DTYPE_BF16) {
    EACH_ROW(STORE_BF16)
  } else {
    EACH_ROW(STORE_F16)
  }
}

#define TILE(i)                                                                                \
  static void tile_##i(const sluice_native_tile_t* tile, sluice_native_prefetch_t* prefetch) { \
    tile_of((i) + 1, 0, 0, tile, prefetch);                                                    \
  }
#define NARROW(i)                                                                                \
  static void narrow_##i(const sluice_native_tile_t* tile, sluice_native_prefetch_t* prefetch) { \
    tile_of((i) + 1, 0, 1, tile, prefetch);                                                      \
  }
#define PACK(i)                                                                                \
  static void pack_##i(const sluice_native_tile_t* tile, sluice_native_prefetch_t* prefetch) { \
    tile_of((i) + 1, 1, 0, tile, prefetch);                                                    \
  }
#define TILE_NAME(i)   tile_##i,
#define NARROW_NAME(i) narrow_##i,
#define PACK_NAME(i)   pack_##i,
EACH_ROW(TILE)
EACH_ROW(NARROW)
#if READS_RAW
EACH_ROW(PACK)
#endif

static void run_tile(const sluice_native_tile_t* tile, sluice_native_prefetch_t* prefetch) {
  static void (*const tiles[2 + READS_RAW][MAX_ROWS])(const sluice_native_tile_t*, sluice_native_prefetch_t*) = {
    {EACH_ROW(TILE_NAME)},
    {EACH_ROW(NARROW_NAME)},
#if READS_RAW
    {EACH_ROW(PACK_NAME)},
#endif
  };
  tiles[tile->raw != NULL ? 1 + READS_RAW : tile->cols <= LANES][tile->rows - 1](tile, prefetch);
}
