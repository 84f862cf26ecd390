// SPDX-License-Identifier: Apache-2.0
/* Measures GFLOP/s of each available GEMM implementation on the GEMMs of one MoE layer. Not a test.
 *
 *   gemm_bench [--torch PATH/libtorch_cpu.so] [--rows LIST] [--forms LIST] [--dtypes LIST] [--repeats N]
 *              [--weights LIST] [--experts N] [--model-width M] [--hidden-width H] [--cpu-time]
 *
 * --torch         loads torch's library first, so that "blas" finds its MKL, as in a torch process
 * --rows          rows per expert, 8,16,32,64,128,256,512,1024,2048
 * --forms         of forward1, forward2, input2, input1, weight, weight_add; all
 * --dtypes        of f32, bf16, f16; f32,bf16
 * --weights       of mxfp4, fp8, int8, int4: weight formats in which "native" is also measured, in forwards and
 *                 gradients of inputs; none
 * --repeats       of each implementation, in turns, 5
 * --experts       GEMMs per call, each with weights of its own, 4; M and H: 1024 and 4096
 * --cpu-time      the calling thread's CPU time in place of the clock's: for one thread on a busy machine
 *
 * Each number is the best of the repeats, followed by their median in parentheses. The measurements of "auto" are
 * written to stderr.
 *
 *   forward1    T_M [r, H] = X [r, M] W1 [H, M]^T          forward2    T_DO [r, M] = ACT [r, H] W2 [M, H]^T
 *   input2      dACT [r, H] = dY [r, M] W2 [M, H]          input1      dT_DI [r, M] = dT_M [r, H] W1 [H, M]
 *   weight      dW2 [M, H] = dY^T ACT                      weight_add  dW2 += dY^T ACT, into f32
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/clock.h"
#include "backend/base/dtype.h"
#include "backend/gemm/gemm.h"

enum { MOST_EXPERTS = 64, MOST_REPEATS = 100, MOST_GEMMS = 10, NUM_FORMS = 6 };
static const char* const form_names[NUM_FORMS] = {"forward1", "forward2", "input2", "input1", "weight", "weight_add"};

typedef struct options_s {
  const char *torch, *rows, *forms, *dtypes, *weights;
  int64_t model_width, hidden_width, experts, repeats;
  int cpu_time;
} options_t;

typedef struct data_s {
  char *weights, *narrow, *wide; /* [experts][M * H], [experts][r * M], [experts][r * H] */
  char *codes, *scales;          /* of packed weights, as many bytes as elements */
} data_t;

/* An implementation, and the format of its weights. */
typedef struct column_s {
  sluice_gemm_t* gemm;
  int32_t format; /* SLUICE_PACKED_* */
} column_t;

static void fill(void* data, int64_t count, int32_t dtype) {
  uint32_t state = 1;
  for (int64_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    float value = (float)((int)(state >> 25) - 64) / 64.0f;
    switch (dtype) {
      case SLUICE_DTYPE_BF16: ((uint16_t*)data)[i] = sluice_f32_to_bf16(value); break;
      case SLUICE_DTYPE_F16: ((uint16_t*)data)[i] = sluice_f32_to_f16(value); break;
      default: ((float*)data)[i] = value; break;
    }
  }
}

static double now(const options_t* o) {
  return (double)(o->cpu_time ? sluice_thread_cpu_ns() : sluice_now_ns()) * 1e-9;
}

/* Prints the measurements and choices of "auto". */
static int num_messages;
static void on_log(void* user, int32_t level, const char* message) {
  (void)user;
  (void)level;
  ++num_messages;
  fprintf(stderr, "%s\n", message);
}

static int listed(const char* list, const char* word) {
  size_t length = strlen(word);
  for (const char* at = strstr(list, word); at != NULL; at = strstr(at + 1, word)) {
    if ((at == list || at[-1] == ',') && (at[length] == ',' || at[length] == '\0')) return 1;
  }
  return 0;
}

static int ascending(const void* a, const void* b) {
  double x = *(const double*)a;
  double y = *(const double*)b;
  return x < y ? -1 : x > y;
}

static sluice_gemm_problem_t problem(const options_t* o, const data_t* d, int form, int64_t r, int64_t expert,
                                     uint64_t bytes, int32_t format) {
  const int64_t m = o->model_width;
  const int64_t h = o->hidden_width;
  const sluice_packed_format_t* f = sluice_packed_format(format);
  void* w = f != NULL ? d->codes + sluice_packed_bytes(f->bits, m * h, expert, 0)
                      : d->weights + (uint64_t)(expert * m * h) * (form == 5 ? sizeof(float) : bytes);
  void* x = d->narrow + (uint64_t)(expert * r * m) * bytes;
  void* y = d->wide + (uint64_t)(expert * r * h) * bytes;
  switch (form) {
    case 0: return (sluice_gemm_problem_t){r, h, m, {x, m, 1}, {w, 1, m}, {y, h, 1}};
    case 1: return (sluice_gemm_problem_t){r, m, h, {y, h, 1}, {w, 1, h}, {x, m, 1}};
    case 2: return (sluice_gemm_problem_t){r, h, m, {x, m, 1}, {w, h, 1}, {y, h, 1}};
    case 3: return (sluice_gemm_problem_t){r, m, h, {y, h, 1}, {w, m, 1}, {x, m, 1}};
    default: return (sluice_gemm_problem_t){m, h, r, {x, 1, m}, {y, h, 1}, {w, h, 1}};
  }
}

/* Describes the packed weight of an expert in this form: W1 [H, M] or W2 [M, H]. */
static sluice_packed_t packing(const options_t* o, const data_t* d, int form, int64_t expert, int32_t format) {
  const sluice_packed_format_t* f = sluice_packed_format(format);
  const int64_t cols = form == 0 || form == 3 ? o->model_width : o->hidden_width;
  const int64_t elements = o->model_width * o->hidden_width;
  const int32_t block = f->block_cols != 0 ? f->block_cols : 128;
  return (sluice_packed_t){format, block, form < 2, d->scales + expert * elements, sluice_packed_blocks(cols, block),
                           0};
}

/* Measures one row of the table: all columns in turns, after one round that is not counted. */
static void measure(const options_t* o, const data_t* d, const column_t* columns, int count, int form, int32_t dtype,
                    int64_t r) {
  static sluice_gemm_problem_t problems[MOST_GEMMS][MOST_EXPERTS];
  static sluice_packed_t packed[MOST_GEMMS][MOST_EXPERTS];
  const int32_t dtype_c = form == 5 ? SLUICE_DTYPE_F32 : dtype;
  sluice_grouped_gemm_t lists[MOST_GEMMS];
  int takes[MOST_GEMMS];
  for (int g = 0; g < count; ++g) {
    const int32_t format = columns[g].format;
    for (int64_t e = 0; e < o->experts; ++e) {
      problems[g][e] = problem(o, d, form, r, e, sluice_dtype_bytes(dtype), format);
      if (format != SLUICE_PACKED_NO) packed[g][e] = packing(o, d, form, e, format);
    }
    lists[g] = (sluice_grouped_gemm_t){.problems = problems[g],
                                       .count = o->experts,
                                       .dtype_ab = dtype,
                                       .dtype_c = dtype_c,
                                       .beta = form == 5 ? 1.0f : 0.0f,
                                       .packed = format != SLUICE_PACKED_NO ? packed[g] : NULL};
    takes[g] = sluice_gemm_supports(columns[g].gemm, &lists[g]) && (format == SLUICE_PACKED_NO || form < 4);
  }
  const double flop = 2.0 * (double)(r * o->model_width * o->hidden_width * o->experts);
  static double seconds[MOST_GEMMS][MOST_REPEATS];
  /* "auto", the last column, measures during its first calls and then logs its choice. If an earlier row has made the
   * choice for this class of sizes, it logs nothing. */
  enum { MOST_CALLS = 300 };
  const int before = num_messages;
  for (int i = 0; i < MOST_CALLS && takes[count - 1] && num_messages == before; ++i) {
    takes[count - 1] = sluice_gemm_run(columns[count - 1].gemm, &lists[count - 1]) == SLUICE_OK;
  }
  for (int64_t i = 0; i <= o->repeats; ++i) {
    for (int g = 0; g < count; ++g) {
      if (!takes[g]) continue;
      double begin = now(o);
      if (sluice_gemm_run(columns[g].gemm, &lists[g]) != SLUICE_OK) takes[g] = 0;
      if (i > 0) seconds[g][i - 1] = now(o) - begin;
    }
  }
  printf("%-4s -> %-4s %-10s %5lld ", sluice_dtype_name(dtype), sluice_dtype_name(dtype_c), form_names[form],
         (long long)r);
  for (int g = 0; g < count; ++g) {
    if (!takes[g]) {
      printf("            -   ");
      continue;
    }
    qsort(seconds[g], (size_t)o->repeats, sizeof seconds[g][0], ascending);
    printf("  %6.1f (%5.1f)", flop / seconds[g][0] * 1e-9, flop / seconds[g][o->repeats / 2] * 1e-9);
  }
  printf("\n");
  fflush(stdout);
}

static int parse(int argc, char** argv, options_t* o) {
  const struct {
    const char* name;
    const char** text;
    int64_t* number;
  } options[] = {{"--torch", &o->torch, NULL},
                 {"--rows", &o->rows, NULL},
                 {"--forms", &o->forms, NULL},
                 {"--dtypes", &o->dtypes, NULL},
                 {"--weights", &o->weights, NULL},
                 {"--repeats", NULL, &o->repeats},
                 {"--experts", NULL, &o->experts},
                 {"--model-width", NULL, &o->model_width},
                 {"--hidden-width", NULL, &o->hidden_width}};
  enum { NUM = sizeof options / sizeof options[0] };
  for (int i = 1; i < argc; ++i) {
    if (strcmp(argv[i], "--cpu-time") == 0) {
      o->cpu_time = 1;
      continue;
    }
    int n = 0;
    while (n < NUM && strcmp(argv[i], options[n].name) != 0) ++n;
    if (n == NUM || ++i == argc) return 0;
    if (options[n].text != NULL) *options[n].text = argv[i];
    if (options[n].number != NULL) *options[n].number = atoll(argv[i]);
  }
  return o->repeats > 0 && o->repeats <= MOST_REPEATS && o->experts > 0 && o->experts <= MOST_EXPERTS &&
         o->model_width > 0 && o->hidden_width > 0;
}

static void run(const options_t* o, const data_t* d, const column_t* columns, int count, int64_t most_rows) {
  static const int32_t dtypes[] = {SLUICE_DTYPE_F32, SLUICE_DTYPE_BF16, SLUICE_DTYPE_F16};
  printf("%-30s", "GFLOP/s: best (median)    rows");
  for (int g = 0; g < count; ++g) {
    const int32_t format = columns[g].format;
    printf("  %14.14s", format == SLUICE_PACKED_NO ? columns[g].gemm->name : sluice_packed_format(format)->name);
  }
  printf("\n");
  for (int t = 0; t < 3; ++t) {
    if (!listed(o->dtypes, sluice_dtype_name(dtypes[t]))) continue;
    fill(d->narrow, o->experts * most_rows * o->model_width, dtypes[t]);
    fill(d->wide, o->experts * most_rows * o->hidden_width, dtypes[t]);
    for (int form = 0; form < NUM_FORMS; ++form) {
      if (!listed(o->forms, form_names[form])) continue;
      fill(d->weights, o->experts * o->model_width * o->hidden_width, form == 5 ? SLUICE_DTYPE_F32 : dtypes[t]);
      for (const char* at = o->rows; at != NULL; at = strchr(at, ',') != NULL ? strchr(at, ',') + 1 : NULL) {
        int64_t r = atoll(at);
        if (r > 0) measure(o, d, columns, count, form, dtypes[t], r);
      }
    }
  }
}

int main(int argc, char** argv) {
  options_t o = {.rows = "8,16,32,64,128,256,512,1024,2048",
                 .forms = "forward1,forward2,input2,input1,weight,weight_add",
                 .dtypes = "f32,bf16",
                 .weights = "",
                 .model_width = 1024,
                 .hidden_width = 4096,
                 .experts = 4,
                 .repeats = 5};
  if (!parse(argc, argv, &o)) {
    fprintf(stderr,
            "usage: gemm_bench [--torch PATH/libtorch_cpu.so] [--rows LIST] [--forms LIST] [--dtypes LIST]\n"
            "  [--repeats N] [--weights LIST] [--experts N] [--model-width M] [--hidden-width H] [--cpu-time]\n");
    return 2;
  }
  sluice_set_log(on_log, NULL, SLUICE_LOG_INFO);
  if (o.torch != NULL && dlopen(o.torch, RTLD_NOW | RTLD_LOCAL) == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  int64_t most_rows = 1;
  for (const char* at = o.rows; at != NULL; at = strchr(at, ',') != NULL ? strchr(at, ',') + 1 : NULL) {
    if (atoll(at) > most_rows) most_rows = atoll(at);
  }
  sluice_allocator_t* allocator = sluice_process_allocator();
  const uint64_t each[3] = {(uint64_t)(o.experts * o.model_width * o.hidden_width) * sizeof(float),
                            (uint64_t)(o.experts * most_rows * o.model_width) * sizeof(float),
                            (uint64_t)(o.experts * most_rows * o.hidden_width) * sizeof(float)};
  const uint64_t elements = each[0] / sizeof(float);
  const data_t d = {sluice_alloc(allocator, each[0], "bench weights"), sluice_alloc(allocator, each[1], "bench rows"),
                    sluice_alloc(allocator, each[2], "bench wide rows"),
                    sluice_alloc(allocator, elements, "bench codes"),
                    sluice_alloc(allocator, elements, "bench scales")};
  if (d.weights == NULL || d.narrow == NULL || d.wide == NULL || d.codes == NULL || d.scales == NULL) return 1;
  memset(d.codes, 0x35, elements);
  memset(d.scales, 0x3f, elements); /* no NaN and no subnormal number as u8, bf16 or f32 */
  sluice_gemm_t* gemms[MOST_GEMMS] = {NULL};
  column_t columns[MOST_GEMMS];
  int opened = 0, count = 0;
  const sluice_gemm_options_t options = {.name = "auto"};
  if (sluice_gemm_native_create(allocator, &gemms[opened]) == SLUICE_OK) {
    columns[count++] = (column_t){gemms[opened], SLUICE_PACKED_NO};
    for (int32_t format = 1; format < SLUICE_PACKED_FORMATS; ++format) {
      if (listed(o.weights, sluice_packed_format(format)->name)) columns[count++] = (column_t){gemms[opened], format};
    }
    ++opened;
  }
  const int packed = opened;
  if (sluice_gemm_blas_create(NULL, allocator, &gemms[opened]) == SLUICE_OK) ++opened;
  if (sluice_gemm_onednn_create(NULL, allocator, &gemms[opened]) == SLUICE_OK) ++opened;
  if (sluice_gemm_create(&options, allocator, &gemms[opened]) == SLUICE_OK) ++opened;
  for (int g = packed; g < opened; ++g) columns[count++] = (column_t){gemms[g], SLUICE_PACKED_NO};
  run(&o, &d, columns, count, most_rows);
  for (int g = 0; g < opened; ++g) sluice_gemm_destroy(gemms[g]);
  sluice_free(allocator, d.weights, each[0]);
  sluice_free(allocator, d.narrow, each[1]);
  sluice_free(allocator, d.wide, each[2]);
  sluice_free(allocator, d.codes, elements);
  sluice_free(allocator, d.scales, elements);
  return 0;
}
