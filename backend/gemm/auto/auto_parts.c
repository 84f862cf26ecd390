// SPDX-License-Identifier: Apache-2.0
#include "backend/gemm/auto/auto_parts.h"

#include "backend/base/cache.h"
#include "backend/base/dtype.h"
#include "backend/base/math.h"

enum { LINE = 64, PAGE = 4096 };
enum { LEAST_HALVED = 256, FEW_THREADS = 4 };

/* Returns the dimension that can be divided without shorter rows of the weights or of their gradient. */
static int64_t harmless_of(const sluice_gemm_form_t* form) { return form->trans_a ? form->m : form->n; }

/* Whether a part fits into this GEMM of the list. It always fits into the largest. */
static int has_part(const sluice_gemm_parts_t* parts, int64_t problem, sluice_gemm_form_t* form) {
  if (!sluice_gemm_form(&parts->list->problems[problem], form)) return 0;
  const sluice_gemm_problem_t* p = &parts->part;
  return form->trans_a == parts->form.trans_a && form->trans_b == parts->form.trans_b && form->m >= p->m &&
         form->k >= p->k && form->n >= p->n && harmless_of(form) >= harmless_of(&parts->form);
}

/* Whether the parts write to the result of the call. A weight gradient mostly writes, and looks several times as fast
 * if its result is in a cache; so it is measured in place if the call overwrites the result. */
static int is_own_result(const sluice_gemm_parts_t* parts) { return parts->form.trans_a && parts->list->beta == 0.0f; }

/* Halves a GEMM until its arithmetic and its result are small enough: first the harmless dimension, then the largest.
 * Also halves the harmless dimension, if that is long enough, until scratch memory holds a result for each thread. */
static sluice_gemm_problem_t size_of_part(const sluice_gemm_parts_t* parts, int num_threads, double most_flop,
                                          uint64_t most_bytes) {
  const uint64_t bytes_c = sluice_dtype_bytes(parts->list->dtype_c);
  const sluice_gemm_form_t* form = &parts->form;
  sluice_gemm_problem_t p = {.m = form->m, .n = form->n, .k = form->k};
  int64_t* harmless = form->trans_a ? &p.m : &p.n;
  const uint64_t each = is_own_result(parts) ? most_bytes : most_bytes / (uint64_t)sluice_min(num_threads, FEW_THREADS);
  for (;;) {
    const uint64_t bytes = (uint64_t)(p.m * p.n) * bytes_c;
    const int is_large = 2.0 * (double)p.m * (double)p.n * (double)p.k > most_flop || bytes > most_bytes;
    int64_t* largest = &p.m;
    if (p.n > *largest) largest = &p.n;
    if (p.k > *largest) largest = &p.k;
    if (*harmless >= LEAST_HALVED && (is_large || bytes > each)) {
      *harmless = (*harmless + 1) / 2;
    } else if (is_large) {
      *largest = (*largest + 1) / 2;
    } else {
      return p;
    }
  }
}

/* Bytes of the result of one part, rounded up to cache lines. */
static uint64_t result_bytes(const sluice_gemm_parts_t* parts) {
  const uint64_t bytes = (uint64_t)(parts->part.m * parts->part.n) * sluice_dtype_bytes(parts->list->dtype_c);
  return sluice_round_up_u64(bytes, LINE);
}

static int64_t parts_in_run(const sluice_gemm_parts_t* parts, int num_threads, double most_flop, uint64_t most_bytes) {
  int64_t distinct = 0;
  for (int64_t i = 0; i < parts->list->count; ++i) {
    sluice_gemm_form_t form;
    if (has_part(parts, i, &form)) distinct += parts->along;
  }
  const sluice_gemm_problem_t* p = &parts->part;
  const double most = num_threads * most_flop / (2.0 * (double)p->m * (double)p->n * (double)p->k);
  int64_t count = sluice_min(distinct, sluice_min(num_threads * SLUICE_GEMM_PARTS_PER_THREAD, SLUICE_GEMM_PARTS_MOST));
  if ((double)count > most) count = (int64_t)most;
  if (!is_own_result(parts)) count = sluice_min(count, (int64_t)(most_bytes / result_bytes(parts)));
  return count < 1 ? 1 : count;
}

void sluice_gemm_parts_begin(sluice_gemm_parts_t* parts, const sluice_grouped_gemm_t* list,
                             const sluice_gemm_form_t* form, int num_threads, double most_flop, uint64_t most_bytes) {
  *parts = (sluice_gemm_parts_t){.list = list, .form = *form, .evict = sluice_cache_evict};
  parts->part = size_of_part(parts, num_threads, most_flop, most_bytes);
  parts->along = harmless_of(form) / (form->trans_a ? parts->part.m : parts->part.n);
  parts->in_run = parts_in_run(parts, num_threads, most_flop, most_bytes);
}

uint64_t sluice_gemm_parts_result_bytes(const sluice_gemm_parts_t* parts) {
  return is_own_result(parts) ? 0 : (uint64_t)parts->in_run * result_bytes(parts);
}

/* Touches each page, so that the kernel's page faults do not count for the candidate that is measured first. */
static void touch(char* data, uint64_t bytes) {
  for (uint64_t at = 0; at < bytes; at += PAGE) data[at] = 0;
  if (bytes > 0) data[bytes - 1] = 0;
}

/* Prepares the result row by row, since the memory between rows may belong to other tensors. */
static void place_result(const sluice_gemm_parts_t* parts, const sluice_gemm_problem_t* p) {
  const uint64_t bytes_c = sluice_dtype_bytes(parts->list->dtype_c);
  const uint64_t ld_bytes = (uint64_t)p->c.row_stride * bytes_c;
  uint64_t row_bytes = (uint64_t)p->n * bytes_c;
  const int is_dense = row_bytes == ld_bytes;
  if (is_dense) row_bytes *= (uint64_t)p->m;
  for (int64_t i = 0; i < (is_dense ? 1 : p->m); ++i) {
    char* row = (char*)p->c.data + (uint64_t)i * ld_bytes;
    if (is_own_result(parts)) touch(row, row_bytes);
    parts->evict(row, row_bytes);
  }
}

static sluice_gemm_problem_t next_part(sluice_gemm_parts_t* parts, void* scratch) {
  sluice_gemm_form_t f;
  while (!has_part(parts, parts->problem, &f)) parts->problem = (parts->problem + 1) % parts->list->count;
  const int64_t bytes = (int64_t)sluice_dtype_bytes(parts->list->dtype_ab);
  sluice_gemm_problem_t p = parts->part;
  const int64_t first = parts->at * (f.trans_a ? p.m : p.n);
  const char* a = (const char*)f.a + (f.trans_a ? first * bytes : 0);
  const char* b = (const char*)f.b + (f.trans_a ? 0 : first * (f.trans_b ? f.ldb : 1) * bytes);
  p.a = f.trans_a ? (sluice_matrix_t){(void*)a, 1, f.lda} : (sluice_matrix_t){(void*)a, f.lda, 1};
  p.b = f.trans_b ? (sluice_matrix_t){(void*)b, 1, f.ldb} : (sluice_matrix_t){(void*)b, f.ldb, 1};
  p.c = (sluice_matrix_t){scratch, p.n, 1};
  if (is_own_result(parts)) {
    const int64_t bytes_c = (int64_t)sluice_dtype_bytes(parts->list->dtype_c);
    p.c = (sluice_matrix_t){(char*)f.c + first * f.ldc * bytes_c, f.ldc, 1};
  }
  if (f.trans_a) place_result(parts, &p);
  if (++parts->at == parts->along) {
    parts->at = 0;
    parts->problem = (parts->problem + 1) % parts->list->count;
  }
  return p;
}

const sluice_gemm_problem_t* sluice_gemm_parts_next(sluice_gemm_parts_t* parts, void* scratch) {
  for (int64_t i = 0; i < parts->in_run; ++i) {
    char* result = is_own_result(parts) ? NULL : (char*)scratch + (uint64_t)i * result_bytes(parts);
    parts->run[i] = next_part(parts, result);
  }
  return parts->run;
}
