/* The optimizer over ranks, as threads: sums in rank order beside updates, all of a step on all ranks or nothing. What
 * one rank has to get is what a step without a communicator makes of gradients that were summed by hand. */
#include <float.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/base/dtype.h"
#include "sluice/optimizer.h"

enum { MAX_RANKS = 4, NUM_GROUPS = 3, NUM_TENSORS = 7, STEPS = 2, ELEMENTS = 151308 };

/* The second group is the experts': its tensors are those of a part of the ranks where a case says so. */
static const int64_t counts[NUM_TENSORS] = {70001, 3, 33000, 1, 40303, 0, 8000};
static const int32_t group_of[NUM_TENSORS] = {0, 0, 0, 1, 1, 2, 2};
static const int32_t dtypes[NUM_TENSORS] = {SLUICE_DTYPE_F32,  SLUICE_DTYPE_BF16, SLUICE_DTYPE_BF16, SLUICE_DTYPE_F16,
                                            SLUICE_DTYPE_BF16, SLUICE_DTYPE_F32,  SLUICE_DTYPE_F16};

/* ---- parameters and what is kept of them ---- */

typedef struct states_s {
  float param[ELEMENTS], master[ELEMENTS], exp_avg[ELEMENTS], exp_avg_sq[ELEMENTS];
} states_t;

typedef struct model_s {
  states_t s;
  float grad[ELEMENTS]; /* of each tensor's dtype, from its first element's place on */
  sluice_optimizer_tensor_t tensors[NUM_TENSORS];
  sluice_optimizer_group_t groups[NUM_GROUPS];
  const sluice_optimizer_group_t* list[NUM_GROUPS];
  sluice_optimizer_step_args_t args;
  sluice_optimizer_step_result_t result;
  sluice_optimizer_t* optimizer;
} model_t;

static float draw(uint64_t* seed, double scale) {
  *seed = *seed * 6364136223846793005u + 1442695040888963407u;
  return (float)(((double)(*seed >> 11) / 4503599627370496.0 - 1.0) * scale);
}

static int64_t first_of(int tensor) {
  int64_t first = 0;
  for (int t = 0; t < tensor; ++t) first += counts[t];
  return first;
}

static void write_element(void* data, int32_t dtype, int64_t i, float x) {
  if (dtype == SLUICE_DTYPE_F32) ((float*)data)[i] = x;
  if (dtype == SLUICE_DTYPE_BF16) ((uint16_t*)data)[i] = sluice_f32_to_bf16(x);
  if (dtype == SLUICE_DTYPE_F16) ((uint16_t*)data)[i] = sluice_f32_to_f16(x);
}

static float read_element(const void* data, int32_t dtype, int64_t i) {
  if (dtype == SLUICE_DTYPE_F32) return ((const float*)data)[i];
  const uint16_t half = ((const uint16_t*)data)[i];
  return dtype == SLUICE_DTYPE_BF16 ? sluice_bf16_to_f32(half) : sluice_f16_to_f32(half);
}

static model_t* open_model(void) {
  model_t* m = calloc(1, sizeof *m);
  assert_non_null(m);
  uint64_t seed = 7;
  sluice_optimizer_step_args_init(&m->args, sizeof m->args);
  for (int g = 0; g < NUM_GROUPS; ++g) {
    sluice_optimizer_group_init(&m->groups[g], sizeof m->groups[g]);
    m->groups[g].lr = 1e-2 * (g + 1);
    m->groups[g].tensors = m->tensors;
    m->list[g] = &m->groups[g];
  }
  for (int t = 0; t < NUM_TENSORS; ++t) {
    const int64_t first = first_of(t);
    sluice_optimizer_group_t* group = &m->groups[group_of[t]];
    if (group->num_tensors == 0) group->tensors = m->tensors + t;
    ++group->num_tensors;
    m->tensors[t] = (sluice_optimizer_tensor_t){.count = counts[t],
                                                .step = 1,
                                                .param = m->s.param + first,
                                                .master = dtypes[t] == SLUICE_DTYPE_F32 ? NULL : m->s.master + first,
                                                .grad = m->grad + first,
                                                .exp_avg = m->s.exp_avg + first,
                                                .exp_avg_sq = m->s.exp_avg_sq + first,
                                                .param_dtype = dtypes[t],
                                                .grad_dtype = dtypes[t]};
    for (int64_t i = 0; i < counts[t]; ++i) {
      m->s.master[first + i] = draw(&seed, 1.0);
      write_element(m->s.param + first, dtypes[t], i, m->s.master[first + i]);
    }
  }
  m->args.groups = m->list;
  m->args.num_groups = NUM_GROUPS;
  sluice_optimizer_step_result_init(&m->result, sizeof m->result);
  sluice_optimizer_config_t config;
  sluice_optimizer_config_init(&config, sizeof config);
  assert_int_equal(sluice_optimizer_create(&config, &m->optimizer), SLUICE_OK);
  return m;
}

static void close_model(model_t* m) {
  sluice_optimizer_destroy(m->optimizer);
  free(m);
}

static void set_gradients(model_t* m, int rank, int step) {
  uint64_t seed = (uint64_t)(1000 * (step + 1) + rank);
  for (int t = 0; t < NUM_TENSORS; ++t) {
    m->tensors[t].step = step + 1;
    for (int64_t i = 0; i < counts[t]; ++i) write_element(m->grad + first_of(t), dtypes[t], i, draw(&seed, 0.5));
  }
}

/* ---- ranks ---- */

typedef struct world_s world_t;

typedef struct rank_s {
  world_t* world;
  int32_t rank;
  model_t* model;
  sluice_comm_t *parent, *comm, *own;
  sluice_status_t status;
  sluice_error_info_t error;
  int32_t step;
} rank_t;

struct world_s {
  int32_t size, is_tcp, parts; /* parts: the second group is summed over ranks that are alike modulo it; 0: over all */
  void (*before)(rank_t* me);  /* what a case bends, before each step */
  rank_t ranks[MAX_RANKS];
  sluice_local_group_t *group, *groups[MAX_RANKS];
};

static sluice_comm_t* join(sluice_local_group_t* group, int32_t rank, int32_t size) {
  sluice_comm_config_t config;
  sluice_comm_config_init(&config, sizeof config);
  config.rank = rank;
  config.world_size = size;
  config.timeout_ns = UINT64_C(60000000000);
  sluice_comm_t* comm = NULL;
  assert_int_equal(sluice_comm_create_local(group, &config, &comm), SLUICE_OK);
  return comm;
}

static void* connect_rank(void* data) {
  rank_t* me = data;
  me->status = sluice_comm_create_tcp(me->parent, NULL, &me->comm);
  return NULL;
}

static void* step_rank(void* data) {
  rank_t* me = data;
  model_t* m = me->model;
  m->args.comm = me->comm;
  m->groups[1].comm = me->own;
  set_gradients(m, me->rank, me->step);
  if (me->world->before != NULL) me->world->before(me);
  me->status = sluice_optimizer_step(m->optimizer, &m->args, &m->result);
  sluice_error_last(&me->error);
  return NULL;
}

static void on_all(world_t* w, void* (*fn)(void* rank)) {
  pthread_t threads[MAX_RANKS];
  for (int r = 0; r < w->size; ++r) assert_int_equal(pthread_create(threads + r, NULL, fn, w->ranks + r), 0);
  for (int r = 0; r < w->size; ++r) pthread_join(threads[r], NULL);
}

static world_t* open_world(int32_t size, int32_t is_tcp, int32_t parts) {
  world_t* w = calloc(1, sizeof *w);
  assert_non_null(w);
  w->size = size, w->is_tcp = is_tcp, w->parts = parts;
  assert_int_equal(sluice_local_group_create(size, &w->group), SLUICE_OK);
  for (int32_t p = 0; p < parts; ++p) {
    assert_int_equal(sluice_local_group_create(size / parts, &w->groups[p]), SLUICE_OK);
  }
  for (int32_t r = 0; r < size; ++r) {
    rank_t* me = w->ranks + r;
    *me = (rank_t){.world = w, .rank = r, .model = open_model()};
    me->parent = me->comm = join(w->group, r, size);
    if (parts > 0) me->own = join(w->groups[r % parts], r / parts, size / parts);
    sluice_error_info_init(&me->error, sizeof me->error);
  }
  if (is_tcp) on_all(w, connect_rank);
  for (int32_t r = 0; r < size; ++r) assert_int_equal(w->ranks[r].status, SLUICE_OK);
  return w;
}

static void close_world(world_t* w) {
  for (int32_t r = 0; r < w->size; ++r) {
    close_model(w->ranks[r].model);
    if (w->is_tcp) sluice_comm_destroy(w->ranks[r].comm);
    sluice_comm_destroy(w->ranks[r].parent);
    sluice_comm_destroy(w->ranks[r].own);
  }
  sluice_local_group_destroy(w->group);
  for (int32_t p = 0; p < w->parts; ++p) sluice_local_group_destroy(w->groups[p]);
  free(w);
}

/* One step on all ranks. */
static void step(world_t* w, int32_t number) {
  for (int32_t r = 0; r < w->size; ++r) w->ranks[r].step = number;
  on_all(w, step_rank);
}

/* ---- the reference ---- */

/* Sums of `me`'s gradients in rank order, over the ranks that it shares each tensor with, into f32 gradients. */
static void sum_gradients(const world_t* w, const rank_t* me, model_t* reference) {
  for (int t = 0; t < NUM_TENSORS; ++t) {
    const int64_t first = first_of(t);
    const int32_t parts = group_of[t] == 1 && w->parts > 0 ? w->parts : 1;
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

static void expect_states(const world_t* w, const rank_t* me, const states_t* wanted) {
  const states_t* found = &me->model->s;
  if (memcmp(found, wanted, sizeof *found) == 0) return;
  for (int64_t i = 0; i < ELEMENTS; ++i) {
    if (memcmp(&found->param[i], &wanted->param[i], 4) == 0 && found->exp_avg[i] == wanted->exp_avg[i]) continue;
    fail_msg("rank %d of %d, step %d: element %lld: moment %a, wanted %a", me->rank, w->size, me->step, (long long)i,
             (double)found->exp_avg[i], (double)wanted->exp_avg[i]);
  }
  fail();
}

/* Steps of a world of this kind have the bits of the reference; returns how many were decided. */
static int check_steps(world_t* w, int64_t bucket, int64_t chunk, double max_norm) {
  int decided = 0;
  model_t* references[MAX_RANKS];
  for (int32_t r = 0; r < w->size; ++r) references[r] = open_model();
  for (int32_t number = 0; number < STEPS; ++number) {
    for (int32_t r = 0; r < w->size; ++r) {
      sluice_optimizer_step_args_t* args = &w->ranks[r].model->args;
      args->bucket = bucket, args->sum_buckets = chunk, args->max_norm = max_norm;
      args->loss_scale = references[r]->args.loss_scale = 8.0;
      references[r]->args.max_norm = max_norm;
    }
    step(w, number);
    for (int32_t r = 0; r < w->size; ++r) {
      const rank_t* me = w->ranks + r;
      model_t* reference = references[r];
      if (me->status != SLUICE_OK) fail_msg("rank %d: %s", r, me->error.message);
      sum_gradients(w, me, reference);
      assert_int_equal(sluice_optimizer_step(reference->optimizer, &reference->args, &reference->result), SLUICE_OK);
      expect_states(w, me, &reference->s);
      assert_int_equal(me->model->result.skipped, 0);
      if (max_norm > 0.0) assert_true(me->model->result.norm == reference->result.norm);
      if (chunk > 0) assert_true(me->model->result.sum_buckets == chunk);
      decided += me->model->result.decided;
    }
  }
  for (int32_t r = 0; r < w->size; ++r) close_model(references[r]);
  return decided;
}

/* ---- numbers ---- */

static void Steps_OverRanks_HaveTheBitsOfSumsInRankOrder(void** state) {
  (void)state;
  static const int64_t buckets[] = {999, 65536, 1 << 22}, chunks[] = {1, 2, 4, INT64_MAX, 0};
  for (int32_t size = 1; size <= 4; size *= 2) {
    for (int i = 0; i < 15; ++i) {
      world_t* w = open_world(size, i % 4 == 3, 0);
      assert_int_equal(check_steps(w, buckets[i / 5], chunks[i % 5], 0.0), 0);
      close_world(w);
    }
  }
}

static void Steps_ThatClip_HaveTheNormOfOneRankAndAreDecided(void** state) {
  (void)state;
  static const int64_t buckets[] = {999, 65536, 1 << 22}, chunks[] = {1, 4, INT64_MAX};
  for (int i = 0; i < 9; ++i) {
    world_t* w = open_world(2, i % 2, 0);
    assert_int_equal(check_steps(w, buckets[i / 3], chunks[i % 3], 0.25), 2 * STEPS);
    close_world(w);
  }
}

static void GroupsOfAPartOfTheRanks_AreSummedOverIt(void** state) {
  (void)state;
  for (int32_t parts = 2; parts <= 4; parts += 2) {
    world_t* w = open_world(4, 0, parts);
    assert_int_equal(check_steps(w, 5000, 2, 0.0), 0);
    close_world(w);
  }
}

/* sqrt of the squares of all that is there once: groups of all ranks, and the part that each pair of ranks has. */
static void GroupsOfAPartOfTheRanks_CountOnceInTheNorm(void** state) {
  (void)state;
  world_t* w = open_world(4, 0, 2);
  model_t* sums = open_model();
  for (int32_t r = 0; r < 4; ++r) w->ranks[r].model->args.max_norm = 1e-3;
  step(w, 0);
  double squares = 0.0;
  for (int32_t r = 0; r < 2; ++r) {
    sum_gradients(w, w->ranks + r, sums);
    for (int t = 0; t < NUM_TENSORS; ++t) {
      if (r == 1 && group_of[t] != 1) continue;
      for (int64_t i = 0; i < counts[t]; ++i) {
        squares += (double)sums->grad[first_of(t) + i] * (double)sums->grad[first_of(t) + i];
      }
    }
  }
  for (int32_t r = 0; r < 4; ++r) {
    const double norm = w->ranks[r].model->result.norm;
    assert_true(fabs(norm / sqrt(squares) - 1.0) < 1e-12);
    assert_true(norm == w->ranks[0].model->result.norm);
  }
  close_model(sums);
  close_world(w);
}

/* ---- all or nothing ---- */

static int32_t bad_rank, bad_tensor, bad_at_end;
static float bad_value;

static void plant(rank_t* me) {
  if (me->rank != bad_rank) return;
  const int64_t at = bad_at_end ? counts[bad_tensor] - 1 : 0;
  write_element(me->model->grad + first_of(bad_tensor), dtypes[bad_tensor], at, bad_value);
}

static void expect_nothing(world_t* w, const states_t* before, int32_t is_decided) {
  for (int32_t r = 0; r < w->size; ++r) {
    if (w->ranks[r].status != SLUICE_OK) fail_msg("rank %d: %s", r, w->ranks[r].error.message);
    assert_int_equal(w->ranks[r].model->result.skipped, 1);
    assert_int_equal(w->ranks[r].model->result.decided, is_decided);
    assert_memory_equal(&w->ranks[r].model->s, before, sizeof *before);
  }
}

static void Step_WithABadGradientOnAnyRankAndBucket_ChangesNothingAnywhere(void** state) {
  (void)state;
  static const float bad[] = {INFINITY, -INFINITY, NAN};
  model_t* fresh = open_model();
  for (int clips = 0; clips < 2; ++clips) {
    for (int size = 1; size <= 4; size *= 2) {
      world_t* w = open_world(size, clips, 0);
      for (int i = 0; i < size * NUM_TENSORS * 2; ++i) {
        bad_rank = i % size, bad_tensor = i / size % NUM_TENSORS, bad_at_end = i / size / NUM_TENSORS;
        bad_value = bad[i % 3];
        if (counts[bad_tensor] == 0) continue;
        w->before = plant;
        for (int r = 0; r < size; ++r) {
          w->ranks[r].model->args.bucket = 20000, w->ranks[r].model->args.sum_buckets = 1;
          w->ranks[r].model->args.max_norm = clips;
        }
        step(w, 0);
        expect_nothing(w, &fresh->s, clips);
      }
      w->before = NULL;
      assert_true(check_steps(w, 20000, 1, 0.0) == 0); /* and the next step goes on as if nothing had been */
      close_world(w);
    }
  }
  close_model(fresh);
}

static float huge_of[MAX_RANKS];

/* All of them finite, in the last bucket but of f32. */
static void plant_huge(rank_t* me) { me->model->grad[70000] = huge_of[me->rank]; }

static void Step_WhoseSumAloneIsInfinite_ChangesNothingAnywhere(void** state) {
  (void)state;
  static const float rows[][4] = {{3e38F, 3e38F}, {0, 3e38F, 2e38F, 0}, {-FLT_MAX, 0, 0, -FLT_MAX}, {FLT_MAX, FLT_MAX}};
  model_t* fresh = open_model();
  for (int i = 0; i < 8; ++i) {
    world_t* w = open_world(4, i % 2, 0);
    memcpy(huge_of, rows[i / 2], sizeof huge_of);
    w->before = plant_huge;
    for (int r = 0; r < 4; ++r) w->ranks[r].model->args.bucket = 1000, w->ranks[r].model->args.sum_buckets = 2;
    step(w, 0);
    expect_nothing(w, &fresh->s, 1);
    close_world(w);
  }
  close_model(fresh);
}

static void Step_OfHugeGradientsWhoseSumIsFinite_IsDecidedAndTaken(void** state) {
  (void)state;
  world_t* w = open_world(4, 0, 0);
  const float row[] = {3e38F, -3e38F, 1e38F, 1.0F};
  memcpy(huge_of, row, sizeof huge_of);
  w->before = plant_huge;
  assert_int_equal(check_steps(w, 1000, 2, 0.0), 4 * STEPS);
  close_world(w);
}

/* ---- refusals ---- */

static void (*bend)(model_t* m);

static void bend_rank_1(rank_t* me) {
  if (me->rank == 1) bend(me->model);
}

static void bend_lr(model_t* m) { m->groups[2].lr = NAN; }
static void bend_count(model_t* m) { m->tensors[0].count = -1; }
static void bend_groups(model_t* m) { m->args.groups = NULL; }
static void bend_bucket(model_t* m) { m->args.bucket = 0; }
static void bend_chunk(model_t* m) { m->args.sum_buckets = -1; }
static void other_bucket(model_t* m) { m->args.bucket = 77; }
static void other_chunk(model_t* m) { m->args.sum_buckets = 3; }
static void other_count(model_t* m) { m->tensors[0].count -= 1; }
static void other_cut(model_t* m) { m->tensors[0].count -= 1, m->tensors[1].count += 1; }
static void other_step(model_t* m) { m->tensors[2].step = 9; }
static void other_lr(model_t* m) { m->groups[0].lr = 0.5; }
static void other_scale(model_t* m) { m->args.loss_scale = 2.0; }
static void other_norm(model_t* m) { m->args.max_norm = 2.0; }
static void other_groups(model_t* m) { m->args.num_groups = 2; }

typedef struct refusal_s {
  void (*bend)(model_t* m);
  sluice_status_t status; /* of the rank that is bent; the other one gets PEER_REFUSED, or the same MISMATCH */
  const char* text;
} refusal_t;

static const refusal_t refusals[] = {
    {bend_lr, SLUICE_E_INVALID_ARGUMENT, "lr is nan"},
    {bend_count, SLUICE_E_INVALID_ARGUMENT, "has count -1"},
    {bend_groups, SLUICE_E_INVALID_ARGUMENT, "groups is NULL"},
    {bend_bucket, SLUICE_E_INVALID_ARGUMENT, "buckets of 0 elements"},
    {bend_chunk, SLUICE_E_INVALID_ARGUMENT, "sum_buckets is -1"},
    {other_bucket, SLUICE_E_MISMATCH, "bucket"},
    {other_chunk, SLUICE_E_MISMATCH, "sum_buckets"},
    {other_count, SLUICE_E_MISMATCH, "number of elements"},
    {other_cut, SLUICE_E_MISMATCH, "counts, dtypes"},
    {other_step, SLUICE_E_MISMATCH, "counts, dtypes"},
    {other_lr, SLUICE_E_MISMATCH, "lr"},
    {other_scale, SLUICE_E_MISMATCH, "loss_scale"},
    {other_norm, SLUICE_E_MISMATCH, "max_norm"},
    {other_groups, SLUICE_E_MISMATCH, "number of elements"},
};

static void Step_ThatOneRankRefuses_IsRefusedOnAllAndTheNextOneRuns(void** state) {
  (void)state;
  for (size_t i = 0; i < sizeof refusals / sizeof refusals[0]; ++i) {
    const refusal_t* refusal = refusals + i;
    world_t* w = open_world(2, 0, 0);
    model_t* fresh = open_model();
    bend = refusal->bend;
    w->before = bend_rank_1;
    step(w, 0);
    const int is_mismatch = refusal->status == SLUICE_E_MISMATCH;
    assert_int_equal(w->ranks[1].status, refusal->status);
    assert_int_equal(w->ranks[0].status, is_mismatch ? SLUICE_E_MISMATCH : SLUICE_E_PEER_REFUSED);
    for (int r = 0; r < 2; ++r) {
      if (strstr(w->ranks[r].error.message, refusal->text) == NULL) fail_msg("%s", w->ranks[r].error.message);
      assert_memory_equal(&w->ranks[r].model->s, &fresh->s, sizeof fresh->s);
    }
    assert_int_equal(w->ranks[0].error.peer, 1);
    close_model(fresh);
    close_world(w);
  }
}

static void other_own_count(rank_t* me) {
  if (me->rank == 2) me->model->tensors[4].count -= 1;
}

static void Step_WhoseOwnGroupDiffers_IsRefusedOnAllRanks(void** state) {
  (void)state;
  world_t* w = open_world(4, 0, 2);
  model_t* fresh = open_model();
  w->before = other_own_count;
  step(w, 0);
  for (int r = 0; r < 4; ++r) {
    assert_int_equal(w->ranks[r].status, r % 2 == 0 ? SLUICE_E_MISMATCH : SLUICE_E_PEER_REFUSED);
    assert_memory_equal(&w->ranks[r].model->s, &fresh->s, sizeof fresh->s);
  }
  close_model(fresh);
  close_world(w);
}

static void Group_WithACommunicatorInAStepWithout_IsRefused(void** state) {
  (void)state;
  world_t* w = open_world(1, 0, 1);
  w->ranks[0].comm = NULL;
  step(w, 0);
  assert_int_equal(w->ranks[0].status, SLUICE_E_INVALID_ARGUMENT);
  w->ranks[0].comm = w->ranks[0].parent;
  close_world(w);
}

/* ---- a rank that goes ---- */

static void leave(rank_t* me) {
  if (me->rank == 1) sluice_comm_abort(me->comm);
}

static void Step_FromWhichARankGoes_EndsOnTheOthersAndNamesIt(void** state) {
  (void)state;
  for (int is_tcp = 0; is_tcp < 2; ++is_tcp) {
    world_t* w = open_world(2, is_tcp, 0);
    model_t* fresh = open_model();
    w->before = leave;
    step(w, 0);
    assert_int_equal(w->ranks[1].status, SLUICE_E_ABORTED);
    assert_int_equal(w->ranks[0].status, SLUICE_E_PEER_LOST);
    for (int r = 0; r < 2; ++r) assert_memory_equal(&w->ranks[r].model->s, &fresh->s, sizeof fresh->s);
    close_model(fresh);
    close_world(w);
  }
}

/* ---- what is told ---- */

static uint64_t staging_of(int64_t bucket, int64_t chunk, double max_norm) {
  world_t* w = open_world(2, 0, 0);
  (void)check_steps(w, bucket, chunk, max_norm);
  const sluice_optimizer_step_result_t result = w->ranks[0].model->result;
  assert_true(result.sum_ns > 0 && result.update_ns > 0 && result.step_ns >= result.update_ns);
  close_world(w);
  return result.staging_bytes;
}

static void Result_TellsTheBytesOfStagingAndTheTimes(void** state) {
  (void)state;
  assert_int_equal(staging_of(1024, 4, 0.0), 2 * 4 * 1024 * 4); /* two slots of k buckets in f32 */
  assert_int_equal(staging_of(1024, 4, 1.0), 4 * (uint64_t)ELEMENTS);
  assert_int_equal(staging_of(1 << 22, INT64_MAX, 0.0), (4 * (uint64_t)ELEMENTS + 63) / 64 * 64);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(Steps_OverRanks_HaveTheBitsOfSumsInRankOrder),
      cmocka_unit_test(Steps_ThatClip_HaveTheNormOfOneRankAndAreDecided),
      cmocka_unit_test(GroupsOfAPartOfTheRanks_AreSummedOverIt),
      cmocka_unit_test(GroupsOfAPartOfTheRanks_CountOnceInTheNorm),
      cmocka_unit_test(Step_WithABadGradientOnAnyRankAndBucket_ChangesNothingAnywhere),
      cmocka_unit_test(Step_WhoseSumAloneIsInfinite_ChangesNothingAnywhere),
      cmocka_unit_test(Step_OfHugeGradientsWhoseSumIsFinite_IsDecidedAndTaken),
      cmocka_unit_test(Step_ThatOneRankRefuses_IsRefusedOnAllAndTheNextOneRuns),
      cmocka_unit_test(Step_WhoseOwnGroupDiffers_IsRefusedOnAllRanks),
      cmocka_unit_test(Group_WithACommunicatorInAStepWithout_IsRefused),
      cmocka_unit_test(Step_FromWhichARankGoes_EndsOnTheOthersAndNamesIt),
      cmocka_unit_test(Result_TellsTheBytesOfStagingAndTheTimes),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
