// SPDX-License-Identifier: Apache-2.0
/* Trains the layers of one rank of a pipeline: the callbacks, the model, and SGD. */
#include "stage.h"

#include <math.h>
#include <stdlib.h>

#include "host.h"

enum { M = STAGE_WIDTH, H = 32, E = 8, K = 2, T = STAGE_TOKENS, N = STAGE_MICRO_BATCHES };

/* The tensors of one micro-batch that a layer keeps until its backward. */
typedef struct {
  const float* x; /* borrowed from the pipeline, or the host's own data */
  float y[T][M], grad_x[T][M];
  int32_t ids[T][K];
  float weights[T][K];
  sluice_step_t* step;
  sluice_tensor_t out, back; /* results of forward and backward, which the pipeline sends */
} pass_t;

typedef struct {
  float w1[E][H][M], w2[E][M][H], grad_w1[E][H][M], grad_w2[E][M][H]; /* the first E_local of each */
  sluice_tensor_t lists[4][E];
  sluice_expert_tensors_t params, grads;
  sluice_moe_t* moe;
  pass_t passes[N];
} layer_t;

typedef struct {
  int rank, stages, replica, num_local, tokens, begin;
  float data[N][T][M], target[N][T][M], grad_loss[N][T][M];
  int64_t rows[2], routes[2], up[2], down[2];
  double loss;
  layer_t layers[STAGE_LAYERS]; /* the first v are this rank's */
} rank_t;

/* Copies the error message of a callback to out_failure, because every rank of the pipeline reports it. */
static sluice_status_t told(sluice_status_t status, sluice_host_failure_t* out_failure) {
  sluice_error_info_t why;
  if (status == SLUICE_OK) return SLUICE_OK;
  sluice_error_info_init(&why, sizeof why);
  sluice_error_last(&why);
  snprintf(out_failure->message, sizeof out_failure->message, "%.500s", why.message);
  return status;
}

/* ---- the callbacks of the pipeline ---- */

static sluice_status_t forward(void* user, const sluice_stage_call_t* call, sluice_stage_tensors_t* out_result,
                               sluice_host_failure_t* out_failure) {
  rank_t* my = user;
  const int i = call->micro_batch;
  layer_t* layer = &my->layers[call->virtual_stage / my->stages];
  pass_t* pass = &layer->passes[i];
  pass->x = call->is_first ? &my->data[i][0][0] : call->input->tensors[0].data;
  const sluice_tensor_t x = describe(pass->x, SLUICE_TYPE_FLOAT, my->rows);
  const sluice_tensor_t y = describe(pass->y, SLUICE_TYPE_FLOAT, my->rows);
  const sluice_tensor_t ids = describe(pass->ids, SLUICE_TYPE_INT, my->routes);
  const sluice_tensor_t weights = describe(pass->weights, SLUICE_TYPE_FLOAT, my->routes);
  sluice_moe_forward_args_t args;
  sluice_moe_forward_args_init(&args, sizeof args);
  args.tokens = &x, args.expert_ids = &ids, args.route_weights = &weights, args.out_tokens = &y;
  args.params = &layer->params, args.needs_backward = 1;
  const sluice_status_t status = told(sluice_moe_forward(layer->moe, &args, NULL, &pass->step), out_failure);
  if (status != SLUICE_OK) return status;
  for (int e = 0; e < my->tokens * M; ++e) (&pass->y[0][0])[e] += pass->x[e];
  pass->out = describe(pass->y, SLUICE_TYPE_FLOAT, my->rows);
  out_result->tensors = &pass->out, out_result->num_tensors = 1; /* not read after the last layer */
  return SLUICE_OK;
}

static sluice_status_t loss(void* user, const sluice_stage_call_t* call, sluice_host_failure_t* out_failure) {
  rank_t* my = user;
  const int i = call->micro_batch;
  const pass_t* pass = &my->layers[call->virtual_stage / my->stages].passes[i];
  (void)out_failure;
  for (int t = 0; t < my->tokens; ++t) {
    for (int m = 0; m < M; ++m) {
      const double error = pass->y[t][m] - my->target[i][t][m];
      my->loss += error * error / (N * T * M);
      my->grad_loss[i][t][m] = (float)(2 * error / (N * T * M));
    }
  }
  return SLUICE_OK;
}

static sluice_status_t backward(void* user, const sluice_stage_call_t* call, sluice_stage_tensors_t* out_result,
                                sluice_host_failure_t* out_failure) {
  rank_t* my = user;
  const int i = call->micro_batch;
  layer_t* layer = &my->layers[call->virtual_stage / my->stages];
  pass_t* pass = &layer->passes[i];
  const float* grad_y = call->is_last ? &my->grad_loss[i][0][0] : call->output_grad->tensors[0].data;
  const sluice_tensor_t x = describe(pass->x, SLUICE_TYPE_FLOAT, my->rows);
  const sluice_tensor_t dy = describe(grad_y, SLUICE_TYPE_FLOAT, my->rows);
  const sluice_tensor_t dx = describe(pass->grad_x, SLUICE_TYPE_FLOAT, my->rows);
  const sluice_tensor_t weights = describe(pass->weights, SLUICE_TYPE_FLOAT, my->routes);
  sluice_moe_backward_args_t args;
  sluice_moe_backward_args_init(&args, sizeof args);
  args.tokens = &x, args.route_weights = &weights, args.params = &layer->params;
  args.grad_out = &dy, args.grad_tokens = &dx, args.grad_params = &layer->grads;
  args.grad_mode = SLUICE_GRAD_ACCUMULATE; /* the pipeline runs backwards in the order of micro-batches */
  const sluice_status_t status = told(sluice_moe_backward(layer->moe, pass->step, &args, NULL), out_failure);
  sluice_step_drop(pass->step);
  pass->step = NULL;
  if (status != SLUICE_OK) return status;
  for (int e = 0; e < my->tokens * M; ++e) (&pass->grad_x[0][0])[e] += grad_y[e];
  pass->back = describe(pass->grad_x, SLUICE_TYPE_FLOAT, my->rows);
  out_result->tensors = &pass->back, out_result->num_tensors = 1;
  return SLUICE_OK;
}

/* ---- the model ---- */

static void fill_layer(rank_t* my, layer_t* layer, int c) {
  for (int e = 0; e < my->num_local; ++e) {
    const int expert = (c * E + my->replica * my->num_local + e) * H * M;
    for (int i = 0; i < H * M; ++i) {
      (&layer->w1[e][0][0])[i] = 0.4f * noise(2, (uint32_t)(expert + i));
      (&layer->w2[e][0][0])[i] = 0.1f * noise(3, (uint32_t)(expert + i));
    }
    layer->lists[0][e] = describe(layer->w1[e], SLUICE_TYPE_FLOAT, my->up);
    layer->lists[1][e] = describe(layer->w2[e], SLUICE_TYPE_FLOAT, my->down);
    layer->lists[2][e] = describe(layer->grad_w1[e], SLUICE_TYPE_FLOAT, my->up);
    layer->lists[3][e] = describe(layer->grad_w2[e], SLUICE_TYPE_FLOAT, my->down);
  }
  layer->params.struct_size = layer->grads.struct_size = sizeof layer->params;
  layer->params.w1 = layer->lists[0], layer->params.w2 = layer->lists[1];
  layer->grads.w1 = layer->lists[2], layer->grads.w2 = layer->lists[3];
  for (int i = 0; i < N; ++i) {
    for (int t = 0; t < my->tokens; ++t) {
      const uint32_t token = (uint32_t)((c * N + i) * T + my->begin + t);
      for (int k = 0; k < K; ++k) { /* a fixed router */
        layer->passes[i].ids[t][k] = ((int32_t)(4 + 4 * noise(5, token)) + 4 * k) % E;
        layer->passes[i].weights[t][k] = 0.5f;
      }
    }
  }
}

static void fill(rank_t* my) {
  for (int i = 0; i < N; ++i) {
    for (int t = 0; t < my->tokens; ++t) {
      const uint32_t token = (uint32_t)(i * T + my->begin + t);
      for (int m = 0; m < M; ++m) my->data[i][t][m] = noise(1, token * M + (uint32_t)m);
      for (int m = 0; m < M; ++m) my->target[i][t][m] = sinf(3 * my->data[i][t][(m + 1) % M]);
    }
  }
  for (int k = 0; k < STAGE_LAYERS / my->stages; ++k) {
    fill_layer(my, &my->layers[k], k * my->stages + my->rank % my->stages);
  }
}

static int open_layers(rank_t* my, sluice_comm_t* column, sluice_context_t** out_context) {
  sluice_context_config_t context_config;
  sluice_context_config_init(&context_config, sizeof context_config);
  context_config.gemm = "native"; /* not "auto", whose choice may differ between ranks, and with it the bits */
  if (failed(my->rank, sluice_context_create(&context_config, column, out_context))) return 1;
  for (int k = 0; k < STAGE_LAYERS / my->stages; ++k) {
    sluice_moe_config_t config;
    sluice_moe_config_init(&config, sizeof config);
    config.model_width = M, config.hidden_width = H, config.num_experts = E, config.top_k = K, config.layer_id = k;
    if (failed(my->rank, sluice_moe_create(*out_context, &config, &my->layers[k].moe))) return 1;
  }
  return 0;
}

static int open_pipeline(rank_t* my, sluice_comm_t* all, int replicas, sluice_pipeline_t** out_pipeline) {
  static const int32_t has_experts[STAGE_LAYERS] = {1, 1, 1, 1};
  sluice_pipeline_callbacks_t callbacks;
  memset(&callbacks, 0, sizeof callbacks);
  callbacks.struct_size = sizeof callbacks;
  callbacks.forward = forward, callbacks.loss = loss, callbacks.backward = backward;
  sluice_pipeline_config_t config;
  sluice_pipeline_config_init(&config, sizeof config);
  config.num_virtual = STAGE_LAYERS / my->stages;
  config.num_replicas = replicas;
  config.has_experts = has_experts;
  return failed(my->rank, sluice_pipeline_create(&config, all, &callbacks, my, out_pipeline));
}

static void descend(rank_t* my) {
  for (int k = 0; k < STAGE_LAYERS / my->stages; ++k) {
    layer_t* layer = &my->layers[k];
    for (int i = 0; i < my->num_local * H * M;
         ++i) { /* an expert's gradient is a sum over the tokens of all replicas */
      (&layer->w1[0][0][0])[i] -= (&layer->grad_w1[0][0][0])[i];
      (&layer->w2[0][0][0])[i] -= (&layer->grad_w2[0][0][0])[i];
    }
    memset(layer->grad_w1, 0, sizeof layer->grad_w1), memset(layer->grad_w2, 0, sizeof layer->grad_w2);
  }
}

static int train(rank_t* my, sluice_pipeline_t* pipeline, double* out_losses) {
  sluice_pipeline_batch_t batch;
  sluice_pipeline_batch_init(&batch, sizeof batch);
  batch.num_micro_batches = N;
  for (int step = 0; step < STAGE_STEPS; ++step) {
    my->loss = 0;
    if (failed(my->rank, sluice_pipeline_run_batch(pipeline, &batch))) return 1;
    descend(my);
    out_losses[step] = my->loss;
  }
  return 0;
}

int stage_train(sluice_comm_t* all, sluice_comm_t* column, int stages, double* out_losses) {
  const int replicas = column == NULL ? 1 : sluice_comm_world_size(column);
  sluice_context_t* context = NULL;
  sluice_pipeline_t* pipeline = NULL;
  rank_t* my = calloc(1, sizeof *my);
  if (my == NULL) return 1;
  my->rank = all == NULL ? 0 : sluice_comm_rank(all), my->stages = stages, my->replica = my->rank / stages;
  my->num_local = E / replicas;
  my->begin = T * my->replica / replicas, my->tokens = T * (my->replica + 1) / replicas - my->begin;
  my->rows[0] = my->routes[0] = my->tokens, my->rows[1] = M, my->routes[1] = K;
  my->up[0] = my->down[1] = H, my->up[1] = my->down[0] = M;
  fill(my);
  const int bad = open_layers(my, column, &context) || open_pipeline(my, all, replicas, &pipeline) ||
                  train(my, pipeline, out_losses);
  sluice_pipeline_destroy(pipeline);
  for (int k = 0; k < STAGE_LAYERS; ++k) {
    for (int i = 0; i < N; ++i) sluice_step_drop(my->layers[k].passes[i].step); /* of a batch that failed */
    sluice_moe_destroy(my->layers[k].moe);
  }
  sluice_context_destroy(context);
  free(my);
  return bad;
}
