// SPDX-License-Identifier: Apache-2.0
/* The optimizer on fake CUDA devices over several ranks, which are threads. Sums in rank order on the device overlap
 * with updates, and a step runs on all ranks or on none. The reference is a step in host memory on gradients that the
 * test sums. */
#include <math.h>

#include "backend/base/test/refused.h"
#include "backend/device/cuda/fake/fake_cuda.h"
#include "capi/test/cuda/cuda_optimizer_model.h"
#include "capi/test/cuda/fake_rigs.h"
#include "capi/test/cuda/fakes.h"

enum { MAX_RANKS = 4, STEPS = 3, UNKNOWN_ERROR = 999 };

typedef struct member_s {
  rank_t* rank;
  rig_t* rig;
  sluice_comm_t* of_host;      /* over all ranks, for host memory; NULL if unused */
  uint64_t bytes;              /* bytes of the context before the optimizer exists */
  com_model_t *model, *before; /* before: copy in host memory of the state before the last step */
  sluice_status_t status;      /* status of the last step */
  char why[1024];
} member_t;

typedef struct trial_s {
  int32_t size, is_local;
  int64_t bucket, chunk;
  void (*check)(member_t* me); /* after each step, on the rank's thread */
  int64_t nth;                 /* this driver call fails, counted from the first step; -1: none */
  void (*bend)(member_t* me);  /* before each step; may be NULL */
  int32_t has_own_group;       /* the second group is not summed */
  int32_t has_failed;          /* the call failed */
} trial_t;

static trial_t trial;
static member_t members[MAX_RANKS];

/* The first problem of a rank fails the test. */
static void problem(const member_t* me, const char* what) {
  if (me->rank->status != SLUICE_OK) return;
  me->rank->status = SLUICE_E_INTERNAL;
  (void)snprintf(me->rank->why, sizeof me->rank->why, "local %d, bucket %lld, k %lld: %s (%.400s)", trial.is_local,
                 (long long)trial.bucket, (long long)trial.chunk, what, me->why);
}

static uint64_t bytes_now(const member_t* me) {
  sluice_context_stats_t stats = {.struct_size = sizeof stats};
  if (sluice_context_get_stats(me->rig->context, 0, &stats) != SLUICE_OK) abort();
  return stats.current_bytes;
}

/* Most of this time is a reserve for slow peers. */
#if defined(__SANITIZE_THREAD__)
#define TIMEOUT_MS 3000
#else
#define TIMEOUT_MS 200
#endif

static void play(rank_t* r, rig_t* rig) {
  member_t* me = &members[r->rank];
  sluice_local_group_t* group = NULL;
  sluice_comm_t* own = NULL; /* over this rank alone */
  DEFAULTS(sluice_comm_config, one);
  one.world_size = 1;
  if (sluice_local_group_create(1, &group) != SLUICE_OK) abort();
  if (sluice_comm_create_local(group, &one, &own) != SLUICE_OK) abort();
  *me = (member_t){.rank = r, .rig = rig};
  me->bytes = bytes_now(me);
  me->model = com_model_fill(rig->context, r->rank, SLUICE_DTYPE_BF16, SLUICE_DTYPE_BF16);
  me->before = com_model_fill(NULL, r->rank, SLUICE_DTYPE_BF16, SLUICE_DTYPE_BF16);
  sluice_optimizer_config_t optimizer = com_config_of(rig->context);
  optimizer.device_bucket = trial.bucket;
  me->model->args.comm = rig->comm, me->model->args.sum_buckets = trial.chunk;
  if (trial.has_own_group) me->model->groups[1].comm = own;
  if (sluice_optimizer_create(&optimizer, &me->model->optimizer) != SLUICE_OK) abort();
  pthread_barrier_wait(r->barrier);
  if (trial.nth >= 0) fakes_be_patient(TIMEOUT_MS); /* a rank whose peer is gone waits for its stream, as with NCCL */
  if (r->rank == 0) sluice_fake_cuda_fail_call(trial.nth, UNKNOWN_ERROR);
  pthread_barrier_wait(r->barrier);
  for (int64_t t = 1; t <= STEPS; ++t) {
    com_set_gradients(me->model, t);
    com_copy(me->before, me->model);
    if (trial.bend != NULL) trial.bend(me);
    me->status = com_step(me->model);
    (void)snprintf(me->why, sizeof me->why, "%s", me->status != SLUICE_OK ? last_message() : "");
    pthread_barrier_wait(r->barrier);
    trial.check(me);
    pthread_barrier_wait(r->barrier);
    com_advance(me->model);
  }
  if (r->rank == 0) trial.has_failed = sluice_fake_cuda_failed();
  if (r->rank == 0) sluice_fake_cuda_fail_call(-1, 0);
  com_model_free(me->model);
  com_model_free(me->before);
  sluice_comm_destroy(me->of_host);
  sluice_comm_destroy(own);
  sluice_local_group_destroy(group);
}

static void run(trial_t of) {
  rank_t ranks[MAX_RANKS];
  sluice_moe_config_t layer = rig_config();
  layer.num_experts = 2 * of.size;
  trial = of;
  (trial.is_local ? run_local_ranks : trial.nth >= 0 ? run_failing_ranks : run_ranks)(trial.size, &layer, play, ranks);
}

/* ---- expected results ---- */

/* The sum over ranks of one element's gradient, in rank order. */
static float summed(const member_t* me, int64_t element) {
  if (trial.has_own_group && element >= COM_COUNT_A) return com_get_gradient(me->model, element);
  float sum = com_get_gradient(members[0].model, element);
  for (int32_t r = 1; r < trial.size; ++r) sum += com_get_gradient(members[r].model, element);
  return sum;
}

/* Repeats the last step in host memory from the state before it and compares the results. */
static const char* difference_from_host(const member_t* me) {
  com_model_t* reference = com_model_fill(NULL, me->rank->rank, SLUICE_DTYPE_BF16, SLUICE_DTYPE_F32);
  const sluice_optimizer_config_t config = com_config_of(NULL);
  com_copy(reference, me->before);
  for (int i = 0; i < 2; ++i) reference->tensors[i].step = me->model->tensors[i].step;
  for (int64_t i = 0; i < COM_ELEMENTS; ++i) com_set_gradient(reference, i, summed(me, i));
  const char* what = "the reference";
  if (sluice_optimizer_create(&config, &reference->optimizer) == SLUICE_OK && com_step(reference) == SLUICE_OK) {
    what = com_difference(me->model, reference);
  }
  com_model_free(reference);
  return what;
}

static void has_stepped(member_t* me) {
  const char* what = me->status == SLUICE_OK ? difference_from_host(me) : "the step";
  if (what == NULL && me->model->result.skipped) what = "skipped";
  if (what != NULL) problem(me, what);
}

static void has_stepped_early(member_t* me) {
  has_stepped(me);
  if (me->model->result.decided) problem(me, "decided");
}

static void has_stepped_decided(member_t* me) {
  has_stepped(me);
  if (!me->model->result.decided) problem(me, "not decided");
}

static void has_changed_nothing(member_t* me) {
  const char* what = com_difference(me->model, me->before);
  if (what != NULL) problem(me, what);
}

static void was_skipped(member_t* me) {
  if (me->status != SLUICE_OK || !me->model->result.skipped) problem(me, "not skipped");
  has_changed_nothing(me);
}

/* ---- numbers ---- */

TEST(Steps_OverRanks_HaveTheBitsOfSumsInRankOrder) {
  const int64_t buckets[] = {700, 1024, 8192}, chunks[] = {1, 2, 4, INT64_MAX, 0};
  for (int32_t i = 0; i < 15; ++i) {
    for (int32_t size = 2; size <= 4; ++size) {
      run((trial_t){size, (i + size) % 2, buckets[i / 5], chunks[i % 5], has_stepped_early, -1});
    }
  }
}

TEST(GroupOfOneRank_IsNotSummed) { run((trial_t){2, 0, 700, 2, has_stepped_early, -1, NULL, 1}); }

/* Leaves rank 0 without elements. A large gradient makes the other ranks check their sums. */
static void leave_one_rank_without(member_t* me) {
  me->model->groups[0].num_tensors = 0;
  if (me->rank->rank == 0) me->model->groups[1].num_tensors = 0;
  com_set_gradient(me->model, COM_ELEMENTS - 2, 3.3e38F);
}

static void works(member_t* me) {
  if (me->status != SLUICE_OK || me->model->result.skipped) problem(me, "the step");
}

TEST(RankWithoutElements_TakesPart) { run((trial_t){3, 0, 700, 2, works, -1, leave_one_rank_without, 1}); }

/* ---- all or nothing ---- */

static void make_infinite(member_t* me) {
  if (me->rank->rank == trial.size - 1) com_set_gradient(me->model, COM_ELEMENTS - 1, INFINITY);
}

/* Each gradient is finite; the sum is infinite. */
static void make_overflow(member_t* me) { com_set_gradient(me->model, 77, 3e38F); }

/* Gradients and their sums are finite and near the largest f32. */
static void make_large(member_t* me) {
  com_set_gradient(me->model, 77, me->rank->rank == 0 ? 3e38F : -2e38F);
  com_set_gradient(me->model, COM_ELEMENTS - 2, me->rank->rank == 0 ? 0.0F : 3.3e38F);
}

TEST(Step_WithAnInfiniteGradientOnOneRank_IsSkippedOnAll) {
  for (int32_t is_local = 0; is_local < 2; ++is_local) {
    run((trial_t){3, is_local, 1024, 2, was_skipped, -1, make_infinite});
  }
}

TEST(Step_WhoseSumLeavesF32_IsSkippedOnAllRanks) {
  const int64_t chunks[] = {1, 3, INT64_MAX};
  for (int32_t i = 0; i < 3; ++i) {
    run((trial_t){2 + i % 2, i % 2, 700, chunks[i], was_skipped, -1, make_overflow});
  }
}

TEST(Step_WithLargeGradients_LooksAtItsSumsAndHasTheSameBits) {
  const int64_t chunks[] = {1, 3, INT64_MAX};
  for (int32_t i = 0; i < 3; ++i) {
    run((trial_t){2, i % 2, 700, chunks[i], has_stepped_decided, -1, make_large});
  }
}

/* ---- refusals ---- */

static void forget_a_master(member_t* me) {
  if (me->rank->rank == 1) me->model->tensors[1].master = NULL;
}

static void all_were_told(member_t* me) {
  const sluice_status_t wanted = me->rank->rank == 1 ? SLUICE_E_INVALID_ARGUMENT : SLUICE_E_PEER_REFUSED;
  if (me->status != wanted || strstr(me->why, "master is NULL") == NULL) problem(me, "not told");
  if (me->rank->rank != 1 && strstr(me->why, "rank 1") == NULL) problem(me, "rank 1 is not named");
  if (me->rank->rank == 1) me->model->tensors[1].master = me->model->master + COM_COUNT_A;
  has_changed_nothing(me);
}

TEST(Step_ThatOneRankCannotTake_IsRefusedOnAllAndTheNextWorks) {
  run((trial_t){3, 0, 1024, 2, all_were_told, -1, forget_a_master});
}

static void step_over_tcp(member_t* me) {
  if (me->of_host == NULL && sluice_comm_create_tcp(me->rig->comm, NULL, &me->of_host) != SLUICE_OK) abort();
  me->model->args.comm = me->of_host;
}

static void all_refuse_tcp(member_t* me) {
  const int is_named = strstr(me->why, "tcp communicator moves host memory only") != NULL;
  if (me->status != SLUICE_E_UNSUPPORTED || !is_named) problem(me, "not refused");
  has_changed_nothing(me);
}

TEST(Step_OverACommunicatorOfHostMemory_IsRefusedByName) {
  run((trial_t){2, 0, 1024, 2, all_refuse_tcp, -1, step_over_tcp});
}

/* ---- bytes ---- */

static void has_the_bytes_of_the_prediction(member_t* me) {
  DEFAULTS(sluice_optimizer_workload, workload);
  DEFAULTS(sluice_optimizer_prediction, predicted);
  workload.count = COM_ELEMENTS, workload.bucket = trial.bucket, workload.sum_buckets = trial.chunk;
  workload.world_size = trial.size, workload.sums_on_device = 1;
  if (sluice_optimizer_predict(&workload, &predicted) != SLUICE_OK) problem(me, "no prediction");
  if (bytes_now(me) - me->bytes != predicted.slot_bytes + predicted.staging_bytes) problem(me, "other bytes");
  if (me->model->result.staging_bytes != predicted.staging_bytes) problem(me, "other staging");
  has_stepped(me);
}

TEST(Device_OverRanks_HoldsWhatIsPredictedToTheByte) {
  const int64_t chunks[] = {1, 2, INT64_MAX};
  for (int32_t i = 0; i < 6; ++i) {
    run((trial_t){2 + i % 3, 0, i < 3 ? 1024 : 700, chunks[i % 3], has_the_bytes_of_the_prediction, -1});
  }
}

/* ---- failures ---- */

/* If no rank reported an error, the failed call was harmless, such as a release, and the bits must be right. */
static void ends_the_same(member_t* me) {
  int told = 0;
  for (int32_t r = 0; r < trial.size; ++r) told += members[r].status != SLUICE_OK;
  if (told == 0) has_stepped(me);
}

/* All ranks return, and nothing leaks. */
TEST(CallOfTheDriverThatFails_EndsStepsOnAllRanks) {
  int64_t runs = 0;
  for (trial.has_failed = 1; trial.has_failed; ++runs) run((trial_t){2, 0, 1024, 2, ends_the_same, 31 * runs});
  assert_true(runs > 9);
}
