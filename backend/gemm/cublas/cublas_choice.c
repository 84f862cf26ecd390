// SPDX-License-Identifier: Apache-2.0
#include "backend/gemm/cublas/cublas_choice.h"

#include <stddef.h>
#include <string.h>

#include "backend/base/math.h"
#include "backend/gemm/gemm_form.h"

/* The sides of cuBLAS's largest tiles on Hopper. An SM computes one of them at a time. */
enum { TILE = 128, WIDE_TILE = 256 };
/* Times in steps of k, of 12 ns each: prologue and epilogue of a tile, a call on the host, and a join of streams.
 * GEMMs that take less time than the calls that launch them do not overlap on any number of streams. */
enum { DEPTH_OF_A_TILE = 170, DEPTH_OF_A_CALL = 340, DEPTH_OF_A_JOIN = 512 };

/* cuBLAS may use its tiles in either orientation. */
static int64_t tiles_of(const sluice_gemm_form_t* f) {
  const int64_t tall = sluice_ceil_div(f->m, TILE) * sluice_ceil_div(f->n, WIDE_TILE);
  return sluice_min(tall, sluice_ceil_div(f->m, WIDE_TILE) * sluice_ceil_div(f->n, TILE));
}

int32_t sluice_cublas_choose(const sluice_grouped_gemm_t* list, int32_t num_sms) {
  int64_t count = 0;
  double idle = 0; /* SMs without a tile, times the depth for which they have none */
  for (int64_t i = 0; i < list->count; ++i) {
    sluice_gemm_form_t form;
    if (!sluice_gemm_form(&list->problems[i], &form) || form.m == 0 || form.n == 0 || form.k == 0) continue;
    const int64_t tiles = tiles_of(&form), waves = sluice_ceil_div(tiles, num_sms);
    ++count;
    if (form.k + DEPTH_OF_A_TILE < DEPTH_OF_A_CALL) continue;
    if (tiles < 2 * (int64_t)num_sms) idle += (double)(waves * num_sms - tiles) * (double)(form.k + DEPTH_OF_A_TILE);
  }
  return count > 1 && idle >= (double)num_sms * DEPTH_OF_A_JOIN ? SLUICE_CUBLAS_STREAMS : SLUICE_CUBLAS_SINGLE;
}

int32_t sluice_cublas_how_named(const char* name) {
  static const char* const names[] = {NULL, "grouped", "single", "lt", "streams"};
  for (int32_t how = SLUICE_CUBLAS_GROUPED; name != NULL && how <= SLUICE_CUBLAS_STREAMS; ++how) {
    if (strcmp(name, names[how]) == 0) return how;
  }
  return SLUICE_CUBLAS_BY_RULE;
}
