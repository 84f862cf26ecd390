// SPDX-License-Identifier: Apache-2.0
#include "capi/test/cuda/cuda_optimizer_model.h"

#include <stdlib.h>
#include <string.h>

#include "backend/base/dtype.h"
#include "capi/test/cuda/fakes.h"

static void* take(const com_model_t* m, uint64_t bytes) {
  void* data = m->context != NULL ? fakes_machine()->allocate(m->rank, bytes) : malloc(bytes);
  if (data == NULL) abort();
  return data;
}

static void give(const com_model_t* m, void* data) {
  if (m->context != NULL) {
    fakes_machine()->release(data);
  } else {
    free(data);
  }
}

static char* at(void* data, int32_t dtype, int64_t element) {
  return (char*)data + element * (int64_t)sluice_dtype_bytes(dtype);
}

static void put(void* data, int32_t dtype, int64_t element, float value) {
  char* to = at(data, dtype, element);
  if (dtype == SLUICE_DTYPE_F32) *(float*)(void*)to = value;
  if (dtype == SLUICE_DTYPE_BF16) *(uint16_t*)(void*)to = sluice_f32_to_bf16(value);
  if (dtype == SLUICE_DTYPE_F16) *(uint16_t*)(void*)to = sluice_f32_to_f16(value);
}

static void set_tensor(com_model_t* m, int which, int64_t first, int64_t count) {
  m->tensors[which] = (sluice_optimizer_tensor_t){
      .count = count,
      .step = 1,
      .param = at(m->param, m->param_dtype, first),
      .master = m->master + first,
      .grad = at(m->grad, m->grad_dtype, first),
      .exp_avg = m->exp_avg + first,
      .exp_avg_sq = m->exp_avg_sq + first,
      .param_dtype = m->param_dtype,
      .grad_dtype = m->grad_dtype,
  };
  sluice_optimizer_group_init(&m->groups[which], sizeof m->groups[which]);
  m->groups[which].tensors = &m->tensors[which];
  m->groups[which].num_tensors = 1;
  m->group_list[which] = &m->groups[which];
}

com_model_t* com_model_fill(sluice_context_t* context, int32_t rank, int32_t param_dtype, int32_t grad_dtype) {
  com_model_t* m = calloc(1, sizeof *m);
  if (m == NULL) abort();
  m->context = context, m->rank = rank;
  m->param_dtype = param_dtype, m->grad_dtype = grad_dtype;
  m->param = take(m, COM_ELEMENTS * sluice_dtype_bytes(param_dtype));
  m->grad = take(m, COM_ELEMENTS * sluice_dtype_bytes(grad_dtype));
  for (int64_t i = 0; i < COM_ELEMENTS; ++i) {
    m->master[i] = (float)(i % 101 - 50) / 64.0F;
    put(m->param, param_dtype, i, m->master[i]);
  }
  set_tensor(m, 0, 0, COM_COUNT_A);
  set_tensor(m, 1, COM_COUNT_A, COM_COUNT_B);
  m->groups[1].lr = 0.01, m->groups[1].decoupled = 0;
  sluice_optimizer_step_args_init(&m->args, sizeof m->args);
  sluice_optimizer_step_result_init(&m->result, sizeof m->result);
  m->args.groups = m->group_list;
  m->args.num_groups = 2;
  m->args.loss_scale = 4.0;
  m->args.stream = context != NULL ? fakes_stream(rank) : NULL;
  com_set_gradients(m, 1);
  return m;
}

sluice_optimizer_config_t com_config_of(sluice_context_t* context) {
  sluice_optimizer_config_t config;
  sluice_optimizer_config_init(&config, sizeof config);
  config.context = context;
  config.device_bucket = COM_BUCKET;
  return config;
}

void com_model_free(com_model_t* m) {
  sluice_optimizer_destroy(m->optimizer);
  give(m, m->param);
  give(m, m->grad);
  free(m);
}

static float gradient(int64_t element, int64_t step, int32_t rank) {
  const float x = (float)((element * 37 + step * 11 + rank * 17) % 29 - 14) / 7.0F;
  return sluice_bf16_to_f32(sluice_f32_to_bf16(x));
}

void com_set_gradient(com_model_t* m, int64_t element, float value) { put(m->grad, m->grad_dtype, element, value); }

float com_get_gradient(const com_model_t* m, int64_t element) {
  if (m->grad_dtype == SLUICE_DTYPE_F32) return ((const float*)m->grad)[element];
  return sluice_bf16_to_f32(((const uint16_t*)m->grad)[element]);
}

void com_set_gradients(com_model_t* m, int64_t step) {
  for (int64_t i = 0; i < COM_ELEMENTS; ++i) com_set_gradient(m, i, gradient(i, step, m->rank));
}

sluice_status_t com_step(com_model_t* m) {
  const sluice_status_t status = sluice_optimizer_step(m->optimizer, &m->args, &m->result);
  if (m->context != NULL) fakes_machine()->settle(m->rank);
  return status;
}

void com_advance(com_model_t* m) {
  for (int i = 0; i < 2; ++i) ++m->tensors[i].step;
}

void com_copy(com_model_t* to, const com_model_t* from) {
  memcpy(to->param, from->param, COM_ELEMENTS * sluice_dtype_bytes(from->param_dtype));
  memcpy(to->master, from->master, sizeof from->master);
  memcpy(to->exp_avg, from->exp_avg, sizeof from->exp_avg);
  memcpy(to->exp_avg_sq, from->exp_avg_sq, sizeof from->exp_avg_sq);
}

const char* com_difference(const com_model_t* a, const com_model_t* b) {
  if (memcmp(a->param, b->param, COM_ELEMENTS * sluice_dtype_bytes(a->param_dtype)) != 0) return "param";
  if (memcmp(a->master, b->master, sizeof a->master) != 0) return "master";
  if (memcmp(a->exp_avg, b->exp_avg, sizeof a->exp_avg) != 0) return "exp_avg";
  return memcmp(a->exp_avg_sq, b->exp_avg_sq, sizeof a->exp_avg_sq) != 0 ? "exp_avg_sq" : NULL;
}
