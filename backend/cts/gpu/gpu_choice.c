/* Which way GEMMs go: times of each at the benchmarks' shapes. */
#include <stdio.h>
#include <stdlib.h>

#include "backend/base/clock.h"
#include "backend/cts/gpu/gpu_array.h"
#include "backend/cts/gpu/gpu_cublas.h"
#include "backend/cts/gpu/gpu_parts.h"
#include "backend/cts/gpu/gpu_rig.h"

enum { CHOICE_REPEATS = 20 };

/* Seconds of one run of the list, the shortest of five sets. */
static double seconds_of(sluice_gemm_t* gemm, const sluice_grouped_gemm_t* list, int repeats) {
  double best = -1;
  for (int set = 0; set < 6; ++set) { /* the first makes what later ones find */
    uint64_t begin = sluice_now_ns();
    for (int i = 0; i < repeats; ++i) {
      if (sluice_gemm_run(gemm, list) != SLUICE_OK) gpu_die("a GEMM");
    }
    if (gpu_rig.driver->cuStreamSynchronize(NULL) != 0) gpu_die("a wait");
    double seconds = (double)(sluice_now_ns() - begin) * 1e-9 / repeats;
    if (set > 0 && (best < 0 || seconds < best)) best = seconds;
  }
  return best;
}

/* Times the ways of the library by turns and prints a row for backend/gemm/cublas/cublas_choices.inc where another than
 * grouped is faster by a twentieth. The three GEMMs of a layer: forward, input gradient, weight gradient. */
static void choose(int64_t experts, int64_t rows, int64_t width, int64_t hidden) {
  static const char* const names[] = {"", "SLUICE_CUBLAS_GROUPED", "SLUICE_CUBLAS_SINGLE", "SLUICE_CUBLAS_LT"};
  sluice_gemm_problem_t* list = calloc((size_t)experts, sizeof *list);
  gpu_array_t x = gpu_repeated(SLUICE_DTYPE_BF16, experts * rows * width),
              w = gpu_repeated(SLUICE_DTYPE_BF16, experts * hidden * width),
              y = gpu_repeated(SLUICE_DTYPE_BF16, experts * rows * hidden);
  sluice_allocator_t host;
  sluice_allocator_init(&host, NULL, NULL, NULL);
  for (int kind = 0; kind < 3; ++kind) {
    for (int64_t e = 0; e < experts; ++e) {
      char *xe = (char*)x.there + e * rows * width * 2, *we = (char*)w.there + e * hidden * width * 2,
           *ye = (char*)y.there + e * rows * hidden * 2;
      list[e] =
          kind == 0   ? (sluice_gemm_problem_t){rows, hidden, width, {xe, width, 1}, {we, 1, width}, {ye, hidden, 1}}
          : kind == 1 ? (sluice_gemm_problem_t){rows, width, hidden, {ye, hidden, 1}, {we, width, 1}, {xe, width, 1}}
                      : (sluice_gemm_problem_t){hidden, width, rows, {ye, 1, hidden}, {xe, width, 1}, {we, width, 1}};
    }
    const sluice_grouped_gemm_t call = {list, experts, SLUICE_DTYPE_BF16, SLUICE_DTYPE_BF16, 0, NULL};
    double times[4] = {0};
    int32_t best = SLUICE_CUBLAS_GROUPED;
    for (int32_t how = SLUICE_CUBLAS_GROUPED; how <= SLUICE_CUBLAS_LT; ++how) {
      sluice_gemm_t* gemm = gpu_cublas_open(how, &host);
      times[how] = seconds_of(gemm, &call, CHOICE_REPEATS);
      sluice_gemm_destroy(gemm);
      if (times[how] < 0.95 * times[SLUICE_CUBLAS_GROUPED] && times[how] < times[best]) best = how;
    }
    printf("     %lld GEMMs [%lld, %lld, %lld]: grouped %.1f us, single %.1f, lt %.1f\n", (long long)experts,
           (long long)list->m, (long long)list->n, (long long)list->k, times[1] * 1e6, times[2] * 1e6, times[3] * 1e6);
    if (best != SLUICE_CUBLAS_GROUPED) {
      printf("     CHOICE(SLUICE_DTYPE_BF16, %d, %d, %lld, %lld, %lld, %s)\n", kind == 2, kind == 0, (long long)experts,
             (long long)list->m, (long long)(list->n * list->k), names[best]);
    }
  }
  free(list);
  gpu_drop(&x), gpu_drop(&w), gpu_drop(&y);
  gpu_report("cublas leaves nothing", host.num_live == 0 ? NULL : "blocks left");
  sluice_allocator_deinit(&host);
}

/* The layers of peers/production's shapes as one rank of eight sees them, balanced; rows of one and of four chunks. */
void gpu_part_choice(void) {
  static const int64_t shapes[][3] = {{2, 2048, 8192}, {1, 4096, 14336}, {16, 2048, 768}, {32, 7168, 2048}};
  static const int64_t routes[] = {32768, 32768, 131072, 131072}, experts[] = {16, 8, 128, 256};
  if (GPU_IS_FAKE) {
    choose(3, 4, 6, 8); /* says nothing but that it runs */
    return;
  }
  for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; ++s) {
    for (int64_t chunks = 1; chunks <= 4; chunks *= 4) {
      choose(shapes[s][0], routes[s] * 8 / experts[s] / chunks, shapes[s][1], shapes[s][2]);
    }
  }
}
