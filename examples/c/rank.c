// SPDX-License-Identifier: Apache-2.0
/* Trains a layer with expert parallelism on one rank: communicator, context, layer, and SGD. */
#include "rank.h"

#include <math.h>
#include <stdlib.h>

#include "host.h"

enum { M = RANK_WIDTH, H = RANK_HIDDEN, E = RANK_EXPERTS, K = RANK_TOP_K, MAX_T = RANK_TOKENS };

typedef struct {
  float x[MAX_T][M], target[MAX_T][M], y[MAX_T][M], grad_y[MAX_T][M], weights[MAX_T][K];
  int32_t ids[MAX_T][K];
  float w1[E][H][M], w2[E][M][H], grad_w1[E][H][M], grad_w2[E][M][H];
  sluice_tensor_t lists[4][E];
} memory_t;

/* Fills the tokens begin..begin+T-1 and the experts first..first+num_local-1. */
static void fill(memory_t* my, int begin, int T, int first, int num_local) {
  for (int t = 0; t < T; ++t) {
    uint32_t token = (uint32_t)(begin + t);
    for (int m = 0; m < M; ++m) my->x[t][m] = noise(1, token * M + (uint32_t)m);
    for (int m = 0; m < M; ++m) my->target[t][m] = sinf(3 * my->x[t][(m + 1) % M]);
    for (int k = 0; k < K; ++k) { /* a fixed router, by the signs of two coordinates of x */
      my->ids[t][k] = ((my->x[t][0] > 0) + 2 * (my->x[t][1] > 0) + 4 * k) % E;
      my->weights[t][k] = 0.5f;
    }
  }
  for (int e = 0; e < num_local; ++e) {
    for (int i = 0; i < H * M; ++i) {
      (&my->w1[e][0][0])[i] = 0.4f * noise(2, (uint32_t)((first + e) * H * M + i));
      (&my->w2[e][0][0])[i] = 0.3f * noise(3, (uint32_t)((first + e) * H * M + i));
    }
  }
}

static int train(memory_t* my, sluice_moe_t* moe, int rank, int T, double* out_losses) {
  const int num_local = sluice_moe_num_local_experts(moe);
  int64_t rows[] = {T, M}, routes[] = {T, K}, up[] = {H, M}, down[] = {M, H};
  sluice_tensor_t x = describe(my->x, SLUICE_TYPE_FLOAT, rows), y = describe(my->y, SLUICE_TYPE_FLOAT, rows);
  sluice_tensor_t grad_y = describe(my->grad_y, SLUICE_TYPE_FLOAT, rows);
  sluice_tensor_t ids = describe(my->ids, SLUICE_TYPE_INT, routes);
  sluice_tensor_t weights = describe(my->weights, SLUICE_TYPE_FLOAT, routes);
  for (int e = 0; e < num_local; ++e) {
    my->lists[0][e] = describe(my->w1[e], SLUICE_TYPE_FLOAT, up),
    my->lists[1][e] = describe(my->w2[e], SLUICE_TYPE_FLOAT, down);
    my->lists[2][e] = describe(my->grad_w1[e], SLUICE_TYPE_FLOAT, up);
    my->lists[3][e] = describe(my->grad_w2[e], SLUICE_TYPE_FLOAT, down);
  }
  sluice_expert_tensors_t params, grads;
  memset(&params, 0, sizeof params), memset(&grads, 0, sizeof grads);
  params.struct_size = grads.struct_size = sizeof params;
  params.w1 = my->lists[0], params.w2 = my->lists[1], grads.w1 = my->lists[2], grads.w2 = my->lists[3];

  for (int step = 0; step < RANK_STEPS; ++step) {
    sluice_moe_forward_args_t forward;
    sluice_moe_backward_args_t backward;
    sluice_step_t* saved = NULL;
    sluice_moe_forward_args_init(&forward, sizeof forward);
    forward.tokens = &x, forward.expert_ids = &ids, forward.route_weights = &weights, forward.out_tokens = &y;
    forward.params = &params, forward.needs_backward = 1;
    if (failed(rank, sluice_moe_forward(moe, &forward, NULL, &saved))) return 1;
    out_losses[step] = 0;
    for (int t = 0; t < T; ++t) {
      for (int m = 0; m < M; ++m) {
        double error = my->y[t][m] - my->target[t][m];
        out_losses[step] += error * error / (RANK_TOKENS * M);
        my->grad_y[t][m] = (float)(2 * error / (RANK_TOKENS * M));
      }
    }
    sluice_moe_backward_args_init(&backward, sizeof backward);
    backward.tokens = &x, backward.route_weights = &weights, backward.params = &params;
    backward.grad_out = &grad_y, backward.grad_params = &grads;
    sluice_status_t status = sluice_moe_backward(moe, saved, &backward, NULL);
    sluice_step_drop(saved);
    if (failed(rank, status)) return 1;
    for (int i = 0; i < num_local * H * M; ++i) { /* an expert's gradient is a sum over the tokens of all ranks */
      (&my->w1[0][0][0])[i] -= 1.5f * (&my->grad_w1[0][0][0])[i];
      (&my->w2[0][0][0])[i] -= 1.5f * (&my->grad_w2[0][0][0])[i];
    }
  }
  return 0;
}

int rank_train(sluice_comm_t* comm, double* out_losses) {
  const int rank = comm == NULL ? 0 : sluice_comm_rank(comm), W = comm == NULL ? 1 : sluice_comm_world_size(comm);
  const int begin = RANK_TOKENS * rank / W, T = RANK_TOKENS * (rank + 1) / W - begin;
  sluice_context_t* context = NULL;
  sluice_moe_t* moe = NULL;
  sluice_context_config_t context_config;
  sluice_moe_config_t config;
  memory_t* my = calloc(1, sizeof *my);
  int bad = my == NULL;
  sluice_context_config_init(&context_config, sizeof context_config);
  bad = bad || failed(rank, sluice_context_create(&context_config, comm, &context));
  sluice_moe_config_init(&config, sizeof config);
  config.model_width = M, config.hidden_width = H, config.num_experts = E, config.top_k = K;
  config.num_chunks = 2; /* one half is sent while the other is computed */
  bad = bad || failed(rank, sluice_moe_create(context, &config, &moe));
  if (!bad) {
    fill(my, begin, T, E / W * rank, E / W);
    bad = train(my, moe, rank, T, out_losses);
  }
  sluice_moe_destroy(moe);
  sluice_context_destroy(context);
  free(my);
  return bad;
}
