// SPDX-License-Identifier: Apache-2.0
#include "capi/test/optimizer/optimizer_world.h"

#include <pthread.h>

#include "third_party/bazel/test.h"

static sluice_comm_t* join(sluice_local_group_t* group, int32_t rank, int32_t size) {
  DEFAULTS(sluice_comm_config, config);
  config.rank = rank;
  config.world_size = size;
  config.timeout_ns = UINT64_C(60000000000);
  sluice_comm_t* comm = NULL;
  WORKS(sluice_comm_create_local(group, &config, &comm));
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
  model_t* m = me->model;
  m->args.comm = me->comm;
  m->groups[1].comm = me->own;
  set_gradients(m, me->step, me->rank);
  if (me->world->before != NULL) me->world->before(me);
  me->status = sluice_optimizer_step(m->optimizer, &m->args, &m->result);
  sluice_error_last(&me->error);
  return NULL;
}

void ow_on_all(ow_world_t* w, void* (*fn)(void* rank)) {
  pthread_t threads[OW_MAX_RANKS];
  for (int r = 0; r < w->size; ++r) assert_int_equal(pthread_create(threads + r, NULL, fn, w->ranks + r), 0);
  for (int r = 0; r < w->size; ++r) pthread_join(threads[r], NULL);
}

ow_world_t* ow_world_new(int32_t size, int32_t is_tcp, int32_t parts) {
  ow_world_t* w = calloc(1, sizeof *w);
  assert_non_null(w);
  w->size = size, w->is_tcp = is_tcp, w->parts = parts;
  WORKS(sluice_local_group_create(size, &w->group));
  for (int32_t p = 0; p < parts; ++p) {
    WORKS(sluice_local_group_create(size / parts, &w->groups[p]));
  }
  for (int32_t r = 0; r < size; ++r) {
    ow_rank_t* me = w->ranks + r;
    *me = (ow_rank_t){.world = w, .rank = r, .model = open_model()};
    me->parent = me->comm = join(w->group, r, size);
    if (parts > 0) me->own = join(w->groups[r % parts], r / parts, size / parts);
    sluice_error_info_init(&me->error, sizeof me->error);
  }
  tcp_place_init(w->place);
  if (is_tcp) ow_on_all(w, is_tcp == OW_TCP_AT ? meet_rank : connect_rank);
  for (int32_t r = 0; r < size; ++r) assert_int_equal(w->ranks[r].status, SLUICE_OK);
  return w;
}

void ow_world_free(ow_world_t* w) {
  for (int32_t r = 0; r < w->size; ++r) {
    if (w->is_tcp) sluice_comm_destroy(w->ranks[r].comm);
    sluice_comm_destroy(w->ranks[r].parent);
    sluice_comm_destroy(w->ranks[r].own);
  }
  for (int32_t r = 0; r < w->size; ++r) close_model(w->ranks[r].model);
  sluice_local_group_destroy(w->group);
  for (int32_t p = 0; p < w->parts; ++p) sluice_local_group_destroy(w->groups[p]);
  free(w);
}

void ow_step(ow_world_t* w, int32_t number) {
  for (int32_t r = 0; r < w->size; ++r) w->ranks[r].step = number;
  ow_on_all(w, step_rank);
}

/* ---- the reference ---- */

void ow_sum_gradients(const ow_world_t* w, const ow_rank_t* me, model_t* reference) {
  for (int64_t t = 0, first = 0; t < NUM_TENSORS; first += counts[t++]) {
    const int32_t parts = t >= NUM_TENSORS / 2 && w->parts > 0 ? w->parts : 1;
    for (int64_t i = 0; i < counts[t]; ++i) {
      float sum = 0;
      for (int32_t r = me->rank % parts; r < w->size; r += parts) {
        const float g = read_element(w->ranks[r].model->grad + first, dtypes[t], i);
        sum = r < parts ? g : sum + g;
      }
      reference->grad[first + i] = sum;
    }
    reference->tensors[t].grad_dtype = SLUICE_DTYPE_F32;
    reference->tensors[t].step = me->model->tensors[t].step;
  }
}

static void expect_bits(const ow_world_t* w, const ow_rank_t* me, const states_t* wanted) {
  const states_t* found = &me->model->s;
  if (memcmp(found, wanted, sizeof *found) == 0) return;
  for (int64_t i = 0; i < ELEMENTS; ++i) {
    if (memcmp(&found->param[i], &wanted->param[i], 4) == 0 && found->exp_avg[i] == wanted->exp_avg[i]) continue;
    fail_msg("rank %d of %d, step %d: element %lld: moment %a, wanted %a", me->rank, w->size, me->step, (long long)i,
             (double)found->exp_avg[i], (double)wanted->exp_avg[i]);
  }
  fail();
}

int ow_check_steps(ow_world_t* w, int64_t bucket, int64_t chunk, double max_norm) {
  int decided = 0;
  model_t* references[OW_MAX_RANKS];
  for (int32_t r = 0; r < w->size; ++r) references[r] = open_model();
  for (int32_t number = 1; number <= OW_STEPS; ++number) {
    for (int32_t r = 0; r < w->size; ++r) {
      sluice_optimizer_step_args_t* args = &w->ranks[r].model->args;
      args->bucket = bucket, args->sum_buckets = chunk, args->max_norm = max_norm;
      args->loss_scale = references[r]->args.loss_scale = 8.0;
      references[r]->args.max_norm = max_norm;
    }
    ow_step(w, number);
    for (int32_t r = 0; r < w->size; ++r) {
      const ow_rank_t* me = w->ranks + r;
      model_t* reference = references[r];
      if (me->status != SLUICE_OK) fail_msg("rank %d: %s", r, me->error.message);
      ow_sum_gradients(w, me, reference);
      WORKS(sluice_optimizer_step(reference->optimizer, &reference->args, &reference->result));
      expect_bits(w, me, &reference->s);
      assert_int_equal(me->model->result.skipped, 0);
      if (max_norm > 0.0) assert_true(me->model->result.norm == reference->result.norm);
      if (chunk > 0) assert_true(me->model->result.sum_buckets == chunk);
      decided += me->model->result.decided;
    }
  }
  for (int32_t r = 0; r < w->size; ++r) close_model(references[r]);
  return decided;
}
