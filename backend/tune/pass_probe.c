/* Passes of a small layer on the machine below a context, for passes.h: on its own lanes, products and communicator,
 * but in a context of its own, so that the layer leaves nothing behind and counts towards no budget. */
#include <string.h>

#include "backend/base/clock.h"
#include "backend/base/tensor.h"
#include "backend/moe/run.h"
#include "backend/tune/passes.h"
#include "backend/tune/probe.h"

#define TOKENS        SLUICE_PASSES_MANY
#define EXPERTS       2                    /* of a rank: chunks are cut out of rows as in any layer of several */
#define LAYERS        16                   /* one for each n that is asked for */
#define MOST_OF_THEIR ((uint64_t)96 << 20) /* bytes of weights and gradients; wider layers share the bench's */

typedef struct scene_s {
  sluice_bench_t* bench;
  sluice_context_t* context;
  sluice_moe_t* layers[LAYERS];
  int64_t ids[TOKENS];
  float weights[TOKENS], grad_weights[TOKENS];
  char *out, *grads;      /* [TOKENS, M] */
  char* own;              /* weights and gradients of each expert's two matrices; NULL: the bench's for all */
  uint64_t matrix, bytes; /* of one, and of all */
} scene_t;

static sluice_tensor_t tensor(void* data, int32_t dtype, int64_t* shape) {
  const uint8_t code = dtype == SLUICE_DTYPE_BF16 ? SLUICE_TYPE_BFLOAT : SLUICE_TYPE_FLOAT;
  return (sluice_tensor_t){data, SLUICE_DEVICE_CPU, 0, 2, code, dtype == SLUICE_DTYPE_F32 ? 32 : 16, 1, shape, NULL, 0};
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
        .restore_middle = SLUICE_RESTORE_ADAPTIVE,
    };
    SLUICE_TRY(sluice_layer_create(s->context, &config, NULL, &s->layers[num_chunks]));
  }
  *out_moe = s->layers[num_chunks];
  return SLUICE_OK;
}

/* Where a matrix of an expert lies, or its gradient. */
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
  const sluice_tensor_t tokens = tensor(b->rows, b->dtype, rows), out = tensor(s->out, b->dtype, rows);
  const sluice_tensor_t grad = tensor(s->grads, b->dtype, rows), weights = tensor(s->weights, SLUICE_DTYPE_F32, routes);
  const sluice_tensor_t grad_weights = tensor(s->grad_weights, SLUICE_DTYPE_F32, routes);
  sluice_tensor_t ids = weights;
  ids.data = s->ids, ids.type_code = SLUICE_TYPE_INT, ids.type_bits = 64;
  sluice_tensor_t first[EXPERTS], second[EXPERTS], first_grad[EXPERTS], second_grad[EXPERTS];
  for (int32_t e = 0; e < EXPERTS; ++e) {
    first[e] = tensor(matrix_of(s, e, 0, 0), b->dtype, w1), second[e] = tensor(matrix_of(s, e, 1, 0), b->dtype, w2);
    first_grad[e] = tensor(matrix_of(s, e, 0, 1), b->dtype, w1);
    second_grad[e] = tensor(matrix_of(s, e, 1, 1), b->dtype, w2);
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
                                               .halves = SLUICE_HALF_BOTH,
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

static sluice_status_t open_scene(scene_t* s) {
  sluice_bench_t* b = s->bench;
  SLUICE_TRY(sluice_engine_create(b->context->comm, NULL, NULL, NULL, &s->context));
  s->context->device = b->context->device; /* borrowed: see close_scene */
  s->context->gemm = b->context->gemm;
  const uint64_t bytes = TOKENS * (uint64_t)b->model_width * b->element;
  s->out = sluice_alloc_zeroed(sluice_process_allocator(), bytes, "calibration");
  s->grads = sluice_alloc_zeroed(sluice_process_allocator(), bytes, "calibration");
  if (s->out == NULL || s->grads == NULL) return SLUICE_E_NO_MEMORY;
  s->matrix = sluice_align_up((uint64_t)(b->model_width * b->hidden_width) * b->element);
  s->bytes = 4 * EXPERTS * s->matrix;
  if (s->bytes <= MOST_OF_THEIR) {
    s->own = sluice_alloc(sluice_process_allocator(), s->bytes, "calibration");
    if (s->own == NULL) return SLUICE_E_NO_MEMORY;
    memset(s->own, 0x3c, s->bytes); /* small finite numbers, as the bench's */
  }
  for (int32_t t = 0; t < TOKENS; ++t) {
    s->ids[t] = t % (EXPERTS * s->context->world_size);
    s->weights[t] = 0.5f;
  }
  return SLUICE_OK;
}

static void close_scene(scene_t* s) {
  const uint64_t bytes = TOKENS * (uint64_t)s->bench->model_width * s->bench->element;
  for (int32_t n = 0; n < LAYERS; ++n) sluice_layer_release(s->layers[n]);
  sluice_free(sluice_process_allocator(), s->out, bytes);
  sluice_free(sluice_process_allocator(), s->grads, bytes);
  if (s->own != NULL) sluice_free(sluice_process_allocator(), s->own, s->bytes);
  if (s->context == NULL) return;
  s->context->device = NULL;
  s->context->gemm = NULL;
  sluice_engine_release(s->context);
}

sluice_status_t sluice_bench_passes(sluice_bench_t* b, double seconds, sluice_machine_t* machine) {
  scene_t s;
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
