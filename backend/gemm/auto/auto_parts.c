#include "backend/gemm/auto/auto_parts.h"

#include "backend/base/cache.h"
#include "backend/base/dtype.h"

/* The dimension that shortens no row of the weights, or of their gradient. */
static int64_t harmless_of(const sluice_gemm_form_t* form) { return form->trans_a ? form->m : form->n; }

void sluice_gemm_parts_begin(sluice_gemm_parts_t* parts, const sluice_product_list_t* list,
                             const sluice_gemm_form_t* form, double most_flop, uint64_t most_bytes) {
  const uint64_t bytes_c = sluice_dtype_bytes(list->dtype_c);
  sluice_product_t p = {.m = form->m, .n = form->n, .k = form->k};
  int64_t* harmless = form->trans_a ? &p.m : &p.n;
  /* Halves until a run is short and its result small: first the harmless dimension, then the largest. */
  while (2.0 * (double)p.m * (double)p.n * (double)p.k > most_flop || (uint64_t)(p.m * p.n) * bytes_c > most_bytes) {
    int64_t* largest = &p.m;
    if (p.n > *largest) largest = &p.n;
    if (p.k > *largest) largest = &p.k;
    if (*harmless >= 256) largest = harmless;
    *largest = (*largest + 1) / 2;
  }
  *parts = (sluice_gemm_parts_t){.list = list, .form = *form, .part = p, .evict = sluice_cache_evict};
  parts->along = harmless_of(form) / *harmless;
}

/* A weight gradient is mostly writing: from a cache it looks several times as fast. Where it is overwritten anyway, it
 * is measured in place. */
static int is_own_result(const sluice_gemm_parts_t* parts) { return parts->form.trans_a && parts->list->beta == 0.0f; }

uint64_t sluice_gemm_parts_result_bytes(const sluice_gemm_parts_t* parts) {
  if (is_own_result(parts)) return 0;
  return (uint64_t)(parts->part.m * parts->part.n) * sluice_dtype_bytes(parts->list->dtype_c);
}

/* Whether a part fits into a product of the list; the largest one always has it. */
static int has_part(const sluice_gemm_parts_t* parts, int64_t product, sluice_gemm_form_t* form) {
  if (!sluice_gemm_form(&parts->list->products[product], form)) return 0;
  const sluice_product_t* p = &parts->part;
  return form->trans_a == parts->form.trans_a && form->trans_b == parts->form.trans_b && form->m >= p->m &&
         form->k >= p->k && form->n >= p->n && harmless_of(form) >= harmless_of(&parts->form);
}

/* Row by row: between them may lie what others use. */
static void evict_result(const sluice_gemm_parts_t* parts) {
  const sluice_product_t* p = &parts->part;
  const uint64_t bytes_c = sluice_dtype_bytes(parts->list->dtype_c), row_bytes = (uint64_t)p->n * bytes_c;
  const uint64_t ld_bytes = (uint64_t)p->c.row_stride * bytes_c;
  if (row_bytes == ld_bytes) {
    parts->evict(p->c.data, (uint64_t)p->m * row_bytes);
    return;
  }
  for (int64_t i = 0; i < p->m; ++i) parts->evict((const char*)p->c.data + (uint64_t)i * ld_bytes, row_bytes);
}

const sluice_product_t* sluice_gemm_parts_next(sluice_gemm_parts_t* parts, void* scratch) {
  sluice_gemm_form_t f;
  while (!has_part(parts, parts->product, &f)) parts->product = (parts->product + 1) % parts->list->count;
  const int64_t bytes = (int64_t)sluice_dtype_bytes(parts->list->dtype_ab);
  sluice_product_t* p = &parts->part;
  const int64_t first = parts->at * (f.trans_a ? p->m : p->n);
  const char* a = (const char*)f.a + (f.trans_a ? first * bytes : 0);
  const char* b = (const char*)f.b + (f.trans_a ? 0 : first * (f.trans_b ? f.ldb : 1) * bytes);
  p->a = f.trans_a ? (sluice_matrix_t){(void*)a, 1, f.lda} : (sluice_matrix_t){(void*)a, f.lda, 1};
  p->b = f.trans_b ? (sluice_matrix_t){(void*)b, 1, f.ldb} : (sluice_matrix_t){(void*)b, f.ldb, 1};
  p->c = (sluice_matrix_t){scratch, p->n, 1};
  if (is_own_result(parts)) {
    const int64_t bytes_c = (int64_t)sluice_dtype_bytes(parts->list->dtype_c);
    p->c = (sluice_matrix_t){(char*)f.c + first * f.ldc * bytes_c, f.ldc, 1};
  }
  if (f.trans_a) evict_result(parts);
  if (++parts->at == parts->along) {
    parts->at = 0;
    parts->product = (parts->product + 1) % parts->list->count;
  }
  return p;
}
