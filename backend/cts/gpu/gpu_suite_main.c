/* What must hold on a GPU, as one program without a test framework: kernels against the plain ones, routing against a
 * plain sort, products by cuBLAS against f64, copies and pinned memory, passes on streams.
 *
 *   gpu_suite --list            the parts
 *   gpu_suite PART              runs one; a line per case, the last `N passed, N failed`; exit 0, 1, or 77: no GPU here
 *
 * integration_tests/gpu/run builds it with gcc and nvcc and runs it under compute-sanitizer too; the same source with
 * the fake driver and cuBLAS behind it (-DSLUICE_GPU_SUITE_FAKE) is a test of Bazel's, so that the suite itself is
 * tried. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/clock.h"
#include "backend/base/dtype.h"
#include "backend/cts/gpu/gpu_graphs.h"
#include "backend/cts/gpu/gpu_rates.h"
#include "backend/device/cuda/cuda_memory.h"
#include "backend/device/cuda/cuda_routing.h"
#include "backend/gemm/cublas/gemm_cublas.h"
#ifdef SLUICE_GPU_SUITE_FAKE
#include "backend/device/cuda/fake/fake_cuda.h"
#include "backend/gemm/cublas/fake/fake_cublas.h"
#endif

enum { NO_GPU = 77, CHOICE_REPEATS = 20, MOST_DRAWN = 1 << 20 };

static sluice_device_t* device;
static sluice_allocator_t memory; /* the device's */
static const sluice_cuda_driver_t* driver;
static int passed, failed;

static void report(const char* name, const char* problem) {
  passed += problem == NULL;
  failed += problem != NULL;
  printf("%s %s%s%s\n", problem == NULL ? "ok  " : "FAIL", name, problem == NULL ? "" : ": ",
         problem == NULL ? "" : problem);
  fflush(stdout); /* what is ended by a deadline leaves its lines */
}

static const char* last_error(void) {
  static sluice_error_info_t why;
  sluice_error_info_init(&why, sizeof why);
  sluice_error_last(&why);
  return why.message;
}

static void die(const char* what) {
  printf("FAIL %s: %s\n", what, last_error());
  exit(1);
}

/* ---- arrays on both sides -------------------------------------------------------------------------------------- */

typedef struct array_s {
  void* host;  /* what the plain version works on */
  void* there; /* the device's */
  void* back;  /* what came from the device */
  int64_t bytes;
  int64_t skipped; /* bytes between the device's block and `there` */
} array_t;

static array_t array_behind(int64_t skipped, int64_t bytes) {
  array_t a = {.bytes = bytes, .skipped = skipped};
  a.host = calloc(1, (size_t)bytes + 1);
  a.back = calloc(1, (size_t)bytes + 1);
  char* block = sluice_alloc(&memory, (uint64_t)(skipped + bytes + 1), "an array of the suite");
  if (a.host == NULL || a.back == NULL || block == NULL) die("memory");
  a.there = block + skipped;
  return a;
}
static array_t array(int64_t bytes) { return array_behind(0, bytes); }
static void send(const array_t* a) {
  if (sluice_cuda_copy(device, NULL, a->there, a->host, (uint64_t)a->bytes) != SLUICE_OK) die("copy");
  if (driver->cuStreamSynchronize(NULL) != 0) die("synchronize");
}
static void fetch(const array_t* a) {
  if (sluice_cuda_copy(device, NULL, a->back, a->there, (uint64_t)a->bytes) != SLUICE_OK) die("copy");
  if (driver->cuStreamSynchronize(NULL) != 0) die("synchronize");
}
/* What a kernel writes in part and the suite fetches whole: a checker of memory that was never written would stop
 * there.
 */
static array_t zeros(int64_t bytes) {
  array_t a = array(bytes);
  send(&a);
  return a;
}
static void drop(array_t* a) {
  sluice_free(&memory, (char*)a->there - a->skipped, (uint64_t)(a->skipped + a->bytes + 1));
  free(a->host);
  free(a->back);
}

static uint64_t seed = 1;
static uint32_t random_bits(void) {
  seed = seed * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(seed >> 33);
}

static double get(int32_t dtype, const void* data, int64_t i) {
  switch (dtype) {
    case SLUICE_DTYPE_F32: return (double)((const float*)data)[i];
    case SLUICE_DTYPE_BF16: return (double)sluice_bf16_to_f32(((const uint16_t*)data)[i]);
    case SLUICE_DTYPE_F16: return (double)sluice_f16_to_f32(((const uint16_t*)data)[i]);
    default: return ((const double*)data)[i];
  }
}
static void put(int32_t dtype, void* data, int64_t i, double x) {
  switch (dtype) {
    case SLUICE_DTYPE_F32: ((float*)data)[i] = (float)x; break;
    case SLUICE_DTYPE_BF16: ((uint16_t*)data)[i] = sluice_f32_to_bf16((float)x); break;
    case SLUICE_DTYPE_F16: ((uint16_t*)data)[i] = sluice_f32_to_f16((float)x); break;
    default: ((double*)data)[i] = x; break;
  }
}
/* Elements that arrays of random numbers lie behind an aligned place, as parts of a host's tensors may. */
static int64_t apart;
static array_t randoms(int32_t dtype, int64_t count) {
  int64_t size = (int64_t)sluice_dtype_bytes(dtype);
  array_t a = array_behind(apart * size, count * size);
  for (int64_t i = 0; i < count; ++i) put(dtype, a.host, i, ((double)random_bits() / 2147483648.0 - 0.5) * 6);
  send(&a);
  return a;
}

/* NULL, or where the device's result differs from the plain one by more than relative * |x| + absolute. */
static const char* differs(const array_t* a, int32_t dtype, double relative, double absolute) {
  static char text[160];
  fetch(a);
  for (int64_t i = 0; i < a->bytes / (int64_t)sluice_dtype_bytes(dtype); ++i) {
    double want = get(dtype, a->host, i), got = get(dtype, a->back, i);
    if (want == got || (isnan(want) && isnan(got))) continue;
    if (fabs(want - got) <= relative * fabs(want) + absolute) continue;
    snprintf(text, sizeof text, "%s element %lld is %.9g, want %.9g", sluice_dtype_name(dtype), (long long)i, got,
             want);
    return text;
  }
  return NULL;
}

static void enter(void) {
  if (sluice_cuda_enter(device) != SLUICE_OK) die("enter");
}
static void leave(void) {
  if (sluice_cuda_leave(device) != SLUICE_OK) die("leave");
}

/* ---- kernels --------------------------------------------------------------------------------------------------- */

static const int32_t DTYPES[] = {SLUICE_DTYPE_F32, SLUICE_DTYPE_BF16, SLUICE_DTYPE_F16, SLUICE_DTYPE_F64};

static void moving(int32_t dtype, int64_t rows, int64_t width) {
  const sluice_kernels_t *ref = sluice_cpu_kernels_ref(), *gpu = device->kernels;
  int64_t bytes = (int64_t)sluice_dtype_bytes(dtype);
  array_t src = randoms(dtype, rows * width), dst = randoms(dtype, rows * width), index = array(rows * 4 * 2),
          scale = randoms(SLUICE_DTYPE_F32, rows * 2), out = randoms(dtype, rows * width);
  sluice_row_run_t* runs = calloc((size_t)rows, sizeof *runs);
  for (int64_t i = 0; i < 2 * rows; ++i) ((int32_t*)index.host)[i] = (int32_t)(random_bits() % (uint32_t)rows);
  send(&index);
  for (int64_t i = 0; i < rows; ++i) runs[i] = (sluice_row_run_t){(i * 7) % rows, i, 1};
  enter();
  ref->gather_rows(NULL, dtype, rows, width, src.host, width, index.host, dst.host);
  gpu->gather_rows(NULL, dtype, rows, width, src.there, width, index.there, dst.there);
  report("gather_rows", differs(&dst, dtype, 0, 0));
  ref->move_rows(NULL, width * bytes, runs, rows, src.host, dst.host);
  gpu->move_rows(NULL, width * bytes, runs, rows, src.there, dst.there);
  report("move_rows", differs(&dst, dtype, 0, 0));
  ((int32_t*)index.host)[0] = -1;
  send(&index);
  ref->combine_rows(NULL, dtype, rows, 2, width, src.host, index.host, scale.host, 2, 1, out.host, width);
  gpu->combine_rows(NULL, dtype, rows, 2, width, src.there, index.there, scale.there, 2, 1, out.there, width);
  report("combine_rows", differs(&out, dtype, 0, 0));
  ref->scale_rows(NULL, dtype, rows, width, src.host, scale.host, out.host);
  gpu->scale_rows(NULL, dtype, rows, width, src.there, scale.there, out.there);
  report("scale_rows", differs(&out, dtype, 0, 0));
  ref->add_bias(NULL, dtype, rows, width, out.host, src.host);
  gpu->add_bias(NULL, dtype, rows, width, out.there, src.there);
  report("add_bias", differs(&out, dtype, 0, 0));
  ref->dot_rows(NULL, dtype, rows, width, src.host, dst.host, width, 1, scale.host);
  gpu->dot_rows(NULL, dtype, rows, width, src.there, dst.there, width, 1, scale.there);
  report("dot_rows", differs(&scale, SLUICE_DTYPE_F32, 0, 0));
  ref->sum_columns(NULL, dtype, rows, width, src.host, width, scale.host, 0, dtype, out.host);
  gpu->sum_columns(NULL, dtype, rows, width, src.there, width, scale.there, 0, dtype, out.there);
  report("sum_columns", differs(&out, dtype, 0, 0));
  int64_t rounded = width < 2 ? rows : rows * 2; /* what both arrays hold */
  ref->round_rows(NULL, dtype, 1, rounded, scale.host, 1, out.host, rounded);
  gpu->round_rows(NULL, dtype, 1, rounded, scale.there, 1, out.there, rounded);
  report("round_rows", differs(&out, dtype, 0, 0));
  leave();
  free(runs);
  drop(&src), drop(&dst), drop(&index), drop(&scale), drop(&out);
}

/* The plain version evaluates in f64, the kernels in f32: a few ulps, and one more rounding to bf16 or f16. */
static void activations(int32_t dtype, int64_t rows, int64_t width) {
  static const double ulp[] = {0, 0x1p-23, 0x1p-7, 0x1p-10, 0x1p-52};
  const sluice_kernels_t *ref = sluice_cpu_kernels_ref(), *gpu = device->kernels;
  double absolute = 16 * 27 * (dtype == SLUICE_DTYPE_F64 ? 0x1p-52 : 0x1p-23);
  for (int32_t activation = SLUICE_ACTIVATION_IDENTITY; activation <= SLUICE_ACTIVATION_SILU; ++activation) {
    for (int32_t gated = 0; gated < 2; ++gated) {
      char name[64];
      array_t pre = randoms(dtype, rows * width * (gated + 1)), act = randoms(dtype, rows * width),
              dact = randoms(dtype, rows * width), weight = randoms(SLUICE_DTYPE_F32, rows),
              dpre = randoms(dtype, rows * width * (gated + 1)), dw = randoms(SLUICE_DTYPE_F32, rows);
      enter();
      ref->activation_forward(NULL, dtype, activation, gated, rows, width, pre.host, dact.host, NULL, act.host);
      gpu->activation_forward(NULL, dtype, activation, gated, rows, width, pre.there, dact.there, NULL, act.there);
      snprintf(name, sizeof name, "activation_forward %d gated %d", activation, gated);
      report(name, differs(&act, dtype, ulp[dtype], absolute));
      ref->activation_backward(NULL, dtype, activation, gated, rows, width, pre.host, dact.host, weight.host, dpre.host,
                               act.host, dw.host);
      gpu->activation_backward(NULL, dtype, activation, gated, rows, width, pre.there, dact.there, weight.there,
                               dpre.there, act.there, dw.there);
      snprintf(name, sizeof name, "activation_backward %d gated %d", activation, gated);
      report(name, differs(&dpre, dtype, ulp[dtype], absolute));
      report(name, differs(&act, dtype, 2 * ulp[dtype], absolute)); /* act is rounded, then its product */
      leave();
      drop(&pre), drop(&act), drop(&dact), drop(&weight), drop(&dpre), drop(&dw);
    }
  }
}

static void part_kernels(void) {
  static const int64_t widths[] = {1, 33, 64, 250, 2048};
  for (int d = 0; d < 4; ++d) {
    for (apart = 0; apart < 2; ++apart) {
      for (size_t w = 0; w < sizeof widths / sizeof widths[0]; ++w) moving(DTYPES[d], 150, widths[w]);
      activations(DTYPES[d], 20, 264);
      activations(DTYPES[d], 9, 37);
    }
    apart = 0;
  }
}

/* ---- routing --------------------------------------------------------------------------------------------------- */

static const char* route(int64_t tokens, int64_t top_k, int64_t experts) {
  int64_t routes = tokens * top_k, row = 0;
  const char* problem = NULL;
  array_t ids = array(routes * 4), counts = array(experts * 4), offsets = array((experts + 1) * 4),
          token_of = zeros(routes * 4), position = array(routes * 4),
          scratch = array((int64_t)sluice_cuda_route_scratch_bytes(routes, experts));
  int32_t* id = ids.host;
  for (int64_t r = 0; r < routes; ++r) id[r] = (int32_t)(random_bits() % (uint32_t)(experts + 1)) - 1;
  send(&ids);
  const sluice_route_args_t args = {.ids = ids.there,
                                    .tile_counts = scratch.there,
                                    .counts = counts.there,
                                    .offsets = offsets.there,
                                    .token_of = token_of.there,
                                    .position = position.there,
                                    .num_routes = routes,
                                    .top_k = top_k,
                                    .num_experts = experts,
                                    .ids_t = top_k,
                                    .ids_k = 1};
  enter();
  sluice_cuda_route(NULL, &args);
  leave();
  fetch(&offsets), fetch(&token_of), fetch(&position);
  for (int64_t e = 0; e < experts; ++e) {
    if (((int32_t*)offsets.back)[e] != row) problem = "an offset";
    for (int64_t r = 0; r < routes; ++r) {
      if (id[r] != e) continue;
      if (((int32_t*)position.back)[r] != row || ((int32_t*)token_of.back)[row] != r / top_k) problem = "a row";
      ++row;
    }
  }
  if (((int32_t*)offsets.back)[experts] != row) problem = "the number of rows";
  drop(&ids), drop(&counts), drop(&offsets), drop(&token_of), drop(&position), drop(&scratch);
  return problem;
}

static const char* blocks(int64_t tokens, int64_t top_k, int64_t experts) {
  enum { BLOCKS = 64 };
  int64_t routes = tokens * top_k, columns = experts + 1;
  const char* problem = NULL;
  array_t ids = array(routes * 4), counts = array(BLOCKS * columns * 4);
  int32_t *id = ids.host, *want = counts.host;
  for (int64_t r = 0; r < routes; ++r) id[r] = (int32_t)(random_bits() % (uint32_t)(experts + 1)) - 1;
  send(&ids);
  const sluice_block_args_t args = {.ids = ids.there,
                                    .counts = counts.there,
                                    .units = BLOCKS,
                                    .num_tokens = tokens,
                                    .top_k = top_k,
                                    .num_experts = experts,
                                    .ids_t = top_k,
                                    .ids_k = 1};
  enter();
  sluice_cuda_count_blocks(NULL, &args);
  leave();
  memset(want, 0, (size_t)counts.bytes);
  for (int64_t g = 0; g < BLOCKS; ++g) {
    want[g * columns + experts] = INT32_MAX;
    for (int64_t r = tokens * g / BLOCKS * top_k; r < tokens * (g + 1) / BLOCKS * top_k; ++r) {
      if (id[r] >= 0) ++want[g * columns + id[r]];
    }
  }
  fetch(&counts);
  if (memcmp(counts.back, want, (size_t)counts.bytes) != 0) problem = "a count";
  drop(&ids), drop(&counts);
  return problem;
}

/* Where a token's routes to one rank share a row; expert e belongs to rank e % W. */
static const char* parcels(int64_t tokens, int64_t top_k, int64_t experts, int64_t ranks) {
  int64_t routes = tokens * top_k, most = top_k < ranks ? top_k : ranks, row = 0;
  const int64_t first_token[] = {0, tokens};
  const char* problem = NULL;
  array_t ids = array(routes * 4), position = array(routes * 4), counts = array((ranks + 1) * 4),
          token = zeros(tokens * most * 4), table = array(tokens * ranks * 4), slots = zeros(routes * 4),
          owner = array(experts * 4);
  array_t scratch = array((int64_t)device->far->parcel_scratch_bytes(routes, (int32_t)experts, (int32_t)ranks));
  int32_t *id = ids.host, *at = position.host, *rank = owner.host;
  for (int64_t e = 0; e < experts; ++e) rank[e] = (int32_t)(e % ranks);
  for (int64_t r = 0; r < routes; ++r) id[r] = (int32_t)(random_bits() % (uint32_t)(experts + 1)) - 1;
  for (int64_t r = 0; r < routes; ++r) at[r] = id[r] < 0 ? -1 : (int32_t)r; /* any places that differ will do */
  send(&ids), send(&position);
  const sluice_far_parcels_t args = {.ids = ids.there,
                                     .ids_t = top_k,
                                     .ids_k = 1,
                                     .num_chunks = 1,
                                     .first_token = first_token,
                                     .rank_of_expert = rank,
                                     .top_k = (int32_t)top_k,
                                     .num_experts = (int32_t)experts,
                                     .num_ranks = (int32_t)ranks,
                                     .most = (int32_t)most,
                                     .position = position.there,
                                     .counts = counts.there,
                                     .token = token.there,
                                     .position_of_token = table.there,
                                     .slots = slots.there,
                                     .scratch = scratch.there};
  if (device->far->number_parcels(device, NULL, &args) != SLUICE_OK) problem = last_error();
  fetch(&counts), fetch(&token), fetch(&table), fetch(&slots);
  for (int64_t w = 0; w < ranks; ++w) {
    int64_t first = row;
    for (int64_t t = 0; t < tokens; ++t) {
      int any = 0;
      for (int64_t r = t * top_k; r < (t + 1) * top_k; ++r) {
        if (id[r] < 0 || rank[id[r]] != w) continue;
        any = 1;
        if (((int32_t*)slots.back)[r] != (row - first) * top_k + r % top_k) problem = "a slot";
      }
      if (((int32_t*)table.back)[t * ranks + w] != (any ? row : -1)) problem = "a place";
      if (any && ((int32_t*)token.back)[row++] != t) problem = "a token";
    }
    if (((int32_t*)counts.back)[w] != row - first) problem = "a count";
  }
  drop(&ids), drop(&position), drop(&counts), drop(&token), drop(&table), drop(&slots), drop(&owner), drop(&scratch);
  return problem;
}

static void part_routing(void) {
  report("parcels T=1 K=1 E=1 W=1", parcels(1, 1, 1, 1));
  report("parcels T=1000 K=2 E=8 W=4", parcels(1000, 2, 8, 4));
  report("parcels T=5000 K=8 E=256 W=8", parcels(5000, 8, 256, 8));
  report("blocks T=1 K=1 E=1", blocks(1, 1, 1));
  report("blocks T=5000 K=8 E=256", blocks(5000, 8, 256));
  report("route T=1 K=1 E=1", route(1, 1, 1));
  report("route T=1000 K=2 E=8", route(1000, 2, 8));
  report("route T=5000 K=8 E=256", route(5000, 8, 256));
  report("route T=4097 K=1 E=64", route(4097, 1, 64));
}

/* ---- products -------------------------------------------------------------------------------------------------- */

typedef const char* (*run_t)(sluice_gemm_t* gemm, const sluice_product_list_t* list);

static const char* run_eagerly(sluice_gemm_t* gemm, const sluice_product_list_t* list) {
  return sluice_gemm_run(gemm, list) == SLUICE_OK ? NULL : last_error();
}

/* A list of other products, so that nothing on the host is as it was: what a launch reads must be in the graph. */
static sluice_status_t run_others(sluice_gemm_t* gemm, const sluice_product_list_t* list, const array_t* space) {
  sluice_product_t others[40];
  char* at = space->there;
  int64_t size = (int64_t)sluice_dtype_bytes(list->dtype_ab);
  for (int i = 0; i < 40; ++i) {
    others[i] = (sluice_product_t){8, 16, 8, {at, 8, 1}, {at + 512, 16, 1}, {at + 1536 + i * 128 * size, 16, 1}};
  }
  const sluice_product_list_t call = {others, 40, list->dtype_ab, list->dtype_ab, 0, list->stream};
  return sluice_gemm_run(gemm, &call);
}

/* The list as a graph, launched once. */
static const char* run_captured(sluice_gemm_t* gemm, const sluice_product_list_t* list) {
  static char text[96];
  sluice_product_list_t call = *list;
  gpu_graph_t graph = {NULL, NULL};
  const char* problem = NULL;
  array_t space = array(1 << 20);
  void* stream = NULL;
  if (driver->cuStreamCreateWithPriority(&stream, SLUICE_CU_STREAM_NON_BLOCKING, 0) != 0) die("a stream");
  call.stream = stream;
  send(&space); /* zeros */
  int code = gpu_graph_begin(stream);
  if (code == 0 && sluice_gemm_run(gemm, &call) != SLUICE_OK) problem = last_error();
  if (code == 0) code = gpu_graph_end(stream, &graph);
  if (code == 0 && problem == NULL && run_others(gemm, &call, &space) != SLUICE_OK) problem = last_error();
  if (code == 0 && problem == NULL) code = gpu_graph_launch(&graph, stream);
  if (code == 0) code = driver->cuStreamSynchronize(stream);
  gpu_graph_drop(&graph);
  (void)driver->cuStreamDestroy_v2(stream);
  drop(&space);
  if (code == 0 || problem != NULL) return problem;
  snprintf(text, sizeof text, "the capture or its launch: CUresult %d", code);
  return text;
}

/* As backend/cts/gemm: sums in f64, the bound for adding k f32 products in any order, one rounding to C's dtype. */
static const char* products(sluice_gemm_t* gemm, int32_t dtype, int32_t dtype_c, int trans, int64_t count, run_t run) {
  enum { M = 40, N = 72, K = 56 };
  static char text[160];
  const char* problem;
  sluice_product_t list[24];
  array_t a = randoms(dtype, count * M * K), b = randoms(dtype, count * K * N), c = randoms(dtype_c, count * M * N);
  int64_t in = (int64_t)sluice_dtype_bytes(dtype), out = (int64_t)sluice_dtype_bytes(dtype_c);
  for (int64_t i = 0; i < count; ++i) {
    list[i] = (sluice_product_t){i % 5 == 3 ? 0 : M,
                                 N,
                                 K,
                                 {(char*)a.there + i * M * K * in, K, 1},
                                 {(char*)b.there + i * K * N * in, trans ? 1 : N, trans ? K : 1},
                                 {(char*)c.there + i * M * N * out, N, 1}};
  }
  const sluice_product_list_t call = {list, count, dtype, dtype_c, 1, NULL};
  problem = run(gemm, &call);
  fetch(&c);
  double unit = dtype == SLUICE_DTYPE_F64 ? 0x1p-53 : 0x1p-24;
  double last = dtype_c == SLUICE_DTYPE_BF16 ? 0x1p-8 : (dtype_c == SLUICE_DTYPE_F16 ? 0x1p-11 : unit);
  for (int64_t at = 0; at < count * M * N && problem == NULL; ++at) {
    int64_t i = at / (M * N), row = at / N % M, col = at % N;
    double sum = get(dtype_c, c.host, at), size = fabs(sum);
    for (int64_t k = 0; k < K && list[i].m > 0; ++k) {
      double x = get(dtype, a.host, i * M * K + row * K + k) *
                 get(dtype, b.host, i * K * N + (trans ? col * K + k : k * N + col));
      sum += x;
      size += fabs(x);
    }
    if (fabs(get(dtype_c, c.back, at) - sum) <= (K + 2) * unit * size + last * fabs(sum)) continue;
    snprintf(text, sizeof text, "element %lld is %.9g, want %.9g", (long long)at, get(dtype_c, c.back, at), sum);
    problem = text;
  }
  drop(&a), drop(&b), drop(&c);
  return problem;
}

static sluice_gemm_t* open_cublas(int32_t how, sluice_allocator_t* host) {
  sluice_gemm_t* gemm = NULL;
  sluice_gemm_cublas_options_t options = {.device = device, .memory = &memory, .how = how};
#ifdef SLUICE_GPU_SUITE_FAKE
  sluice_cublas_symbols_t symbols = sluice_fake_cublas(1);
  sluice_cublaslt_symbols_t lt = sluice_fake_cublaslt();
  options.symbols = &symbols, options.lt_symbols = &lt;
#endif
  if (sluice_gemm_cublas_create(&options, host, &gemm) != SLUICE_OK) die("cublas");
  return gemm;
}

static const char* const hows[] = {"by table", "grouped", "single", "lt"};

static void part_gemm(void) {
  static const int32_t types[][2] = {{SLUICE_DTYPE_F32, SLUICE_DTYPE_F32},
                                     {SLUICE_DTYPE_BF16, SLUICE_DTYPE_BF16},
                                     {SLUICE_DTYPE_BF16, SLUICE_DTYPE_F32},
                                     {SLUICE_DTYPE_F16, SLUICE_DTYPE_F16},
                                     {SLUICE_DTYPE_F64, SLUICE_DTYPE_F64}};
  sluice_allocator_t host;
  sluice_allocator_init(&host, NULL, NULL, NULL);
  for (int32_t how = SLUICE_CUBLAS_BY_TABLE; how <= SLUICE_CUBLAS_LT; ++how) {
    sluice_gemm_t* gemm = open_cublas(how, &host);
    printf("     %s, %s\n", gemm->name, hows[how]);
    for (size_t t = 0; t < sizeof types / sizeof types[0]; ++t) {
      for (int trans = 0; trans < 2; ++trans) {
        for (int64_t count = 1; count <= 24; count += 23) {
          char name[96];
          snprintf(name, sizeof name, "%s: %lld products of %s into %s, N%s", hows[how], (long long)count,
                   sluice_dtype_name(types[t][0]), sluice_dtype_name(types[t][1]), trans ? "T" : "N");
          report(name, products(gemm, types[t][0], types[t][1], trans, count, run_eagerly));
          strncat(name, ", captured", sizeof name - strlen(name) - 1);
          report(name, products(gemm, types[t][0], types[t][1], trans, count, run_captured));
        }
      }
    }
    sluice_gemm_destroy(gemm);
  }
  report("cublas leaves nothing", host.num_live == 0 ? NULL : "blocks left");
  sluice_allocator_deinit(&host);
}

/* ---- which way products go ------------------------------------------------------------------------------------- */

/* Seconds of one run of the list, the shortest of five sets. */
static double seconds_of(sluice_gemm_t* gemm, const sluice_product_list_t* list, int repeats) {
  double best = -1;
  for (int set = 0; set < 6; ++set) { /* the first makes what later ones find */
    uint64_t begin = sluice_now_ns();
    for (int i = 0; i < repeats; ++i) {
      if (sluice_gemm_run(gemm, list) != SLUICE_OK) die("a product");
    }
    if (driver->cuStreamSynchronize(NULL) != 0) die("a wait");
    double seconds = (double)(sluice_now_ns() - begin) * 1e-9 / repeats;
    if (set > 0 && (best < 0 || seconds < best)) best = seconds;
  }
  return best;
}

/* Random numbers that repeat: as good for times, and there at once where a host would need a minute for them. */
static array_t repeated(int32_t dtype, int64_t count) {
  array_t a = array(count * (int64_t)sluice_dtype_bytes(dtype));
  int64_t drawn = count < MOST_DRAWN ? count : MOST_DRAWN, done = drawn * (int64_t)sluice_dtype_bytes(dtype);
  for (int64_t i = 0; i < drawn; ++i) put(dtype, a.host, i, ((double)random_bits() / 2147483648.0 - 0.5) * 6);
  if (sluice_cuda_copy(device, NULL, a.there, a.host, (uint64_t)done) != SLUICE_OK) die("copy");
  for (int64_t more; done < a.bytes; done += more) {
    more = a.bytes - done < done ? a.bytes - done : done;
    if (sluice_cuda_copy(device, NULL, (char*)a.there + done, a.there, (uint64_t)more) != SLUICE_OK) die("copy");
  }
  if (driver->cuStreamSynchronize(NULL) != 0) die("synchronize");
  return a;
}

/* Times the ways of the library by turns and prints a row for backend/gemm/cublas/cublas_choices.inc where another than
 * grouped is faster by a twentieth. The three products of a layer: forward, input gradient, weight gradient. */
static void choose(int64_t experts, int64_t rows, int64_t width, int64_t hidden) {
  static const char* const names[] = {"", "SLUICE_CUBLAS_GROUPED", "SLUICE_CUBLAS_SINGLE", "SLUICE_CUBLAS_LT"};
  sluice_product_t* list = calloc((size_t)experts, sizeof *list);
  array_t x = repeated(SLUICE_DTYPE_BF16, experts * rows * width),
          w = repeated(SLUICE_DTYPE_BF16, experts * hidden * width),
          y = repeated(SLUICE_DTYPE_BF16, experts * rows * hidden);
  sluice_allocator_t host;
  sluice_allocator_init(&host, NULL, NULL, NULL);
  for (int kind = 0; kind < 3; ++kind) {
    for (int64_t e = 0; e < experts; ++e) {
      char *xe = (char*)x.there + e * rows * width * 2, *we = (char*)w.there + e * hidden * width * 2,
           *ye = (char*)y.there + e * rows * hidden * 2;
      list[e] = kind == 0   ? (sluice_product_t){rows, hidden, width, {xe, width, 1}, {we, 1, width}, {ye, hidden, 1}}
                : kind == 1 ? (sluice_product_t){rows, width, hidden, {ye, hidden, 1}, {we, width, 1}, {xe, width, 1}}
                            : (sluice_product_t){hidden, width, rows, {ye, 1, hidden}, {xe, width, 1}, {we, width, 1}};
    }
    const sluice_product_list_t call = {list, experts, SLUICE_DTYPE_BF16, SLUICE_DTYPE_BF16, 0, NULL};
    double times[4] = {0};
    int32_t best = SLUICE_CUBLAS_GROUPED;
    for (int32_t how = SLUICE_CUBLAS_GROUPED; how <= SLUICE_CUBLAS_LT; ++how) {
      sluice_gemm_t* gemm = open_cublas(how, &host);
      times[how] = seconds_of(gemm, &call, CHOICE_REPEATS);
      sluice_gemm_destroy(gemm);
      if (times[how] < 0.95 * times[SLUICE_CUBLAS_GROUPED] && times[how] < times[best]) best = how;
    }
    printf("     %lld products [%lld, %lld, %lld]: grouped %.1f us, single %.1f, lt %.1f\n", (long long)experts,
           (long long)list->m, (long long)list->n, (long long)list->k, times[1] * 1e6, times[2] * 1e6, times[3] * 1e6);
    if (best != SLUICE_CUBLAS_GROUPED) {
      printf("     CHOICE(SLUICE_DTYPE_BF16, %d, %d, %lld, %lld, %lld, %s)\n", kind == 2, kind == 0, (long long)experts,
             (long long)list->m, (long long)(list->n * list->k), names[best]);
    }
  }
  free(list);
  drop(&x), drop(&w), drop(&y);
  report("cublas leaves nothing", host.num_live == 0 ? NULL : "blocks left");
  sluice_allocator_deinit(&host);
}

/* The layers of peers/production's shapes as one rank of eight sees them, balanced; rows of one and of four chunks. */
static void part_choice(void) {
#ifdef SLUICE_GPU_SUITE_FAKE
  choose(3, 4, 6, 8); /* says nothing but that it runs */
#else
  static const int64_t shapes[][3] = {{2, 2048, 8192}, {1, 4096, 14336}, {16, 2048, 768}, {32, 7168, 2048}};
  static const int64_t routes[] = {32768, 32768, 131072, 131072}, experts[] = {16, 8, 128, 256};
  for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; ++s) {
    for (int64_t chunks = 1; chunks <= 4; chunks *= 4) {
      choose(shapes[s][0], routes[s] * 8 / experts[s] / chunks, shapes[s][1], shapes[s][2]);
    }
  }
#endif
}

static void part_rates(void) {
#ifdef SLUICE_GPU_SUITE_FAKE
  report("rates", gpu_rates(device, &memory, 1));
#else
  report("rates", gpu_rates(device, &memory, 0));
#endif
}

/* ---- streams and memory ---------------------------------------------------------------------------------------- */

/* Each job adds its number to what it waits for, on its lane, through a chain over all lanes: order shows in the bits.
 */
typedef struct chain_s {
  float* cell; /* on the device */
  float* ones;
} chain_t;
static sluice_status_t chain_job(void* user, int32_t index, sluice_stream_t stream) {
  const chain_t* chain = user;
  if (index % 2 == 0) {
    device->kernels->add_bias(stream, SLUICE_DTYPE_F32, 1, 1024, chain->cell, chain->ones);
  } else {
    device->kernels->scale_rows(stream, SLUICE_DTYPE_F32, 1, 1024, chain->cell, chain->ones + 1024, chain->cell);
  }
  return SLUICE_OK;
}

static void part_streams(void) {
  enum { JOBS = 200 };
  array_t cell = array(1024 * 4), ones = array(2048 * 4);
  sluice_cuda_stats_t before = sluice_cuda_device_stats(device);
  for (int i = 0; i < 1024; ++i) ((float*)cell.host)[i] = 0;
  for (int i = 0; i < 2048; ++i) ((float*)ones.host)[i] = i < 1024 ? 1.0f : 0.5f;
  send(&cell), send(&ones);
  chain_t chain = {cell.there, ones.there};
  int32_t waits[JOBS];
  sluice_status_t status = device->vtable->begin(device, JOBS, chain_job, &chain, NULL);
  for (int32_t i = 0; i < JOBS && status == SLUICE_OK; ++i) {
    waits[i] = i - 1;
    const sluice_job_t job = {i, (i * 7) % 4, &waits[i], i > 0, 0};
    status = device->vtable->submit(device, &job);
  }
  if (status == SLUICE_OK) status = device->vtable->join(device);
  report("a chain of 200 jobs over four lanes is enqueued", status == SLUICE_OK ? NULL : last_error());
  float want = 0;
  for (int i = 0; i < JOBS; ++i) want = i % 2 == 0 ? want + 1 : want * 0.5f;
  for (int i = 0; i < 1024; ++i) ((float*)cell.host)[i] = want;
  report("and runs in order", differs(&cell, SLUICE_DTYPE_F32, 0, 0));
  sluice_cuda_stats_t after = sluice_cuda_device_stats(device);
  report("without a host wait", after.num_host_waits == before.num_host_waits ? NULL : "it waited");
  float got[4] = {0};
  status = sluice_cuda_read(device, NULL, cell.there, got, sizeof got);
  report("one read is host-complete", status == SLUICE_OK && got[3] == want ? NULL : last_error());
  drop(&cell), drop(&ones);
}

static void part_memory(void) {
  sluice_pinned_pool_t* pool = NULL;
  sluice_pinned_block_t block;
  array_t a = randoms(SLUICE_DTYPE_F32, 100000), b = array(400000);
  if (sluice_pinned_pool_create(device, 1 << 20, &pool) != SLUICE_OK) die("pool");
  sluice_status_t status = sluice_pinned_pool_take(pool, 400000, NULL, &block);
  if (status == SLUICE_OK) status = sluice_cuda_copy(device, NULL, block.data, a.there, 400000);
  if (status == SLUICE_OK) status = sluice_cuda_copy(device, NULL, b.there, block.data, 400000);
  if (status == SLUICE_OK) status = sluice_pinned_pool_give(pool, &block, NULL);
  memcpy(b.host, a.host, 400000);
  report("offload and back", status == SLUICE_OK ? differs(&b, SLUICE_DTYPE_F32, 0, 0) : last_error());
  status = sluice_pinned_pool_take(pool, 2 << 20, NULL, &block);
  report("the pool is bounded", status == SLUICE_E_OVER_BUDGET ? NULL : "no error");
  sluice_pinned_pool_destroy(pool);
  status = sluice_cuda_check_memory(device, a.host, 4, 4, "host");
  report("host memory is refused", status == SLUICE_E_INVALID_ARGUMENT ? NULL : "taken");
  status = sluice_cuda_check_memory(device, a.there, 4, 64, "device");
  report("device memory is taken", status == SLUICE_OK ? NULL : last_error());
  drop(&a), drop(&b);
  size_t free_bytes = 0, total = 0;
  enter();
  if (driver->cuMemGetInfo_v2(&free_bytes, &total) != 0) die("memory info");
  leave();
  report("too much memory is NO_MEMORY",
         sluice_alloc(&memory, (uint64_t)total * 2, "too much") == NULL ? NULL : "taken");
  report("the device goes on", route(100, 2, 8));
}

static const struct {
  const char* name;
  void (*run)(void);
} parts[] = {{"kernels", part_kernels}, {"routing", part_routing}, {"gemm", part_gemm},    {"choice", part_choice},
             {"rates", part_rates},     {"streams", part_streams}, {"memory", part_memory}};
enum { NUM_PARTS = sizeof parts / sizeof parts[0] };

static sluice_status_t open_device(void) {
#ifdef SLUICE_GPU_SUITE_FAKE
  sluice_fake_cuda_reset();
  return sluice_cuda_device_create_from(sluice_fake_cuda_driver(), sluice_fake_cuda_image(), 0,
                                        sluice_process_allocator(), &device);
#else
  return sluice_cuda_device_create(0, sluice_process_allocator(), &device);
#endif
}

static void print_log(void* user, int32_t level, const char* message) {
  (void)user, (void)level;
  printf("     %s\n", message);
}

int main(int argc, char** argv) {
  int part = -1;
  for (int i = 0; i < NUM_PARTS; ++i) {
    if (argc == 2 && strcmp(argv[1], "--list") == 0) printf("%s\n", parts[i].name);
    if (argc == 2 && strcmp(argv[1], parts[i].name) == 0) part = i;
  }
  if (argc == 2 && strcmp(argv[1], "--list") == 0) return 0;
  if (part < 0) {
    fprintf(stderr, "usage: gpu_suite --list | PART\n");
    return 2;
  }
  sluice_set_log(print_log, NULL, SLUICE_LOG_INFO); /* a library that declines what it was asked for, say */
  sluice_status_t status = open_device();
  if (status == SLUICE_E_NOT_FOUND) {
    printf("no GPU: %s\n", last_error());
    return NO_GPU;
  }
  if (status != SLUICE_OK) die("device");
  driver = sluice_cuda_device_driver(device);
  sluice_cuda_allocator_init(device, &memory);
  if (!gpu_graphs_open()) die("a driver with graphs");
  enter(); /* the default stream of this device, for the suite's own waits */
  parts[part].run();
  leave();
  report("no device memory is left", memory.num_live == 0 ? NULL : "blocks left");
  sluice_allocator_deinit(&memory);
  device->vtable->destroy(device);
  printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 && passed > 0 ? 0 : 1;
}
