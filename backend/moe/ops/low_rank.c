// SPDX-License-Identifier: Apache-2.0
#include "backend/moe/ops/low_rank.h"

#include <string.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "backend/base/dtype.h"
#include "backend/base/hash.h"
#include "backend/base/math.h"
#include "backend/moe/pass/weight_sums.h"

/* ---- terms ---- */

int32_t sluice_low_terms(const sluice_pass_t* pass, sluice_linear_t linear, sluice_low_term_t* out) {
  const sluice_moe_config_t* c = &pass->moe->shape.config;
  const sluice_expert_tensors_t* p = pass->params;
  const int64_t hidden = c->hidden_width, width = pass->moe->shape.gate_factor * hidden;
  int32_t count = 0;
  if (linear == SLUICE_LINEAR_DOWN) {
    if (p->la2 != NULL)
      out[count++] = (sluice_low_term_t){p->la2, p->lb2, NULL, SLUICE_LA2, 0, c->model_width, p->lora_scale2};
    return count;
  }
  const int halves = c->gated == SLUICE_GATED_HALVES, is_shared = halves && p->la3 == NULL && p->lb3 != NULL;
  if (p->la1 != NULL) {
    const int64_t columns = halves && !is_shared ? hidden : width;
    out[count++] =
        (sluice_low_term_t){p->la1, p->lb1, is_shared ? p->lb3 : NULL, SLUICE_LA1, 0, columns, p->lora_scale1};
  }
  if (p->la3 != NULL)
    out[count++] = (sluice_low_term_t){p->la3, p->lb3, NULL, SLUICE_LA3, hidden, hidden, p->lora_scale3};
  return count;
}

static int64_t rank_of(const sluice_low_term_t* term) { return term->a[0].shape[0]; }

uint64_t sluice_low_signature(const sluice_expert_tensors_t* p) {
  const sluice_tensor_t* const factors[] = {p->la1, p->lb1, p->la3, p->lb3, p->la2, p->lb2};
  const float scales[] = {p->lora_scale1, p->lora_scale3, p->lora_scale2};
  uint64_t hash = SLUICE_HASH_OF_NOTHING;
  int any = 0;
  for (int32_t i = 0; i < 6; ++i) {
    const int64_t rank = factors[i] == NULL ? 0 : factors[i][0].shape[i % 2];
    const float scale = factors[i] == NULL ? 0 : scales[i / 2];
    any |= rank > 0;
    hash = sluice_hash_bytes(hash, &rank, sizeof rank);
    hash = sluice_hash_bytes(hash, &scale, sizeof scale);
  }
  return any ? hash | 1 : 0;
}

/* ---- lists of GEMMs over experts ---- */

/* Factors of experts from `first` on, packed one after the other at `data`. */
typedef struct packed_s {
  const sluice_tensor_t* factors; /* of all local experts; NULL: nothing is packed here */
  int32_t first, count;
  uint64_t each; /* bytes */
  char* data;
} packed_t;

typedef struct list_s {
  sluice_pass_t* pass;
  const sluice_op_t* op;
  float beta;
  int64_t count;
  int32_t kinds;                         /* kinds of factors that one block may need packed, which share the memory */
  uint64_t used;                         /* bytes of pass->adapters */
  packed_t packed[SLUICE_MAX_LOW_TERMS]; /* the last packed factors of each kind */
} list_t;

static sluice_status_t run(list_t* list) {
  const int64_t count = list->count;
  list->count = 0;
  return sluice_grouped_gemm_run(list->pass, list->op, count, list->pass->moe->shape.config.dtype, list->beta);
}

static sluice_status_t add(list_t* list, sluice_gemm_problem_t problem) {
  list->pass->gemms[list->count++] = problem;
  return list->count == sluice_pass_gemms(&list->pass->moe->shape) ? run(list) : SLUICE_OK;
}

/* Whether a GEMM can read the factor in place: it has the layer's dtype and one stride of 1. */
static int is_direct(const sluice_pass_t* pass, const sluice_tensor_t* t) {
  return sluice_tensor_dtype(t) == pass->moe->shape.config.dtype &&
         sluice_is_matrix(t->shape, sluice_tensor_stride(t, 0), sluice_tensor_stride(t, 1));
}

/* Row-major copies of the matrices of `experts` neighbours, of any strides, `each` bytes apart. In PEFT's B
 * [out, r * E] the values of an expert are E elements apart, with those of its neighbours between them: a copy of one
 * expert would read a cache line for each value, and the copy of the next expert the same lines. */
enum { MOST_NEIGHBOURS = 16, STAGED = 64 };

enum { FOUR = 4 };

/* out[e][k] = data[k * stride + e] for four e and four k. */
static void transpose_four(const float* data, int64_t stride, float* out, int64_t out_ld) {
#if defined(__x86_64__)
  __m128 a = _mm_loadu_ps(data), b = _mm_loadu_ps(data + stride);
  __m128 c = _mm_loadu_ps(data + 2 * stride), d = _mm_loadu_ps(data + 3 * stride);
  _MM_TRANSPOSE4_PS(a, b, c, d);
  _mm_storeu_ps(out, a), _mm_storeu_ps(out + out_ld, b);
  _mm_storeu_ps(out + 2 * out_ld, c), _mm_storeu_ps(out + 3 * out_ld, d);
#else
  for (int64_t i = 0; i < FOUR * FOUR; ++i) out[i / FOUR * out_ld + i % FOUR] = data[i % FOUR * stride + i / FOUR];
#endif
}

/* out[e][k] = data[k * stride + e] for k < count; rows of out are out_ld apart. Prefetches the next `count` k, which
 * the hardware does not if each is in another line or page. */
static void transpose(const float* data, int64_t stride, int64_t count, int32_t experts, float* out, int64_t out_ld) {
  for (int64_t k = 0; k < count; k += FOUR) {
    const float* from = data + k * stride;
    for (int64_t i = 0; i < FOUR; ++i) __builtin_prefetch(from + (count + i) * stride);
    int32_t e = 0;
    for (; count - k >= FOUR && experts - e >= FOUR; e += FOUR)
      transpose_four(from + e, stride, out + e * out_ld + k, out_ld);
    for (; e < experts; ++e) {
      for (int64_t i = 0; i < sluice_min(count - k, FOUR); ++i) out[e * out_ld + k + i] = from[i * stride + e];
    }
  }
}

/* Copies f32 factors for a layer of f32 or 16 bits, STAGED values of each expert at a time. */
static void copy_f32(const sluice_kernels_t* kernels, int32_t dtype, const sluice_tensor_t* t, int32_t experts,
                     char* to, uint64_t each) {
  const int64_t row_stride = sluice_tensor_stride(t, 0), col_stride = sluice_tensor_stride(t, 1);
  const int64_t element = (int64_t)sluice_dtype_bytes(dtype), ld = (int64_t)each / element;
  int64_t rows = t->shape[0], columns = t->shape[1];
  if (row_stride == columns * col_stride) columns *= rows, rows = 1;
  for (int64_t i = 0; i < rows; ++i, to += columns * element) {
    const float* row = (const float*)sluice_tensor_data(t) + i * row_stride;
    if (dtype != SLUICE_DTYPE_F32 && col_stride == 1 && experts == 1) {
      kernels->round_rows(NULL, dtype, 1, columns, row, 0, to, columns);
      continue;
    }
    for (int64_t j = 0; j < columns; j += STAGED) {
      const int64_t count = sluice_min(columns - j, STAGED);
      float staged[MOST_NEIGHBOURS * STAGED];
      char* out = to + j * element;
      if (dtype == SLUICE_DTYPE_F32) {
        transpose(row + j * col_stride, col_stride, count, experts, (float*)(void*)out, ld);
        continue;
      }
      transpose(row + j * col_stride, col_stride, count, experts, staged, count);
      kernels->round_rows(NULL, dtype, experts, count, staged, 0, out, ld);
    }
  }
}

/* NOLINTBEGIN(bugprone-macro-parentheses): types */
#define COPY(name, from_t, to_t)                                                                                      \
  static void name(const sluice_tensor_t* t, int32_t experts, char* to, uint64_t each) {                              \
    const int64_t row_stride = sluice_tensor_stride(t, 0), col_stride = sluice_tensor_stride(t, 1);                   \
    const from_t* row = sluice_tensor_data(t);                                                                        \
    for (int64_t i = 0; i < t->shape[0]; ++i, row += row_stride, to += (uint64_t)t->shape[1] * sizeof(to_t)) {        \
      for (int64_t j = 0; j < t->shape[1]; ++j) {                                                                     \
        for (int32_t e = 0; e < experts; ++e) ((to_t*)(void*)(to + (uint64_t)e * each))[j] = row[j * col_stride + e]; \
      }                                                                                                               \
    }                                                                                                                 \
  }
/* NOLINTEND(bugprone-macro-parentheses) */

COPY(copy_16, uint16_t, uint16_t)
COPY(copy_64, double, double)
COPY(copy_to_f64, float, double)

/* Packs row-major, in the layer's dtype. The factors have that dtype, or are f32. */
static void pack(const list_t* list, const sluice_tensor_t* t, int32_t experts, char* to, uint64_t each) {
  const sluice_pass_t* pass = list->pass;
  const int32_t dtype = pass->moe->shape.config.dtype;
  const sluice_kernels_t* kernels = pass->context->device->kernels;
  if (kernels->pack_matrices != NULL) {
    kernels->pack_matrices(sluice_pass_stream(pass, list->op), dtype, sluice_tensor_dtype(t), t->shape[0], t->shape[1],
                           sluice_tensor_data(t), sluice_tensor_stride(t, 0), sluice_tensor_stride(t, 1), experts, to,
                           (int64_t)(each / sluice_dtype_bytes(dtype)));
    return;
  }
  const int is_f32 = sluice_tensor_dtype(t) == SLUICE_DTYPE_F32;
  if (dtype == SLUICE_DTYPE_F64) {
    (is_f32 ? copy_to_f64 : copy_64)(t, experts, to, each);
  } else if (is_f32) {
    copy_f32(kernels, dtype, t, experts, to, each);
  } else {
    copy_16(t, experts, to, each);
  }
}

/* Whether the values of the next expert's factor lie next to those of this one. */
static int are_neighbours(const sluice_tensor_t* t) {
  const sluice_tensor_t* next = t + 1;
  return sluice_tensor_stride(t, 0) == sluice_tensor_stride(next, 0) &&
         sluice_tensor_stride(t, 1) == sluice_tensor_stride(next, 1) &&
         (const char*)sluice_tensor_data(next) - (const char*)sluice_tensor_data(t) ==
             (int64_t)sluice_dtype_bytes(sluice_tensor_dtype(t));
}

/* Returns how many experts from `local` on, at most `most`, can be packed together. */
static int32_t neighbours(const sluice_pass_t* pass, const sluice_tensor_t* all, const sluice_tensor_t* lower,
                          int32_t local, int64_t most) {
  int32_t count = 1;
  while (local + count < pass->binding.num_local && count < most && are_neighbours(&all[local + count - 1]) &&
         (lower == NULL || are_neighbours(&lower[local + count - 1])))
    ++count;
  return count;
}

/* Returns an expert's factor as a matrix: the host's own, or a packed copy if GEMMs cannot read that; neighbours are
 * packed with it. lower: the lower halves, or NULL. If memory is used up, the GEMMs listed so far run first. */
static sluice_status_t factor(list_t* list, const sluice_tensor_t* all, const sluice_tensor_t* lower, int32_t local,
                              sluice_matrix_t* out) {
  sluice_pass_t* pass = list->pass;
  const sluice_tensor_t* t = &all[local];
  const int32_t dtype = pass->moe->shape.config.dtype;
  const uint64_t element = sluice_dtype_bytes(dtype), half = (uint64_t)sluice_tensor_elements(t) * element;
  if (is_direct(pass, t) && (lower == NULL || sluice_is_stacked(t, &lower[local], element))) {
    *out = sluice_tensor_matrix(t);
    return SLUICE_OK;
  }
  packed_t *found = NULL, *spare = &list->packed[0];
  for (int i = 0; i < SLUICE_MAX_LOW_TERMS; ++i) {
    packed_t* p = &list->packed[i];
    if (p->factors == all) found = p;
    if (p->factors == NULL) spare = p;
  }
  if (found == NULL || local < found->first || local >= found->first + found->count) {
    if (found == NULL) found = spare;
    const uint64_t each = sluice_align_up(lower == NULL ? half : 2 * half);
    const int64_t most = sluice_min((int64_t)(pass->adapter_bytes / (uint64_t)list->kinds / each), MOST_NEIGHBOURS);
    const int32_t count = neighbours(pass, all, lower, local, most);
    if (list->used + (uint64_t)count * each > pass->adapter_bytes) {
      SLUICE_TRY(run(list));
      list->used = 0;
      memset(list->packed, 0, sizeof list->packed);
    }
    *found = (packed_t){all, local, count, each, pass->adapters + list->used};
    list->used += (uint64_t)count * each;
    pack(list, t, count, found->data, each);
    if (lower != NULL) pack(list, &lower[local], count, found->data + half, each);
  }
  *out = (sluice_matrix_t){found->data + (uint64_t)(local - found->first) * found->each, t->shape[1], 1};
  return SLUICE_OK;
}

/* ---- rows ---- */

/* An expert's rows of one chunk, or of all chunks if they are contiguous. */
typedef struct block_s {
  int32_t chunk, local;
  int64_t rows;
} block_t;

/* Visits the blocks of an op: calls `visit` for each block with rows, then runs the listed GEMMs. */
typedef sluice_status_t (*visit_fn_t)(list_t* list, const block_t* block, const void* user);

/* kinds: number of factors that a visit asks for. */
static sluice_status_t for_blocks(sluice_pass_t* pass, const sluice_op_t* op, float beta, int32_t kinds,
                                  visit_fn_t visit, const void* user) {
  const sluice_binding_t* b = &pass->binding;
  const int joined = op->chunk < 0 && sluice_weight_rows_are_joined(pass);
  const int32_t first = op->chunk < 0 ? 0 : op->chunk, end = op->chunk < 0 && !joined ? b->num_chunks : first + 1;
  list_t list = {.pass = pass, .op = op, .beta = beta, .kinds = kinds};
  for (int32_t e = 0; e < b->num_local; ++e) {
    for (int32_t i = first; i < end; ++i) {
      const block_t block = {i, e, sluice_rows_of_expert(pass, joined ? -1 : i, e)};
      if (block.rows > 0) SLUICE_TRY(visit(&list, &block, user));
    }
  }
  return run(&list);
}

static uint64_t element_of(const sluice_pass_t* pass) { return sluice_dtype_bytes(pass->moe->shape.config.dtype); }

/* Columns of a tensor of the pass, from `first`. */
static sluice_matrix_t columns_of(const sluice_pass_t* pass, int32_t tensor, const block_t* block, int64_t first) {
  const uint64_t element = element_of(pass);
  return sluice_rows_matrix(sluice_pass_rows(pass, tensor, block->chunk, block->local),
                            (int64_t)(sluice_row_bytes(&pass->moe->shape, tensor) / element), first, element);
}

sluice_matrix_t sluice_low_matrix(const sluice_pass_t* pass, void* rows, int32_t second) {
  const int64_t rank = pass->moe->shape.config.lora_rank;
  return sluice_rows_matrix(rows, 2 * rank, second * rank, element_of(pass));
}

static sluice_matrix_t low_of(const sluice_pass_t* pass, const block_t* block, int32_t second) {
  return sluice_low_matrix(pass, sluice_pass_rows(pass, SLUICE_T_LOW, block->chunk, block->local), second);
}

static void scale_rows(int32_t dtype, sluice_matrix_t m, int64_t rows, int64_t rank, float s) {
  for (int64_t i = 0; i < rows; ++i) {
    float* f32 = (float*)m.data + i * m.row_stride;
    double* f64 = (double*)m.data + i * m.row_stride;
    uint16_t* short_float = (uint16_t*)m.data + i * m.row_stride;
    switch (dtype) {
      case SLUICE_DTYPE_F32:
        for (int64_t j = 0; j < rank; ++j) f32[j] *= s;
        break;
      case SLUICE_DTYPE_F64:
        for (int64_t j = 0; j < rank; ++j) f64[j] *= (double)s;
        break;
      case SLUICE_DTYPE_BF16:
        for (int64_t j = 0; j < rank; ++j) short_float[j] = sluice_f32_to_bf16(sluice_bf16_to_f32(short_float[j]) * s);
        break;
      default:
        for (int64_t j = 0; j < rank; ++j) short_float[j] = sluice_f32_to_f16(sluice_f16_to_f32(short_float[j]) * s);
    }
  }
}

/* ---- the first products: with A of X, with B of G ---- */

typedef struct linear_rows_s {
  int32_t x, y, g, dx; /* tensors */
} linear_rows_t;

static const linear_rows_t rows_of_linear[] = {{SLUICE_T_DI, SLUICE_T_M, SLUICE_T_DM, SLUICE_T_DDI},
                                               {SLUICE_T_ACT, SLUICE_T_DO, SLUICE_T_DDO, SLUICE_T_DACT}};

typedef struct product_s {
  const sluice_low_term_t* term;
  int32_t rows;   /* tensor of X or G */
  int32_t with_b; /* G B, else X A^T */
  int32_t second; /* half of T_LOW */
} product_t;

static sluice_status_t add_product(list_t* list, const block_t* block, const void* user) {
  const product_t* p = user;
  const sluice_low_term_t* t = p->term;
  sluice_matrix_t m;
  SLUICE_TRY(p->with_b ? factor(list, t->b, t->b_lower, block->local, &m) : factor(list, t->a, NULL, block->local, &m));
  return add(list, (sluice_gemm_problem_t){block->rows, rank_of(t), p->with_b ? t->columns : t->a[0].shape[1],
                                           columns_of(list->pass, p->rows, block, p->with_b ? t->first : 0),
                                           p->with_b ? m : sluice_transpose(m), low_of(list->pass, block, p->second)});
}

static sluice_status_t scale_product(list_t* list, const block_t* block, const void* user) {
  const product_t* p = user;
  const sluice_pass_t* pass = list->pass;
  const sluice_kernels_t* kernels = pass->context->device->kernels;
  const int32_t dtype = pass->moe->shape.config.dtype;
  const sluice_matrix_t m = low_of(pass, block, p->second);
  if (kernels->scale_columns != NULL) {
    kernels->scale_columns(sluice_pass_stream(pass, list->op), dtype, block->rows, rank_of(p->term), m.data,
                           m.row_stride, p->term->scale);
  } else {
    scale_rows(dtype, m, block->rows, rank_of(p->term), p->term->scale);
  }
  return SLUICE_OK;
}

static sluice_status_t make_product(sluice_pass_t* pass, const sluice_op_t* op, const product_t* p) {
  SLUICE_TRY(for_blocks(pass, op, 0, 1, add_product, p));
  return p->term->scale == 1.0f ? SLUICE_OK : for_blocks(pass, op, 0, 1, scale_product, p);
}

sluice_status_t sluice_low_p(sluice_pass_t* pass, const sluice_op_t* op, sluice_linear_t linear,
                             const sluice_low_term_t* term) {
  const int32_t x = linear == SLUICE_LINEAR_DOWN ? SLUICE_T_DACT : SLUICE_T_DI; /* dT_ACT holds w act by then */
  return make_product(pass, op, &(product_t){term, x, 0, 0});
}

/* The half of T_LOW in which sluice_low_backward leaves U of a linear layer's only term. */
static int32_t half_of(sluice_linear_t linear) { return linear == SLUICE_LINEAR_DOWN; }

sluice_status_t sluice_low_u(sluice_pass_t* pass, const sluice_op_t* op, sluice_linear_t linear,
                             const sluice_low_term_t* term, int32_t* out_half) {
  sluice_low_term_t terms[SLUICE_MAX_LOW_TERMS];
  const int is_kept = pass->schedule->spec.dgrad && sluice_low_terms(pass, SLUICE_LINEAR_UP, terms) <= 1;
  *out_half = is_kept ? half_of(linear) : 1;
  return is_kept ? SLUICE_OK : make_product(pass, op, &(product_t){term, rows_of_linear[linear].g, 1, 1});
}

/* ---- the second products: the terms themselves ---- */

typedef struct terms_s {
  const sluice_low_term_t* terms;
  int32_t count;
  int32_t out; /* tensor */
  int64_t width;
} terms_t;

typedef struct addend_s {
  const sluice_low_term_t* term;
  int32_t second, out;
} addend_t;

/* Zeroes columns of Y that no term adds to, by a GEMM with an empty sum. */
static sluice_status_t add_forward(list_t* list, const block_t* block, const void* user) {
  const terms_t* s = user;
  int64_t next = 0;
  for (int32_t i = 0; i <= s->count; ++i) {
    const int64_t first = i < s->count ? s->terms[i].first : s->width;
    const sluice_matrix_t low = low_of(list->pass, block, i == s->count ? 0 : i);
    if (next < first) {
      SLUICE_TRY(add(list, (sluice_gemm_problem_t){block->rows, first - next, 0, low, low,
                                                   columns_of(list->pass, s->out, block, next)}));
    }
    if (i == s->count) return SLUICE_OK;
    const sluice_low_term_t* t = &s->terms[i];
    sluice_matrix_t b;
    SLUICE_TRY(factor(list, t->b, t->b_lower, block->local, &b));
    SLUICE_TRY(add(list, (sluice_gemm_problem_t){block->rows, t->columns, rank_of(t), low, sluice_transpose(b),
                                                 columns_of(list->pass, s->out, block, first)}));
    next = first + t->columns;
  }
  return SLUICE_OK;
}

sluice_status_t sluice_low_forward(sluice_pass_t* pass, const sluice_op_t* op, sluice_linear_t linear,
                                   float* out_beta) {
  sluice_low_term_t terms[SLUICE_MAX_LOW_TERMS];
  const int32_t count = sluice_low_terms(pass, linear, terms);
  *out_beta = count > 0 ? 1 : 0;
  for (int32_t i = 0; i < count; ++i) {
    SLUICE_TRY(make_product(pass, op, &(product_t){&terms[i], rows_of_linear[linear].x, 0, i}));
  }
  if (count == 0) return SLUICE_OK;
  const int32_t out = rows_of_linear[linear].y;
  const terms_t all = {terms, count, out, (int64_t)(sluice_row_bytes(&pass->moe->shape, out) / element_of(pass))};
  return for_blocks(pass, op, 0, count, add_forward, &all);
}

static sluice_status_t add_backward(list_t* list, const block_t* block, const void* user) {
  const addend_t* s = user;
  const sluice_low_term_t* t = s->term;
  sluice_matrix_t a;
  SLUICE_TRY(factor(list, t->a, NULL, block->local, &a));
  return add(list,
             (sluice_gemm_problem_t){block->rows, t->a[0].shape[1], rank_of(t), low_of(list->pass, block, s->second), a,
                                     columns_of(list->pass, s->out, block, 0)});
}

sluice_status_t sluice_low_backward(sluice_pass_t* pass, const sluice_op_t* op, sluice_linear_t linear,
                                    float* out_beta) {
  sluice_low_term_t terms[SLUICE_MAX_LOW_TERMS];
  const int32_t count = sluice_low_terms(pass, linear, terms);
  *out_beta = count > 0 ? 1 : 0;
  for (int32_t i = 0; i < count; ++i) {
    const int32_t half = count == 1 ? half_of(linear) : i;
    SLUICE_TRY(make_product(pass, op, &(product_t){&terms[i], rows_of_linear[linear].g, 1, half}));
  }
  for (int32_t i = 0; i < count; ++i) {
    const addend_t one = {&terms[i], count == 1 ? half_of(linear) : i, rows_of_linear[linear].dx};
    SLUICE_TRY(for_blocks(pass, op, i == 0 ? 0 : 1, 1, add_backward, &one));
  }
  return SLUICE_OK;
}
