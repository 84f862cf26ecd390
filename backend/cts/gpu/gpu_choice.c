// SPDX-License-Identifier: Apache-2.0
/* Measures the ways to run GEMMs: times of each for the lists that the engine makes at the benchmarks' shapes. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "backend/base/clock.h"
#include "backend/cts/gpu/gpu_array.h"
#include "backend/cts/gpu/gpu_parts.h"
#include "backend/cts/gpu/gpu_rig.h"

enum { SETS = 4, MOST_REPEATS = 20, NUM_WAYS = SLUICE_CUBLAS_STREAMS + 1 };
#define SET_SECONDS 0.015

/* The lists of a layer's passes, in their order; gate and up are in one tensor, as in hosts. */
typedef enum list_kind_e { UP, DOWN, DOWN_GRAD, UP_GRAD, WEIGHT_GRAD, NUM_LIST_KINDS } list_kind_t;

typedef struct layer_s {
  const char* name;
  int64_t experts, rows /* of all experts */, model, hidden, factor /* 2: gated */;
  int32_t is_uneven;
} layer_t;

typedef struct operands_s {
  gpu_array_t x, pre, act, y, up, down;
  int64_t* first; /* first row of each expert, and the end */
  sluice_gemm_problem_t* list;
} operands_t;

/* Uneven, as with a router without a balancing loss: the fullest expert has 2.3 times the mean and the emptiest a third
 * of it; few numbers of rows are whole tiles. */
static void divide_rows(const layer_t* l, int64_t* first) {
  first[0] = 0;
  for (int64_t e = 0; e < l->experts; ++e) {
    double place = (double)((e * 5 + 3) % l->experts), count = (double)l->experts;
    double share = l->is_uneven ? (exp(-2 * place / count) - exp(-2 * (place + 1) / count)) / (1 - exp(-2)) : 1 / count;
    first[e + 1] = first[e] + (int64_t)((double)l->rows * share);
  }
}

static sluice_matrix_t at(const gpu_array_t* a, int64_t row, int64_t columns, int is_turned) {
  void* data = (char*)a->there + row * columns * 2;
  return is_turned ? (sluice_matrix_t){data, 1, columns} : (sluice_matrix_t){data, columns, 1};
}

/* The list as backend/moe/ops makes it: forward_ops.c, backward_ops.c, weight_grad.c. Returns the number of GEMMs.
 * Weight gradients replace the weights, and are one list here where the engine makes two. */
static int64_t make_list(const layer_t* l, const operands_t* o, list_kind_t kind, int64_t count) {
  const int64_t model = l->model, hidden = l->hidden, wide = l->factor * l->hidden;
  int64_t n = 0;
  for (int64_t e = 0; e < count; ++e) {
    const int64_t row = o->first[e], rows = o->first[e + 1] - row;
    const sluice_matrix_t x = at(&o->x, row, model, 0), pre = at(&o->pre, row, wide, 0),
                          act = at(&o->act, row, hidden, 0), y = at(&o->y, row, model, 0);
    switch (kind) {
      case UP: o->list[n++] = (sluice_gemm_problem_t){rows, wide, model, x, at(&o->up, e * wide, model, 1), pre}; break;
      case DOWN:
        o->list[n++] = (sluice_gemm_problem_t){rows, model, hidden, act, at(&o->down, e * model, hidden, 1), y};
        break;
      case DOWN_GRAD:
        o->list[n++] = (sluice_gemm_problem_t){rows, hidden, model, y, at(&o->down, e * model, hidden, 0), act};
        break;
      case UP_GRAD:
        o->list[n++] = (sluice_gemm_problem_t){rows, model, wide, pre, at(&o->up, e * wide, model, 0), x};
        break;
      default:
        o->list[n++] = (sluice_gemm_problem_t){
            model, hidden, rows, at(&o->y, row, model, 1), act, at(&o->down, e * model, hidden, 0)};
        for (int64_t half = 0; half < l->factor; ++half) {
          sluice_matrix_t dm = {(char*)pre.data + half * hidden * 2, 1, wide};
          o->list[n++] =
              (sluice_gemm_problem_t){hidden, model, rows, dm, x, at(&o->up, e * wide + half * hidden, model, 0)};
        }
    }
  }
  return n;
}

static operands_t open_operands(const layer_t* l) {
  const int64_t wide = l->factor * l->hidden;
  operands_t o = {.x = gpu_repeated(SLUICE_DTYPE_BF16, l->rows * l->model),
                  .pre = gpu_repeated(SLUICE_DTYPE_BF16, l->rows * wide),
                  .act = gpu_repeated(SLUICE_DTYPE_BF16, l->rows * l->hidden),
                  .y = gpu_repeated(SLUICE_DTYPE_BF16, l->rows * l->model),
                  .up = gpu_repeated(SLUICE_DTYPE_BF16, l->experts * wide * l->model),
                  .down = gpu_repeated(SLUICE_DTYPE_BF16, l->experts * l->hidden * l->model),
                  .first = calloc((size_t)l->experts + 1, sizeof *o.first),
                  .list = calloc((size_t)l->experts * 3, sizeof *o.list)};
  if (o.first == NULL || o.list == NULL) gpu_die("memory");
  divide_rows(l, o.first);
  return o;
}

static void drop_operands(operands_t* o) {
  gpu_array_t* all[] = {&o->x, &o->pre, &o->act, &o->y, &o->up, &o->down};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; ++i) gpu_drop(all[i]);
  free(o->first), free(o->list);
}

/* ---- ways ------------------------------------------------------------------------------------------------------ */

typedef struct way_s {
  sluice_gemm_t* gemm;
  void* stream;
} way_t;

static way_t open_way(int32_t how, sluice_allocator_t* host) {
  way_t w = {.gemm = gpu_cublas_open(how, host)};
  if (gpu_rig.driver->cuStreamCreateWithPriority(&w.stream, SLUICE_CU_STREAM_NON_BLOCKING, 0) != 0) {
    gpu_die("a stream");
  }
  return w;
}

static void close_way(way_t* w) {
  sluice_gemm_destroy(w->gemm);
  (void)gpu_rig.driver->cuStreamDestroy_v2(w->stream);
}

static void run_list(const way_t* w, const sluice_grouped_gemm_t* list) {
  sluice_grouped_gemm_t call = *list;
  call.stream = w->stream;
  if (sluice_gemm_run(w->gemm, &call) != SLUICE_OK) gpu_die("a GEMM");
}

static double seconds_of_set(const way_t* w, const sluice_grouped_gemm_t* list, int repeats) {
  uint64_t begin = sluice_now_ns();
  for (int i = 0; i < repeats; ++i) run_list(w, list);
  if (gpu_rig.driver->cuStreamSynchronize(w->stream) != 0) gpu_die("a wait");
  return (double)(sluice_now_ns() - begin) * 1e-9 / repeats;
}

/* Seconds of one run of the list, the shortest of several sets of equal length. */
static double seconds_of(const way_t* w, const sluice_grouped_gemm_t* list) {
  (void)seconds_of_set(w, list, 1); /* warms up */
  double best = seconds_of_set(w, list, 1);
  const double wanted = SET_SECONDS / (best > 1e-9 ? best : 1e-9);
  const int repeats = wanted < 1 ? 1 : wanted > MOST_REPEATS ? MOST_REPEATS : (int)wanted;
  for (int set = 0; set < SETS; ++set) {
    double seconds = seconds_of_set(w, list, repeats);
    if (seconds < best) best = seconds;
  }
  return best;
}

/* ---- parts ----------------------------------------------------------------------------------------------------- */

/* Times every way with every list, and reports where another way than the rule's (cublas_choice.h) is faster by 5 %. */
static void choose(const layer_t* l) {
  static const char* const names[NUM_WAYS] = {"", "grouped", "single", "lt", "streams"};
  static const char* const kinds[NUM_LIST_KINDS] = {"up", "down", "gradient of down", "gradient of up",
                                                    "gradients of weights"};
  sluice_allocator_t host;
  sluice_allocator_init(&host, NULL, NULL, NULL);
  operands_t o = open_operands(l);
  for (list_kind_t kind = UP; kind < NUM_LIST_KINDS; ++kind) {
    const int64_t count = make_list(l, &o, kind, l->experts);
    const sluice_grouped_gemm_t call = {o.list, count, SLUICE_DTYPE_BF16, SLUICE_DTYPE_BF16, 0, NULL};
    double times[NUM_WAYS] = {0}, work = 0;
    const int32_t rule = sluice_cublas_choose(&call, sluice_cuda_device_sms(gpu_rig.device));
    int32_t best = rule;
    for (int64_t i = 0; i < count; ++i) work += 2e-12 * (double)o.list[i].m * (double)(o.list[i].n * o.list[i].k);
    for (int32_t how = SLUICE_CUBLAS_GROUPED; how < NUM_WAYS; ++how) {
      way_t way = open_way(how, &host);
      times[how] = seconds_of(&way, &call);
      close_way(&way);
    }
    for (int32_t how = SLUICE_CUBLAS_GROUPED; how < NUM_WAYS; ++how) {
      if (times[how] < 0.95 * times[rule] && times[how] < times[best]) best = how;
    }
    printf(
        "     %s%s, %s, %lld GEMMs [%lld, %lld, %lld]: grouped %.1f us, single %.1f, lt %.1f, streams %.1f; "
        "TFLOP/s %.0f, %.0f, %.0f, %.0f\n",
        l->name, l->is_uneven ? ", uneven" : "", kinds[kind], (long long)count, (long long)o.list->m,
        (long long)o.list->n, (long long)o.list->k, times[1] * 1e6, times[2] * 1e6, times[3] * 1e6, times[4] * 1e6,
        work / times[1], work / times[2], work / times[3], work / times[4]);
    if (best != rule) printf("     the rule takes %s, and %s is faster\n", names[rule], names[best]);
    fflush(stdout); /* keeps the lines if a deadline ends the program */
  }
  drop_operands(&o);
  gpu_report("cublas leaves nothing", host.num_live == 0 ? NULL : "blocks left");
  sluice_allocator_deinit(&host);
}

/* Whole models on one GPU with uneven rows; then one rank of eight, balanced, rows of one and of four chunks. */
void gpu_part_choice(void) {
  static const layer_t layers[] = {{"qwen3", 128, 131072, 2048, 768, 2, 1},
                                   {"mixtral", 8, 32768, 4096, 14336, 2, 1},
                                   {"deepseek", 256, 131072, 7168, 2048, 2, 1},
                                   {"gpt3-xl", 64, 16384, 2048, 8192, 1, 1},
                                   {"qwen3, one rank of 8", 16, 131072, 2048, 768, 2, 0},
                                   {"qwen3, one rank of 8, a chunk of 4", 16, 32768, 2048, 768, 2, 0},
                                   {"mixtral, one rank of 8", 1, 32768, 4096, 14336, 2, 0},
                                   {"mixtral, one rank of 8, a chunk of 4", 1, 8192, 4096, 14336, 2, 0},
                                   {"deepseek, one rank of 8", 32, 131072, 7168, 2048, 2, 0},
                                   {"deepseek, one rank of 8, a chunk of 4", 32, 32768, 7168, 2048, 2, 0}};
  static const layer_t tiny[] = {{"tiny", 3, 40, 6, 8, 2, 1}, {"tiny", 2, 8, 6, 8, 1, 0}}; /* shows that it runs */
  const size_t count = GPU_IS_FAKE ? sizeof tiny / sizeof tiny[0] : sizeof layers / sizeof layers[0];
  for (size_t i = 0; i < count; ++i) choose(GPU_IS_FAKE ? &tiny[i] : &layers[i]);
}

/* Experts of Qwen3's up projection on one rank of eight: all as one grouped call, or only the first. */
static void profile(const char* name, int32_t how, int64_t experts) {
  const layer_t layer =
      GPU_IS_FAKE ? (layer_t){"tiny", 3, 40, 6, 8, 2, 0} : (layer_t){"qwen3", 16, 131072, 2048, 768, 2, 0};
  sluice_allocator_t host;
  sluice_allocator_init(&host, NULL, NULL, NULL);
  operands_t o = open_operands(&layer);
  const int64_t count = make_list(&layer, &o, UP, experts < layer.experts ? experts : layer.experts);
  const sluice_grouped_gemm_t call = {o.list, count, SLUICE_DTYPE_BF16, SLUICE_DTYPE_BF16, 0, NULL};
  way_t way = open_way(how, &host);
  (void)seconds_of_set(&way, &call, 1);
  close_way(&way);
  drop_operands(&o);
  gpu_report(name, host.num_live == 0 ? NULL : "blocks left");
  sluice_allocator_deinit(&host);
}

void gpu_part_profile_grouped(void) { profile("profile of a grouped GEMM", SLUICE_CUBLAS_GROUPED, 16); }
void gpu_part_profile_single(void) { profile("profile of a single GEMM", SLUICE_CUBLAS_SINGLE, 1); }
