// SPDX-License-Identifier: Apache-2.0
/* GEMMs through a BLAS that is opened at run time: f32 with sgemm_, and bf16 with MKL's cblas_gemm_bf16bf16f32 if the
 * library has it. sgemm_ is never linked by name: torch exports one too, and the linker would silently take the first.
 */
#include "backend/gemm/blas/gemm_blas.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "backend/base/dtype.h"
#include "backend/base/math.h"
#include "backend/base/file_trust.h"
#include "backend/gemm/gemm_form.h"

typedef struct sluice_gemm_blas_s {
  sluice_gemm_t base;
  sluice_blas_symbols_t symbols;
} sluice_gemm_blas_t;

/* Larger GEMMs are cut, since integers of a BLAS may have 32 bits. A power of two keeps the parts aligned. */
#define MAX_DIM ((int64_t)1 << 30)
/* A bf16 result is computed in f32 blocks of this many rows and columns: 1 MiB. */
#define BLOCK 512

static void blas_destroy(sluice_gemm_t* gemm) { sluice_free(gemm->allocator, gemm, sizeof(sluice_gemm_blas_t)); }

static int blas_supports(const sluice_gemm_t* gemm, const sluice_grouped_gemm_t* list) {
  const sluice_gemm_blas_t* blas = (const sluice_gemm_blas_t*)gemm;
  if (list->dtype_ab == SLUICE_DTYPE_BF16) {
    if (blas->symbols.cblas_gemm_bf16bf16f32 == NULL) return 0;
    if (list->dtype_c != SLUICE_DTYPE_BF16 && list->dtype_c != SLUICE_DTYPE_F32) return 0;
  } else if (list->dtype_ab != SLUICE_DTYPE_F32 || list->dtype_c != SLUICE_DTYPE_F32) {
    return 0;
  }
  for (int64_t i = 0; i < list->count; ++i) {
    sluice_gemm_form_t form;
    if (!sluice_gemm_form(&list->problems[i], &form)) return 0;
    if (form.lda > INT32_MAX || form.ldb > INT32_MAX || form.ldc > INT32_MAX) return 0;
  }
  return 1;
}

/* Runs one row-major GEMM whose sizes fit an int, with C in f32. */
static void gemm_small(const sluice_gemm_blas_t* blas, const sluice_gemm_form_t* f, int32_t dtype_ab, float beta) {
  if (dtype_ab == SLUICE_DTYPE_BF16) {
    enum { ROW_MAJOR = 101, PLAIN = 111, TRANSPOSED = 112 };
    blas->symbols.cblas_gemm_bf16bf16f32(ROW_MAJOR, f->trans_a ? TRANSPOSED : PLAIN, f->trans_b ? TRANSPOSED : PLAIN,
                                         (int)f->m, (int)f->n, (int)f->k, 1.0f, f->a, (int)f->lda, f->b, (int)f->ldb,
                                         beta, f->c, (int)f->ldc);
    return;
  }
  /* Fortran reads matrices column by column, so a row-major X is its X^T: C^T = B^T A^T, operands swapped. */
  const float alpha = 1.0f;
  blas->symbols.sgemm_(f->trans_b ? "T" : "N", f->trans_a ? "T" : "N", &f->n, &f->m, &f->k, &alpha, f->b, &f->ldb, f->a,
                       &f->lda, &beta, f->c, &f->ldc);
}

/* Returns the part of `f` that begins at (i, j, l) and has at most the given sizes. The caller moves C. */
static sluice_gemm_form_t piece(const sluice_gemm_form_t* f, uint64_t bytes_ab, int64_t i, int64_t j, int64_t l,
                                int64_t m, int64_t n, int64_t k) {
  sluice_gemm_form_t p = *f;
  p.m = sluice_min(f->m - i, m);
  p.n = sluice_min(f->n - j, n);
  p.k = sluice_min(f->k - l, k);
  p.a = (const char*)f->a + (uint64_t)(f->trans_a ? l * f->lda + i : i * f->lda + l) * bytes_ab;
  p.b = (const char*)f->b + (uint64_t)(f->trans_b ? j * f->ldb + l : l * f->ldb + j) * bytes_ab;
  return p;
}

static void gemm_f32(const sluice_gemm_blas_t* blas, const sluice_gemm_form_t* f, int32_t dtype_ab, float beta) {
  uint64_t bytes_ab = sluice_dtype_bytes(dtype_ab);
  for (int64_t i = 0; i < f->m; i += MAX_DIM) {
    for (int64_t j = 0; j < f->n; j += MAX_DIM) {
      for (int64_t l = 0; l < f->k; l += MAX_DIM) {
        sluice_gemm_form_t p = piece(f, bytes_ab, i, j, l, MAX_DIM, MAX_DIM, MAX_DIM);
        p.c = (float*)f->c + i * f->ldc + j;
        gemm_small(blas, &p, dtype_ab, l == 0 ? beta : 1.0f);
      }
    }
  }
}

/* C in bf16: each block is summed in f32 over the whole of k and rounded once. */
static void gemm_bf16(const sluice_gemm_blas_t* blas, const sluice_gemm_form_t* f, float beta, float* block) {
  for (int64_t i = 0; i < f->m; i += BLOCK) {
    for (int64_t j = 0; j < f->n; j += BLOCK) {
      sluice_gemm_form_t p = piece(f, sizeof(uint16_t), i, j, 0, BLOCK, BLOCK, f->k);
      uint16_t* c = (uint16_t*)f->c + i * f->ldc + j;
      p.c = block;
      p.ldc = p.n;
      for (int64_t r = 0; beta != 0.0f && r < p.m; ++r) {
        for (int64_t s = 0; s < p.n; ++s) block[r * p.n + s] = sluice_bf16_to_f32(c[r * f->ldc + s]);
      }
      gemm_f32(blas, &p, SLUICE_DTYPE_BF16, beta);
      for (int64_t r = 0; r < p.m; ++r) {
        for (int64_t s = 0; s < p.n; ++s) c[r * f->ldc + s] = sluice_f32_to_bf16(block[r * p.n + s]);
      }
    }
  }
}

static sluice_status_t blas_run(sluice_gemm_t* gemm, const sluice_grouped_gemm_t* list) {
  const sluice_gemm_blas_t* blas = (const sluice_gemm_blas_t*)gemm;
  const uint64_t block_bytes = (uint64_t)BLOCK * BLOCK * sizeof(float);
  float* block = NULL;
  if (list->dtype_c == SLUICE_DTYPE_BF16) {
    block = sluice_alloc(gemm->allocator, block_bytes, "gemm blas: f32 block of a bf16 result");
    if (block == NULL) return sluice_alloc_status();
  }
  for (int64_t i = 0; i < list->count; ++i) {
    sluice_gemm_form_t form;
    if (!sluice_gemm_form(&list->problems[i], &form)) continue; /* never: supports() has checked all forms */
    if (sluice_gemm_form_is_trivial(&form, list->dtype_c, list->beta)) continue;
    if (block != NULL) {
      gemm_bf16(blas, &form, list->beta, block);
    } else {
      gemm_f32(blas, &form, list->dtype_ab, list->beta);
    }
  }
  sluice_free(gemm->allocator, block, block_bytes);
  return SLUICE_OK;
}

static const sluice_gemm_vtable_t blas_vtable = {
    .destroy = blas_destroy,
    .supports = blas_supports,
    .run = blas_run,
};

/* "/usr/lib/libopenblas.so.0" -> "libopenblas". */
static void label_of(const char* path, char* out, size_t out_bytes) {
  const char* slash = strrchr(path, '/');
  snprintf(out, out_bytes, "%s", slash != NULL ? slash + 1 : path);
  char* suffix = strstr(out, ".so");
  if (suffix != NULL) *suffix = '\0';
}

/* Multiplies small whole numbers, exact in every order, to detect an sgemm_ with another calling convention. */
static int multiplies(const sluice_blas_symbols_t* symbols) {
  const sluice_gemm_blas_t blas = {.symbols = *symbols};
  float a[6] = {1, 2, 3, 4, 5, 6};  /* [2, 3] */
  float b[6] = {1, -1, 2, 0, 3, 1}; /* [3, 2] */
  float c[4] = {9, 9, 9, 9};
  const sluice_gemm_form_t form = {.m = 2, .n = 2, .k = 3, .a = a, .b = b, .c = c, .lda = 3, .ldb = 2, .ldc = 2};
  gemm_small(&blas, &form, SLUICE_DTYPE_F32, 0.0f);
  return c[0] == 14 && c[1] == 2 && c[2] == 32 && c[3] == 2;
}

static sluice_status_t take(void* handle, const char* library, sluice_blas_symbols_t* out_symbols, char* why,
                            size_t why_bytes) {
  memset(out_symbols, 0, sizeof *out_symbols);
#define SYMBOL(required, result, name, parameters)                                            \
  *(void**)&out_symbols->name = dlsym(handle, #name);                                         \
  if ((required) && out_symbols->name == NULL) {                                              \
    snprintf(why, why_bytes, "%s has no symbol %s: give the path of a BLAS", library, #name); \
    return SLUICE_E_NOT_FOUND;                                                                \
  }
#include "backend/gemm/blas/blas_symbols.inc"
#undef SYMBOL
  if (!multiplies(out_symbols)) {
    snprintf(why, why_bytes, "sgemm_ of %s computes wrong results: its calling convention is not that of BLAS",
             library);
    return SLUICE_E_NOT_FOUND;
  }
  return SLUICE_OK;
}

/* Libraries stay open: their thread pools live until the process ends. */
static sluice_status_t find(const char* library, sluice_blas_symbols_t* out_symbols, char* label, size_t label_bytes,
                            char* why, size_t why_bytes) {
  if (library != NULL) {
    sluice_warn_if_others_write(library);
    void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL) {
      snprintf(why, why_bytes,
               "%s could not be opened as a BLAS (%s): check the path, or leave it out and install one: "
               "apt-get install libopenblas0",
               library, dlerror());
      return SLUICE_E_NOT_FOUND;
    }
    label_of(library, label, label_bytes);
    return take(handle, library, out_symbols, why, why_bytes);
  }
  const char* const torch = "libtorch_cpu.so";
  void* handle = dlopen(torch, RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD);
  if (handle != NULL && take(handle, torch, out_symbols, why, why_bytes) == SLUICE_OK) {
    label_of(torch, label, label_bytes);
    return SLUICE_OK;
  }
  const char* const openblas = "libopenblas.so.0";
  handle = dlopen(openblas, RTLD_NOW | RTLD_LOCAL);
  if (handle != NULL) {
    label_of(openblas, label, label_bytes);
    return take(handle, openblas, out_symbols, why, why_bytes);
  }
  snprintf(why, why_bytes,
           "no BLAS: tried libtorch_cpu.so (only where torch is loaded) and %s: apt-get install "
           "libopenblas0, or give the path of another",
           dlerror());
  return SLUICE_E_NOT_FOUND;
}

sluice_status_t sluice_gemm_blas_create_from(const sluice_blas_symbols_t* symbols, const char* label,
                                             sluice_allocator_t* allocator, sluice_gemm_t** out_gemm) {
  *out_gemm = NULL;
  sluice_gemm_blas_t* blas = sluice_alloc_zeroed(allocator, sizeof *blas, "gemm blas");
  if (blas == NULL) return sluice_alloc_status();
  blas->base.vtable = &blas_vtable;
  blas->base.allocator = allocator;
  snprintf(blas->base.name, sizeof blas->base.name, "blas (%.48s)", label);
  blas->symbols = *symbols;
  *out_gemm = &blas->base;
  return SLUICE_OK;
}

sluice_status_t sluice_gemm_blas_open(const char* library, sluice_allocator_t* allocator, sluice_gemm_t** out_gemm,
                                      char* why, size_t why_bytes) {
  *out_gemm = NULL;
  sluice_blas_symbols_t symbols;
  char label[64];
  SLUICE_TRY(find(library, &symbols, label, sizeof label, why, why_bytes));
  return sluice_gemm_blas_create_from(&symbols, label, allocator, out_gemm);
}

sluice_status_t sluice_gemm_blas_create(const char* library, sluice_allocator_t* allocator, sluice_gemm_t** out_gemm) {
  char why[512];
  sluice_status_t status = sluice_gemm_blas_open(library, allocator, out_gemm, why, sizeof why);
  if (status == SLUICE_E_NOT_FOUND) return SLUICE_FAIL(status, "gemm \"blas\": %s", why);
  return status;
}
