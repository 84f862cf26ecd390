// SPDX-License-Identifier: Apache-2.0
/* GEMMs through every way of cuBLAS against f64, eagerly and in a graph. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "backend/base/test/elements.h"
#include "backend/cts/gpu/gpu_array.h"
#include "backend/cts/gpu/gpu_graphs.h"
#include "backend/cts/gpu/gpu_parts.h"
#include "backend/cts/gpu/gpu_rig.h"
#ifdef SLUICE_GPU_SUITE_FAKE
#include "backend/gemm/cublas/fake/fake_cublas.h"
#endif

sluice_gemm_t* gpu_cublas_open(int32_t how, sluice_allocator_t* host) {
  sluice_gemm_t* gemm = NULL;
  sluice_gemm_cublas_options_t options = {.device = gpu_rig.device, .memory = &gpu_rig.memory, .how = how};
#ifdef SLUICE_GPU_SUITE_FAKE
  sluice_cublas_symbols_t symbols = sluice_fake_cublas(1);
  sluice_cublaslt_symbols_t lt = sluice_fake_cublaslt();
  options.symbols = &symbols, options.lt_symbols = &lt;
#endif
  if (sluice_gemm_cublas_create(&options, host, &gemm) != SLUICE_OK) gpu_die("cublas");
  return gemm;
}

typedef const char* (*run_t)(sluice_gemm_t* gemm, const sluice_grouped_gemm_t* list);

static const char* run_eagerly(sluice_gemm_t* gemm, const sluice_grouped_gemm_t* list) {
  return sluice_gemm_run(gemm, list) == SLUICE_OK ? NULL : last_message();
}

/* Runs a list of other GEMMs, which overwrites all host state: whatever a launch reads must be in the graph. */
static sluice_status_t run_others(sluice_gemm_t* gemm, const sluice_grouped_gemm_t* list, const gpu_array_t* space) {
  sluice_gemm_problem_t others[40];
  char* at = space->there;
  int64_t size = (int64_t)sluice_dtype_bytes(list->dtype_ab);
  for (int i = 0; i < 40; ++i) {
    others[i] = (sluice_gemm_problem_t){8, 16, 8, {at, 8, 1}, {at + 512, 16, 1}, {at + 1536 + i * 128 * size, 16, 1}};
  }
  const sluice_grouped_gemm_t call = {others, 40, list->dtype_ab, list->dtype_ab, 0, list->stream};
  return sluice_gemm_run(gemm, &call);
}

/* The list as a graph, launched once. */
static const char* run_captured(sluice_gemm_t* gemm, const sluice_grouped_gemm_t* list) {
  static char text[96];
  sluice_grouped_gemm_t call = *list;
  gpu_graph_t graph = {NULL, NULL};
  const char* problem = NULL;
  gpu_array_t space = gpu_array(1 << 20);
  void* stream = NULL;
  if (gpu_rig.driver->cuStreamCreateWithPriority(&stream, SLUICE_CU_STREAM_NON_BLOCKING, 0) != 0) gpu_die("a stream");
  call.stream = stream;
  gpu_send(&space); /* zeros */
  int code = gpu_graph_begin(stream);
  if (code == 0 && sluice_gemm_run(gemm, &call) != SLUICE_OK) problem = last_message();
  if (code == 0) code = gpu_graph_end(stream, &graph);
  if (code == 0 && problem == NULL && run_others(gemm, &call, &space) != SLUICE_OK) problem = last_message();
  if (code == 0 && problem == NULL) code = gpu_graph_launch(&graph, stream);
  if (code == 0) code = gpu_rig.driver->cuStreamSynchronize(stream);
  gpu_graph_drop(&graph);
  (void)gpu_rig.driver->cuStreamDestroy_v2(stream);
  gpu_drop(&space);
  if (code == 0 || problem != NULL) return problem;
  snprintf(text, sizeof text, "the capture or its launch: CUresult %d", code);
  return text;
}

/* As backend/cts/gemm: sums in f64, the bound for adding k f32 products in any order, one rounding to C's dtype. */
static const char* problems(sluice_gemm_t* gemm, int32_t dtype, int32_t dtype_c, int trans, int64_t count, run_t run) {
  enum { M = 40, N = 72, K = 56 };
  static char text[160];
  const char* problem;
  sluice_gemm_problem_t list[24];
  gpu_array_t a = gpu_randoms(dtype, count * M * K), b = gpu_randoms(dtype, count * K * N),
              c = gpu_randoms(dtype_c, count * M * N);
  int64_t in = (int64_t)sluice_dtype_bytes(dtype), out = (int64_t)sluice_dtype_bytes(dtype_c);
  for (int64_t i = 0; i < count; ++i) {
    list[i] = (sluice_gemm_problem_t){i % 5 == 3 ? 0 : M,
                                      N,
                                      K,
                                      {(char*)a.there + i * M * K * in, K, 1},
                                      {(char*)b.there + i * K * N * in, trans ? 1 : N, trans ? K : 1},
                                      {(char*)c.there + i * M * N * out, N, 1}};
  }
  const sluice_grouped_gemm_t call = {list, count, dtype, dtype_c, 1, NULL};
  problem = run(gemm, &call);
  gpu_fetch(&c);
  double unit = dtype == SLUICE_DTYPE_F64 ? 0x1p-53 : 0x1p-24;
  double last = dtype_c == SLUICE_DTYPE_BF16 ? 0x1p-8 : (dtype_c == SLUICE_DTYPE_F16 ? 0x1p-11 : unit);
  for (int64_t at = 0; at < count * M * N && problem == NULL; ++at) {
    int64_t i = at / (M * N), row = at / N % M, col = at % N;
    double sum = get_element(c.host, at, dtype_c), size = fabs(sum);
    for (int64_t k = 0; k < K && list[i].m > 0; ++k) {
      double x = get_element(a.host, i * M * K + row * K + k, dtype) *
                 get_element(b.host, i * K * N + (trans ? col * K + k : k * N + col), dtype);
      sum += x;
      size += fabs(x);
    }
    if (fabs(get_element(c.back, at, dtype_c) - sum) <= (K + 2) * unit * size + last * fabs(sum)) continue;
    snprintf(text, sizeof text, "element %lld is %.9g, want %.9g", (long long)at, get_element(c.back, at, dtype_c),
             sum);
    problem = text;
  }
  gpu_drop(&a), gpu_drop(&b), gpu_drop(&c);
  return problem;
}

static const char* const hows[] = {"by rule", "grouped", "single", "lt", "streams"};

static void run_ways(int32_t first, int32_t last) {
  static const int32_t types[][2] = {{SLUICE_DTYPE_F32, SLUICE_DTYPE_F32},
                                     {SLUICE_DTYPE_BF16, SLUICE_DTYPE_BF16},
                                     {SLUICE_DTYPE_BF16, SLUICE_DTYPE_F32},
                                     {SLUICE_DTYPE_F16, SLUICE_DTYPE_F16},
                                     {SLUICE_DTYPE_F64, SLUICE_DTYPE_F64}};
  sluice_allocator_t host;
  if (!gpu_graphs_open()) gpu_die("a driver with graphs");
  sluice_allocator_init(&host, NULL, NULL, NULL);
  for (int32_t how = first; how <= last; ++how) {
    sluice_gemm_t* gemm = gpu_cublas_open(how, &host);
    printf("     %s, %s\n", gemm->name, hows[how]);
    for (size_t t = 0; t < sizeof types / sizeof types[0]; ++t) {
      for (int trans = 0; trans < 2; ++trans) {
        for (int64_t count = 1; count <= 24; count += 23) {
          char name[96];
          snprintf(name, sizeof name, "%s: %lld GEMMs of %s into %s, N%s", hows[how], (long long)count,
                   sluice_dtype_name(types[t][0]), sluice_dtype_name(types[t][1]), trans ? "T" : "N");
          gpu_report(name, problems(gemm, types[t][0], types[t][1], trans, count, run_eagerly));
          strncat(name, ", captured", sizeof name - strlen(name) - 1);
          gpu_report(name, problems(gemm, types[t][0], types[t][1], trans, count, run_captured));
        }
      }
    }
    sluice_gemm_destroy(gemm);
  }
  gpu_report("cublas leaves nothing", host.num_live == 0 ? NULL : "blocks left");
  sluice_allocator_deinit(&host);
}

void gpu_part_gemm(void) { run_ways(SLUICE_CUBLAS_BY_RULE, SLUICE_CUBLAS_STREAMS); }
/* Only these ways: an error in a capture can break the context, and makes the rest of the process meaningless. */
void gpu_part_gemm_by_rule(void) {
  run_ways(SLUICE_CUBLAS_BY_RULE, SLUICE_CUBLAS_BY_RULE);
  run_ways(SLUICE_CUBLAS_STREAMS, SLUICE_CUBLAS_STREAMS);
}
void gpu_part_gemm_grouped(void) { run_ways(SLUICE_CUBLAS_GROUPED, SLUICE_CUBLAS_GROUPED); }
void gpu_part_gemm_single(void) { run_ways(SLUICE_CUBLAS_SINGLE, SLUICE_CUBLAS_SINGLE); }
void gpu_part_gemm_lt(void) { run_ways(SLUICE_CUBLAS_LT, SLUICE_CUBLAS_LT); }
