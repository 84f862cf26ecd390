// SPDX-License-Identifier: Apache-2.0
/* GEMMs with packed weights have the same bits as dense GEMMs with the decoded weights: each format, type, direction
 * and ragged edge, with each implementation. The places of codes and scales are computed here; packed_test.c checks
 * each code and scale. Codes, scales and C end at the end of accessible memory.
 *
 *   packed_cts NAME     ref, native, onednn, blas, host, auto, cublas (on fakes)
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/math.h"
#include "backend/base/test/refused.h"
#include "backend/device/cuda/fake/fake_cuda.h"
#include "backend/gemm/cublas/fake/fake_cublas.h"
#include "backend/gemm/gemm.h"
#include "backend/gemm/native/native_kernels.h"
#include "backend/gemm/test/operands.h"

static sluice_allocator_t allocator;
static const char* name;     /* of the implementation */
static const char* set_name; /* of "native": its kernels, or NULL */

static int is_on_device(void) { return strcmp(name, "cublas") == 0; }
static int is_foreign(void) { return strcmp(name, "blas") == 0 || strcmp(name, "onednn") == 0; }

static uint32_t seed = 1;
static uint32_t next_bits(void) {
  seed = seed * 1664525u + 1013904223u;
  return seed >> 8;
}
static float next_value(void) { return (float)next_bits() / (1 << 23) - 1; }

/* ---- a weight ---------------------------------------------------------------------------------------------------- */

typedef struct weight_s {
  int64_t rows, cols, ld; /* ld: of the codes; larger than cols if cols is even */
  fenced_t codes, scales;
  sluice_packed_t packed;
} weight_t;

/* The code of an ordinary scale, or sometimes of the smallest, 2^-127, which is subnormal in f32. */
static int e8m0_code(void) { return next_bits() % 16 == 0 ? 0 : 117 + (int)(next_bits() % 20); }

/* whole: numbers and scales whose sums are exact in any order. */
static weight_t make_weight(int32_t format, int32_t block_cols, int64_t rows, int64_t cols, int64_t half, int whole) {
  weight_t w = {rows, cols, cols + (cols % 2 == 0 ? 6 : 0), {0}, {0}, {0}};
  const sluice_packed_format_t* f = sluice_packed_format(format);
  const int block_rows = f->block_rows;
  const int64_t across = sluice_ceil_div(cols, block_cols);
  int64_t down = sluice_ceil_div(rows, block_rows);
  if (half > 0) down = sluice_ceil_div(half, block_rows) + sluice_ceil_div(rows - half, block_rows);
  const int64_t bytes = ((rows - 1) * w.ld + cols) * f->bits / 8; /* the last row has no padding */
  w.codes = fenced(bytes);
  w.scales = fenced(down * across * f->scale_bytes);
  uint8_t* codes = w.codes.data;
  for (int64_t i = 0; i < bytes; ++i) {
    codes[i] = (uint8_t)next_bits();
    if (format == SLUICE_PACKED_FP8 && (codes[i] & 127) == 127) codes[i] ^= 1;
    if (whole && format == SLUICE_PACKED_INT8) codes[i] = (uint8_t)(codes[i] % 9 - 4);
  }
  for (int64_t i = 0; i < down * across; ++i) {
    const float scale = whole ? 1 : 0.01f + 0.01f * (float)(next_bits() % 100);
    if (format == SLUICE_PACKED_MXFP4) ((uint8_t*)w.scales.data)[i] = (uint8_t)(whole ? 127 : e8m0_code());
    if (format == SLUICE_PACKED_FP8) memcpy((char*)w.scales.data + 4 * i, &scale, sizeof scale);
    if (f->scale_bytes == 2) ((uint16_t*)w.scales.data)[i] = sluice_f32_to_bf16(scale);
  }
  w.packed = (sluice_packed_t){format, block_cols, 0, w.scales.data, across, half};
  return w;
}

static void free_weight(weight_t* w) {
  unfence(&w->codes);
  unfence(&w->scales);
}

/* The weight in `dtype`, `ld` elements from row to row. */
static void* dense_of(const weight_t* w, int32_t dtype) {
  const int32_t format = w->packed.format;
  const sluice_packed_format_t* f = sluice_packed_format(format);
  const uint8_t* codes = w->codes.data;
  void* dense = calloc((size_t)(w->rows * w->ld), sluice_dtype_bytes(dtype));
  assert_non_null(dense);
  for (int64_t r = 0; r < w->rows; ++r) {
    int64_t block = format == SLUICE_PACKED_FP8 ? r / 128 : r;
    if (w->packed.half > 0 && format == SLUICE_PACKED_FP8 && r >= w->packed.half) {
      block = sluice_ceil_div(w->packed.half, 128) + (r - w->packed.half) / 128;
    }
    for (int64_t c = 0; c < w->cols; ++c) {
      const int64_t at = block * w->packed.scales_ld + c / w->packed.block_cols;
      const float scale = sluice_packed_scale(format, (const char*)w->scales.data + f->scale_bytes * at);
      const int code = f->bits == 8 ? codes[r * w->ld + c] : codes[(r * w->ld + c) / 2] >> (c % 2 * 4) & 15;
      set_element(dense, r * w->ld + c, dtype, sluice_packed_code(format, (uint8_t)code) * scale);
    }
  }
  return dense;
}

/* ---- one GEMM twice ---------------------------------------------------------------------------------------------- */

typedef struct direction_s {
  const char* name;
  int transposed;
} direction_t;
static const direction_t directions[] = {{"forward", 1}, {"gradient of the input", 0}};

/* Runs a list on the device, with scratch memory for its largest weight only, at the end of accessible memory. */
static sluice_status_t run_on_device(sluice_gemm_t* gemm, const sluice_grouped_gemm_t* list) {
  sluice_grouped_gemm_t there = *list;
  for (int64_t i = 0; list->packed != NULL && i < list->count; ++i) {
    const sluice_gemm_problem_t* p = &list->problems[i];
    const uint64_t bytes = sluice_align_up((uint64_t)(p->n * p->k) * sluice_dtype_bytes(list->dtype_ab));
    there.scratch_bytes = sluice_max_u64(there.scratch_bytes, bytes);
  }
  fenced_t scratch = fenced((int64_t)there.scratch_bytes);
  there.scratch = scratch.data;
  const sluice_status_t status = sluice_gemm_run(gemm, &there);
  assert_true(sluice_fake_cuda_idle(NULL));
  unfence(&scratch);
  return status;
}

static uint64_t borrowed;        /* the most memory that the last run() allocated */
static uint64_t borrowed_packed; /* the same for the run with packed weights in check_same */

static sluice_status_t run(sluice_gemm_t* gemm, const sluice_grouped_gemm_t* list) {
  const uint64_t before = allocator.current_bytes;
  sluice_allocator_reset_peak(&allocator);
  const sluice_status_t status = is_on_device() ? run_on_device(gemm, list) : sluice_gemm_run(gemm, list);
  assert_int_equal(allocator.current_bytes, before);
  borrowed = allocator.peak_bytes - before;
  assert_true(borrowed <= SLUICE_GEMM_SCRATCH_BYTES);
  return status;
}

static void check_same(sluice_gemm_t* gemm, const weight_t* w, int transposed, int64_t m, int32_t dtype,
                       int32_t dtype_c, float beta, int whole) {
  const int64_t k = transposed ? w->cols : w->rows, n = transposed ? w->rows : w->cols;
  const int64_t bytes = (int64_t)sluice_dtype_bytes(dtype), bytes_c = (int64_t)sluice_dtype_bytes(dtype_c);
  fenced_t a = fenced(m * k * bytes), c[2] = {fenced(m * n * bytes_c), fenced(m * n * bytes_c)};
  void* dense = dense_of(w, dtype);
  for (int64_t i = 0; i < m * k; ++i)
    set_element(a.data, i, dtype, whole ? (float)(next_bits() % 5) - 2 : next_value());
  for (int64_t i = 0; i < m * n; ++i) {
    set_element(c[0].data, i, dtype_c, beta == 0 ? NAN : whole ? (float)(next_bits() % 5) - 2 : next_value());
  }
  memcpy(c[1].data, c[0].data, (size_t)(m * n * bytes_c));
  sluice_gemm_problem_t p = {m, n, k, {a.data, k, 1}, {w->codes.data, w->ld, 1}, {c[0].data, n, 1}};
  if (transposed) p.b = (sluice_matrix_t){w->codes.data, 1, w->ld};
  sluice_packed_t packed = w->packed;
  packed.transposed = transposed;
  sluice_grouped_gemm_t list = {&p, 1, dtype, dtype_c, beta, NULL, &packed};
  if (run(gemm, &list) != SLUICE_OK) fail_msg("%s", last_message());
  borrowed_packed = borrowed;
  list.packed = NULL;
  p.b.data = dense;
  p.c.data = c[1].data;
  if (run(gemm, &list) != SLUICE_OK) fail_msg("%s", last_message());
  for (int64_t i = 0; i < m * n; ++i) {
    if (memcmp((char*)c[0].data + i * bytes_c, (char*)c[1].data + i * bytes_c, (size_t)bytes_c) == 0) continue;
    fail_msg(
        "%s%s%s, %s, %s, blocks of %d, [%d, %d, %d], %s -> %s, beta %g: C[%d][%d] has other bits than with the "
        "decoded weight",
        name, set_name != NULL ? " " : "", set_name != NULL ? set_name : "",
        sluice_packed_format(w->packed.format)->name, directions[!transposed].name, w->packed.block_cols, (int)m,
        (int)n, (int)k, sluice_dtype_name(dtype), sluice_dtype_name(dtype_c), (double)beta, (int)(i / n), (int)(i % n));
  }
  free(dense);
  unfence(&a);
  unfence(&c[0]);
  unfence(&c[1]);
}

/* ---- cases ------------------------------------------------------------------------------------------------------- */

static sluice_gemm_t* gemm; /* NULL: not available */

static int32_t host_gemm(void* user, const sluice_host_gemm_args_t* args) {
  (void)user;
  (void)args;
  return 1; /* never called */
}

static sluice_device_t* device; /* NULL: this CPU */

static sluice_status_t create_cublas(void) {
  sluice_fake_cuda_reset();
  SLUICE_TRY(sluice_fake_cuda_device(&allocator, &device));
  const sluice_cublas_symbols_t symbols = sluice_fake_cublas(1);
  const sluice_gemm_cublas_options_t options = {
      .device = device, .memory = &allocator, .symbols = &symbols, .workspace_bytes = 4096};
  return sluice_gemm_cublas_create(&options, &allocator, &gemm);
}

static int set_up(void** state) {
  (void)state;
  sluice_allocator_init(&allocator, NULL, NULL, NULL);
  gemm = NULL;
  if (set_name != NULL) setenv("SLUICE_NATIVE", set_name, 1);
#if defined(__SANITIZE_THREAD__)
  if (is_foreign()) return 0;
#endif
  const sluice_gemm_options_t options = {name, NULL, host_gemm, NULL};
  if (is_on_device()) return create_cublas() != SLUICE_OK;
  const sluice_status_t status = sluice_gemm_create(&options, &allocator, &gemm);
  return status != SLUICE_OK && status != SLUICE_E_NOT_FOUND && status != SLUICE_E_UNSUPPORTED;
}

static int tear_down(void** state) {
  (void)state;
  sluice_gemm_destroy(gemm);
  if (device != NULL) device->vtable->destroy(device);
  device = NULL;
  const int leaked = allocator.num_live != 0;
  sluice_allocator_deinit(&allocator);
  return leaked;
}

static void skip_when_missing(void) {
#if defined(__SANITIZE_THREAD__)
  if (is_foreign()) skip_because("ThreadSanitizer: it does not see inside %s", name);
#endif
  if (gemm == NULL && is_foreign()) skip_because("the library of %s is not installed", name);
  if (gemm == NULL) skip_because("this processor has no %s", set_name != NULL ? set_name : name);
}

static const int32_t dtypes[][2] = {{SLUICE_DTYPE_F32, SLUICE_DTYPE_F32},
                                    {SLUICE_DTYPE_BF16, SLUICE_DTYPE_BF16},
                                    {SLUICE_DTYPE_BF16, SLUICE_DTYPE_F32},
                                    {SLUICE_DTYPE_F16, SLUICE_DTYPE_F16}};
enum { NUM_DTYPES = sizeof dtypes / sizeof dtypes[0] };

/* Few and many rows, tiles and blocks of each set with their edges, sums kept between blocks. */
static const int64_t sizes[][3] = {
    {1, 5, 32},    {2, 1, 64},     {3, 17, 96},     {16, 33, 352},  {20, 40, 288},  {31, 131, 160},  {40, 300, 544},
    {1, 70, 320},  {2, 23, 160},   {3, 66, 384},    {4, 70, 224},   {1, 3, 33024},  {5, 3, 16448},   {26, 4, 4160},
    {8, 150, 416}, {150, 70, 544}, {300, 75, 1056}, {40, 35, 5504}, {7, 520, 2080}, {270, 530, 320},
};
enum { NUM_SIZES = sizeof sizes / sizeof sizes[0] };

static void every_type_and_edge(int32_t format) {
  const sluice_packed_format_t* f = sluice_packed_format(format);
  static const int32_t blocks[] = {32, 96, 128};
  for (int i = 0; i < NUM_SIZES; ++i) {
    /* Only "native" has blocks for packed weights. "ref", and implementations that fall back to it, are slow. */
    if (strcmp(name, "native") != 0 && sizes[i][0] * sizes[i][1] * sizes[i][2] > 1 << 20) continue;
    for (int direction = 0; direction < 2; ++direction) {
      const int d = (i + direction) % 2; /* beta */
      int64_t rows = sizes[i][1], cols = sizes[i][2];
      if (!directions[direction].transposed && cols > 4096) {
        rows = 1100; /* sums are long in this direction, too */
        cols = 32 * sizes[i][1];
      }
      /* The last block is partial if the format allows it. */
      if (format == SLUICE_PACKED_INT4 && i % 2 == 1) cols -= 2;
      if (f->bits == 8 && i % 3 != 0) cols -= 2 * (i % 3) - 1;
      const int32_t block_cols = f->block_cols != 0 ? f->block_cols : blocks[i % 3];
      weight_t w = make_weight(format, block_cols, rows, cols, i % 4 == 1 ? rows / 2 : 0, 0);
      for (int t = 0; t < NUM_DTYPES; ++t) {
        check_same(gemm, &w, directions[direction].transposed, sizes[i][0], dtypes[t][0], dtypes[t][1],
                   (float)((d + t) % 2), 0);
      }
      free_weight(&w);
    }
  }
}

TEST(Packed_EveryFormatTypeAndEdge_BitsOfTheDecodedWeight) {
  skip_when_missing();
  for (int32_t format = 1; format < SLUICE_PACKED_FORMATS; ++format) every_type_and_edge(format);
}

/* f64 always runs in ref. */
TEST(Packed_F64_BitsOfTheDecodedWeight) {
  skip_when_missing();
  for (int32_t format = 1; format < SLUICE_PACKED_FORMATS; ++format) {
    const int32_t own = sluice_packed_format(format)->block_cols;
    weight_t w = make_weight(format, own != 0 ? own : 32, 70, 96, 0, 0);
    for (int d = 0; d < 2; ++d) {
      check_same(gemm, &w, directions[d].transposed, 33, SLUICE_DTYPE_F64, SLUICE_DTYPE_F64, (float)d, 0);
    }
    free_weight(&w);
  }
}

/* More columns than scratch memory can hold decoded. Sums of whole numbers are exact in any order. */
TEST(Packed_MoreThanScratchHolds_InPartsWithinIt) {
  skip_when_missing();
  for (int d = 0; d < 2; ++d) {
    weight_t w = make_weight(SLUICE_PACKED_INT8, 128, d == 0 ? 2301 : 1040, d == 0 ? 1040 : 2301, 0, 1);
    check_same(gemm, &w, directions[d].transposed, 3, SLUICE_DTYPE_F32, SLUICE_DTYPE_F32, 1, 1);
    free_weight(&w);
  }
}

/* Decoding a weight to memory first takes many times as long as a GEMM of one row. */
TEST(Packed_OneRow_DecodesNothingToMemory) {
  skip_when_missing();
  if (is_foreign() || is_on_device()) skip_because("%s reads only decoded weights", name);
  enum { ROWS = 256, COLS = 1024 };
  weight_t w = make_weight(SLUICE_PACKED_MXFP4, 32, ROWS, COLS, 0, 0);
  for (int d = 0; d < 2; ++d) {
    check_same(gemm, &w, directions[d].transposed, 1, SLUICE_DTYPE_F32, SLUICE_DTYPE_F32, 0, 0);
    if (borrowed_packed > borrowed) {
      fail_msg("%s, %s: %llu bytes borrowed with the packed weight, %llu with the decoded one", name,
               directions[d].name, (unsigned long long)borrowed_packed, (unsigned long long)borrowed);
    }
  }
  free_weight(&w);
}

/* A list with packed and plain weights, and GEMMs without rows or depth. */
TEST(Packed_NextToOthersInAList_EachItsOwnWay) {
  skip_when_missing();
  enum { M = 9, N = 40, K = 64 };
  weight_t w = make_weight(SLUICE_PACKED_MXFP4, 32, N, K, 0, 0);
  float* dense = dense_of(&w, SLUICE_DTYPE_F32);
  float a[M * K], c[4][M * N];
  for (int i = 0; i < M * K; ++i) a[i] = next_value();
  sluice_gemm_problem_t p[4];
  sluice_packed_t packed[4];
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < M * N; ++j) c[i][j] = NAN;
    p[i] = (sluice_gemm_problem_t){M, N, K, {a, K, 1}, {w.codes.data, 1, w.ld}, {c[i], N, 1}};
    packed[i] = w.packed;
    packed[i].transposed = 1;
  }
  packed[1] = (sluice_packed_t){0};
  p[1].b.data = dense;
  p[2].m = 0;
  p[3].k = 0;
  const sluice_grouped_gemm_t list = {p, 4, SLUICE_DTYPE_F32, SLUICE_DTYPE_F32, 0, NULL, packed};
  if (run(gemm, &list) != SLUICE_OK) fail_msg("%s", last_message());
  assert_memory_equal(c[0], c[1], sizeof c[0]);
  for (int i = 0; i < M * N; ++i) assert_true(isnan(c[2][i]) && c[3][i] == 0);
  free(dense);
  free_weight(&w);
}

static void refused(const sluice_gemm_problem_t* p, const sluice_packed_t* packed, const char* part) {
  const sluice_grouped_gemm_t list = {p, 1, SLUICE_DTYPE_F32, SLUICE_DTYPE_F32, 0, NULL, packed};
  assert_int_equal(sluice_gemm_run(gemm, &list), SLUICE_E_INVALID_ARGUMENT);
  if (strstr(last_message(), part) == NULL) fail_msg("\"%s\" does not say \"%s\"", last_message(), part);
}

TEST(Packed_StridesOrSizesThatDoNotFit_Refused) {
  skip_when_missing();
  float a[64], c[64];
  uint8_t codes[64] = {0}, scales[4] = {0};
  const sluice_packed_t packed = {SLUICE_PACKED_MXFP4, 32, 1, scales, 1, 0};
  const sluice_gemm_problem_t good = {1, 2, 32, {a, 32, 1}, {codes, 1, 32}, {c, 2, 1}};
  sluice_gemm_problem_t p = good;
  p.k = 31;
  refused(&p, &packed, "the packed weight of GEMM 0: a width of 31");
  p = good;
  p.b.col_stride = 33;
  refused(&p, &packed, "strides of 1 along a row and 33 between rows");
  p = good;
  p.b.row_stride = 2;
  refused(&p, &packed, "strides of 2 along a row");
  sluice_packed_t unknown = packed;
  unknown.format = 7;
  refused(&good, &unknown, "weight format 7 is unknown");
  const sluice_grouped_gemm_t list = {&good, 1, SLUICE_DTYPE_F32, SLUICE_DTYPE_F32, 0, NULL, &packed};
  assert_int_equal(run(gemm, &list), SLUICE_OK);
}

int main(int argc, char** argv) {
  name = argc > 1 ? argv[1] : "ref";
  unsetenv("SLUICE_GEMM");
  if (strcmp(name, "native") != 0) return run_cases_each(set_up, tear_down);
  sluice_native_set_t sets[SLUICE_NATIVE_SETS];
  int failed = 0;
  for (int i = 0, count = sluice_native_sets(sets); i < count; ++i) {
    set_name = sets[i].name;
    print_message("%s\n", set_name);
    failed += run_cases_each(set_up, tear_down);
  }
  return failed;
}
