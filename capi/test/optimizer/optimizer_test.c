// SPDX-License-Identifier: Apache-2.0
/* The optimizer through its public calls: errors, skipped steps, and training of a small model. */
#include <math.h>
#include <pthread.h>
#include <string.h>

#include "capi/test/optimizer/filed_model.h"

enum { COUNT = 1000 };

/* One group of one f32 tensor. */
static model_t* open_one(void) {
  model_t* m = open_model();
  for (int i = 0; i < COUNT; ++i) m->s.param[i] = (float)i / COUNT, m->grad[i] = (float)(i % 7 - 3) / 4.0F;
  m->tensors[0].count = COUNT, m->tensors[0].master = NULL;
  m->groups[0].num_tensors = m->args.num_groups = 1;
  return m;
}

static void check_unchanged(const model_t* m, const states_t* before) {
  assert_memory_equal(&m->s, before, sizeof m->s);
}

/* The loss is the sum of (p - target)^2 / 2, so its gradient is p - target. */
TEST(Steps_OnAQuadratic_ReachItsMinimum) {
  model_t* m = open_one();
  m->groups[0].lr = 0.02, m->groups[0].weight_decay = 0.0;
  for (int64_t t = 1; t <= 500; ++t) {
    for (int i = 0; i < COUNT; ++i) m->grad[i] = 1024.0F * (m->s.param[i] - 0.25F);
    m->tensors[0].step = t;
    m->args.loss_scale = 1024.0;
    WORKS(sluice_optimizer_step(m->optimizer, &m->args, NULL));
  }
  for (int i = 0; i < COUNT; ++i) assert_true(fabsf(m->s.param[i] - 0.25F) < 1e-3F);
  close_model(m);
}

TEST(Step_WithResult_TellsTheNormAndWhetherItWasSkipped) {
  model_t* m = open_one();
  const states_t before = m->s;
  const float last = m->grad[COUNT - 1];
  DEFAULTS(sluice_optimizer_step_result, result);
  double squares = 0.0;
  for (int i = 0; i < COUNT; ++i) squares += (double)m->grad[i] * (double)m->grad[i];
  m->grad[COUNT - 1] = -INFINITY;
  WORKS(sluice_optimizer_step(m->optimizer, &m->args, &result));
  assert_int_equal(result.skipped, 1);
  check_unchanged(m, &before);
  m->grad[COUNT - 1] = last;
  WORKS(sluice_optimizer_step(m->optimizer, &m->args, &result));
  assert_true(fabs(result.norm - sqrt(squares)) < 1e-9);
  assert_int_equal(result.skipped, 0);
  close_model(m);
}

TEST(Step_BadArguments_AreRefusedByNameAndChangeNothing) {
  model_t* m = open_one();
  const states_t before = m->s;
  const model_t good = *m;
#define STEP_REFUSES(of, field, value, status, text)                          \
  m->of.field = (value);                                                      \
  REFUSED(sluice_optimizer_step(m->optimizer, &m->args, NULL), status, text); \
  m->of = good.of;                                                            \
  check_unchanged(m, &before)
#define TENSOR(field, value, text) STEP_REFUSES(tensors[0], field, value, BAD, text)
#define GROUP(field, value, text)  STEP_REFUSES(groups[0], field, value, BAD, text)
#define ARGS(field, value, text)   STEP_REFUSES(args, field, value, BAD, text)
  TENSOR(count, -1, "tensor 0 of group 0 has count -1");
  TENSOR(count, (INT64_C(1) << 48) + 1, "has count 281474976710657; give 0 to 2^48");
  TENSOR(count, INT64_MAX, "has count 9223372036854775807; give 0 to 2^48");
  TENSOR(step, 0, "tensor 0 of group 0 is at step 0");
  TENSOR(param, NULL, "param is NULL");
  TENSOR(grad, NULL, "grad is NULL");
  TENSOR(exp_avg, NULL, "exp_avg is NULL");
  TENSOR(exp_avg_sq, NULL, "exp_avg_sq is NULL");
  TENSOR(param_dtype, SLUICE_DTYPE_F64, "param_dtype is f64");
  TENSOR(grad_dtype, 99, "grad_dtype is unknown (99)");
  GROUP(lr, -1.0, "lr is -1");
  GROUP(lr, NAN, "lr is nan");
  GROUP(beta1, 1.0, "beta1 is 1");
  GROUP(beta2, -0.5, "beta2 is -0.5");
  GROUP(epsilon, NAN, "epsilon is nan");
  GROUP(epsilon, -1.0, "epsilon is -1");
  GROUP(weight_decay, INFINITY, "weight_decay is inf");
  GROUP(weight_decay, -1.0, "weight_decay is -1");
  GROUP(num_tensors, -1, "num_tensors -1");
  GROUP(reserved, 7, "reserved is 7");
  GROUP(tensors, NULL, "array is NULL");
  ARGS(loss_scale, 0.0, "loss_scale is 0");
  ARGS(max_norm, -1.0, "max_norm is -1");
  ARGS(num_groups, -1, "num_groups is -1");
  ARGS(groups, NULL, "groups is NULL");
  ARGS(reserved, 1, "reserved is 1");
  m->list[0] = NULL;
  REFUSED(sluice_optimizer_step(m->optimizer, &m->args, NULL), BAD, "group 0 is NULL");
  m->list[0] = &m->groups[0];
  STEP_REFUSES(groups[0], struct_size, 1, SLUICE_E_ABI, "sluice_optimizer_group_t");
  REFUSED(sluice_optimizer_step(NULL, &m->args, NULL), BAD, "optimizer is NULL");
  REFUSED(sluice_optimizer_create(NULL, NULL), BAD, "out_optimizer is NULL");
  check_unchanged(m, &before);
  WORKS(sluice_optimizer_step(m->optimizer, &m->args, NULL));
  close_model(m);
  sluice_optimizer_destroy(NULL);
}

/* Counts whose sum overflows are not added. Memory may not be used twice: in two groups, in one group, in part, or as
 * states of two parameters. */
TEST(Step_TensorsThatCannotBe_AreRefusedByName) {
  model_t* m = open_one();
  const states_t before = m->s;
  sluice_optimizer_tensor_t tensors[3] = {m->tensors[0], m->tensors[0], m->tensors[0]};
  sluice_optimizer_group_t second = m->groups[0];
  const sluice_optimizer_group_t* groups[2] = {&m->groups[0], &second};
  tensors[0].count = tensors[1].count = INT64_MAX, tensors[2].count = 10;
  m->groups[0].tensors = tensors, m->groups[0].num_tensors = 3;
  REFUSED(sluice_optimizer_step(m->optimizer, &m->args, NULL), BAD, "tensor 0 of group 0 has count");
  tensors[0].count = tensors[1].count = INT64_C(1) << 47, tensors[2].count = 1;
  REFUSED(sluice_optimizer_step(m->optimizer, &m->args, NULL), BAD, "tensor 2 of group 0 has count 1; give 0 to 2^48");
  m->groups[0].tensors = second.tensors = m->tensors, m->groups[0].num_tensors = second.num_tensors = 1;
  m->args.groups = groups, m->args.num_groups = 2;
  REFUSED(sluice_optimizer_step(m->optimizer, &m->args, NULL), BAD,
          "tensor 0 of group 0 and tensor 0 of group 1 share memory");
  m->args.num_groups = 1;
  m->groups[0].tensors = tensors, m->groups[0].num_tensors = 2;
  tensors[0] = tensors[1] = m->tensors[0];
  tensors[0].count = 500, tensors[1].count = 501, tensors[1].param = m->s.param + 499;
  tensors[1].exp_avg = m->s.exp_avg + 499, tensors[1].exp_avg_sq = m->s.exp_avg_sq + 499;
  REFUSED(sluice_optimizer_step(m->optimizer, &m->args, NULL), BAD,
          "tensor 0 of group 0 and tensor 1 of group 0 share memory");
  tensors[1].count = 500, tensors[1].param = m->s.param + 500, tensors[1].exp_avg_sq = m->s.exp_avg_sq + 500;
  REFUSED(sluice_optimizer_step(m->optimizer, &m->args, NULL), BAD, "share memory");
  check_unchanged(m, &before);
  tensors[1].exp_avg = m->s.exp_avg + 500; /* adjacent memory does not overlap */
  WORKS(sluice_optimizer_step(m->optimizer, &m->args, NULL));
  close_model(m);
}

/* Two threads that call alternately and concurrently: each call either runs completely or returns BUSY. */
typedef struct caller_s {
  model_t* model;
  int ran, busy;
} caller_t;

static void* call_often(void* data) {
  caller_t* caller = data;
  for (int i = 0; i < 300; ++i) {
    const sluice_status_t status = sluice_optimizer_step(caller->model->optimizer, &caller->model->args, NULL);
    caller->ran += status == SLUICE_OK;
    caller->busy += status == SLUICE_E_BUSY;
  }
  return NULL;
}

TEST(Step_FromTwoThreads_RunsOrIsBusy) {
  model_t* m = open_one();
  caller_t callers[2] = {{.model = m}, {.model = m}};
  pthread_t threads[2];
  for (int i = 0; i < 2; ++i) assert_int_equal(pthread_create(&threads[i], NULL, call_often, &callers[i]), 0);
  for (int i = 0; i < 2; ++i) pthread_join(threads[i], NULL);
  for (int i = 0; i < 2; ++i) assert_int_equal(callers[i].ran + callers[i].busy, 300);
  assert_true(callers[0].ran + callers[1].ran > 0);
  close_model(m);
}
