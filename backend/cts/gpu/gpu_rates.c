// SPDX-License-Identifier: Apache-2.0
/* Rates of the row kernels and the routing at the benchmarks' shapes, and of a copy on the device: to look at first
 * when a layer is slower than its GEMMs. Activations run over the rows of all experts at once, as in the engine. */
#include <math.h>
#include <stdio.h>

#include "backend/base/clock.h"
#include "backend/base/dtype.h"
#include "backend/cts/gpu/gpu_array.h"
#include "backend/cts/gpu/gpu_parts.h"
#include "backend/cts/gpu/gpu_rig.h"
#include "backend/device/cuda/cuda_memory.h"
#include "backend/device/cuda/cuda_routing.h"

enum { SETS = 4, REPEATS = 10, DTYPE = SLUICE_DTYPE_BF16 };
enum { COPY, GATHER, COMBINE, FORWARD, BACKWARD, ROUTE, NUM_KINDS };

typedef struct shape_s {
  const char* name;
  int64_t tokens, width, hidden, experts, top_k;
  int32_t gated;
} shape_t;

typedef struct rates_s {
  shape_t s;
  int64_t rows, columns; /* of pre-activations: H, or 2 H */
  gpu_array_t rows_of_tokens, tokens, pre, dpre, act, dact, weight, dweight;
  gpu_array_t index, position, ids, counts, offsets, token_of, scratch;
} rates_t;

/* The output of a router over `limit` entries: neighbours are far from each other. */
static gpu_array_t scattered(int64_t count, int64_t limit) {
  gpu_array_t a = gpu_array(count * 4);
  for (int64_t i = 0; i < count; ++i) ((int32_t*)a.host)[i] = (int32_t)((uint64_t)i * 2654435761u % (uint64_t)limit);
  gpu_send(&a);
  return a;
}

static rates_t open_rates(const shape_t* s) {
  const int64_t rows = s->tokens * s->top_k, columns = s->hidden * (s->gated ? 2 : 1);
  return (rates_t){.s = *s,
                   .rows = rows,
                   .columns = columns,
                   .rows_of_tokens = gpu_repeated(DTYPE, rows * s->width),
                   .tokens = gpu_repeated(DTYPE, s->tokens * s->width),
                   .pre = gpu_repeated(DTYPE, rows * columns),
                   .dpre = gpu_repeated(DTYPE, rows * columns),
                   .act = gpu_repeated(DTYPE, rows * s->hidden),
                   .dact = gpu_repeated(DTYPE, rows * s->hidden),
                   .weight = gpu_repeated(SLUICE_DTYPE_F32, rows),
                   .dweight = gpu_repeated(SLUICE_DTYPE_F32, rows),
                   .index = scattered(rows, s->tokens),
                   .position = scattered(rows, rows),
                   .ids = scattered(rows, s->experts),
                   .counts = gpu_zeros(s->experts * 4),
                   .offsets = gpu_zeros((s->experts + 1) * 4),
                   .token_of = gpu_zeros(rows * 4),
                   .scratch = gpu_zeros((int64_t)sluice_cuda_route_scratch_bytes(rows, s->experts))};
}

static void drop_rates(rates_t* r) {
  gpu_array_t* all[] = {&r->rows_of_tokens, &r->tokens,   &r->pre,    &r->dpre,     &r->act, &r->dact,
                        &r->weight,         &r->dweight,  &r->index,  &r->position, &r->ids, &r->counts,
                        &r->offsets,        &r->token_of, &r->scratch};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; ++i) gpu_drop(all[i]);
}

static void wait_for_all(void) {
  if (gpu_rig.driver->cuStreamSynchronize(NULL) != 0) gpu_die("a wait");
}

static void launch(const rates_t* r, int kind) {
  const shape_t* s = &r->s;
  const sluice_kernels_t* k = gpu_rig.device->kernels;
  const sluice_unit_t unit = {SLUICE_ACTIVATION_SILU, s->gated, 1, 1, 0};
  switch (kind) {
    case COPY:
      (void)sluice_cuda_copy(gpu_rig.device, NULL, r->dpre.there, r->pre.there, (uint64_t)(r->rows * r->columns) * 2);
      break;
    case GATHER:
      k->gather_rows(NULL, DTYPE, r->rows, s->width, r->tokens.there, s->width, r->index.there,
                     r->rows_of_tokens.there);
      break;
    case COMBINE:
      k->combine_rows(NULL, DTYPE, s->tokens, s->top_k, s->width, r->rows_of_tokens.there, r->position.there,
                      r->weight.there, s->top_k, 1, r->tokens.there, s->width);
      break;
    case FORWARD:
      k->unit_forward(NULL, DTYPE, &unit, r->rows, s->hidden, r->pre.there, NULL, NULL, r->act.there);
      break;
    case BACKWARD:
      k->unit_backward(NULL, DTYPE, &unit, r->rows, s->hidden, r->pre.there, r->dact.there, r->weight.there,
                       r->dpre.there, r->act.there, r->dweight.there);
      break;
    default:
      sluice_cuda_route(NULL, &(sluice_route_args_t){.ids = r->ids.there,
                                                     .tile_counts = r->scratch.there,
                                                     .counts = r->counts.there,
                                                     .offsets = r->offsets.there,
                                                     .token_of = r->token_of.there,
                                                     .position = r->position.there,
                                                     .num_routes = r->rows,
                                                     .top_k = s->top_k,
                                                     .num_experts = s->experts,
                                                     .ids_t = s->top_k,
                                                     .ids_k = 1});
  }
}

/* The least that a kernel must read and write. */
static double bytes_of(const rates_t* r, int kind) {
  const double rows = (double)r->rows, width = (double)r->s.width, hidden = (double)r->s.hidden;
  const double columns = (double)r->columns;
  switch (kind) {
    case COPY: return 4 * rows * columns;
    case GATHER: return 4 * rows * width;
    case COMBINE: return 2 * (rows + (double)r->s.tokens) * width;
    case FORWARD: return 2 * rows * (columns + hidden);
    case BACKWARD: return 2 * rows * 2 * (columns + hidden);
    default: return 0;
  }
}

/* Seconds for all rows, the minimum of several sets; the first loads the kernel. */
static double seconds_of(const rates_t* r, int kind) {
  double best = INFINITY;
  for (int set = 0; set < SETS; ++set) {
    uint64_t begin_ns = sluice_now_ns();
    for (int i = 0; i < REPEATS; ++i) launch(r, kind);
    wait_for_all();
    double seconds = (double)(sluice_now_ns() - begin_ns) * 1e-9 / REPEATS;
    if (set > 0 && seconds < best) best = seconds;
  }
  return best;
}

static void run_shape(const shape_t* shape) {
  static const char* const names[NUM_KINDS] = {"copy on the device", "gather_rows",   "combine_rows",
                                               "unit_forward",       "unit_backward", "routing, four kernels"};
  rates_t r = open_rates(shape);
  for (int kind = 0; kind < NUM_KINDS; ++kind) {
    double seconds = seconds_of(&r, kind), bytes = bytes_of(&r, kind);
    printf("     %s: %s %.4f ms", shape->name, names[kind], seconds * 1e3);
    if (bytes > 0) printf(", %.0f GB/s", bytes / seconds * 1e-9);
    printf("\n");
  }
  drop_rates(&r);
}

enum { GPT3_XL, MIXTRAL, QWEN3, DEEPSEEK, NUM_SHAPES };
static const shape_t shapes[NUM_SHAPES] = {[GPT3_XL] = {"gpt3-xl", 16384, 2048, 8192, 64, 1, 0},
                                           [MIXTRAL] = {"mixtral", 16384, 4096, 14336, 8, 2, 1},
                                           [QWEN3] = {"qwen3", 16384, 2048, 768, 128, 8, 1},
                                           [DEEPSEEK] = {"deepseek", 16384, 7168, 2048, 256, 8, 1}};
static const shape_t tiny = {"tiny", 16, 8, 16, 4, 2, 1};

void gpu_part_rates(void) {
  for (int i = 0; i < (GPU_IS_FAKE ? 1 : NUM_SHAPES); ++i) run_shape(GPU_IS_FAKE ? &tiny : &shapes[i]);
  gpu_report("rates", NULL);
}

void gpu_part_profile_kernels(void) {
  rates_t r = open_rates(GPU_IS_FAKE ? &tiny : &shapes[QWEN3]);
  launch(&r, BACKWARD);
  launch(&r, COMBINE);
  wait_for_all();
  drop_rates(&r);
  gpu_report("profile of unit_backward and combine_rows", NULL);
}
