// SPDX-License-Identifier: Apache-2.0
#include "data.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = NUM_PARAMS, WEIGHTS, GRAD_OUT, ROUTES, ONES };

/* Returns a number in [-1, 1). */
static double noise(uint64_t seed, uint64_t kind, uint64_t a, uint64_t b) {
  uint64_t x =
      (seed * 64 + kind + 1) * 0x9e3779b97f4a7c15u ^ (a + 1) * 0xbf58476d1ce4e5b9u ^ (b + 1) * 0x94d049bb133111ebu;
  x ^= x >> 31, x *= 0x7fb5d329728ea185u, x ^= x >> 27, x *= 0x81dadef4bc2dd44du, x ^= x >> 33;
  return (double)(x >> 11) / 9007199254740992.0 * 2 - 1;
}

static uint32_t bits_of(float x) {
  uint32_t bits = 0;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
static float float_of(uint32_t bits) {
  float x = 0;
  memcpy(&x, &bits, sizeof x);
  return x;
}

static uint16_t to_bf16(float x) {
  uint32_t bits = bits_of(x);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* Rounds to nearest even; numbers below the smallest normal one become 0, those above the largest infinity. */
static uint16_t to_f16(float x) {
  uint32_t bits = bits_of(x), sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff;
  rest += 0xfff + ((rest >> 13) & 1);
  if (rest < UINT32_C(113) << 23) return (uint16_t)sign;
  if (rest >= UINT32_C(143) << 23) return (uint16_t)(sign | 0x7c00);
  return (uint16_t)(sign | ((rest >> 13) - (112 << 10)));
}
static float from_f16(uint16_t x) {
  uint32_t sign = (uint32_t)(x & 0x8000) << 16, rest = x & 0x7fff;
  if (rest >= 0x7c00) return float_of(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  if (rest < 0x400) return (sign != 0 ? -1.0f : 1.0f) * (float)rest * 0x1p-24f;
  return float_of(sign | ((rest << 13) + (UINT32_C(112) << 23)));
}

uint64_t data_element_bytes(int32_t dtype) {
  return dtype == F64 || dtype == AS_I64 ? 8 : dtype == BF16 || dtype == F16 ? 2 : 4;
}

double data_load(int32_t dtype, const void* data, int64_t i) {
  switch (dtype) {
    case F32: return ((const float*)data)[i];
    case BF16: return float_of((uint32_t)((const uint16_t*)data)[i] << 16);
    case F16: return from_f16(((const uint16_t*)data)[i]);
    default: return ((const double*)data)[i];
  }
}

void data_store(int32_t dtype, void* data, int64_t i, double x) {
  switch (dtype) {
    case F32: ((float*)data)[i] = (float)x; break;
    case BF16: ((uint16_t*)data)[i] = to_bf16((float)x); break;
    case F16: ((uint16_t*)data)[i] = to_f16((float)x); break;
    case AS_I32: ((int32_t*)data)[i] = (int32_t)x; break;
    case AS_I64: ((int64_t*)data)[i] = (int64_t)x; break;
    default: ((double*)data)[i] = x;
  }
}

uint64_t data_hash(uint64_t hash, const void* data, uint64_t bytes) {
  for (uint64_t i = 0; i < bytes; ++i) hash = (hash ^ ((const uint8_t*)data)[i]) * UINT64_C(0x100000001b3);
  return hash;
}

static void forget(block_t* b) {
  if (b->data != NULL) memset(b->data, 0xff, b->bytes); /* NaN, -1 */
}

/* transposed: columns are contiguous. pad: elements between rows. */
static void make_block(block_t* b, int32_t dtype, int32_t ndim, int64_t rows, int64_t cols, int transposed,
                       int64_t pad) {
  const int64_t lines = transposed ? cols : rows, length = (transposed ? rows : cols) + pad;
  b->rows = rows, b->cols = cols, b->ndim = ndim, b->dtype = dtype;
  b->row_stride = transposed ? 1 : length, b->col_stride = transposed ? length : 1;
  b->bytes = (uint64_t)(lines * length) * data_element_bytes(dtype);
  b->data = aligned_alloc(64, (b->bytes + 128) / 64 * 64);
  if (b->data == NULL) abort();
  forget(b);
}

static int64_t place(const block_t* b, int64_t row, int64_t col) { return row * b->row_stride + col * b->col_stride; }

static int is_used(const call_t* c, int kind) {
  if (c->callback) return 0;
  if (kind == W3 || kind == B3) return c->gated == GATE_HALVES && (kind == W3 || c->bias);
  return kind == B1 || kind == B2 ? c->bias : 1;
}

static void make_params(rank_data_t* d, int kind) {
  const call_t* c = d->call;
  const int32_t grad_dtype = c->grad_f32 && c->dtype != F64 ? F32 : c->dtype;
  const int64_t hidden = c->hidden * (c->gated == GATE_INTERLEAVED ? 2 : 1);
  const int64_t rows = kind == W2 || kind == B2 ? c->width : kind == W3 || kind == B3 ? c->hidden : hidden;
  const int64_t cols = kind >= B1 ? 1 : kind == W2 ? c->hidden : c->width;
  const double scale = kind >= B1 ? 0.3 : 1.5 / sqrt((double)cols);
  for (int32_t l = 0; l < d->num_local; ++l) {
    block_t* b = &d->params[kind][l];
    make_block(b, c->dtype, kind >= B1 ? 1 : 2, rows, cols, c->transposed && kind < B1, 0);
    make_block(&d->grads[kind][l], grad_dtype, b->ndim, rows, cols, c->transposed && kind < B1, 0);
    for (int64_t i = 0; i < rows * cols; ++i) {
      double x = scale * noise((uint64_t)c->seed, (uint64_t)kind, (uint64_t)d->local[l], (uint64_t)i);
      data_store(c->dtype, b->data, place(b, i / cols, i % cols), x);
    }
  }
}

void data_make(rank_data_t* d, const call_t* c, int32_t rank) {
  const int64_t T = c->tokens[rank];
  memset(d, 0, sizeof *d);
  d->call = c, d->rank = rank;
  for (int32_t e = 0; e < c->experts; ++e) {
    d->owner[e] = call_owner(c, e);
    if (d->owner[e] == rank) d->local[d->num_local++] = e;
  }
  make_block(&d->x, c->dtype, 2, T, c->width, 0, 3);
  make_block(&d->ids, c->ids32 ? AS_I32 : AS_I64, 2, T, c->topk, !c->ids32, 0); /* like DeepSpeed, and like others */
  make_block(&d->weights, F32, 2, T, c->topk, 0, 1);
  make_block(&d->y, c->dtype, 2, T, c->width, 0, 2);
  make_block(&d->dy, c->dtype, 2, T, c->width, 0, 0);
  make_block(&d->dx, c->dtype, 2, T, c->width, 0, 1);
  make_block(&d->dw, F32, 2, T, c->topk, 0, 0);
  for (int kind = 0; kind < NUM_PARAMS; ++kind) {
    if (is_used(c, kind)) make_params(d, kind);
  }
}

void data_drop(rank_data_t* d) {
  block_t* all[] = {&d->x, &d->ids, &d->weights, &d->y, &d->dy, &d->dx, &d->dw};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; ++i) free(all[i]->data);
  for (int kind = 0; kind < NUM_PARAMS; ++kind) {
    for (int32_t l = 0; l < d->num_local; ++l) free(d->params[kind][l].data), free(d->grads[kind][l].data);
  }
}

/* Gradients that are accumulated start from nonzero numbers. */
void data_forget_outputs(rank_data_t* d) {
  forget(&d->y), forget(&d->dx), forget(&d->dw);
  for (int kind = 0; kind < NUM_PARAMS; ++kind) {
    for (int32_t l = 0; l < d->num_local; ++l) {
      block_t* b = &d->grads[kind][l];
      forget(b);
      for (int64_t i = 0; b->data != NULL && d->call->accumulate && i < b->rows * b->cols; ++i) {
        data_store(b->dtype, b->data, place(b, i / b->cols, i % b->cols), noise(1, ONES, (uint64_t)kind, (uint64_t)i));
      }
    }
  }
}

/* Experts of a token are distinct, except with same_every. */
static int32_t routed_to(const call_t* c, int64_t step, int32_t rank, int64_t t, int32_t k) {
  int64_t flat = t * c->topk + k;
  if (c->drop_every > 0 && flat % c->drop_every == c->drop_every - 1) return -1;
  if (c->same_every > 0 && k > 0 && t % c->same_every == 0) k = 0;
  if (k == 0 && c->hot >= 0) return c->hot;
  double at = (noise((uint64_t)(c->seed + step), ROUTES, (uint64_t)rank, (uint64_t)t) + 1) / 2;
  int32_t first = (int32_t)(at * c->experts) % c->experts, id = (first + k) % c->experts;
  return c->hot >= 0 && id == c->hot ? (first + c->topk) % c->experts : id;
}

void data_begin(rank_data_t* d, int32_t step, int64_t tokens, int32_t ids_by) {
  const call_t* c = d->call;
  const uint64_t seed = (uint64_t)(c->seed + step);
  block_t* all[] = {&d->x, &d->ids, &d->weights, &d->y, &d->dy, &d->dx, &d->dw};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; ++i) all[i]->rows = tokens;
  for (int64_t t = 0; t < tokens; ++t) {
    const uint64_t at = (uint64_t)(d->rank * 1000003 + t);
    for (int64_t m = 0; m < c->width; ++m) {
      data_store(c->dtype, d->x.data, place(&d->x, t, m), noise(seed, TOKENS, at, (uint64_t)m));
      data_store(c->dtype, d->dy.data, place(&d->dy, t, m), noise(seed, GRAD_OUT, at, (uint64_t)m));
    }
    for (int32_t k = 0; k < c->topk; ++k) {
      int32_t e = routed_to(c, step, d->rank, t, k);
      data_store(d->ids.dtype, d->ids.data, place(&d->ids, t, k), e < 0 ? e : (e + ids_by) % c->experts);
      data_store(F32, d->weights.data, place(&d->weights, t, k), 0.5 + 0.5 * noise(seed, WEIGHTS, at, (uint64_t)k));
    }
  }
  data_forget_outputs(d);
}
