// SPDX-License-Identifier: Apache-2.0
/* The optimizer on fake CUDA devices over several ranks, which are threads. Sums in rank order on the device overlap
 * with updates, and a step runs on all ranks or on none. The reference is a step in host memory on gradients that the
 * test sums. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/test/refused.h"
#include "backend/device/cuda/fake/fake_cuda.h"
#include "capi/test/cuda/cuda_optimizer_model.h"
#include "capi/test/cuda/fakes.h"

enum { MAX_RANKS = 4, STEPS = 3, UNKNOWN_ERROR = 999 };

typedef struct world_s world_t;
typedef struct rank_s {
  world_t* world;
  int32_t rank;
  sluice_comm_t *comm, *own; /* own: over this rank alone */
  sluice_comm_t* of_host;    /* over all ranks, for host memory; NULL if unused */
  sluice_context_t* context;
  uint64_t bytes;              /* bytes of the context before the optimizer exists */
  com_model_t *model, *before; /* before: copy in host memory of the state before the last step */
  sluice_status_t status;      /* status of the last step */
  char why[1024];
} rank_t;

struct world_s {
  int32_t size, is_local;
  int64_t bucket, chunk;
  int32_t has_own_group;     /* the second group is not summed */
  int64_t nth;               /* this driver call fails, counted from the first step; -1: none */
  int32_t has_failed;        /* the call failed */
  void (*bend)(rank_t* me);  /* before each step; may be NULL */
  void (*check)(rank_t* me); /* after each step, on the rank's thread */
  pthread_barrier_t barrier;
  rank_t ranks[MAX_RANKS];
  sluice_local_group_t* groups[MAX_RANKS];
  pthread_mutex_t mutex;
  char problem[1200]; /* the first problem that a rank found */
};

static void problem(rank_t* me, const char* what) {
  world_t* w = me->world;
  pthread_mutex_lock(&w->mutex);
  if (w->problem[0] == '\0') {
    (void)snprintf(w->problem, sizeof w->problem, "W %d, local %d, bucket %lld, k %lld, rank %d: %s (%.700s)", w->size,
                   w->is_local, (long long)w->bucket, (long long)w->chunk, me->rank, what, me->why);
  }
  pthread_mutex_unlock(&w->mutex);
}

/* ---- a world ---- */

static sluice_comm_config_t comm_config(int32_t rank, int32_t size) {
  DEFAULTS(sluice_comm_config, config);
  config.rank = rank, config.world_size = size, config.timeout_ns = UINT64_C(300000000000);
  return config;
}

static void keep(rank_t* me) {
  const com_model_t* m = me->model;
  memcpy(me->before->param, m->param, COM_ELEMENTS * sizeof *m->param);
  memcpy(me->before->master, m->master, sizeof m->master);
  memcpy(me->before->exp_avg, m->exp_avg, sizeof m->exp_avg);
  memcpy(me->before->exp_avg_sq, m->exp_avg_sq, sizeof m->exp_avg_sq);
}

static uint64_t bytes_now(const rank_t* me) {
  sluice_context_stats_t stats = {.struct_size = sizeof stats};
  if (sluice_context_get_stats(me->context, 0, &stats) != SLUICE_OK) abort();
  return stats.current_bytes;
}

static sluice_status_t open_rank(rank_t* me) {
  world_t* w = me->world;
  const sluice_comm_config_t all = comm_config(me->rank, w->size), one = comm_config(0, 1);
  DEFAULTS(sluice_context_config, config);
  config.device_type = SLUICE_DEVICE_CUDA, config.device_id = fakes_machine()->device_id(me->rank);
  sluice_status_t status = fakes_machine()->make_comm(me->rank, &all, &me->comm);
  if (status == SLUICE_OK) status = fakes_machine()->make_context(me->rank, &config, me->comm, &me->context);
  if (status == SLUICE_OK) status = sluice_comm_create_local(w->groups[me->rank], &one, &me->own);
  if (status != SLUICE_OK) return status;
  me->bytes = bytes_now(me);
  me->model = com_model_fill(me->context, me->rank, SLUICE_DTYPE_BF16);
  me->before = com_model_fill(NULL, me->rank, SLUICE_DTYPE_BF16);
  sluice_optimizer_config_t optimizer = com_config_of(me->context);
  optimizer.device_bucket = w->bucket;
  me->model->args.comm = me->comm;
  me->model->args.sum_buckets = w->chunk;
  if (w->has_own_group) me->model->groups[1].comm = me->own;
  return sluice_optimizer_create(&optimizer, &me->model->optimizer);
}

static void close_rank(rank_t* me) {
  com_model_free(me->model);
  com_model_free(me->before);
  sluice_context_destroy(me->context);
  sluice_comm_destroy(me->of_host);
  sluice_comm_destroy(me->own);
  sluice_comm_destroy(me->comm);
}

static void* rank_main(void* argument) {
  rank_t* me = argument;
  if (open_rank(me) != SLUICE_OK) abort();
  pthread_barrier_wait(&me->world->barrier);
  if (me->rank == 0) sluice_fake_cuda_fail_call(me->world->nth, UNKNOWN_ERROR);
  pthread_barrier_wait(&me->world->barrier);
  for (int64_t t = 1; t <= STEPS; ++t) {
    com_set_gradients(me->model, t);
    keep(me);
    if (me->world->bend != NULL) me->world->bend(me);
    me->status = com_step(me->model);
    (void)snprintf(me->why, sizeof me->why, "%s", me->status != SLUICE_OK ? last_message() : "");
    pthread_barrier_wait(&me->world->barrier);
    me->world->check(me);
    pthread_barrier_wait(&me->world->barrier);
    com_advance(me->model);
  }
  if (me->rank == 0) {
    me->world->has_failed = sluice_fake_cuda_failed();
    sluice_fake_cuda_fail_call(-1, 0);
  }
  close_rank(me);
  return NULL;
}

static world_t world_of(int32_t size, int32_t is_local, int64_t bucket, int64_t chunk, void (*check)(rank_t*)) {
  return (world_t){.size = size, .is_local = is_local, .bucket = bucket, .chunk = chunk, .check = check, .nth = -1};
}

/* Most of this time is a reserve for slow peers. */
#if defined(__SANITIZE_THREAD__)
#define TIMEOUT_MS 3000
#else
#define TIMEOUT_MS 200
#endif

static void run(world_t* w) {
  pthread_t threads[MAX_RANKS];
  char text[400];
  (w->is_local ? fakes_open_local : fakes_open)(w->size, 1);
  if (w->nth >= 0) fakes_be_patient(TIMEOUT_MS); /* a rank whose peer is gone waits for its stream, as with NCCL */
  pthread_barrier_init(&w->barrier, NULL, (unsigned)w->size);
  pthread_mutex_init(&w->mutex, NULL);
  for (int32_t r = 0; r < w->size; ++r) {
    w->ranks[r] = (rank_t){.world = w, .rank = r};
    if (sluice_local_group_create(1, &w->groups[r]) != SLUICE_OK) abort();
    pthread_create(&threads[r], NULL, rank_main, &w->ranks[r]);
  }
  for (int32_t r = 0; r < w->size; ++r) pthread_join(threads[r], NULL);
  for (int32_t r = 0; r < w->size; ++r) sluice_local_group_destroy(w->groups[r]);
  pthread_barrier_destroy(&w->barrier);
  pthread_mutex_destroy(&w->mutex);
  const int64_t hazards = sluice_fake_cuda_hazards(text, sizeof text);
  if (w->problem[0] != '\0') fail_msg("%s", w->problem);
  if (hazards != 0 && w->nth < 0) fail_msg("%lld hazards: %s", (long long)hazards, text);
  if (fakes_close(text, sizeof text) != 0) fail_msg("left: %s", text);
}

/* ---- expected results ---- */

/* The sum over ranks of one element's gradient, in rank order. */
static float summed(const rank_t* me, int64_t element) {
  const world_t* w = me->world;
  if (w->has_own_group && element >= COM_COUNT_A) return com_get_gradient(me->model, element);
  float sum = com_get_gradient(w->ranks[0].model, element);
  for (int32_t r = 1; r < w->size; ++r) sum += com_get_gradient(w->ranks[r].model, element);
  return sum;
}

/* Repeats the last step in host memory from the state before it and compares the results. */
static const char* difference_from_host(const rank_t* me) {
  com_model_t* reference = com_model_fill(NULL, me->rank, SLUICE_DTYPE_F32);
  const sluice_optimizer_config_t config = com_config_of(NULL);
  const com_model_t* before = me->before;
  memcpy(reference->param, before->param, COM_ELEMENTS * sizeof *before->param);
  memcpy(reference->master, before->master, sizeof before->master);
  memcpy(reference->exp_avg, before->exp_avg, sizeof before->exp_avg);
  memcpy(reference->exp_avg_sq, before->exp_avg_sq, sizeof before->exp_avg_sq);
  for (int i = 0; i < 2; ++i) reference->tensors[i].step = me->model->tensors[i].step;
  for (int64_t i = 0; i < COM_ELEMENTS; ++i) com_set_gradient(reference, i, summed(me, i));
  const char* what = "the reference";
  if (sluice_optimizer_create(&config, &reference->optimizer) == SLUICE_OK && com_step(reference) == SLUICE_OK) {
    what = com_difference(me->model, reference);
  }
  com_model_free(reference);
  return what;
}

static void has_stepped(rank_t* me) {
  const char* what = me->status == SLUICE_OK ? difference_from_host(me) : "the step";
  if (what == NULL && me->model->result.skipped) what = "skipped";
  if (what != NULL) problem(me, what);
}

static void has_stepped_early(rank_t* me) {
  has_stepped(me);
  if (me->model->result.decided) problem(me, "decided");
}

static void has_stepped_decided(rank_t* me) {
  has_stepped(me);
  if (!me->model->result.decided) problem(me, "not decided");
}

static void has_changed_nothing(rank_t* me) {
  const char* what = com_difference(me->model, me->before);
  if (what != NULL) problem(me, what);
}

static void was_skipped(rank_t* me) {
  if (me->status != SLUICE_OK || !me->model->result.skipped) problem(me, "not skipped");
  has_changed_nothing(me);
}

/* ---- numbers ---- */

TEST(Steps_OverRanks_HaveTheBitsOfSumsInRankOrder) {
  const int64_t buckets[] = {700, 1024, 8192}, chunks[] = {1, 2, 4, INT64_MAX, 0};
  for (int32_t i = 0; i < 15; ++i) {
    for (int32_t size = 2; size <= 4; ++size) {
      world_t w = world_of(size, (i + size) % 2, buckets[i / 5], chunks[i % 5], has_stepped_early);
      run(&w);
    }
  }
}

TEST(GroupOfOneRank_IsNotSummed) {
  world_t w = world_of(2, 0, 700, 2, has_stepped_early);
  w.has_own_group = 1;
  run(&w);
}

/* Leaves rank 0 without elements. A large gradient makes the other ranks check their sums. */
static void leave_one_rank_without(rank_t* me) {
  me->model->groups[0].num_tensors = 0;
  if (me->rank == 0) me->model->groups[1].num_tensors = 0;
  com_set_gradient(me->model, COM_ELEMENTS - 2, 3.3e38F);
}

static void works(rank_t* me) {
  if (me->status != SLUICE_OK || me->model->result.skipped) problem(me, "the step");
}

TEST(RankWithoutElements_TakesPart) {
  world_t w = world_of(3, 0, 700, 2, works);
  w.has_own_group = 1;
  w.bend = leave_one_rank_without;
  run(&w);
}

/* ---- all or nothing ---- */

static void make_infinite(rank_t* me) {
  if (me->rank == me->world->size - 1) com_set_gradient(me->model, COM_ELEMENTS - 1, INFINITY);
}

/* Each gradient is finite; the sum is infinite. */
static void make_overflow(rank_t* me) { com_set_gradient(me->model, 77, 3e38F); }

/* Gradients and their sums are finite and near the largest f32. */
static void make_large(rank_t* me) {
  com_set_gradient(me->model, 77, me->rank == 0 ? 3e38F : -2e38F);
  com_set_gradient(me->model, COM_ELEMENTS - 2, me->rank == 0 ? 0.0F : 3.3e38F);
}

TEST(Step_WithAnInfiniteGradientOnOneRank_IsSkippedOnAll) {
  for (int32_t is_local = 0; is_local < 2; ++is_local) {
    world_t w = world_of(3, is_local, 1024, 2, was_skipped);
    w.bend = make_infinite;
    run(&w);
  }
}

TEST(Step_WhoseSumLeavesF32_IsSkippedOnAllRanks) {
  const int64_t chunks[] = {1, 3, INT64_MAX};
  for (int32_t i = 0; i < 3; ++i) {
    world_t w = world_of(2 + i % 2, i % 2, 700, chunks[i], was_skipped);
    w.bend = make_overflow;
    run(&w);
  }
}

TEST(Step_WithLargeGradients_LooksAtItsSumsAndHasTheSameBits) {
  const int64_t chunks[] = {1, 3, INT64_MAX};
  for (int32_t i = 0; i < 3; ++i) {
    world_t w = world_of(2, i % 2, 700, chunks[i], has_stepped_decided);
    w.bend = make_large;
    run(&w);
  }
}

/* ---- refusals ---- */

static void forget_a_master(rank_t* me) {
  if (me->rank == 1) me->model->tensors[1].master = NULL;
}

static void all_were_told(rank_t* me) {
  const sluice_status_t wanted = me->rank == 1 ? SLUICE_E_INVALID_ARGUMENT : SLUICE_E_PEER_REFUSED;
  if (me->status != wanted || strstr(me->why, "master is NULL") == NULL) problem(me, "not told");
  if (me->rank != 1 && strstr(me->why, "rank 1") == NULL) problem(me, "rank 1 is not named");
  if (me->rank == 1) me->model->tensors[1].master = me->model->master + COM_COUNT_A;
  has_changed_nothing(me);
}

TEST(Step_ThatOneRankCannotTake_IsRefusedOnAllAndTheNextWorks) {
  world_t w = world_of(3, 0, 1024, 2, all_were_told);
  w.bend = forget_a_master;
  run(&w);
}

static void step_over_tcp(rank_t* me) {
  if (me->of_host == NULL && sluice_comm_create_tcp(me->comm, NULL, &me->of_host) != SLUICE_OK) abort();
  me->model->args.comm = me->of_host;
}

static void all_refuse_tcp(rank_t* me) {
  const int is_named = strstr(me->why, "tcp communicator moves host memory only") != NULL;
  if (me->status != SLUICE_E_UNSUPPORTED || !is_named) problem(me, "not refused");
  has_changed_nothing(me);
}

TEST(Step_OverACommunicatorOfHostMemory_IsRefusedByName) {
  world_t w = world_of(2, 0, 1024, 2, all_refuse_tcp);
  w.bend = step_over_tcp;
  run(&w);
}

static void take_another_bucket(rank_t* me) { me->model->args.sum_buckets = me->rank == 0 ? 2 : 3; }

static void all_see_the_mismatch(rank_t* me) {
  if (me->status != SLUICE_E_MISMATCH || strstr(me->why, "sum_buckets") == NULL) problem(me, "no mismatch");
  has_changed_nothing(me);
}

TEST(Step_WithAnotherKOnOneRank_IsAMismatchOnAll) {
  world_t w = world_of(2, 0, 1024, 2, all_see_the_mismatch);
  w.bend = take_another_bucket;
  run(&w);
}

/* ---- bytes ---- */

static void has_the_bytes_of_the_prediction(rank_t* me) {
  const world_t* w = me->world;
  DEFAULTS(sluice_optimizer_workload, workload);
  sluice_optimizer_prediction_t predicted;
  sluice_optimizer_prediction_init(&predicted, sizeof predicted);
  workload.count = COM_ELEMENTS, workload.bucket = w->bucket, workload.sum_buckets = w->chunk;
  workload.world_size = w->size, workload.sums_on_device = 1;
  if (sluice_optimizer_predict(&workload, &predicted) != SLUICE_OK) problem(me, "no prediction");
  if (bytes_now(me) - me->bytes != predicted.slot_bytes + predicted.staging_bytes) problem(me, "other bytes");
  if (me->model->result.staging_bytes != predicted.staging_bytes) problem(me, "other staging");
  has_stepped(me);
}

TEST(Device_OverRanks_HoldsWhatIsPredictedToTheByte) {
  const int64_t chunks[] = {1, 2, INT64_MAX};
  for (int32_t i = 0; i < 6; ++i) {
    world_t w = world_of(2 + i % 3, 0, i < 3 ? 1024 : 700, chunks[i % 3], has_the_bytes_of_the_prediction);
    run(&w);
  }
}

/* ---- failures ---- */

/* If no rank reported an error, the failed call was harmless, such as a release, and the bits must be right. */
static void ends_the_same(rank_t* me) {
  int told = 0;
  for (int32_t r = 0; r < me->world->size; ++r) told += me->world->ranks[r].status != SLUICE_OK;
  if (told == 0) has_stepped(me);
}

/* All ranks return, and nothing leaks. */
TEST(CallOfTheDriverThatFails_EndsStepsOnAllRanks) {
  int64_t failures = 0;
  for (int64_t nth = 0;; nth += 31) {
    world_t w = world_of(2, 0, 1024, 2, ends_the_same);
    w.nth = nth;
    run(&w);
    if (!w.has_failed) break;
    ++failures;
  }
  assert_true(failures > 8);
}
