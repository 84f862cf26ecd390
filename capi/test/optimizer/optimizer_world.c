// SPDX-License-Identifier: Apache-2.0
#include "capi/test/optimizer/optimizer_world.h"

#include <pthread.h>

#include "backend/base/dtype.h"
#include "third_party/bazel/test.h"

const int64_t ow_counts[OW_NUM_TENSORS] = {70001, 3, 33000, 1, 40303, 0, 8000};
const int32_t ow_group_of[OW_NUM_TENSORS] = {0, 0, 0, 1, 1, 2, 2};
const int32_t ow_dtypes[OW_NUM_TENSORS] = {SLUICE_DTYPE_F32,  SLUICE_DTYPE_BF16, SLUICE_DTYPE_BF16, SLUICE_DTYPE_F16,
                                           SLUICE_DTYPE_BF16, SLUICE_DTYPE_F32,  SLUICE_DTYPE_F16};

/* ---- parameters and their states ---- */

static float draw(uint64_t* seed, double scale) {
  *seed = *seed * 6364136223846793005u + 1442695040888963407u;
  return (float)(((double)(*seed >> 11) / 4503599627370496.0 - 1.0) * scale);
}

int64_t ow_first_of(int tensor) {
  int64_t first = 0;
  for (int t = 0; t < tensor; ++t) first += ow_counts[t];
  return first;
}

void ow_write_element(void* data, int32_t dtype, int64_t i, float x) {
  if (dtype == SLUICE_DTYPE_F32) ((float*)data)[i] = x;
  if (dtype == SLUICE_DTYPE_BF16) ((uint16_t*)data)[i] = sluice_f32_to_bf16(x);
  if (dtype == SLUICE_DTYPE_F16) ((uint16_t*)data)[i] = sluice_f32_to_f16(x);
}

static float read_element(const void* data, int32_t dtype, int64_t i) {
  if (dtype == SLUICE_DTYPE_F32) return ((const float*)data)[i];
  const uint16_t half = ((const uint16_t*)data)[i];
  return dtype == SLUICE_DTYPE_BF16 ? sluice_bf16_to_f32(half) : sluice_f16_to_f32(half);
}

ow_model_t* ow_model_new(void) {
  ow_model_t* m = calloc(1, sizeof *m);
  assert_non_null(m);
  uint64_t seed = 7;
  sluice_optimizer_step_args_init(&m->args, sizeof m->args);
  for (int g = 0; g < OW_NUM_GROUPS; ++g) {
    sluice_optimizer_group_init(&m->groups[g], sizeof m->groups[g]);
    m->groups[g].lr = 1e-2 * (g + 1);
    m->groups[g].tensors = m->tensors;
    m->list[g] = &m->groups[g];
  }
  for (int t = 0; t < OW_NUM_TENSORS; ++t) {
    const int64_t first = ow_first_of(t);
    sluice_optimizer_group_t* group = &m->groups[ow_group_of[t]];
    if (group->num_tensors == 0) group->tensors = m->tensors + t;
    ++group->num_tensors;
    m->tensors[t] = (sluice_optimizer_tensor_t){.count = ow_counts[t],
                                                .step = 1,
                                                .param = m->s.param + first,
                                                .master = ow_dtypes[t] == SLUICE_DTYPE_F32 ? NULL : m->s.master + first,
                                                .grad = m->grad + first,
                                                .exp_avg = m->s.exp_avg + first,
                                                .exp_avg_sq = m->s.exp_avg_sq + first,
                                                .param_dtype = ow_dtypes[t],
                                                .grad_dtype = ow_dtypes[t]};
    for (int64_t i = 0; i < ow_counts[t]; ++i) {
      m->s.master[first + i] = draw(&seed, 1.0);
      ow_write_element(m->s.param + first, ow_dtypes[t], i, m->s.master[first + i]);
    }
  }
  m->args.groups = m->list;
  m->args.num_groups = OW_NUM_GROUPS;
  sluice_optimizer_step_result_init(&m->result, sizeof m->result);
  DEFAULTS(sluice_optimizer_config, config);
  assert_int_equal(sluice_optimizer_create(&config, &m->optimizer), SLUICE_OK);
  return m;
}

void ow_model_free(ow_model_t* m) {
  sluice_optimizer_destroy(m->optimizer);
  free(m);
}

static void set_gradients(ow_model_t* m, int rank, int step) {
  uint64_t seed = (uint64_t)(1000 * (step + 1) + rank);
  for (int t = 0; t < OW_NUM_TENSORS; ++t) {
    m->tensors[t].step = step + 1;
    for (int64_t i = 0; i < ow_counts[t]; ++i)
      ow_write_element(m->grad + ow_first_of(t), ow_dtypes[t], i, draw(&seed, 0.5));
  }
}

/* ---- ranks ---- */

static sluice_comm_t* join(sluice_local_group_t* group, int32_t rank, int32_t size) {
  DEFAULTS(sluice_comm_config, config);
  config.rank = rank;
  config.world_size = size;
  config.timeout_ns = UINT64_C(60000000000);
  sluice_comm_t* comm = NULL;
  assert_int_equal(sluice_comm_create_local(group, &config, &comm), SLUICE_OK);
  return comm;
}

static void* connect_rank(void* data) {
  ow_rank_t* me = data;
  me->status = sluice_comm_create_tcp(me->parent, NULL, &me->comm);
  return NULL;
}

static void* meet_rank(void* data) {
  ow_rank_t* me = data;
  DEFAULTS(sluice_comm_config, config);
  config.rank = me->rank;
  config.world_size = me->world->size;
  config.timeout_ns = UINT64_C(60000000000);
  me->status =
      sluice_comm_create_tcp_at(&config, me->world->place, tcp_place_secret, sizeof tcp_place_secret, NULL, &me->comm);
  return NULL;
}

static void* step_rank(void* data) {
  ow_rank_t* me = data;
  ow_model_t* m = me->model;
  m->args.comm = me->comm;
  m->groups[1].comm = me->own;
  set_gradients(m, me->rank, me->step);
  if (me->world->before != NULL) me->world->before(me);
  me->status = sluice_optimizer_step(m->optimizer, &m->args, &m->result);
  sluice_error_last(&me->error);
  return NULL;
}

static void on_all(ow_world_t* w, void* (*fn)(void* rank)) {
  pthread_t threads[OW_MAX_RANKS];
  for (int r = 0; r < w->size; ++r) assert_int_equal(pthread_create(threads + r, NULL, fn, w->ranks + r), 0);
  for (int r = 0; r < w->size; ++r) pthread_join(threads[r], NULL);
}

ow_world_t* ow_world_new(int32_t size, int32_t is_tcp, int32_t parts) {
  ow_world_t* w = calloc(1, sizeof *w);
  assert_non_null(w);
  w->size = size, w->is_tcp = is_tcp, w->parts = parts;
  assert_int_equal(sluice_local_group_create(size, &w->group), SLUICE_OK);
  for (int32_t p = 0; p < parts; ++p) {
    assert_int_equal(sluice_local_group_create(size / parts, &w->groups[p]), SLUICE_OK);
  }
  for (int32_t r = 0; r < size; ++r) {
    ow_rank_t* me = w->ranks + r;
    *me = (ow_rank_t){.world = w, .rank = r, .model = ow_model_new()};
    me->parent = me->comm = join(w->group, r, size);
    if (parts > 0) me->own = join(w->groups[r % parts], r / parts, size / parts);
    sluice_error_info_init(&me->error, sizeof me->error);
  }
  tcp_place_init(w->place);
  if (is_tcp) on_all(w, is_tcp == OW_TCP_AT ? meet_rank : connect_rank);
  for (int32_t r = 0; r < size; ++r) assert_int_equal(w->ranks[r].status, SLUICE_OK);
  return w;
}

void ow_world_free(ow_world_t* w) {
  for (int32_t r = 0; r < w->size; ++r) {
    ow_model_free(w->ranks[r].model);
    if (w->is_tcp) sluice_comm_destroy(w->ranks[r].comm);
    sluice_comm_destroy(w->ranks[r].parent);
    sluice_comm_destroy(w->ranks[r].own);
  }
  sluice_local_group_destroy(w->group);
  for (int32_t p = 0; p < w->parts; ++p) sluice_local_group_destroy(w->groups[p]);
  free(w);
}

void ow_step(ow_world_t* w, int32_t number) {
  for (int32_t r = 0; r < w->size; ++r) w->ranks[r].step = number;
  on_all(w, step_rank);
}

/* ---- the reference ---- */

void ow_sum_gradients(const ow_world_t* w, const ow_rank_t* me, ow_model_t* reference) {
  for (int t = 0; t < OW_NUM_TENSORS; ++t) {
    const int64_t first = ow_first_of(t);
    const int32_t parts = ow_group_of[t] == 1 && w->parts > 0 ? w->parts : 1;
    for (int64_t i = 0; i < ow_counts[t]; ++i) {
      float sum = 0;
      for (int32_t r = me->rank % parts; r < w->size; r += parts) {
        const float g = read_element(w->ranks[r].model->grad + first, ow_dtypes[t], i);
        sum = r < parts ? g : sum + g;
      }
      reference->grad[first + i] = sum;
    }
    reference->tensors[t].grad_dtype = SLUICE_DTYPE_F32;
    reference->tensors[t].step = me->model->tensors[t].step;
  }
}

static void expect_states(const ow_world_t* w, const ow_rank_t* me, const ow_states_t* wanted) {
  const ow_states_t* found = &me->model->s;
  if (memcmp(found, wanted, sizeof *found) == 0) return;
  for (int64_t i = 0; i < OW_ELEMENTS; ++i) {
    if (memcmp(&found->param[i], &wanted->param[i], 4) == 0 && found->exp_avg[i] == wanted->exp_avg[i]) continue;
    fail_msg("rank %d of %d, step %d: element %lld: moment %a, wanted %a", me->rank, w->size, me->step, (long long)i,
             (double)found->exp_avg[i], (double)wanted->exp_avg[i]);
  }
  fail();
}

int ow_check_steps(ow_world_t* w, int64_t bucket, int64_t chunk, double max_norm) {
  int decided = 0;
  ow_model_t* references[OW_MAX_RANKS];
  for (int32_t r = 0; r < w->size; ++r) references[r] = ow_model_new();
  for (int32_t number = 0; number < OW_STEPS; ++number) {
    for (int32_t r = 0; r < w->size; ++r) {
      sluice_optimizer_step_args_t* args = &w->ranks[r].model->args;
      args->bucket = bucket, args->sum_buckets = chunk, args->max_norm = max_norm;
      args->loss_scale = references[r]->args.loss_scale = 8.0;
      references[r]->args.max_norm = max_norm;
    }
    ow_step(w, number);
    for (int32_t r = 0; r < w->size; ++r) {
      const ow_rank_t* me = w->ranks + r;
      ow_model_t* reference = references[r];
      if (me->status != SLUICE_OK) fail_msg("rank %d: %s", r, me->error.message);
      ow_sum_gradients(w, me, reference);
      assert_int_equal(sluice_optimizer_step(reference->optimizer, &reference->args, &reference->result), SLUICE_OK);
      expect_states(w, me, &reference->s);
      assert_int_equal(me->model->result.skipped, 0);
      if (max_norm > 0.0) assert_true(me->model->result.norm == reference->result.norm);
      if (chunk > 0) assert_true(me->model->result.sum_buckets == chunk);
      decided += me->model->result.decided;
    }
  }
  for (int32_t r = 0; r < w->size; ++r) ow_model_free(references[r]);
  return decided;
}
