// SPDX-License-Identifier: Apache-2.0
#include "capi/test/optimizer/filed_model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "backend/base/dtype.h"

const int64_t counts[NUM_TENSORS] = {7000, 0, 2150, 1000};
const int32_t dtypes[NUM_TENSORS] = {SLUICE_DTYPE_F32, SLUICE_DTYPE_F32, SLUICE_DTYPE_BF16, SLUICE_DTYPE_F16};

static float draw(uint64_t* seed, double scale) {
  *seed = *seed * 6364136223846793005u + 1442695040888963407u;
  return (float)(((double)(*seed >> 11) / 4503599627370496.0 - 1.0) * scale);
}

void write_element(void* data, int32_t dtype, int64_t i, float x) {
  if (dtype == SLUICE_DTYPE_F32) ((float*)data)[i] = x;
  if (dtype == SLUICE_DTYPE_BF16) ((uint16_t*)data)[i] = sluice_f32_to_bf16(x);
  if (dtype == SLUICE_DTYPE_F16) ((uint16_t*)data)[i] = sluice_f32_to_f16(x);
}

float read_element(const void* data, int32_t dtype, int64_t i) {
  if (dtype == SLUICE_DTYPE_F32) return ((const float*)data)[i];
  const uint16_t half = ((const uint16_t*)data)[i];
  return dtype == SLUICE_DTYPE_BF16 ? sluice_bf16_to_f32(half) : sluice_f16_to_f32(half);
}

void set_gradients(model_t* m, int step, int rank) {
  uint64_t seed = (uint64_t)(100 * step + rank);
  for (int64_t t = 0, first = 0; t < NUM_TENSORS; first += counts[t++]) {
    m->tensors[t].step = step;
    m->tensors[t].grad_dtype = dtypes[t];
    for (int64_t i = 0; i < counts[t]; ++i) write_element(m->grad + first, dtypes[t], i, draw(&seed, 0.5));
  }
  if (m->machine != NULL) m->machine->send(m->rank, m->grad_there, m->grad, sizeof m->grad);
}

void init_model(model_t* m) {
  memset(m, 0, sizeof *m);
  uint64_t seed = 7;
  for (int64_t t = 0, first = 0; t < NUM_TENSORS; first += counts[t++]) {
    m->tensors[t] = (sluice_optimizer_tensor_t){.count = counts[t],
                                                .param = m->s.param + first,
                                                .master = m->s.master + first,
                                                .grad = m->grad + first,
                                                .exp_avg = m->s.exp_avg + first,
                                                .exp_avg_sq = m->s.exp_avg_sq + first,
                                                .param_dtype = dtypes[t]};
    for (int64_t i = 0; i < counts[t]; ++i) {
      m->s.master[first + i] = draw(&seed, 1.0);
      write_element(m->s.param + first, dtypes[t], i, m->s.master[first + i]);
    }
  }
  for (int g = 0; g < 2; ++g) {
    sluice_optimizer_group_init(&m->groups[g], sizeof m->groups[g]);
    m->groups[g].tensors = m->tensors + 2 * g;
    m->groups[g].num_tensors = 2;
    m->groups[g].lr = 1e-2 * (g + 1), m->groups[g].decoupled = g == 0;
    m->list[g] = &m->groups[g];
  }
  set_gradients(m, 1, 0);
  sluice_optimizer_step_args_init(&m->args, sizeof m->args);
  sluice_optimizer_step_result_init(&m->result, sizeof m->result);
  m->args.groups = m->list, m->args.num_groups = 2, m->args.bucket = BUCKET;
}

model_t* open_model(void) {
  model_t* m = malloc(sizeof *m);
  assert_non_null(m);
  init_model(m);
  DEFAULTS(sluice_optimizer_config, config);
  WORKS(sluice_optimizer_create(&config, &m->optimizer));
  return m;
}

void close_model(model_t* m) {
  sluice_optimizer_destroy(m->optimizer);
  sluice_optimizer_file_close(m->file);
  if (m->path[0] != '\0') (void)unlink(m->path);
  if (m->machine != NULL) m->machine->release(m->param_there), m->machine->release(m->grad_there);
  free(m);
}

void move_model(model_t* m, const world_machine_t* machine, int32_t rank) {
  m->machine = machine, m->rank = rank;
  m->param_there = machine->allocate(rank, sizeof m->s.param);
  m->grad_there = machine->allocate(rank, sizeof m->grad);
  machine->send(rank, m->param_there, m->s.param, sizeof m->s.param);
  machine->send(rank, m->grad_there, m->grad, sizeof m->grad);
  for (int64_t t = 0, first = 0; t < NUM_TENSORS; first += counts[t++]) {
    m->tensors[t].param = (float*)(void*)m->param_there + first;
    m->tensors[t].grad = (float*)(void*)m->grad_there + first;
  }
  m->args.stream = machine->stream(rank);
}

sluice_status_t run_step(model_t* m) {
  const sluice_status_t status = sluice_optimizer_step(m->optimizer, &m->args, &m->result);
  if (m->machine == NULL) return status;
  m->machine->settle(m->rank);
  m->machine->fetch(m->rank, m->s.param, m->param_there, sizeof m->s.param);
  m->machine->fetch(m->rank, m->grad, m->grad_there, sizeof m->grad);
  return status;
}

sluice_optimizer_file_config_t config_of(model_t* m) {
  static _Atomic int number;
  const char* folder = getenv("TEST_TMPDIR");
  if (m->path[0] == '\0') {
    (void)snprintf(m->path, sizeof m->path, "%s/states%d.%d", folder != NULL ? folder : "/tmp", (int)getpid(),
                   number++);
  }
  DEFAULTS(sluice_optimizer_file_config, config);
  config.path = m->path;
  config.comm = m->comm;
  return config;
}

void forget_states(model_t* m) {
  for (int t = 0; t < NUM_TENSORS; ++t) {
    m->tensors[t].master = m->tensors[t].exp_avg = m->tensors[t].exp_avg_sq = NULL;
  }
}

model_t* open_with_file_at(const char* path) {
  model_t* m = open_model();
  if (path != NULL) memcpy(m->path, path, sizeof m->path);
  const sluice_optimizer_file_config_t config = config_of(m);
  WORKS(sluice_optimizer_file_create(&config, m->list, 2, &m->file));
  forget_states(m);
  m->args.file = m->file;
  return m;
}

model_t* open_with_file(void) { return open_with_file_at(NULL); }

sluice_optimizer_file_info_t info_of(model_t* m) {
  DEFAULTS(sluice_optimizer_file_info, info);
  WORKS(sluice_optimizer_file_info(m->file, &info));
  return info;
}

void step_model(model_t* m, int number) {
  set_gradients(m, number, 0);
  WORKS(run_step(m));
}

void expect_states(model_t* m, const model_t* wanted) {
  states_t* found = calloc(1, sizeof *found);
  assert_non_null(found);
  model_t copy = *m;
  for (int64_t t = 0, first = 0; t < NUM_TENSORS; first += counts[t++]) {
    copy.tensors[t].param = found->param + first;
    copy.tensors[t].master = found->master + first;
    copy.tensors[t].exp_avg = found->exp_avg + first;
    copy.tensors[t].exp_avg_sq = found->exp_avg_sq + first;
  }
  for (int g = 0; g < 2; ++g) copy.groups[g].tensors = copy.tensors + 2 * g, copy.list[g] = &copy.groups[g];
  WORKS(sluice_optimizer_file_load(m->file, copy.list, 2));
  assert_memory_equal(found->master, wanted->s.master, sizeof found->master);
  assert_memory_equal(found->exp_avg, wanted->s.exp_avg, sizeof found->exp_avg);
  assert_memory_equal(found->exp_avg_sq, wanted->s.exp_avg_sq, sizeof found->exp_avg_sq);
  assert_memory_equal(found->param, wanted->s.param, sizeof found->param);
  assert_memory_equal(m->s.param, wanted->s.param, sizeof m->s.param);
  free(found);
}

void write_params(model_t* m, model_t* copy, int seed) {
  uint64_t state = (uint64_t)seed;
  for (int64_t t = 0, first = 0; t < NUM_TENSORS; first += counts[t++]) {
    for (int64_t i = seed % 5; i < counts[t]; i += 7) {
      const float x = draw(&state, 3.0), before = read_element(copy->s.param + first, dtypes[t], i);
      write_element(m->s.param + first, dtypes[t], i, x);
      write_element(copy->s.param + first, dtypes[t], i, x);
      const float now = read_element(copy->s.param + first, dtypes[t], i);
      if (now != before) copy->s.master[first + i] = now; /* otherwise the master keeps its unrounded value */
    }
  }
}

void close_file(model_t* m) {
  sluice_optimizer_file_close(m->file);
  m->args.file = m->file = NULL;
}

void reopen(model_t* m, int64_t at) {
  close_file(m);
  sluice_optimizer_file_config_t config = config_of(m);
  config.step = at;
  WORKS(sluice_optimizer_file_open(&config, &m->file));
  m->args.file = m->file;
}
