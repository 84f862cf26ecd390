// SPDX-License-Identifier: Apache-2.0
/* Measures the speed of the row kernels and of memcpy, on one thread.
 *
 *   bazel run //backend/device/cpu:kernels_bench [-- ROWS WIDTH]
 *
 * GB/s counts every byte that a kernel must read and write once. The best of several repetitions. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/clock.h"
#include "backend/base/dtype.h"
#include "backend/device/cpu/kernels_paths.h"

enum { REPETITIONS = 9, K = 2 };

typedef struct {
  const sluice_kernels_t* kernels;
  int32_t dtype, activation, gated;
  int64_t rows, width;
  char *a, *b, *c, *d; /* [rows, 2 * width] each */
  float *weight, *sums;
  int32_t* index;
} bench_t;

static void do_memcpy(bench_t* b) { memcpy(b->b, b->a, (size_t)(b->rows * b->width) * sluice_dtype_bytes(b->dtype)); }
static void do_gather(bench_t* b) {
  b->kernels->gather_rows(NULL, b->dtype, b->rows, b->width, b->a, b->width, b->index, b->b);
}
static void do_combine(bench_t* b) {
  b->kernels->combine_rows(NULL, b->dtype, b->rows / K, K, b->width, b->a, b->index, b->weight, K, 1, b->b, b->width);
}
static void do_forward(bench_t* b) {
  b->kernels->activation_forward(NULL, b->dtype, b->activation, b->gated, b->rows, b->width, b->a, NULL, NULL, b->b);
}
static void do_backward(bench_t* b) {
  b->kernels->activation_backward(NULL, b->dtype, b->activation, b->gated, b->rows, b->width, b->a, b->b, b->weight,
                                  b->c, b->d, b->sums);
}
static void do_bias(bench_t* b) { b->kernels->add_bias(NULL, b->dtype, b->rows, b->width, b->c, b->a); }
static void do_dot(bench_t* b) {
  b->kernels->dot_rows(NULL, b->dtype, b->rows, b->width, b->a, b->b, b->width, 0, b->sums);
}
static void do_sum(bench_t* b) {
  b->kernels->sum_columns(NULL, b->dtype, b->rows, b->width, b->a, b->width, b->weight, 0, b->dtype, b->c);
}
static void do_scale(bench_t* b) { b->kernels->scale_rows(NULL, b->dtype, b->rows, b->width, b->a, b->weight, b->b); }

/* `moved`: elements read and written per element of [rows, width]. */
static double measure(bench_t* b, const char* name, void (*run)(bench_t*), double moved, double memcpy_gbs) {
  uint64_t best = UINT64_MAX;
  for (int i = 0; i < REPETITIONS; ++i) {
    uint64_t began = sluice_now_ns();
    run(b);
    uint64_t took = sluice_now_ns() - began;
    if (took < best) best = took;
  }
  double elements = (double)(b->rows * b->width), ns = (double)best;
  double gbs = moved * elements * (double)sluice_dtype_bytes(b->dtype) / ns;
  printf("%-5s %-30s %7.3f ns/element %7.2f GB/s", sluice_dtype_name(b->dtype), name, ns / elements, gbs);
  if (memcpy_gbs > 0) printf("  %3.0f %% of memcpy", 100 * gbs / memcpy_gbs);
  printf("\n");
  return gbs;
}

static void measure_activations(bench_t* b, double memcpy_gbs) {
  static const char* const names[] = {"identity", "relu", "gelu", "gelu_tanh", "silu"};
  char title[64];
  for (b->gated = 0; b->gated <= 1; ++b->gated) {
    double g = b->gated ? 2 : 1;
    for (b->activation = 1; b->activation < 5; ++b->activation) {
      if (b->gated && b->activation != SLUICE_ACTIVATION_SILU) continue;
      snprintf(title, sizeof title, "%s%s forward", names[b->activation], b->gated ? ", gated," : "");
      measure(b, title, do_forward, g + 1, memcpy_gbs);
      snprintf(title, sizeof title, "%s%s backward", names[b->activation], b->gated ? ", gated," : "");
      measure(b, title, do_backward, 2 * g + 2, memcpy_gbs);
    }
  }
}

static void fill(bench_t* b, char* data) {
  for (int64_t i = 0; i < b->rows * 2 * b->width; ++i) {
    float x = (float)((i * 2654435761u) % 4001) / 1000.0f - 2.0f;
    if (b->dtype == SLUICE_DTYPE_F32) {
      ((float*)data)[i] = x;
    } else {
      ((uint16_t*)data)[i] = b->dtype == SLUICE_DTYPE_BF16 ? sluice_f32_to_bf16(x) : sluice_f32_to_f16(x);
    }
  }
}

int main(int argc, char** argv) {
  static const int32_t dtypes[] = {SLUICE_DTYPE_F32, SLUICE_DTYPE_BF16, SLUICE_DTYPE_F16};
  bench_t b = {.kernels = sluice_cpu_kernels(), .rows = 4096, .width = 1024};
  if (argc == 3) b.rows = atoll(argv[1]), b.width = atoll(argv[2]);
  size_t bytes = (size_t)(b.rows * 2 * b.width) * 4;
  if (b.rows < 1 || b.width < 1) return fprintf(stderr, "usage: kernels_bench [ROWS WIDTH]\n"), 2;
  b.a = malloc(bytes), b.b = malloc(bytes), b.c = malloc(bytes), b.d = malloc(bytes);
  b.weight = malloc((size_t)b.rows * 4), b.sums = malloc((size_t)b.rows * 4), b.index = malloc((size_t)b.rows * 4);
  if (!b.a || !b.b || !b.c || !b.d || !b.weight || !b.sums || !b.index) fprintf(stderr, "no memory\n"), exit(1);
  for (int64_t i = 0; i < b.rows; ++i) b.weight[i] = 0.5f, b.index[i] = (int32_t)((i * 7919) % b.rows);
  printf("%s, %lld rows of %lld\n", sluice_cpu_kernels_name(), (long long)b.rows, (long long)b.width);
  for (int d = 0; d < 3; ++d) {
    b.dtype = dtypes[d];
    fill(&b, b.a), fill(&b, b.b), fill(&b, b.c), fill(&b, b.d);
    double gbs = measure(&b, "memcpy", do_memcpy, 2, 0);
    measure(&b, "gather_rows", do_gather, 2, gbs);
    measure(&b, "combine_rows, K = 2", do_combine, 1.5, gbs);
    measure(&b, "scale_rows", do_scale, 2, gbs);
    measure(&b, "add_bias", do_bias, 2, gbs);
    measure(&b, "dot_rows", do_dot, 2, gbs);
    measure(&b, "sum_columns", do_sum, 1, gbs);
    measure_activations(&b, gbs);
  }
  return 0;
}
