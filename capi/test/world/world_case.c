// SPDX-License-Identifier: Apache-2.0
/* Base case, runs, and comparison of results for world.h. */
#include "capi/test/world/world_split.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static void* rank_main(void* argument) {
  world_run_rank(argument);
  return NULL;
}

void world_make_result(const case_t* c, result_t* out) {
  memset(out, 0, sizeof *out);
  for (int kind = 0; kind < NUM_PARAMS; ++kind) {
    int64_t size = c->num_experts * world_param_size(c, kind);
    out->grad_params[kind] = calloc((size_t)size + 1, sizeof(double));
    for (int i = 0; i < 2 && c->moves; ++i) out->board[i][kind] = calloc((size_t)size + 1, sizeof(double));
  }
}

case_t world_small_case(void) {
  return (case_t){.world_size = 1,
                  .tokens = {13, 9, 17, 5},
                  .model_width = 11,
                  .hidden_width = 19,
                  .num_experts = 12,
                  .top_k = 2,
                  .num_chunks = 1,
                  .dtype = SLUICE_DTYPE_F32,
                  .activation = SLUICE_ACTIVATION_GELU,
                  .restore_input = SLUICE_RESTORE_KEEP,
                  .restore_pre_activation = SLUICE_RESTORE_KEEP,
                  .hot_expert = -1};
}

double world_tolerance(const case_t* c) {
  switch (c->dtype) {
    case SLUICE_DTYPE_F64: return 3e-7;
    case SLUICE_DTYPE_F32: return 5e-6;
    case SLUICE_DTYPE_F16: return 1e-2;
    default: return 6e-2;
  }
}

void world_run(const case_t* c, result_t* out) {
  world_make_result(c, out);
  sluice_local_group_t* group = NULL;
  if (c->world_size > 1 && sluice_local_group_create(c->world_size, &group) != SLUICE_OK) abort();
  pthread_t threads[WORLD_MAX_RANKS];
  rank_t ranks[WORLD_MAX_RANKS];
  for (int32_t r = 0; r < c->world_size; ++r) {
    ranks[r] = (rank_t){c, out, group, r};
    pthread_create(&threads[r], NULL, rank_main, &ranks[r]);
  }
  for (int32_t r = 0; r < c->world_size; ++r) pthread_join(threads[r], NULL);
  sluice_local_group_destroy(group);
}

void world_free(result_t* result) {
  for (int r = 0; r < WORLD_MAX_RANKS; ++r) {
    free(result->out[r]);
    free(result->grad_tokens[r]);
    free(result->grad_weights[r]);
  }
  for (int kind = 0; kind < NUM_PARAMS; ++kind) {
    free(result->grad_params[kind]);
    free(result->board[0][kind]);
    free(result->board[1][kind]);
  }
}

static double distance(const double* a, const double* b, int64_t count) {
  double worst = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (isnan(a[i]) && !isnan(b[i])) return -1;
    double d = fabs(a[i] - b[i]) / (1 + fabs(b[i]));
    if (d > worst) worst = d;
  }
  return worst;
}

double world_distance(const case_t* c, const result_t* a, const result_t* b) {
  double worst = 0;
  for (int32_t r = 0; r < c->world_size; ++r) {
    const double d[] = {distance(a->out[r], b->out[r], c->tokens[r] * c->model_width),
                        distance(a->grad_tokens[r], b->grad_tokens[r], c->tokens[r] * c->model_width),
                        distance(a->grad_weights[r], b->grad_weights[r], c->tokens[r] * c->top_k)};
    for (int i = 0; i < 3; ++i) {
      if (d[i] < 0) return -1;
      if (d[i] > worst) worst = d[i];
    }
  }
  for (int kind = 0; kind < NUM_PARAMS && !c->callback_experts; ++kind) {
    double d = distance(a->grad_params[kind], b->grad_params[kind], c->num_experts * world_param_size(c, kind));
    if (d < 0) return -1;
    if (d > worst) worst = d;
  }
  return worst;
}

int world_identical(const case_t* c, const result_t* a, const result_t* b, int params) {
  for (int32_t r = 0; r < c->world_size; ++r) {
    size_t bytes = (size_t)(c->tokens[r] * c->model_width) * sizeof(double);
    if (memcmp(a->out[r], b->out[r], bytes) != 0 || memcmp(a->grad_tokens[r], b->grad_tokens[r], bytes) != 0) return 0;
    if (memcmp(a->grad_weights[r], b->grad_weights[r], (size_t)(c->tokens[r] * c->top_k) * sizeof(double)) != 0)
      return 0;
  }
  for (int kind = 0; params && kind < NUM_PARAMS; ++kind) {
    size_t bytes = (size_t)(c->num_experts * world_param_size(c, kind)) * sizeof(double);
    if (memcmp(a->grad_params[kind], b->grad_params[kind], bytes) != 0) return 0;
  }
  return 1;
}

/* Runs one rank on this thread, which has the changed input. */
double world_objective(const case_t* c, int which, int64_t index, double delta) {
  world_move(which, index, delta);
  result_t result;
  world_make_result(c, &result);
  rank_t rank = {c, &result, NULL, 0};
  world_run_rank(&rank);
  world_move(-1, 0, 0);
  double sum = 0;
  for (int64_t t = 0; t < c->tokens[0]; ++t) {
    for (int64_t m = 0; m < c->model_width; ++m)
      sum += result.out[0][t * c->model_width + m] * world_grad_value(c, 0, t, m);
  }
  world_free(&result);
  return sum;
}
