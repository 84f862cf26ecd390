// SPDX-License-Identifier: Apache-2.0
/* Trains one MoE layer and its router in one process: pure C99, with the library loaded at run time.
 *
 *   examples/c/build.sh /tmp/out && LD_LIBRARY_PATH=<folder of libsluice.so.0> /tmp/out/layer [path of libsluice.so.0]
 *
 * The layer learns y[t][m] = sin(3 x[t][m+1]). In each step the router computes logits = x Wg, the gate chooses K of E
 * experts, the layer runs forward and backward, the gate's backward computes the gradient of Wg, and SGD updates all
 * parameters. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <math.h>
#include <stdlib.h>

#include "host.h"

enum { T = 96, M = 16, H = 32, E = 4, K = 2, STEPS = 60 };

/* ---- the functions that this program uses, by name ---- */

/* clang-format off */
#define FUNCTIONS(X) \
  X(sluice_error_info_init) X(sluice_error_last) X(sluice_status_name) X(sluice_build_info) \
  X(sluice_context_config_init) X(sluice_context_create) X(sluice_context_destroy) X(sluice_gate_config_init) \
  X(sluice_gate_forward) X(sluice_gate_backward) X(sluice_moe_config_init) X(sluice_moe_create) \
  X(sluice_moe_destroy) X(sluice_moe_forward_args_init) X(sluice_moe_forward) X(sluice_moe_backward_args_init) \
  X(sluice_moe_backward) X(sluice_step_drop)
/* clang-format on */
#define DECLARE(name) static __typeof__(name)* p_##name;
FUNCTIONS(DECLARE)

static void load(const char* path) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    exit(2);
  }
#define LOAD(name)                                           \
  *(void**)&p_##name = dlsym(library, #name);                \
  if (p_##name == NULL) {                                    \
    fprintf(stderr, "%s has no function %s\n", path, #name); \
    exit(2);                                                 \
  }
  FUNCTIONS(LOAD)
}

static void must(sluice_status_t status) {
  sluice_error_info_t why;
  if (status == SLUICE_OK) return;
  p_sluice_error_info_init(&why, sizeof why);
  p_sluice_error_last(&why);
  fprintf(stderr, "%s: %s\n", p_sluice_status_name(status), why.message);
  exit(1);
}

/* ---- the data of this program ---- */

static float x[T][M], target[T][M], y[T][M], grad_y[T][M];
static float router[M][E], logits[T][E], grad_logits[T][E], weights[T][K], grad_weights[T][K];
static int32_t ids[T][K];
static float w1[E][H][M], b1[E][H], w2[E][M][H], b2[E][M];
static float grad_w1[E][H][M], grad_b1[E][H], grad_w2[E][M][H], grad_b2[E][M];

static void descend(float* parameter, const float* gradient, size_t count, float rate) {
  for (size_t i = 0; i < count; ++i) parameter[i] -= rate * gradient[i];
}

int main(int argc, char** argv) {
  load(argc > 1 ? argv[1] : "libsluice.so.0");
  printf("%s\n", p_sluice_build_info());
  for (int t = 0; t < T; ++t) {
    for (int m = 0; m < M; ++m) x[t][m] = noise(1, (uint32_t)(t * M + m));
    for (int m = 0; m < M; ++m) target[t][m] = sinf(3 * x[t][(m + 1) % M]);
  }
  for (uint32_t i = 0; i < M * E; ++i) (&router[0][0])[i] = 0.2f * noise(2, i);
  for (uint32_t i = 0; i < E * H * M; ++i)
    (&w1[0][0][0])[i] = 0.4f * noise(3, i), (&w2[0][0][0])[i] = 0.3f * noise(4, i);

  sluice_context_config_t context_config;
  sluice_context_t* context = NULL;
  p_sluice_context_config_init(&context_config, sizeof context_config);
  must(p_sluice_context_create(&context_config, NULL, &context)); /* NULL: one rank */

  sluice_moe_config_t config;
  sluice_moe_t* moe = NULL;
  p_sluice_moe_config_init(&config, sizeof config);
  config.model_width = M, config.hidden_width = H, config.num_experts = E, config.top_k = K, config.bias = 1;
  must(p_sluice_moe_create(context, &config, &moe));

  sluice_gate_config_t gate;
  p_sluice_gate_config_init(&gate, sizeof gate);
  gate.num_experts = E, gate.top_k = K, gate.renormalize = 1;

  /* Shapes are borrowed, so tensors share them. There is one tensor per local expert and kind. */
  static int64_t rows[] = {T, M}, scores[] = {T, E}, routes[] = {T, K}, up[] = {H, M}, down[] = {M, H};
  const sluice_tensor_t dx = describe(x, SLUICE_TYPE_FLOAT, rows), dy = describe(y, SLUICE_TYPE_FLOAT, rows);
  const sluice_tensor_t dgrad_y = describe(grad_y, SLUICE_TYPE_FLOAT, rows);
  const sluice_tensor_t dlogits = describe(logits, SLUICE_TYPE_FLOAT, scores);
  const sluice_tensor_t dgrad_logits = describe(grad_logits, SLUICE_TYPE_FLOAT, scores);
  const sluice_tensor_t dids = describe(ids, SLUICE_TYPE_INT, routes);
  const sluice_tensor_t dweights = describe(weights, SLUICE_TYPE_FLOAT, routes);
  const sluice_tensor_t dgrad_weights = describe(grad_weights, SLUICE_TYPE_FLOAT, routes);
  sluice_tensor_t lists[8][E];
  for (int e = 0; e < E; ++e) {
    void* const data[8] = {w1[e], b1[e], w2[e], b2[e], grad_w1[e], grad_b1[e], grad_w2[e], grad_b2[e]};
    for (int kind = 0; kind < 8; ++kind) {
      lists[kind][e] = describe(data[kind], SLUICE_TYPE_FLOAT, kind % 4 < 2 ? up : down);
      if (kind % 2 != 0) lists[kind][e].ndim = 1; /* a bias */
    }
  }
  sluice_expert_tensors_t params, grads;
  memset(&params, 0, sizeof params), memset(&grads, 0, sizeof grads);
  params.struct_size = grads.struct_size = sizeof params;
  params.w1 = lists[0], params.b1 = lists[1], params.w2 = lists[2], params.b2 = lists[3];
  grads.w1 = lists[4], grads.b1 = lists[5], grads.w2 = lists[6], grads.b2 = lists[7];

  double first = 0, loss = 0;
  for (int step = 0; step < STEPS; ++step) {
    for (int t = 0; t < T; ++t) {
      for (int e = 0; e < E; ++e) {
        logits[t][e] = 0;
        for (int m = 0; m < M; ++m) logits[t][e] += x[t][m] * router[m][e];
      }
    }
    must(p_sluice_gate_forward(&gate, &dlogits, NULL, &dids, &dweights, NULL, NULL, NULL));

    sluice_moe_forward_args_t forward;
    sluice_step_t* saved = NULL;
    p_sluice_moe_forward_args_init(&forward, sizeof forward);
    forward.tokens = &dx, forward.expert_ids = &dids, forward.route_weights = &dweights;
    forward.params = &params, forward.out_tokens = &dy, forward.needs_backward = 1;
    must(p_sluice_moe_forward(moe, &forward, NULL, &saved));

    loss = 0;
    for (int t = 0; t < T; ++t) {
      for (int m = 0; m < M; ++m) {
        double error = y[t][m] - target[t][m];
        loss += error * error / (T * M);
        grad_y[t][m] = (float)(2 * error / (T * M));
      }
    }
    if (step == 0) first = loss;
    if (step % 10 == 0 || step == STEPS - 1) printf("step %2d loss %.6f\n", step, loss);

    sluice_moe_backward_args_t backward;
    p_sluice_moe_backward_args_init(&backward, sizeof backward);
    backward.tokens = &dx, backward.route_weights = &dweights, backward.params = &params;
    backward.grad_out = &dgrad_y, backward.grad_route_weights = &dgrad_weights;
    backward.grad_params = &grads; /* grad_tokens stays NULL, because x is data */
    must(p_sluice_moe_backward(moe, saved, &backward, NULL));
    p_sluice_step_drop(saved);
    must(p_sluice_gate_backward(&gate, &dlogits, NULL, &dids, &dgrad_weights, 0, 0, &dgrad_logits));

    const float rate = 1.5f;
    for (int m = 0; m < M; ++m) {
      for (int e = 0; e < E; ++e) {
        for (int t = 0; t < T; ++t) router[m][e] -= rate * x[t][m] * grad_logits[t][e];
      }
    }
    descend(&w1[0][0][0], &grad_w1[0][0][0], E * H * M, rate);
    descend(&b1[0][0], &grad_b1[0][0], E * H, rate);
    descend(&w2[0][0][0], &grad_w2[0][0][0], E * M * H, rate);
    descend(&b2[0][0], &grad_b2[0][0], E * M, rate);
  }
  p_sluice_moe_destroy(moe);
  p_sluice_context_destroy(context);
  printf("loss %.6f -> %.6f\n", first, loss);
  return loss < 0.8 * first ? 0 : 1;
}
