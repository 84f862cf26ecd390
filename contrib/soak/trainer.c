// SPDX-License-Identifier: Apache-2.0
/* Trains the layer of a rank of the soak test, and saves its weights every ten steps. */
#include "trainer.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { M = 24, H = 40, T = 96, K = 2, EXPERTS_OF_A_RANK = 2, KEEP_EVERY = 10 };

typedef struct {
  float x[T][M], target[T][M], y[T][M], grad_y[T][M], route_weights[T][K];
  int32_t ids[T][K];
  struct {
    float w1[EXPERTS_OF_A_RANK][H][M], w2[EXPERTS_OF_A_RANK][M][H];
  } weights, grads;
} memory_t;

static memory_t my;
static trainer_t* self;

uint64_t trainer_now_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

/* Returns a pseudorandom number in [-1, 1) for the index i of a kind. */
static float noise(uint32_t kind, uint32_t i) {
  uint32_t h = kind * 0x9e3779b9u + i * 0x85ebca6bu;
  h ^= h >> 16, h *= 0x7feb352du, h ^= h >> 15, h *= 0x846ca68bu, h ^= h >> 16;
  return (float)(h >> 8) / 8388608.0f - 1;
}

/* ---- weights ----------------------------------------------------------------------------------------------------- */

static void name_of(int step, const char* end, char out[512]) {
  snprintf(out, 512, "%s/weights-%d-%d%s", self->folder, self->rank, step, end);
}

static void keep(int step) {
  char part[512], path[512];
  name_of(step, ".new", part), name_of(step, "", path);
  FILE* file = fopen(part, "wb");
  const int is_whole = file != NULL && fwrite(&my.weights, sizeof my.weights, 1, file) == 1;
  if (file != NULL && fclose(file) == 0 && is_whole) rename(part, path);
}

static int take(int step) {
  char path[512];
  if (step == 0) {
    for (size_t i = 0; i < sizeof my.weights / sizeof(float); ++i) {
      ((float*)&my.weights)[i] = 0.3f * noise(2, (uint32_t)(self->rank * 100000 + (int)i));
    }
    return 1;
  }
  name_of(step, "", path);
  FILE* file = fopen(path, "rb");
  const int is_whole = file != NULL && fread(&my.weights, sizeof my.weights, 1, file) == 1;
  if (file != NULL) fclose(file);
  return is_whole;
}

/* ---- a step ------------------------------------------------------------------------------------------------------ */

static void make_batch(int step) {
  for (int t = 0; t < T; ++t) {
    const uint32_t token = (uint32_t)((step * self->world_size + self->rank) * T + t);
    for (int m = 0; m < M; ++m) my.x[t][m] = noise(1, token * M + (uint32_t)m);
    for (int m = 0; m < M; ++m) my.target[t][m] = 0.5f * my.x[t][(m + 1) % M];
    for (int k = 0; k < K; ++k) {
      my.ids[t][k] =
          (int32_t)((token * 7 + token / 3 + (uint32_t)k) % (uint32_t)(EXPERTS_OF_A_RANK * self->world_size));
      my.route_weights[t][k] = 0.5f;
    }
  }
}

static sluice_tensor_t describe(void* data, uint8_t type_code, int64_t* shape) {
  sluice_tensor_t t;
  memset(&t, 0, sizeof t);
  t.data = data, t.device_type = SLUICE_DEVICE_CPU, t.ndim = 2, t.shape = shape;
  t.type_code = type_code, t.type_bits = 32, t.type_lanes = 1;
  return t;
}

static sluice_status_t train_step(sluice_moe_t* moe, int step, double* out_loss) {
  int64_t rows[] = {T, M}, routes[] = {T, K}, up[] = {H, M}, down[] = {M, H};
  sluice_tensor_t x = describe(my.x, SLUICE_TYPE_FLOAT, rows), y = describe(my.y, SLUICE_TYPE_FLOAT, rows);
  sluice_tensor_t grad_y = describe(my.grad_y, SLUICE_TYPE_FLOAT, rows),
                  ids = describe(my.ids, SLUICE_TYPE_INT, routes);
  sluice_tensor_t route_weights = describe(my.route_weights, SLUICE_TYPE_FLOAT, routes);
  sluice_tensor_t lists[4][EXPERTS_OF_A_RANK];
  for (int e = 0; e < EXPERTS_OF_A_RANK; ++e) {
    lists[0][e] = describe(my.weights.w1[e], SLUICE_TYPE_FLOAT, up);
    lists[1][e] = describe(my.weights.w2[e], SLUICE_TYPE_FLOAT, down);
    lists[2][e] = describe(my.grads.w1[e], SLUICE_TYPE_FLOAT, up);
    lists[3][e] = describe(my.grads.w2[e], SLUICE_TYPE_FLOAT, down);
  }
  sluice_expert_tensors_t params, grads;
  memset(&params, 0, sizeof params), memset(&grads, 0, sizeof grads);
  params.struct_size = grads.struct_size = sizeof params;
  params.w1 = lists[0], params.w2 = lists[1], grads.w1 = lists[2], grads.w2 = lists[3];
  sluice_moe_forward_args_t forward;
  sluice_moe_backward_args_t backward;
  sluice_step_t* saved = NULL;
  make_batch(step);
  sluice_moe_forward_args_init(&forward, sizeof forward);
  forward.tokens = &x, forward.expert_ids = &ids, forward.route_weights = &route_weights, forward.out_tokens = &y;
  forward.params = &params, forward.needs_backward = 1;
  self->began_ms = trainer_now_ms();
  sluice_status_t status = sluice_moe_forward(moe, &forward, NULL, &saved);
  if (status != SLUICE_OK) return status;
  *out_loss = 0;
  for (int t = 0; t < T; ++t) {
    for (int m = 0; m < M; ++m) {
      const double error = (double)my.y[t][m] - my.target[t][m];
      *out_loss += error * error / (T * M);
      my.grad_y[t][m] = (float)(2 * error / (T * M));
    }
  }
  sluice_moe_backward_args_init(&backward, sizeof backward);
  backward.tokens = &x, backward.route_weights = &route_weights, backward.params = &params;
  backward.grad_out = &grad_y, backward.grad_params = &grads;
  self->began_ms = trainer_now_ms();
  status = sluice_moe_backward(moe, saved, &backward, NULL);
  sluice_step_drop(saved);
  if (status != SLUICE_OK) return status;
  for (size_t i = 0; i < sizeof my.weights / sizeof(float); ++i) {
    ((float*)&my.weights)[i] -= 0.5f / (float)self->world_size * ((const float*)&my.grads)[i];
  }
  return SLUICE_OK;
}

/* ---- training ---------------------------------------------------------------------------------------------------- */

sluice_status_t trainer_run(trainer_t* trainer, sluice_comm_t* comm, int turn, int first_step, int num_steps) {
  self = trainer;
  sluice_context_t* context = NULL;
  sluice_moe_t* moe = NULL;
  sluice_context_config_t context_config;
  sluice_moe_config_t config;
  sluice_context_config_init(&context_config, sizeof context_config);
  context_config.gemm = "ref"; /* gives the same bits in every run */
  sluice_status_t status = sluice_context_create(&context_config, comm, &context);
  sluice_moe_config_init(&config, sizeof config);
  config.model_width = M, config.hidden_width = H, config.num_experts = EXPERTS_OF_A_RANK * self->world_size,
  config.top_k = K;
  config.num_chunks = 2;
  if (status == SLUICE_OK) status = sluice_moe_create(context, &config, &moe);
  if (status == SLUICE_OK && !take(first_step)) exit(3);
  printf("made %d\n", turn);
  for (int step = first_step; status == SLUICE_OK && step < first_step + num_steps; ++step) {
    double loss = 0;
    status = train_step(moe, step, &loss);
    if (status != SLUICE_OK) break;
    printf("step %d %d %a\n", turn, step, loss);
    if ((step + 1) % KEEP_EVERY == 0) keep(step + 1);
  }
  sluice_moe_destroy(moe);
  sluice_context_destroy(context);
  return status;
}
