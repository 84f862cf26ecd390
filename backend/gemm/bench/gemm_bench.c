/* GFLOP/s of each implementation that opens, by layout and dtypes. Not a test.
 *
 *   gemm_bench [--torch PATH/libtorch_cpu.so] [--ms MILLISECONDS] [--ref]
 *
 * --torch   loads torch's library first, so that "blas" finds it, as in a torch process
 * --ms      time per number, 60
 * --ref     measures ref too (slow)
 *
 * Rows 8 to 2048, N and K in {1024, 4096}: NN (forward, weights [K, N]), NT (weights [N, K]) and TN (weight gradient:
 * C [N, K] += dY^T X over the rows, beta 1). A number is the total over the four (N, K).
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/clock.h"
#include "backend/base/dtype.h"
#include "backend/gemm/gemm.h"

static void fill(void* data, int64_t count, int32_t dtype) {
  uint32_t state = 1;
  for (int64_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    float value = (float)((int)(state >> 25) - 64) / 64.0f;
    if (dtype == SLUICE_DTYPE_BF16) {
      ((uint16_t*)data)[i] = sluice_f32_to_bf16(value);
    } else {
      ((float*)data)[i] = value;
    }
  }
}

/* Seconds of the shortest run, < 0 when the list is not taken. */
static double seconds(sluice_gemm_t* gemm, const sluice_product_list_t* list, double limit) {
  double best = -1; /* the first run, which also starts threads, counts only when it is the only one */
  double spent = 0;
  if (!sluice_gemm_supports(gemm, list)) return -1;
  for (int i = 0; i == 0 || (i < 50 && spent < limit); ++i) {
    uint64_t begin = sluice_now_ns();
    if (sluice_gemm_run(gemm, list) != SLUICE_OK) return -1;
    double s = (double)(sluice_now_ns() - begin) * 1e-9;
    spent += s;
    if (i <= 1 || s < best) best = s;
  }
  return best;
}

static const int64_t rows[] = {8, 32, 128, 512, 2048};
static const int64_t sizes[] = {1024, 4096};
enum { NUM_ROWS = 5, MOST = 4096 };
static const char* const layouts[] = {"NN", "NT", "TN"};

static void print_line(sluice_gemm_t* gemm, int32_t dtype_ab, int32_t dtype_c, int layout, void* x, void* y, void* z,
                       double limit) {
  double numbers[NUM_ROWS];
  int any = 0;
  for (int r = 0; r < NUM_ROWS; ++r) {
    double flop = 0;
    double time = 0;
    for (int i = 0; i < 4; ++i) {
      int64_t m = rows[r];
      int64_t n = sizes[i / 2];
      int64_t k = sizes[i % 2];
      sluice_product_t p = {m, n, k, {x, k, 1}, {y, n, 1}, {z, n, 1}};
      if (layout == 1) p.b = (sluice_matrix_t){y, 1, k};
      if (layout == 2) p = (sluice_product_t){n, k, m, {x, 1, n}, {y, k, 1}, {z, k, 1}};
      sluice_product_list_t list = {&p, 1, dtype_ab, dtype_c, layout == 2 ? 1.0f : 0.0f};
      double s = seconds(gemm, &list, limit);
      if (s < 0) continue;
      flop += 2.0 * (double)m * (double)n * (double)k;
      time += s;
    }
    numbers[r] = time > 0 ? flop / time * 1e-9 : 0;
    any |= time > 0;
  }
  if (!any) return;
  printf("%-22s %4s -> %-4s %s  ", gemm->name, sluice_dtype_name(dtype_ab), sluice_dtype_name(dtype_c),
         layouts[layout]);
  for (int r = 0; r < NUM_ROWS; ++r) printf(" %7.1f", numbers[r]);
  printf("\n");
  fflush(stdout);
}

int main(int argc, char** argv) {
  double limit = 0.06;
  int with_ref = 0;
  for (int i = 1; i < argc; ++i) {
    if (strcmp(argv[i], "--ref") == 0) {
      with_ref = 1;
    } else if (strcmp(argv[i], "--ms") == 0 && i + 1 < argc) {
      limit = atof(argv[++i]) * 1e-3;
    } else if (strcmp(argv[i], "--torch") == 0 && i + 1 < argc) {
      if (dlopen(argv[++i], RTLD_NOW | RTLD_LOCAL) == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
      }
    } else {
      fprintf(stderr, "usage: gemm_bench [--torch PATH/libtorch_cpu.so] [--ms MILLISECONDS] [--ref]\n");
      return 2;
    }
  }
  sluice_allocator_t* allocator = sluice_process_allocator();
  uint64_t bytes = (uint64_t)MOST * MOST * sizeof(float);
  void* x = sluice_alloc(allocator, bytes, "bench A");
  void* y = sluice_alloc(allocator, bytes, "bench B");
  void* z = sluice_alloc_zeroed(allocator, bytes, "bench C");
  sluice_gemm_t* gemms[4] = {NULL};
  int count = 0;
  if (x == NULL || y == NULL || z == NULL) return 1;
  const sluice_gemm_options_t options = {.name = "auto"};
  if (sluice_gemm_blas_create(NULL, allocator, &gemms[count]) == SLUICE_OK) ++count;
  if (sluice_gemm_onednn_create(NULL, allocator, &gemms[count]) == SLUICE_OK) ++count;
  if (with_ref && sluice_gemm_ref_create(allocator, &gemms[count]) == SLUICE_OK) ++count;
  if (sluice_gemm_create(&options, allocator, &gemms[count]) == SLUICE_OK) ++count;

  printf("GFLOP/s, rows                       ");
  for (int r = 0; r < NUM_ROWS; ++r) printf(" %7lld", (long long)rows[r]);
  printf("\n");
  static const int32_t dtypes[][2] = {{SLUICE_DTYPE_F32, SLUICE_DTYPE_F32},
                                      {SLUICE_DTYPE_BF16, SLUICE_DTYPE_BF16},
                                      {SLUICE_DTYPE_BF16, SLUICE_DTYPE_F32}};
  for (int d = 0; d < 3; ++d) {
    fill(x, (int64_t)MOST * MOST, dtypes[d][0]);
    fill(y, (int64_t)MOST * MOST, dtypes[d][0]);
    for (int layout = 0; layout < 3; ++layout) {
      for (int g = 0; g < count; ++g) {
        memset(z, 0, bytes);
        print_line(gemms[g], dtypes[d][0], dtypes[d][1], layout, x, y, z, limit);
      }
    }
  }
  for (int g = 0; g < count; ++g) sluice_gemm_destroy(gemms[g]);
  sluice_free(allocator, x, bytes);
  sluice_free(allocator, y, bytes);
  sluice_free(allocator, z, bytes);
  return 0;
}
