// SPDX-License-Identifier: Apache-2.0
#include "backend/gemm/cublas/fake/fake_gemms.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/dtype.h"
#include "backend/device/cuda/fake/fake_record.h"
#include "backend/gemm/cublas/gemm_cublas.h"

static double element(const void* data, int64_t at, int type) {
  switch (type) {
    case SLUICE_CUBLAS_R_16BF: return (double)sluice_bf16_to_f32(((const uint16_t*)data)[at]);
    case SLUICE_CUBLAS_R_16F: return (double)sluice_f16_to_f32(((const uint16_t*)data)[at]);
    case SLUICE_CUBLAS_R_64F: return ((const double*)data)[at];
    default: return (double)((const float*)data)[at];
  }
}
static void set_element(void* data, int64_t at, int type, double x) {
  switch (type) {
    case SLUICE_CUBLAS_R_16BF: ((uint16_t*)data)[at] = sluice_f32_to_bf16((float)x); break;
    case SLUICE_CUBLAS_R_16F: ((uint16_t*)data)[at] = sluice_f32_to_f16((float)x); break;
    case SLUICE_CUBLAS_R_64F: ((double*)data)[at] = x; break;
    default: ((float*)data)[at] = (float)x; break;
  }
}

static uint64_t bytes_of(int type) { return type == SLUICE_CUBLAS_R_64F ? 8 : type == SLUICE_CUBLAS_R_32F ? 4 : 2; }

static void note_columns(const fake_gemm_t* p, const void* data, int type, int rows, int columns, int ld,
                         int is_write) {
  const uint64_t bytes = bytes_of(type);
  for (int64_t j = 0; j < columns; ++j) {
    sluice_fake_cuda_note_at(&p->moment, (const char*)data + (uint64_t)(j * ld) * bytes, (uint64_t)rows * bytes,
                             is_write);
  }
}

void sluice_fake_gemm_run(const fake_gemm_t* p) {
  if (sluice_fake_is_dry()) return;
  note_columns(p, p->a, p->type, p->trans_a ? p->k : p->m, p->trans_a ? p->m : p->k, p->lda, 0);
  note_columns(p, p->b, p->type, p->trans_b ? p->n : p->k, p->trans_b ? p->k : p->n, p->ldb, 0);
  note_columns(p, p->c, p->type_c, p->m, p->n, p->ldc, 1);
  for (int64_t j = 0; j < p->n; ++j) {
    for (int64_t i = 0; i < p->m; ++i) {
      double sum = 0;
      for (int64_t l = 0; l < p->k; ++l) {
        sum += element(p->a, p->trans_a ? i * p->lda + l : l * p->lda + i, p->type) *
               element(p->b, p->trans_b ? l * p->ldb + j : j * p->ldb + l, p->type);
      }
      int64_t at = j * p->ldc + i;
      double old = p->beta != 0 ? p->beta * element(p->c, at, p->type_c) : 0;
      set_element(p->c, at, p->type_c, p->alpha * sum + old);
    }
  }
}

void sluice_fake_gemm_poison(const fake_gemm_t* p) {
  for (int64_t j = 0; j < p->n; ++j) {
    for (int64_t i = 0; i < p->m; ++i) set_element(p->c, j * p->ldc + i, p->type_c, NAN);
  }
}

int sluice_fake_gemm_is_wrong(const fake_gemm_t* p) {
  int rows_a = p->trans_a ? p->k : p->m, rows_b = p->trans_b ? p->n : p->k;
  return p->m <= 0 || p->n <= 0 || p->k <= 0 || p->lda < rows_a || p->ldb < rows_b || p->ldc < p->m;
}

static void run_one(void* user) { sluice_fake_gemm_run(user); }

static void note_one(void* user, const sluice_fake_moment_t* moment) { ((fake_gemm_t*)user)->moment = *moment; }

static void* one_again(const void* user) {
  fake_gemm_t* p = malloc(sizeof *p);
  memcpy(p, user, sizeof *p);
  return p;
}

void sluice_fake_op_enqueue(void* stream, const sluice_fake_op_t* op) {
  sluice_fake_cuda_lock();
  sluice_fake_cuda_enqueue(stream, op);
  sluice_fake_cuda_unlock();
}

void sluice_fake_gemm_record(void* stream, const char* entry, const fake_gemm_t* problems, int count) {
  sluice_fake_part_t* parts = malloc((size_t)count * sizeof *parts);
  for (int i = 0; i < count; ++i) {
    parts[i] = (sluice_fake_part_t){{problems[i].m, problems[i].n, problems[i].k}};
  }
  sluice_fake_cuda_lock();
  (void)sluice_fake_note_event(&(sluice_fake_event_t){.kind = SLUICE_FAKE_GEMM,
                                                      .rank = sluice_fake_stream_rank(stream),
                                                      .stream = sluice_fake_stream_number(stream),
                                                      .name = entry,
                                                      .units = (int64_t)bytes_of(problems->type),
                                                      .length = (int64_t)bytes_of(problems->type_c),
                                                      .number = problems->sms,
                                                      .count = count},
                               parts);
  sluice_fake_cuda_unlock();
  free(parts);
}

void sluice_fake_gemm_enqueue(void* stream, const char* entry, const fake_gemm_t* p) {
  sluice_fake_gemm_record(stream, entry, p, 1);
  fake_gemm_t* kept = malloc(sizeof *kept);
  *kept = *p;
  sluice_fake_op_enqueue(
      stream, &(sluice_fake_op_t){
                  .name = "a GEMM", .run = run_one, .drop = free, .user = kept, .note = note_one, .again = one_again});
}
