// SPDX-License-Identifier: Apache-2.0
#include "capi/test/optimizer/optimizer_world.h"

#include <pthread.h>

#include "capi/test/cuda/fakes.h"
#include "third_party/bazel/test.h"

int ow_is_on_gpus(const ow_world_t* w) { return w->kind >= OW_NCCL; }

static const layer_machine_t* gpus_of(const ow_world_t* w) { return fakes_layer_machine(w->kind == OW_ONE_GPU); }

static sluice_comm_config_t config_of_rank(int32_t rank, int32_t size) {
  DEFAULTS(sluice_comm_config, config);
  config.rank = rank;
  config.world_size = size;
  config.timeout_ns = UINT64_C(60000000000);
  return config;
}

static sluice_comm_t* join(sluice_local_group_t* group, int32_t rank, int32_t size) {
  const sluice_comm_config_t config = config_of_rank(rank, size);
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
  const sluice_comm_config_t config = config_of_rank(me->rank, me->world->size);
  me->status =
      sluice_comm_create_tcp_at(&config, me->world->place, tcp_place_secret, sizeof tcp_place_secret, NULL, &me->comm);
  return NULL;
}

static void* move_rank(void* data) {
  ow_rank_t* me = data;
  const world_machine_t* machine = gpus_of(me->world)->world();
  const sluice_comm_config_t comm = config_of_rank(me->rank, me->world->size);
  DEFAULTS(sluice_context_config, context);
  context.device_type = machine->device_type, context.device_id = machine->device_id(me->rank);
  me->status = machine->make_comm(me->rank, &comm, &me->comm);
  me->parent = me->comm;
  if (me->status == SLUICE_OK) me->status = machine->make_context(me->rank, &context, me->comm, &me->context);
  sluice_optimizer_destroy(me->model->optimizer);
  me->model->optimizer = NULL;
  move_model(me->model, machine, me->rank);
  return NULL;
}

static void* step_rank(void* data) {
  ow_rank_t* me = data;
  model_t* m = me->model;
  m->args.comm = me->comm;
  m->groups[1].comm = me->own;
  set_gradients(m, me->step, me->rank);
  if (me->world->before != NULL) me->world->before(me);
  me->status = run_step(m);
  sluice_error_last(&me->error);
  return NULL;
}

static void* close_rank(void* data) {
  ow_rank_t* me = data;
  close_model(me->model);
  sluice_context_destroy(me->context);
  if (me->comm != me->parent) sluice_comm_destroy(me->comm);
  sluice_comm_destroy(me->parent);
  sluice_comm_destroy(me->own);
  return NULL;
}

void ow_on_all(ow_world_t* w, void* (*fn)(void* rank)) {
  pthread_t threads[OW_MAX_RANKS];
  for (int r = 0; r < w->size; ++r) assert_int_equal(pthread_create(threads + r, NULL, fn, w->ranks + r), 0);
  for (int r = 0; r < w->size; ++r) pthread_join(threads[r], NULL);
}

/* On CPUs f32 parameters are their own master weights. */
static model_t* open_rank_model(const ow_world_t* w) {
  model_t* m = open_model();
  for (int t = 0; t < NUM_TENSORS && !ow_is_on_gpus(w); ++t) {
    if (dtypes[t] == SLUICE_DTYPE_F32) m->tensors[t].master = NULL;
  }
  return m;
}

ow_world_t* ow_world_new(int32_t size, int32_t kind, int32_t parts) {
  static void* (*const openers[])(void*) = {NULL, connect_rank, meet_rank, move_rank, move_rank};
  ow_world_t* w = calloc(1, sizeof *w);
  assert_non_null(w);
  w->size = size, w->kind = kind, w->parts = parts;
  if (ow_is_on_gpus(w)) gpus_of(w)->open(size, 1);
  WORKS(sluice_local_group_create(size, &w->group));
  for (int32_t p = 0; p < parts; ++p) {
    WORKS(sluice_local_group_create(size / parts, &w->groups[p]));
  }
  for (int32_t r = 0; r < size; ++r) {
    ow_rank_t* me = w->ranks + r;
    *me = (ow_rank_t){.world = w, .rank = r, .model = open_rank_model(w)};
    if (!ow_is_on_gpus(w)) me->parent = me->comm = join(w->group, r, size);
    if (parts > 0) me->own = join(w->groups[r % parts], r / parts, size / parts);
    sluice_error_info_init(&me->error, sizeof me->error);
  }
  tcp_place_init(w->place);
  if (openers[kind] != NULL) ow_on_all(w, openers[kind]);
  for (int32_t r = 0; r < size; ++r) assert_int_equal(w->ranks[r].status, SLUICE_OK);
  return w;
}

void ow_world_free(ow_world_t* w) {
  ow_on_all(w, close_rank);
  const char* left = ow_is_on_gpus(w) ? gpus_of(w)->close() : NULL;
  if (left != NULL) fail_msg("%s", left);
  sluice_local_group_destroy(w->group);
  for (int32_t p = 0; p < w->parts; ++p) sluice_local_group_destroy(w->groups[p]);
  free(w);
}

void ow_set(ow_world_t* w, int64_t bucket, int64_t sum_buckets, double max_norm) {
  for (int32_t r = 0; r < w->size; ++r) {
    model_t* m = w->ranks[r].model;
    m->args.bucket = bucket, m->args.sum_buckets = sum_buckets, m->args.max_norm = max_norm;
    if (!ow_is_on_gpus(w)) continue;
    DEFAULTS(sluice_optimizer_config, config);
    config.context = w->ranks[r].context, config.device_bucket = bucket;
    sluice_optimizer_destroy(m->optimizer);
    WORKS(sluice_optimizer_create(&config, &m->optimizer));
  }
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
        const model_t* m = w->ranks[r].model;
        const float g = read_element(m->grad + first, m->tensors[t].grad_dtype, i);
        sum = r < parts ? g : sum + g;
      }
      reference->grad[first + i] = sum;
    }
    reference->tensors[t].grad_dtype = SLUICE_DTYPE_F32;
    reference->tensors[t].step = me->model->tensors[t].step;
  }
}

static void expect_bits(const ow_rank_t* me, const states_t* wanted) {
  const states_t* found = &me->model->s;
  if (memcmp(found, wanted, sizeof *found) == 0) return;
  for (int64_t i = 0; i < ELEMENTS; ++i) {
    if (memcmp(&found->param[i], &wanted->param[i], 4) == 0 && found->exp_avg[i] == wanted->exp_avg[i]) continue;
    fail_msg("rank %d of %d, step %d: element %lld: moment %a, wanted %a", me->rank, me->world->size, me->step,
             (long long)i, (double)found->exp_avg[i], (double)wanted->exp_avg[i]);
  }
  fail();
}

static void check_rank(const ow_rank_t* me, model_t* reference) {
  const sluice_optimizer_step_args_t* args = &me->model->args;
  const sluice_optimizer_step_result_t* result = &me->model->result;
  ow_sum_gradients(me->world, me, reference);
  reference->args.max_norm = args->max_norm, reference->args.loss_scale = args->loss_scale;
  WORKS(run_step(reference));
  expect_bits(me, &reference->s);
  assert_int_equal(result->skipped, 0);
  if (args->max_norm > 0.0) assert_true(result->norm == reference->result.norm);
  if (args->sum_buckets > 0) assert_true(result->sum_buckets == args->sum_buckets);
}

int ow_checked_step(ow_world_t* w, int32_t number) {
  int failed = 0;
  model_t* references[OW_MAX_RANKS];
  for (int32_t r = 0; r < w->size; ++r) {
    references[r] = open_rank_model(w);
    references[r]->s = w->ranks[r].model->s;
  }
  ow_step(w, number);
  for (int32_t r = 0; r < w->size; ++r) failed += w->ranks[r].status != SLUICE_OK;
  for (int32_t r = 0; r < w->size; ++r) {
    if (failed == 0) check_rank(w->ranks + r, references[r]);
    close_model(references[r]);
  }
  return failed;
}

int ow_check_steps(ow_world_t* w, int64_t bucket, int64_t chunk, double max_norm) {
  int decided = 0;
  ow_set(w, bucket, chunk, max_norm);
  for (int32_t r = 0; r < w->size; ++r) w->ranks[r].model->args.loss_scale = 8.0;
  for (int32_t number = 1; number <= OW_STEPS; ++number) {
    const int failed = ow_checked_step(w, number);
    for (int32_t r = 0; r < w->size; ++r) {
      if (failed > 0) print_message("rank %d: %s\n", r, w->ranks[r].error.message);
      decided += w->ranks[r].model->result.decided;
    }
    assert_int_equal(failed, 0);
  }
  return decided;
}
