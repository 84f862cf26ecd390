// SPDX-License-Identifier: Apache-2.0
/* Runs passes of a small layer on the machine of a context, for passes_fit.h: on its own lanes, GEMMs and communicator,
 * but in a separate context, so that the layer leaves no state and counts towards no budget. On a device whose pools
 * belong to one context it uses that context, without a budget, and restores its statistics and trace; under a trace
 * each pass waits until the device has finished and reported its times. */
#include <string.h>

#include "backend/base/clock.h"
#include "backend/calibrate/passes_fit.h"
#include "backend/calibrate/probe.h"
#include "backend/moe/context/row_memory.h"
#include "backend/moe/layer/layer_life.h"
#include "backend/moe/run/run.h"

#define TOKENS        SLUICE_PASSES_FULL
#define EXPERTS       2                    /* per rank: chunks are cut out of rows as in any layer with several */
#define LAYERS        16                   /* one per n */
#define MOST_OF_THEIR ((uint64_t)96 << 20) /* bytes of weights and gradients; wider layers use the bench's */

typedef struct routes_s {
  int64_t ids[TOKENS];
  float weights[TOKENS], grads[TOKENS];
} routes_t;

typedef struct scene_s {
  sluice_bench_t* bench;
  sluice_context_t* context;
  sluice_moe_t* layers[LAYERS];
  routes_t* routes;
  char *out, *grads;      /* [TOKENS, M] */
  char* own;              /* weights and gradients of the two matrices of each expert; NULL: all use the bench's */
  uint64_t matrix, bytes; /* of one matrix, and of all */
  sluice_context_stats_t stats; /* saved state of a context on a device */
  sluice_trace_t trace;
  sluice_trace_event_t event;
} scene_t;

static sluice_tensor_t tensor(const scene_t* s, void* data, int32_t dtype, int64_t* shape) {
  const sluice_context_t* c = s->bench->context;
  const uint8_t code = dtype == SLUICE_DTYPE_BF16 ? SLUICE_TYPE_BFLOAT : SLUICE_TYPE_FLOAT;
  return (sluice_tensor_t){data, c->device_type, c->device_id, 2, code, dtype == SLUICE_DTYPE_F32 ? 32 : 16,
                           1,    shape,          NULL,         0};
}

static sluice_status_t layer_of(scene_t* s, int32_t num_chunks, sluice_moe_t** out_moe) {
  if (num_chunks >= LAYERS) return SLUICE_FAIL(SLUICE_E_INTERNAL, "calibration: no layer of %d chunks", num_chunks);
  if (s->layers[num_chunks] == NULL) {
    const sluice_moe_config_t config = {
        .struct_size = sizeof config,
        .model_width = s->bench->model_width,
        .hidden_width = s->bench->hidden_width,
        .num_experts = EXPERTS * s->context->world_size,
        .top_k = 1,
        .dtype = s->bench->dtype,
        .activation = SLUICE_ACTIVATION_GELU,
        .num_chunks = num_chunks,
        .wgrad_mode = SLUICE_WGRAD_DEFERRED,
        .restore_input = SLUICE_RESTORE_ADAPTIVE,
        .restore_pre_activation = SLUICE_RESTORE_ADAPTIVE,
    };
    SLUICE_TRY(sluice_layer_create(s->context, &config, NULL, &s->layers[num_chunks]));
  }
  *out_moe = s->layers[num_chunks];
  return SLUICE_OK;
}

/* Address of a matrix of an expert, or of its gradient. */
static char* matrix_of(const scene_t* s, int32_t expert, int32_t which, int is_grad) {
  if (s->own == NULL) return is_grad ? s->bench->grads : s->bench->weights;
  return s->own + (uint64_t)(4 * expert + 2 * is_grad + which) * s->matrix;
}

static sluice_status_t run_step(scene_t* s, sluice_moe_t* moe, int64_t num_tokens, double out_seconds[2],
                                double out_compute[2]) {
  const sluice_bench_t* b = s->bench;
  const sluice_context_stats_t* stats = &s->context->stats;
  int64_t rows[] = {num_tokens, b->model_width}, routes[] = {num_tokens, 1};
  int64_t w1[] = {b->hidden_width, b->model_width}, w2[] = {b->model_width, b->hidden_width};
  const sluice_tensor_t tokens = tensor(s, b->rows, b->dtype, rows), out = tensor(s, s->out, b->dtype, rows);
  const sluice_tensor_t grad = tensor(s, s->grads, b->dtype, rows);
  const sluice_tensor_t weights = tensor(s, s->routes->weights, SLUICE_DTYPE_F32, routes);
  const sluice_tensor_t grad_weights = tensor(s, s->routes->grads, SLUICE_DTYPE_F32, routes);
  sluice_tensor_t ids = weights;
  ids.data = s->routes->ids, ids.type_code = SLUICE_TYPE_INT, ids.type_bits = 64;
  sluice_tensor_t first[EXPERTS], second[EXPERTS], first_grad[EXPERTS], second_grad[EXPERTS];
  for (int32_t e = 0; e < EXPERTS; ++e) {
    first[e] = tensor(s, matrix_of(s, e, 0, 0), b->dtype, w1);
    second[e] = tensor(s, matrix_of(s, e, 1, 0), b->dtype, w2);
    first_grad[e] = tensor(s, matrix_of(s, e, 0, 1), b->dtype, w1);
    second_grad[e] = tensor(s, matrix_of(s, e, 1, 1), b->dtype, w2);
  }
  const sluice_expert_tensors_t params = {.struct_size = sizeof params, .w1 = first, .w2 = second};
  const sluice_expert_tensors_t grads = {.struct_size = sizeof grads, .w1 = first_grad, .w2 = second_grad};
  const sluice_moe_forward_args_t forward = {.struct_size = sizeof forward,
                                             .tokens = &tokens,
                                             .expert_ids = &ids,
                                             .route_weights = &weights,
                                             .params = &params,
                                             .out_tokens = &out,
                                             .needs_backward = 1};
  const sluice_moe_backward_args_t backward = {.struct_size = sizeof backward,
                                               .tokens = &tokens,
                                               .route_weights = &weights,
                                               .params = &params,
                                               .grad_out = &out,
                                               .grad_tokens = &grad,
                                               .grad_route_weights = &grad_weights,
                                               .grad_params = &grads,
                                               .grad_mode = SLUICE_GRAD_OVERWRITE,
                                               .parts = SLUICE_BACKWARD_BOTH,
                                               .may_reuse_saved = 1};
  sluice_step_t* step = NULL;
  uint64_t began = sluice_now_ns(), compute = stats->compute_ns;
  SLUICE_TRY(sluice_run_forward(moe, &forward, NULL, SLUICE_OK, &step));
  uint64_t between = sluice_now_ns(), forward_compute = stats->compute_ns;
  sluice_status_t status = sluice_run_backward(moe, step, &backward, NULL, SLUICE_OK);
  uint64_t ended = sluice_now_ns();
  sluice_step_drop(step);
  out_seconds[SLUICE_FORWARD] = (double)(between - began) * 1e-9;
  out_seconds[SLUICE_BACKWARD] = (double)(ended - between) * 1e-9;
  out_compute[SLUICE_FORWARD] = (double)(forward_compute - compute) * 1e-9;
  out_compute[SLUICE_BACKWARD] = (double)(stats->compute_ns - forward_compute) * 1e-9;
  return status;
}

static sluice_status_t sample(void* user, int64_t num_tokens, int32_t num_chunks, double out_seconds[2],
                              double out_compute[2]) {
  scene_t* s = user;
  sluice_moe_t* moe = NULL;
  SLUICE_TRY(layer_of(s, num_chunks, &moe));
  double barrier = 0;
  SLUICE_TRY(sluice_bench_longest(s->bench, &barrier, 1));
  return run_step(s, moe, num_tokens, out_seconds, out_compute);
}

static sluice_status_t longest(void* user, double* seconds, int32_t count) {
  const scene_t* s = user;
  return sluice_bench_longest(s->bench, seconds, count);
}

static int on_device_memory(const scene_t* s) { return sluice_bench_on_device_memory(s->bench); }

static void* take(scene_t* s, uint64_t bytes) {
  return sluice_alloc(on_device_memory(s) ? &s->bench->device_memory : sluice_process_allocator(), bytes,
                      "calibration");
}
static void give(scene_t* s, void* data, uint64_t bytes) {
  sluice_free(on_device_memory(s) ? &s->bench->device_memory : sluice_process_allocator(), data, bytes);
}

/* Small finite numbers, as in the bench. */
static sluice_status_t fill(const scene_t* s, void* data, uint64_t bytes) {
  sluice_context_t* context = s->bench->context;
  return context->rows->fill(context, NULL, data, 0x3c, bytes);
}

static uint64_t rows_bytes(const scene_t* s) { return TOKENS * (uint64_t)s->bench->model_width * s->bench->element; }

static sluice_status_t open_memory(scene_t* s) {
  const sluice_bench_t* b = s->bench;
  s->routes = take(s, sizeof *s->routes);
  s->out = take(s, rows_bytes(s));
  s->grads = take(s, rows_bytes(s));
  if (s->routes == NULL || s->out == NULL || s->grads == NULL) return sluice_alloc_status();
  SLUICE_TRY(fill(s, s->out, rows_bytes(s)));
  SLUICE_TRY(fill(s, s->grads, rows_bytes(s)));
  s->matrix = sluice_align_up((uint64_t)(b->model_width * b->hidden_width) * b->element);
  s->bytes = 4 * EXPERTS * s->matrix;
  if (s->bytes > MOST_OF_THEIR) return SLUICE_OK;
  s->own = take(s, s->bytes);
  return s->own != NULL ? fill(s, s->own, s->bytes) : sluice_alloc_status();
}

static sluice_status_t open_routes(const scene_t* s) {
  const sluice_bench_t* b = s->bench;
  sluice_context_t* context = b->context;
  routes_t* here = on_device_memory(s) ? (routes_t*)(void*)b->copied : s->routes;
  float word = 0;
  memset(here, 0, sizeof *here);
  for (int32_t t = 0; t < TOKENS; ++t) {
    here->ids[t] = t % (EXPERTS * b->context->world_size);
    here->weights[t] = 0.5f;
  }
  if (!on_device_memory(s)) return SLUICE_OK;
  SLUICE_TRY(context->rows->copy(context, NULL, s->routes, here, sizeof *here));
  /* waits for the copy, since the block is used again next */
  return context->rows->read(context, NULL, s->routes->weights, &word, sizeof word);
}

static sluice_status_t open_scene(scene_t* s) {
  sluice_context_t* below = s->bench->context;
  if (on_device_memory(s)) {
    s->context = below;
    s->stats = below->stats, s->trace = below->trace;
    below->trace = (sluice_trace_t){.events = &s->event, .capacity = 1};
  } else {
    SLUICE_TRY(sluice_engine_create(below->comm, NULL, NULL, NULL, &s->context));
    s->context->device = below->device; /* borrowed: see close_scene */
    s->context->gemm = below->gemm;
  }
  SLUICE_TRY(open_memory(s));
  return open_routes(s);
}

static void close_scene(scene_t* s) {
  for (int32_t n = 0; n < LAYERS; ++n) sluice_layer_release(s->layers[n]);
  give(s, s->routes, sizeof *s->routes);
  give(s, s->out, rows_bytes(s));
  give(s, s->grads, rows_bytes(s));
  give(s, s->own, s->own != NULL ? s->bytes : 0);
  if (s->context == NULL) return;
  if (on_device_memory(s)) {
    s->context->stats = s->stats, s->context->trace = s->trace;
    return;
  }
  s->context->device = NULL;
  s->context->gemm = NULL;
  sluice_engine_release(s->context);
}

/* Whether to skip the passes: they must not allocate memory that a plan counts, or grow slots that a graph replays. */
static int is_elsewhere(const sluice_bench_t* b) {
  const sluice_context_t* c = b->context;
  return sluice_bench_on_device_memory(b) &&
         (c->memory_budget > 0 || c->host_memory_budget > 0 || c->pass_memory.slots.is_fixed);
}

sluice_status_t sluice_bench_passes(sluice_bench_t* b, double seconds, sluice_machine_t* machine) {
  scene_t s;
  if (is_elsewhere(b)) return SLUICE_OK;
  memset(&s, 0, sizeof s);
  s.bench = b;
  sluice_status_t status = open_scene(&s);
  if (status == SLUICE_OK) {
    const sluice_passes_source_t source = {.sample = sample,
                                           .longest = longest,
                                           .user = &s,
                                           .work = {.model_width = b->model_width,
                                                    .hidden_width = b->hidden_width,
                                                    .num_experts = EXPERTS * b->context->world_size,
                                                    .top_k = 1,
                                                    .gate_factor = 1,
                                                    .dtype = b->dtype,
                                                    .world_size = b->context->world_size,
                                                    .skew = 1,
                                                    .activation = SLUICE_ACTIVATION_GELU}};
    status = sluice_passes_fit(&source, seconds, machine);
  }
  close_scene(&s);
  return status;
}
