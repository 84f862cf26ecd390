// SPDX-License-Identifier: Apache-2.0
/* Experts with packed weights (case_t.weights), or with the same weights decoded. For every second expert, the rows and
 * scales of W3 follow those of W1 in one array; other experts have separate arrays. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/dtype.h"
#include "capi/test/world/world_split.h"

enum { FP8_BLOCK = 128, MXFP4_BLOCK = 32 };

static int is_nibbles(const case_t* c) {
  return c->weights == SLUICE_WEIGHTS_MXFP4 || c->weights == SLUICE_WEIGHTS_INT4;
}
static int64_t block_cols(const case_t* c) {
  if (c->weights == SLUICE_WEIGHTS_FP8) return FP8_BLOCK;
  return c->weights == SLUICE_WEIGHTS_MXFP4 ? MXFP4_BLOCK : c->weight_block;
}
static int64_t block_rows(const case_t* c) { return c->weights == SLUICE_WEIGHTS_FP8 ? FP8_BLOCK : 1; }
static uint64_t scale_bytes(const case_t* c) {
  return c->weights == SLUICE_WEIGHTS_MXFP4 ? 1 : c->weights == SLUICE_WEIGHTS_FP8 ? 4 : 2;
}
static int64_t blocks(int64_t size, int64_t block) { return (size + block - 1) / block; }

/* Rows of a kind's array. In interleaved layers W1's array also holds W3. */
static int64_t rows_of(const case_t* c, int kind) {
  return world_param_rows(c, kind) * (kind == W1 && c->gated == SLUICE_GATED_INTERLEAVED ? 2 : 1);
}

static uint32_t noise_at(int kind, int32_t e, int64_t row, int64_t col) {
  uint32_t x = (uint32_t)(kind * 7919 + e * 104729 + row * 1299709 + col * 15485863 + 12345);
  x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu, x ^= x >> 16;
  return x;
}

static uint8_t code_at(const case_t* c, int kind, int32_t e, int64_t row, int64_t col) {
  const uint8_t code = (uint8_t)noise_at(kind, e, row, col);
  if (is_nibbles(c)) return code & 15;
  return c->weights == SLUICE_WEIGHTS_FP8 && (code & 127) == 127 ? code ^ 1 : code;
}

static double number(const case_t* c, uint8_t code) {
  static const double e2m1[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  switch (c->weights) {
    case SLUICE_WEIGHTS_MXFP4: return (code & 8 ? -1 : 1) * e2m1[code & 7];
    case SLUICE_WEIGHTS_FP8: {
      const int e = code >> 3 & 15, m = code & 7;
      return (code & 128 ? -1 : 1) * (e == 0 ? ldexp(m, -9) : ldexp(8 + m, e - 10));
    }
    case SLUICE_WEIGHTS_INT8: return (int8_t)code;
    default: return (code ^ 8) - 8;
  }
}

/* The scale of block (row, col), as rounded in storage. */
static float scale_at(const case_t* c, int kind, int32_t e, int64_t row, int64_t col) {
  const uint32_t x = noise_at(kind + 3, e, row, col);
  if (c->weights == SLUICE_WEIGHTS_MXFP4) return ldexpf(1, -4 - (int)(x % 4));
  if (c->weights == SLUICE_WEIGHTS_FP8) return 0.0007f + 1e-5f * (float)(x % 100);
  const float wanted = (c->weights == SLUICE_WEIGHTS_INT8 ? 0.0015f : 0.025f) * (1 + 0.01f * (float)(x % 100));
  return sluice_bf16_to_f32(sluice_f32_to_bf16(wanted));
}

static void fill_codes(const case_t* c, int kind, int32_t e, uint8_t* codes) {
  const int64_t cols = world_param_cols(c, kind);
  for (int64_t i = 0; i < rows_of(c, kind) * cols; ++i) {
    const uint8_t code = code_at(c, kind, e, i / cols, i % cols);
    if (is_nibbles(c)) {
      codes[i / 2] = (uint8_t)(i % 2 == 0 ? code : codes[i / 2] | code << 4);
    } else {
      codes[i] = code;
    }
  }
}

static void fill_scales(const case_t* c, int kind, int32_t e, char* scales) {
  const int64_t across = blocks(world_param_cols(c, kind), block_cols(c));
  for (int64_t i = 0; i < blocks(rows_of(c, kind), block_rows(c)) * across; ++i) {
    const float scale = scale_at(c, kind, e, i / across, i % across);
    if (c->weights == SLUICE_WEIGHTS_MXFP4) scales[i] = (char)(127 + ilogbf(scale));
    if (c->weights == SLUICE_WEIGHTS_FP8) memcpy(scales + 4 * i, &scale, sizeof scale);
    if (scale_bytes(c) == 2) ((uint16_t*)(void*)scales)[i] = sluice_f32_to_bf16(scale);
  }
}

static void fill_decoded(const case_t* c, int kind, int32_t e, void* out) {
  const int64_t cols = world_param_cols(c, kind);
  for (int64_t i = 0; i < rows_of(c, kind) * cols; ++i) {
    const int64_t row = i / cols, col = i % cols;
    const float scale = scale_at(c, kind, e, row / block_rows(c), col / block_cols(c));
    set_element(out, i, c->dtype, (double)((float)number(c, code_at(c, kind, e, row, col)) * scale));
  }
}

/* Takes 2 * `bytes` on the rank's machine, with room for W3 after W1. */
static void* take_twice(world_packed_t* p, uint64_t bytes) {
  void* memory = world_take(2 * bytes + 1);
  p->memory[p->num_memory++] = memory;
  return memory;
}

/* Copies to the machine and frees `here`. */
static void send_over(void* there, void* here, uint64_t bytes) {
  if (world_here.machine != NULL) {
    world_here.machine->send(world_here.rank, there, here, bytes);
  } else {
    memcpy(there, here, bytes);
  }
  free(here);
}

static sluice_tensor_t* tensors_of(world_packed_t* p, int kind, int of_scales) {
  return of_scales ? p->scales[kind] : p->codes[kind];
}

static void describe(world_packed_t* p, int kind, int of_scales, int32_t l, void* data, int64_t rows, int64_t cols,
                     uint8_t code, uint8_t bits) {
  const world_machine_t* there = world_here.machine;
  int64_t* shape = p->shapes[kind][of_scales];
  shape[0] = rows, shape[1] = cols;
  tensors_of(p, kind, of_scales)[l] =
      (sluice_tensor_t){.data = data,
                        .device_type = there != NULL ? there->device_type : SLUICE_DEVICE_CPU,
                        .device_id = there != NULL ? there->device_id(world_here.rank) : 0,
                        .ndim = 2,
                        .type_code = code,
                        .type_bits = bits,
                        .type_lanes = 1,
                        .shape = shape};
}

void world_make_packed(world_packed_t* p, const case_t* c, const int32_t* ids, int32_t count,
                       sluice_expert_tensors_t* table) {
  const uint64_t element = sluice_dtype_bytes(c->dtype);
  memset(p, 0, sizeof *p);
  for (int kind = 0; kind <= W2; ++kind) {
    if (kind == W3 && c->gated != SLUICE_GATED_HALVES) continue;
    p->codes[kind] = calloc((size_t)count + 1, sizeof(sluice_tensor_t));
    p->scales[kind] = calloc((size_t)count + 1, sizeof(sluice_tensor_t));
  }
  p->memory = calloc((size_t)(2 * 3 * count) + 1, sizeof(void*));
  for (int32_t l = 0; l < count; ++l) {
    for (int kind = 0; kind <= W2; ++kind) {
      if (p->codes[kind] == NULL) continue;
      const int64_t rows = rows_of(c, kind), cols = world_param_cols(c, kind), across = blocks(cols, block_cols(c));
      const int64_t down = blocks(rows, block_rows(c));
      const uint64_t bytes =
          c->weights_decoded ? (uint64_t)(rows * cols) * element : (uint64_t)(rows * cols) / (is_nibbles(c) ? 2 : 1);
      const uint64_t bytes_of_scales = (uint64_t)(down * across) * scale_bytes(c);
      char *codes, *scales;
      if (kind == W3 && ids[l] % 2 == 0) {
        codes = (char*)p->codes[W1][l].data + bytes;
        scales = (char*)p->scales[W1][l].data + bytes_of_scales;
      } else {
        codes = take_twice(p, bytes);
        scales = take_twice(p, bytes_of_scales);
      }
      void *codes_here = calloc(1, bytes), *scales_here = calloc(1, bytes_of_scales);
      fill_scales(c, kind, ids[l], scales_here);
      send_over(scales, scales_here, bytes_of_scales);
      const int is_bf16 = c->weights >= SLUICE_WEIGHTS_INT8;
      describe(p, kind, 1, l, scales, down, across,
               c->weights == SLUICE_WEIGHTS_MXFP4 ? SLUICE_TYPE_UINT
               : is_bf16                          ? SLUICE_TYPE_BFLOAT
                                                  : SLUICE_TYPE_FLOAT,
               (uint8_t)(8 * scale_bytes(c)));
      if (c->weights_decoded) {
        fill_decoded(c, kind, ids[l], codes_here);
        describe(p, kind, 0, l, codes, rows, cols,
                 c->dtype == SLUICE_DTYPE_BF16 ? SLUICE_TYPE_BFLOAT : SLUICE_TYPE_FLOAT, (uint8_t)(8 * element));
      } else {
        fill_codes(c, kind, ids[l], codes_here);
        describe(p, kind, 0, l, codes, rows, cols / (is_nibbles(c) ? 2 : 1), SLUICE_TYPE_UINT, 8);
      }
      send_over(codes, codes_here, bytes);
    }
  }
  table->w1 = p->codes[W1], table->w3 = p->codes[W3], table->w2 = p->codes[W2];
  if (c->weights_decoded) return;
  table->s1 = p->scales[W1], table->s3 = p->scales[W3], table->s2 = p->scales[W2];
}

void world_free_packed(world_packed_t* p) {
  for (int32_t i = 0; i < p->num_memory; ++i) world_give(p->memory[i]);
  free(p->memory);
  for (int kind = 0; kind <= W2; ++kind) {
    free(p->codes[kind]);
    free(p->scales[kind]);
  }
}
