// SPDX-License-Identifier: Apache-2.0
/* The optimizer over ranks, which are threads, on this CPU and on fake GPUs. Sums in rank order overlap with updates,
 * and a step runs on all ranks or on none. The reference is a step in host memory without a communicator on gradients
 * that the test sums. */
#include <float.h>
#include <math.h>

#include "backend/base/dtype.h"
#include "backend/device/cuda/fake/fake_cuda.h"
#include "capi/test/cuda/fakes.h"
#include "capi/test/optimizer/optimizer_world.h"
#include "third_party/bazel/test.h"

static const int32_t kinds[] = {OW_LOCAL, OW_TCP, OW_NCCL, OW_ONE_GPU};
enum { NUM_KINDS = sizeof kinds / sizeof kinds[0] };

/* ---- numbers ---- */

/* Gradients of the second group in one dtype, so that a bucket of them is sent in it; those of other buckets as f32. */
static void give_bf16(ow_rank_t* me) {
  enum { LAST = NUM_TENSORS - 1 };
  float* grad = me->model->grad + ELEMENTS - counts[LAST];
  for (int64_t i = 0; i < counts[LAST]; ++i)
    write_element(grad, SLUICE_DTYPE_BF16, i, read_element(grad, dtypes[LAST], i));
  me->model->tensors[LAST].grad_dtype = SLUICE_DTYPE_BF16;
}

TEST(Steps_OverRanks_HaveTheBitsOfSumsInRankOrder) {
  static const int64_t buckets[] = {999, 4096, 1 << 14}, chunks[] = {1, 2, 4, INT64_MAX, 0};
  for (int32_t size = 1; size <= 4; ++size) {
    for (int i = 0; i < 30; ++i) {
      const int32_t on_cpu = i % 4 == 3 ? OW_TCP : OW_LOCAL, on_gpus = i % 2 ? OW_NCCL : OW_ONE_GPU;
      ow_world_t* w = ow_world_new(size, i < 15 ? on_cpu : on_gpus, 0);
      w->before = i < 15 && i % 2 ? give_bf16 : NULL;
      assert_int_equal(ow_check_steps(w, buckets[i % 15 / 5], chunks[i % 5], 0.0), 0);
      ow_world_free(w);
    }
  }
}

TEST(Steps_ThatClip_HaveTheNormOfOneRankAndAreDecided) {
  static const int64_t buckets[] = {999, 4096, 1 << 22}, chunks[] = {1, 4, INT64_MAX};
  for (int i = 0; i < 9; ++i) {
    ow_world_t* w = ow_world_new(2, i % 3, 0);
    assert_int_equal(ow_check_steps(w, buckets[i / 3], chunks[i % 3], 0.25), 2 * OW_STEPS);
    ow_world_free(w);
  }
}

TEST(GroupsOfAPartOfTheRanks_AreSummedOverIt) {
  static const int32_t cases[][3] = {{4, OW_LOCAL, 2}, {4, OW_LOCAL, 4}, {2, OW_NCCL, 2}};
  for (int i = 0; i < 3; ++i) {
    ow_world_t* w = ow_world_new(cases[i][0], cases[i][1], cases[i][2]);
    assert_int_equal(ow_check_steps(w, 5000, 2, 0.0), 0);
    ow_world_free(w);
  }
}

/* Leaves rank 0 without elements. A large gradient makes the other ranks check their sums. */
static void leave_one_rank_without(ow_rank_t* me) {
  me->model->groups[0].num_tensors = 0;
  if (me->rank == 0) me->model->groups[1].num_tensors = 0;
  write_element((void*)(uintptr_t)me->model->tensors[2].grad, dtypes[2], 0, 3.3e38F);
}

TEST(RankWithoutElements_TakesPart) {
  ow_world_t* w = ow_world_new(3, OW_NCCL, 3);
  w->before = leave_one_rank_without;
  ow_set(w, 700, 2, 0.0);
  ow_step(w, 1);
  for (int32_t r = 0; r < 3; ++r) {
    if (w->ranks[r].status != SLUICE_OK) fail_msg("rank %d: %s", r, w->ranks[r].error.message);
    assert_int_equal(w->ranks[r].model->result.skipped, 0);
  }
  ow_world_free(w);
}

/* The norm counts every element once: groups of all ranks, and groups that only pairs of ranks share. */
TEST(GroupsOfAPartOfTheRanks_CountOnceInTheNorm) {
  ow_world_t* w = ow_world_new(4, 0, 2);
  model_t* sums = open_model();
  for (int32_t r = 0; r < 4; ++r) w->ranks[r].model->args.max_norm = 1e-3;
  ow_step(w, 1);
  double squares = 0.0;
  for (int32_t r = 0; r < 2; ++r) {
    ow_sum_gradients(w, w->ranks + r, sums);
    const int64_t experts = counts[0] + counts[1]; /* before the tensors of the second group */
    for (int64_t i = r == 1 ? experts : 0; i < ELEMENTS; ++i) squares += (double)sums->grad[i] * (double)sums->grad[i];
  }
  for (int32_t r = 0; r < 4; ++r) {
    const double norm = w->ranks[r].model->result.norm;
    assert_true(fabs(norm / sqrt(squares) - 1.0) < 1e-12);
    assert_true(norm == w->ranks[0].model->result.norm);
  }
  close_model(sums);
  ow_world_free(w);
}

/* ---- all or nothing ---- */

static int32_t bad_rank, bad_tensor, bad_at_end;
static float bad_value;

static void plant(ow_rank_t* me) {
  if (me->rank != bad_rank) return;
  const int64_t at = bad_at_end ? counts[bad_tensor] - 1 : 0;
  write_element((void*)(uintptr_t)me->model->tensors[bad_tensor].grad, dtypes[bad_tensor], at, bad_value);
}

static void expect_nothing(ow_world_t* w, const states_t* before, int32_t is_decided) {
  for (int32_t r = 0; r < w->size; ++r) {
    if (w->ranks[r].status != SLUICE_OK) fail_msg("rank %d: %s", r, w->ranks[r].error.message);
    assert_int_equal(w->ranks[r].model->result.skipped, 1);
    assert_int_equal(w->ranks[r].model->result.decided, is_decided);
    assert_memory_equal(&w->ranks[r].model->s, before, sizeof *before);
  }
}

TEST(Step_WithABadGradientOnAnyRankAndBucket_ChangesNothingAnywhere) {
  static const float bad[] = {INFINITY, -INFINITY, NAN};
  model_t* fresh = open_model();
  for (int kind = 0; kind < NUM_KINDS; ++kind) {
    const int clips = kinds[kind] == OW_TCP, is_on_gpus = kinds[kind] >= OW_NCCL;
    for (int size = 1 + is_on_gpus; size <= (is_on_gpus ? 2 : 4); size *= 2) {
      ow_world_t* w = ow_world_new(size, kinds[kind], 0);
      ow_set(w, 1500, 1, clips);
      for (int i = 0; i < size * NUM_TENSORS * 2; ++i) {
        bad_rank = i % size, bad_tensor = i / size % NUM_TENSORS, bad_at_end = i / size / NUM_TENSORS;
        bad_value = bad[i % 3];
        if (counts[bad_tensor] == 0) continue;
        w->before = plant;
        ow_step(w, 1);
        expect_nothing(w, &fresh->s, clips);
      }
      w->before = NULL;
      assert_true(ow_check_steps(w, 1500, 1, 0.0) == 0); /* the next step continues from the old state */
      ow_world_free(w);
    }
  }
  close_model(fresh);
}

static float huge_of[OW_MAX_RANKS];

/* Plants finite values in the last bucket, except for f32. */
static void plant_huge(ow_rank_t* me) {
  write_element((void*)(uintptr_t)me->model->tensors[0].grad, dtypes[0], counts[0] - 1, huge_of[me->rank]);
}

TEST(Step_WhoseSumAloneIsInfinite_ChangesNothingAnywhere) {
  static const float rows[][4] = {{3e38F, 3e38F}, {0, 3e38F, 2e38F, 0}, {-FLT_MAX, 0, 0, -FLT_MAX}, {FLT_MAX, FLT_MAX}};
  model_t* fresh = open_model();
  for (int i = 0; i < 4 * NUM_KINDS; ++i) {
    ow_world_t* w = ow_world_new(4, kinds[i % NUM_KINDS], 0);
    memcpy(huge_of, rows[i / NUM_KINDS], sizeof huge_of);
    w->before = plant_huge;
    ow_set(w, 1000, i % 3 == 2 ? INT64_MAX : 1 + i % 3, 0.0);
    ow_step(w, 1);
    expect_nothing(w, &fresh->s, 1);
    ow_world_free(w);
  }
  close_model(fresh);
}

TEST(Step_OfHugeGradientsWhoseSumIsFinite_IsDecidedAndTaken) {
  static const int64_t chunks[] = {2, 1, 3, INT64_MAX};
  const float row[] = {3e38F, -3e38F, 1e38F, 1.0F};
  memcpy(huge_of, row, sizeof huge_of);
  for (int kind = 0; kind < NUM_KINDS; ++kind) {
    ow_world_t* w = ow_world_new(4, kinds[kind], 0);
    w->before = plant_huge;
    assert_int_equal(ow_check_steps(w, 1000, chunks[kind], 0.0), 4 * OW_STEPS);
    ow_world_free(w);
  }
}

/* ---- refusals ---- */

static void (*bend)(model_t* m);

static void bend_rank_1(ow_rank_t* me) {
  if (me->rank == 1) bend(me->model);
}

static void bend_lr(model_t* m) { m->groups[1].lr = NAN; }
static void bend_master(model_t* m) { m->tensors[2].master = NULL; }
static void bend_count(model_t* m) { m->tensors[0].count = -1; }
static void bend_groups(model_t* m) { m->args.groups = NULL; }
static void bend_bucket(model_t* m) { m->args.bucket = 0; }
static void bend_chunk(model_t* m) { m->args.sum_buckets = -1; }
static void other_bucket(model_t* m) { m->args.bucket = 77; }
static void other_chunk(model_t* m) { m->args.sum_buckets = 3; }
static void other_count(model_t* m) { m->tensors[0].count -= 1; }
/* Moves one element from the first tensor to the next. */
static void other_cut(model_t* m) {
  sluice_optimizer_tensor_t* next = &m->tensors[1];
  m->tensors[0].count -= 1, next->count += 1;
  next->param = (char*)next->param - sluice_dtype_bytes(next->param_dtype);
  next->grad = (const char*)next->grad - sluice_dtype_bytes(next->grad_dtype);
  if (next->master != NULL) next->master -= 1;
  next->exp_avg -= 1, next->exp_avg_sq -= 1;
}
static void other_step(model_t* m) { m->tensors[2].step = 9; }
static void other_lr(model_t* m) { m->groups[0].lr = 0.5; }
static void other_scale(model_t* m) { m->args.loss_scale = 2.0; }
static void other_norm(model_t* m) { m->args.max_norm = 2.0; }
static void other_groups(model_t* m) { m->args.num_groups = 1; }

enum { EVERYWHERE, ON_CPU, ON_GPUS };

typedef struct refusal_s {
  void (*bend)(model_t* m);
  sluice_status_t status; /* status of rank 1; the other rank returns PEER_REFUSED, or also MISMATCH */
  const char* text;
  int where; /* it is refused; buckets and norms are arguments of steps in host memory alone */
} refusal_t;

static const refusal_t refusals[] = {
    {bend_lr, SLUICE_E_INVALID_ARGUMENT, "lr is nan"},
    {bend_count, SLUICE_E_INVALID_ARGUMENT, "has count -1"},
    {bend_groups, SLUICE_E_INVALID_ARGUMENT, "groups is NULL"},
    {bend_bucket, SLUICE_E_INVALID_ARGUMENT, "buckets of 0 elements", ON_CPU},
    {bend_chunk, SLUICE_E_INVALID_ARGUMENT, "sum_buckets is -1"},
    {bend_master, SLUICE_E_INVALID_ARGUMENT, "master is NULL", ON_GPUS},
    {other_bucket, SLUICE_E_MISMATCH, "bucket", ON_CPU},
    {other_chunk, SLUICE_E_MISMATCH, "sum_buckets"},
    {other_count, SLUICE_E_MISMATCH, "number of elements"},
    {other_cut, SLUICE_E_MISMATCH, "counts, dtypes"},
    {other_step, SLUICE_E_MISMATCH, "counts, dtypes"},
    {other_lr, SLUICE_E_MISMATCH, "lr"},
    {other_scale, SLUICE_E_MISMATCH, "loss_scale"},
    {other_norm, SLUICE_E_MISMATCH, "max_norm", ON_CPU},
    {other_groups, SLUICE_E_MISMATCH, "number of elements"},
};

TEST(Step_ThatOneRankRefuses_IsRefusedOnAllAndTheNextOneRuns) {
  for (size_t i = 0; i < 2 * sizeof refusals / sizeof refusals[0]; ++i) {
    const refusal_t* refusal = refusals + i / 2;
    if (refusal->where == (i % 2 ? ON_CPU : ON_GPUS)) continue;
    ow_world_t* w = ow_world_new(2, i % 2 ? OW_NCCL : OW_LOCAL, 0);
    model_t *fresh = open_model(), *good = w->ranks[1].model;
    ow_set(w, BUCKET, 1, 0.0);
    const model_t before = *good;
    bend = refusal->bend;
    w->before = bend_rank_1;
    ow_step(w, 1);
    const int is_mismatch = refusal->status == SLUICE_E_MISMATCH;
    assert_int_equal(w->ranks[1].status, refusal->status);
    assert_int_equal(w->ranks[0].status, is_mismatch ? SLUICE_E_MISMATCH : SLUICE_E_PEER_REFUSED);
    for (int r = 0; r < 2; ++r) {
      if (strstr(w->ranks[r].error.message, refusal->text) == NULL) fail_msg("%s", w->ranks[r].error.message);
      assert_memory_equal(&w->ranks[r].model->s, &fresh->s, sizeof fresh->s);
    }
    assert_int_equal(w->ranks[0].error.peer, 1);
    w->before = NULL;
    *good = before;
    assert_int_equal(ow_check_steps(w, BUCKET, 1, 0.0), 0);
    close_model(fresh);
    ow_world_free(w);
  }
}

static void step_over_tcp(ow_rank_t* me) {
  if (sluice_comm_create_tcp(me->parent, NULL, &me->own) != SLUICE_OK) abort();
  me->model->args.comm = me->own;
}

TEST(Step_OnGpusOverACommunicatorOfHostMemory_IsRefusedByName) {
  ow_world_t* w = ow_world_new(2, OW_NCCL, 0);
  model_t* fresh = open_model();
  w->before = step_over_tcp;
  ow_set(w, 1024, 2, 0.0);
  ow_step(w, 1);
  for (int r = 0; r < 2; ++r) {
    assert_int_equal(w->ranks[r].status, SLUICE_E_UNSUPPORTED);
    assert_non_null(strstr(w->ranks[r].error.message, "tcp communicator moves host memory only"));
    assert_memory_equal(&w->ranks[r].model->s, &fresh->s, sizeof fresh->s);
  }
  close_model(fresh);
  ow_world_free(w);
}

static void other_own_count(ow_rank_t* me) {
  if (me->rank == 2) me->model->tensors[2].count -= 1;
}

TEST(Step_WhoseOwnGroupDiffers_IsRefusedOnAllRanks) {
  ow_world_t* w = ow_world_new(4, 0, 2);
  model_t* fresh = open_model();
  w->before = other_own_count;
  ow_step(w, 1);
  for (int r = 0; r < 4; ++r) {
    assert_int_equal(w->ranks[r].status, r % 2 == 0 ? SLUICE_E_MISMATCH : SLUICE_E_PEER_REFUSED);
    assert_memory_equal(&w->ranks[r].model->s, &fresh->s, sizeof fresh->s);
  }
  close_model(fresh);
  ow_world_free(w);
}

TEST(Group_WithACommunicatorInAStepWithout_IsRefused) {
  ow_world_t* w = ow_world_new(1, 0, 1);
  w->ranks[0].comm = NULL;
  ow_step(w, 1);
  assert_int_equal(w->ranks[0].status, SLUICE_E_INVALID_ARGUMENT);
  w->ranks[0].comm = w->ranks[0].parent;
  ow_world_free(w);
}

/* ---- a rank that goes ---- */

static void leave(ow_rank_t* me) {
  if (me->rank == 1) sluice_comm_abort(me->comm);
}

TEST(Step_FromWhichARankGoes_EndsOnTheOthersAndNamesIt) {
  for (int is_tcp = 0; is_tcp < 2; ++is_tcp) {
    ow_world_t* w = ow_world_new(2, is_tcp, 0);
    model_t* fresh = open_model();
    w->before = leave;
    ow_step(w, 1);
    assert_int_equal(w->ranks[1].status, SLUICE_E_ABORTED);
    assert_int_equal(w->ranks[0].status, SLUICE_E_PEER_LOST);
    for (int r = 0; r < 2; ++r) assert_memory_equal(&w->ranks[r].model->s, &fresh->s, sizeof fresh->s);
    close_model(fresh);
    ow_world_free(w);
  }
}

/* ---- reports ---- */

static uint64_t staging_of(int64_t bucket, int64_t chunk, double max_norm) {
  ow_world_t* w = ow_world_new(2, 0, 0);
  (void)ow_check_steps(w, bucket, chunk, max_norm);
  const sluice_optimizer_step_result_t result = w->ranks[0].model->result;
  assert_true(result.sum_ns > 0 && result.update_ns > 0 && result.step_ns >= result.update_ns);
  ow_world_free(w);
  return result.staging_bytes;
}

TEST(Result_TellsTheBytesOfStagingAndTheTimes) {
  assert_int_equal(staging_of(1024, 4, 0.0), 2 * 4 * 1024 * 4); /* two slots of k buckets in f32 */
  assert_int_equal(staging_of(1024, 4, 1.0), 4 * (uint64_t)ELEMENTS);
  assert_int_equal(staging_of(1 << 22, INT64_MAX, 0.0), (4 * (uint64_t)ELEMENTS + 63) / 64 * 64);
}

/* ---- fake GPUs ---- */

static uint64_t bytes_of(sluice_context_t* context) {
  sluice_context_stats_t stats = {.struct_size = sizeof stats};
  WORKS(sluice_context_get_stats(context, 0, &stats));
  return stats.current_bytes;
}

TEST(Gpus_HoldWhatIsPredictedToTheByte) {
  static const int64_t chunks[] = {1, 2, INT64_MAX};
  for (int32_t i = 0; i < 6; ++i) {
    ow_world_t* w = ow_world_new(2 + i % 3, OW_NCCL, 0);
    DEFAULTS(sluice_optimizer_workload, workload);
    DEFAULTS(sluice_optimizer_prediction, predicted);
    workload.count = ELEMENTS, workload.bucket = i < 3 ? 1024 : 700, workload.sum_buckets = chunks[i % 3];
    workload.world_size = w->size, workload.sums_on_device = 1;
    WORKS(sluice_optimizer_predict(&workload, &predicted));
    const uint64_t before = bytes_of(w->ranks[0].context);
    (void)ow_check_steps(w, workload.bucket, workload.sum_buckets, 0.0);
    for (int32_t r = 0; r < w->size; ++r) {
      const uint64_t taken = bytes_of(w->ranks[r].context) - before;
      assert_int_equal(taken, predicted.slot_bytes + predicted.staging_bytes);
      assert_int_equal(w->ranks[r].model->result.staging_bytes, predicted.staging_bytes);
    }
    ow_world_free(w);
  }
}

/* Time that a rank whose peer is gone waits for its stream; most of it is a reserve for slow peers. */
#if defined(__SANITIZE_THREAD__)
#define TIMEOUT_MS 3000
#else
#define TIMEOUT_MS 200
#endif

/* All ranks return, and nothing leaks. If none reports an error, the failed call was harmless, such as a release. */
TEST(CallOfTheDriverThatFails_EndsStepsOnAllRanks) {
  enum { UNKNOWN_ERROR = 999 };
  int64_t runs = 0;
  for (int has_failed = 1; has_failed; ++runs) {
    ow_world_t* w = ow_world_new(2, OW_NCCL, 0);
    ow_set(w, 1024, 2, 0.0);
    fakes_be_patient(TIMEOUT_MS);
    sluice_fake_cuda_fail_call(31 * runs, UNKNOWN_ERROR);
    for (int32_t number = 1; number <= 3; ++number) (void)ow_checked_step(w, number);
    has_failed = sluice_fake_cuda_failed();
    sluice_fake_cuda_fail_call(-1, 0);
    sluice_fake_cuda_forget_accesses(); /* those of an aborted step have no order */
    ow_world_free(w);
  }
  assert_true(runs > 9);
}
