// SPDX-License-Identifier: Apache-2.0
/* An asynchronous pipeline with PipeDream's weight stashing: a stage updates its weights after each backward, without a
 * flush, and a backward uses the weights of its micro-batch's forward. The program runs one long batch under "1f1b"
 * with stages that are threads, and compares the bits with those of a sequential loop that has the same delay of
 * updates.
 *
 *   examples/c/build.sh /tmp/out && /tmp/out/stashing [stages: 1 to 8] */
#include <math.h>
#include <pthread.h>
#include <stdlib.h>

#include "host.h"

enum { D = 8, MOST_STAGES = 8, N = 300 };
static const float RATE = 0.05f;

typedef struct {
  float of[D][D];
} weights_t;

/* The data of a micro-batch that a stage keeps from its forward to its backward. */
typedef struct {
  weights_t stashed;
  float x[D], y[D], grad_x[D];
  sluice_tensor_t out, back;
} pass_t;

typedef struct {
  int rank, stages, outstanding, most_outstanding, bad;
  sluice_local_group_t* group;
  weights_t weights;
  double loss;
  int64_t shape[2];
  pass_t passes[N];
} stage_t;

static void fill(float* values, int count, uint32_t kind, uint32_t first, float scale) {
  for (int i = 0; i < count; ++i) values[i] = scale * noise(kind, first + (uint32_t)i);
}

/* ---- the model: y = tanh(w x) on each stage; the target is half of the input ---- */

static void apply(const weights_t* w, const float* x, float* y) {
  for (int r = 0; r < D; ++r) {
    float sum = 0;
    for (int c = 0; c < D; ++c) sum += w->of[r][c] * x[c];
    y[r] = tanhf(sum);
  }
}

/* Computes the gradient with the weights w of the forward, and updates the newest weights. */
static void apply_back(const weights_t* w, const pass_t* pass, const float* grad_y, float* grad_x, weights_t* newest) {
  float grad[D];
  for (int r = 0; r < D; ++r) grad[r] = grad_y[r] * (1 - pass->y[r] * pass->y[r]);
  for (int c = 0; c < D; ++c) {
    grad_x[c] = 0;
    for (int r = 0; r < D; ++r) grad_x[c] += w->of[r][c] * grad[r];
  }
  for (int r = 0; r < D; ++r) {
    for (int c = 0; c < D; ++c) newest->of[r][c] -= RATE * grad[r] * pass->x[c];
  }
}

static double loss_of(int i, const float* y, float* grad_y) {
  float data[D];
  double loss = 0;
  fill(data, D, 1, (uint32_t)(i * D), 1);
  for (int c = 0; c < D; ++c) {
    grad_y[c] = y[c] - data[c] / 2;
    loss += grad_y[c] * grad_y[c] / 2;
  }
  return loss;
}

/* ---- in a pipeline ---- */

static sluice_status_t forward(void* user, const sluice_stage_call_t* call, sluice_stage_tensors_t* out_result,
                               sluice_host_failure_t* out_failure) {
  stage_t* my = user;
  pass_t* pass = &my->passes[call->micro_batch];
  (void)out_failure;
  if (call->is_first) {
    fill(pass->x, D, 1, (uint32_t)(call->micro_batch * D), 1);
  } else {
    memcpy(pass->x, call->input->tensors[0].data, sizeof pass->x);
  }
  pass->stashed = my->weights;
  if (++my->outstanding > my->most_outstanding) my->most_outstanding = my->outstanding;
  apply(&pass->stashed, pass->x, pass->y);
  pass->out = describe(pass->y, SLUICE_TYPE_FLOAT, my->shape);
  out_result->tensors = &pass->out, out_result->num_tensors = 1;
  return SLUICE_OK;
}

static sluice_status_t backward(void* user, const sluice_stage_call_t* call, sluice_stage_tensors_t* out_result,
                                sluice_host_failure_t* out_failure) {
  stage_t* my = user;
  pass_t* pass = &my->passes[call->micro_batch];
  float own[D];
  const float* grad_y = own;
  (void)out_failure;
  if (call->is_last) {
    my->loss += loss_of(call->micro_batch, pass->y, own);
  } else {
    grad_y = call->output_grad->tensors[0].data;
  }
  apply_back(&pass->stashed, pass, grad_y, pass->grad_x, &my->weights);
  --my->outstanding;
  pass->back = describe(pass->grad_x, SLUICE_TYPE_FLOAT, my->shape);
  out_result->tensors = &pass->back, out_result->num_tensors = 1;
  return SLUICE_OK;
}

static void* stage_main(void* argument) {
  stage_t* my = argument;
  sluice_comm_config_t comm_config;
  sluice_pipeline_config_t config;
  sluice_pipeline_batch_t batch;
  sluice_pipeline_callbacks_t callbacks;
  sluice_comm_t* comm = NULL;
  sluice_pipeline_t* pipeline = NULL;
  sluice_comm_config_init(&comm_config, sizeof comm_config);
  comm_config.rank = my->rank, comm_config.world_size = my->stages;
  memset(&callbacks, 0, sizeof callbacks);
  callbacks.struct_size = sizeof callbacks, callbacks.forward = forward, callbacks.backward = backward;
  sluice_pipeline_config_init(&config, sizeof config);
  config.policy = "1f1b", config.in_flight = my->stages;
  sluice_pipeline_batch_init(&batch, sizeof batch);
  batch.num_micro_batches = N;
  fill(&my->weights.of[0][0], D * D, 2, (uint32_t)(my->rank * D * D), 0.5f);
  my->bad = sluice_comm_create_local(my->group, &comm_config, &comm) != SLUICE_OK ||
            sluice_pipeline_create(&config, comm, &callbacks, my, &pipeline) != SLUICE_OK ||
            sluice_pipeline_run_batch(pipeline, &batch) != SLUICE_OK;
  sluice_pipeline_destroy(pipeline);
  sluice_comm_destroy(comm);
  return NULL;
}

/* ---- in sequence ---- */

/* The forward of micro-batch i on stage s of p does not see the updates of the p - 1 - s micro-batches before it. */
static double in_sequence(int stages, weights_t* out_weights) {
  static weights_t versions[MOST_STAGES][N + 1];
  static pass_t passes[MOST_STAGES];
  double loss = 0;
  for (int s = 0; s < stages; ++s) fill(&versions[s][0].of[0][0], D * D, 2, (uint32_t)(s * D * D), 0.5f);
  for (int i = 0; i < N; ++i) {
    float grad[MOST_STAGES + 1][D];
    for (int s = 0; s < stages; ++s) {
      const int delay = stages - 1 - s;
      passes[s].stashed = versions[s][i > delay ? i - delay : 0];
      if (s == 0) fill(passes[s].x, D, 1, (uint32_t)(i * D), 1);
      if (s > 0) memcpy(passes[s].x, passes[s - 1].y, sizeof passes[s].x);
      apply(&passes[s].stashed, passes[s].x, passes[s].y);
    }
    loss += loss_of(i, passes[stages - 1].y, grad[stages]);
    for (int s = stages - 1; s >= 0; --s) {
      versions[s][i + 1] = versions[s][i];
      apply_back(&passes[s].stashed, &passes[s], grad[s + 1], grad[s], &versions[s][i + 1]);
    }
  }
  for (int s = 0; s < stages; ++s) out_weights[s] = versions[s][N];
  return loss;
}

int main(int argc, char** argv) {
  static stage_t stages[MOST_STAGES];
  static weights_t wanted[MOST_STAGES];
  pthread_t threads[MOST_STAGES];
  sluice_local_group_t* group = NULL;
  const int p = argc > 1 ? atoi(argv[1]) : 4;
  if (p < 1 || p > MOST_STAGES || sluice_local_group_create(p, &group) != SLUICE_OK) return 2;
  for (int s = 0; s < p; ++s) {
    stages[s].rank = s, stages[s].stages = p, stages[s].group = group, stages[s].shape[0] = 1, stages[s].shape[1] = D;
    if (pthread_create(&threads[s], NULL, stage_main, &stages[s]) != 0) return 2;
  }
  int bad = 0, is_same = 1;
  for (int s = 0; s < p; ++s) pthread_join(threads[s], NULL), bad |= stages[s].bad;
  sluice_local_group_destroy(group);
  if (bad) return 1;
  const double loss = in_sequence(p, wanted);
  for (int s = 0; s < p; ++s) {
    is_same = is_same && memcmp(&stages[s].weights, &wanted[s], sizeof wanted[s]) == 0;
    printf("stage %d: %d versions of the weights at most\n", s, stages[s].most_outstanding);
  }
  printf("loss %.9g, in sequence %.9g: %s bits\n", stages[p - 1].loss, loss, is_same ? "the same" : "other");
  return is_same && stages[p - 1].loss == loss ? 0 : 1;
}
