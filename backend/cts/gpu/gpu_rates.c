// SPDX-License-Identifier: Apache-2.0
/* Rates of the row kernels and the routing at the benchmarks' shapes, and of a copy on the device: to look at first
 * when a layer is slower than its GEMMs. Activations run over the rows of all experts at once, as in the engine. */
#include <stdio.h>
#include <stdlib.h>

#include "backend/base/clock.h"
#include "backend/base/dtype.h"
#include "backend/cts/gpu/gpu_parts.h"
#include "backend/cts/gpu/gpu_rig.h"
#include "backend/device/cuda/cuda_memory.h"
#include "backend/device/cuda/cuda_routing.h"

enum { SETS = 4, REPEATS = 10, MOST_BLOCKS = 16, DTYPE = SLUICE_DTYPE_BF16 };
enum { COPY, GATHER, COMBINE, FORWARD, BACKWARD, ROUTE, NUM_KINDS };

typedef struct shape_s {
  const char* name;
  int64_t tokens, width, hidden, experts, top_k;
  int32_t gated;
} shape_t;

typedef struct rates_s {
  sluice_device_t* device;
  sluice_allocator_t* memory;
  const sluice_cuda_driver_t* driver;
  shape_t s;
  int64_t rows, columns; /* of pre-activations: H, or 2 H */
  void *rows_of_tokens, *tokens, *pre, *dpre, *act, *dact;
  int32_t *index, *position, *ids, *counts, *offsets, *token_of, *scratch;
  float *weight, *dweight;
  struct {
    void* data;
    uint64_t bytes;
  } blocks[MOST_BLOCKS];
  int num_blocks;
} rates_t;

/* Small finite numbers in every dtype. NULL: no memory. */
static void* take(rates_t* r, int64_t bytes) {
  void* data = sluice_alloc(r->memory, (uint64_t)bytes, "arrays of the rates");
  if (data == NULL) return NULL;
  r->blocks[r->num_blocks].data = data;
  r->blocks[r->num_blocks++].bytes = (uint64_t)bytes;
  int code = r->driver->cuMemsetD8Async((unsigned long long)(uintptr_t)data, 0x3c, (size_t)bytes, NULL);
  return code == 0 ? data : NULL;
}

/* The output of a router over `limit` entries: neighbours are far from each other. */
static int32_t* take_scattered(rates_t* r, int64_t count, int64_t limit) {
  int32_t *there = take(r, count * 4), *here = malloc((size_t)count * sizeof *here);
  for (int64_t i = 0; i < count && here != NULL; ++i) here[i] = (int32_t)((uint64_t)i * 2654435761u % (uint64_t)limit);
  int is_sent = there != NULL && here != NULL &&
                sluice_cuda_copy(r->device, NULL, there, here, (uint64_t)count * 4) == SLUICE_OK &&
                r->driver->cuStreamSynchronize(NULL) == 0;
  free(here);
  return is_sent ? there : NULL;
}

static int take_all(rates_t* r) {
  const shape_t* s = &r->s;
  r->rows_of_tokens = take(r, r->rows * s->width * 2);
  r->tokens = take(r, s->tokens * s->width * 2);
  r->pre = take(r, r->rows * r->columns * 2);
  r->dpre = take(r, r->rows * r->columns * 2);
  r->act = take(r, r->rows * s->hidden * 2);
  r->dact = take(r, r->rows * s->hidden * 2);
  r->weight = take(r, r->rows * 4);
  r->dweight = take(r, r->rows * 4);
  r->index = take_scattered(r, r->rows, s->tokens);
  r->position = take_scattered(r, r->rows, r->rows);
  r->ids = take_scattered(r, r->rows, s->experts);
  r->counts = take(r, s->experts * 4);
  r->offsets = take(r, (s->experts + 1) * 4);
  r->token_of = take(r, r->rows * 4);
  r->scratch = take(r, (int64_t)sluice_cuda_route_scratch_bytes(r->rows, s->experts));
  return r->scratch != NULL && r->num_blocks == 15 && r->index != NULL && r->position != NULL && r->ids != NULL;
}

static void drop_all(rates_t* r) {
  (void)r->driver->cuStreamSynchronize(NULL);
  while (r->num_blocks > 0) {
    --r->num_blocks;
    sluice_free(r->memory, r->blocks[r->num_blocks].data, r->blocks[r->num_blocks].bytes);
  }
}

static void launch(rates_t* r, int kind) {
  const shape_t* s = &r->s;
  const sluice_kernels_t* k = r->device->kernels;
  const sluice_unit_t unit = {SLUICE_ACTIVATION_SILU, s->gated, 1, 1, 0};
  switch (kind) {
    case COPY: (void)sluice_cuda_copy(r->device, NULL, r->dpre, r->pre, (uint64_t)(r->rows * r->columns) * 2); break;
    case GATHER:
      k->gather_rows(NULL, DTYPE, r->rows, s->width, r->tokens, s->width, r->index, r->rows_of_tokens);
      break;
    case COMBINE:
      k->combine_rows(NULL, DTYPE, s->tokens, s->top_k, s->width, r->rows_of_tokens, r->position, r->weight, s->top_k,
                      1, r->tokens, s->width);
      break;
    case FORWARD: k->unit_forward(NULL, DTYPE, &unit, r->rows, s->hidden, r->pre, NULL, NULL, r->act); break;
    case BACKWARD:
      k->unit_backward(NULL, DTYPE, &unit, r->rows, s->hidden, r->pre, r->dact, r->weight, r->dpre, r->act, r->dweight);
      break;
    default:
      sluice_cuda_route(NULL, &(sluice_route_args_t){.ids = r->ids,
                                                     .tile_counts = r->scratch,
                                                     .counts = r->counts,
                                                     .offsets = r->offsets,
                                                     .token_of = r->token_of,
                                                     .position = r->position,
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

/* Seconds for all rows, the minimum of several sets; the first loads the kernel. Negative: the driver failed. */
static double seconds_of(rates_t* r, int kind) {
  double best = -1;
  for (int set = 0; set < SETS; ++set) {
    uint64_t begin_ns = sluice_now_ns();
    for (int i = 0; i < REPEATS; ++i) launch(r, kind);
    if (r->driver->cuStreamSynchronize(NULL) != 0) return -1;
    double seconds = (double)(sluice_now_ns() - begin_ns) * 1e-9 / REPEATS;
    if (set > 0 && (best < 0 || seconds < best)) best = seconds;
  }
  return best;
}

static const char* const names[NUM_KINDS] = {"copy on the device", "gather_rows",   "combine_rows",
                                             "unit_forward",       "unit_backward", "routing, four kernels"};

static const char* run_shape(rates_t* r) {
  if (!take_all(r)) return "memory";
  for (int kind = 0; kind < NUM_KINDS; ++kind) {
    double seconds = seconds_of(r, kind), bytes = bytes_of(r, kind);
    if (seconds < 0) return names[kind];
    if (bytes > 0) {
      printf("     %s: %s %.4f ms, %.0f GB/s\n", r->s.name, names[kind], seconds * 1e3, bytes / seconds * 1e-9);
    } else {
      printf("     %s: %s %.4f ms\n", r->s.name, names[kind], seconds * 1e3);
    }
  }
  return NULL;
}

static rates_t rates_of(const shape_t* shape) {
  rates_t r = {.device = gpu_rig.device, .memory = &gpu_rig.memory, .driver = gpu_rig.driver, .s = *shape};
  r.rows = shape->tokens * shape->top_k;
  r.columns = shape->hidden * (shape->gated ? 2 : 1);
  return r;
}

enum { GPT3_XL, MIXTRAL, QWEN3, DEEPSEEK, NUM_SHAPES };
static const shape_t shapes[NUM_SHAPES] = {[GPT3_XL] = {"gpt3-xl", 16384, 2048, 8192, 64, 1, 0},
                                           [MIXTRAL] = {"mixtral", 16384, 4096, 14336, 8, 2, 1},
                                           [QWEN3] = {"qwen3", 16384, 2048, 768, 128, 8, 1},
                                           [DEEPSEEK] = {"deepseek", 16384, 7168, 2048, 256, 8, 1}};
static const shape_t tiny = {"tiny", 16, 8, 16, 4, 2, 1};

void gpu_part_rates(void) {
  const char* problem = NULL;
  for (int i = 0; i < (GPU_IS_FAKE ? 1 : NUM_SHAPES) && problem == NULL; ++i) {
    rates_t r = rates_of(GPU_IS_FAKE ? &tiny : &shapes[i]);
    problem = run_shape(&r);
    drop_all(&r);
  }
  gpu_report("rates", problem);
}

void gpu_part_profile_kernels(void) {
  rates_t r = rates_of(GPU_IS_FAKE ? &tiny : &shapes[QWEN3]);
  const char* problem = take_all(&r) ? NULL : "memory";
  if (problem == NULL) {
    launch(&r, BACKWARD);
    launch(&r, COMBINE);
    problem = gpu_rig.driver->cuStreamSynchronize(NULL) == 0 ? NULL : "a wait";
  }
  drop_all(&r);
  gpu_report("profile of unit_backward and combine_rows", problem);
}
