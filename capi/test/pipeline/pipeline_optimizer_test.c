// SPDX-License-Identifier: Apache-2.0
/* Gradients of a pipeline are summed while it drains; the optimizer follows. In `reduce`, the host starts the sum of a
 * virtual stage's gradients on its own thread, and later passes the sums to the step. The step's comm contains all
 * ranks, so that all stages step or none; each group's comm has one rank, so that nothing is summed twice. The bits
 * equal those of a step that computes the sums itself. */
#include <math.h>

#include "capi/test/pipeline/pipeline_world.h"
#include "sluice/optimizer.h"
#include "third_party/bazel/test.h"

enum { STAGES = 2, REPLICAS = 2, VIRTUAL = 2, RANKS = STAGES * REPLICAS, LAYERS = STAGES * VIRTUAL, STEPS = 3 };
#define ALL_RANKS UINT32_MAX

typedef struct states_s {
  float param[VIRTUAL][PW_WEIGHTS], exp_avg[VIRTUAL][PW_WEIGHTS], exp_avg_sq[VIRTUAL][PW_WEIGHTS];
} states_t;

typedef struct host_s {
  pw_rank_t* rank;
  states_t sums_given, sums_itself;
  int32_t step; /* the next step */
  float grad[LAYERS][PW_WEIGHTS], sum[LAYERS][PW_WEIGHTS];
  pthread_t threads[LAYERS];
  sluice_comm_t *all, *column, *own;
  sluice_optimizer_t* optimizer;
  int32_t skipped[STEPS], is_unchanged[STEPS];
} host_t;

typedef struct job_s {
  host_t* host;
  int32_t layer, stage;
} job_t;

static host_t hosts[RANKS];
static job_t jobs[RANKS][LAYERS];
static pthread_barrier_t met[LAYERS]; /* replicas meet before they read each other's gradients */
static int32_t bad_step;              /* one replica has an infinite gradient in this step; -1: none */

/* ---- the host's own reduction, in rank order ---- */

static void* sum(void* data) {
  const job_t* job = data;
  host_t* me = job->host;
  pthread_barrier_wait(&met[job->layer]);
  memset(me->sum[job->layer], 0, sizeof me->sum[job->layer]);
  for (int32_t replica = 0; replica < REPLICAS; ++replica) {
    const host_t* other = hosts + replica * STAGES + job->stage;
    for (int32_t w = 0; w < PW_WEIGHTS; ++w) me->sum[job->layer][w] += other->grad[job->layer][w];
  }
  return NULL;
}

/* Replicas have the same data, so this function makes their gradients different. */
static sluice_status_t begin_sum(pw_rank_t* rank, int32_t call, const sluice_stage_call_t* op,
                                 sluice_host_failure_t* out_failure) {
  (void)out_failure;
  if (call != PW_REDUCE) return SLUICE_OK;
  host_t* me = hosts + rank->rank;
  const int32_t c = op->virtual_stage;
  me->rank = rank;
  for (int32_t w = 0; w < PW_WEIGHTS; ++w) {
    me->grad[c][w] = rank->layers[c].grad[w] * (rank->replica == 0 ? 1.0F : 0.3F);
  }
  if (me->step == bad_step && rank->replica == 1 && c == LAYERS - 1) me->grad[c][1] = INFINITY;
  jobs[rank->rank][c] = (job_t){.host = me, .layer = c, .stage = rank->stage};
  if (pthread_create(&me->threads[c], NULL, sum, &jobs[rank->rank][c]) != 0) abort();
  return SLUICE_OK;
}

/* ---- the step ---- */

/* Steps this rank's layers. `column` sums the gradients: all replicas of the stage, or this rank alone. */
static int32_t step(host_t* me, states_t* states, float (*grads)[PW_WEIGHTS], sluice_comm_t* column) {
  sluice_optimizer_tensor_t tensors[VIRTUAL];
  for (int32_t k = 0; k < VIRTUAL; ++k) {
    tensors[k] = (sluice_optimizer_tensor_t){.count = PW_WEIGHTS,
                                             .step = me->step + 1,
                                             .param = states->param[k],
                                             .grad = grads[pw_layer_of(me->rank->world, me->rank->stage, k)],
                                             .exp_avg = states->exp_avg[k],
                                             .exp_avg_sq = states->exp_avg_sq[k],
                                             .param_dtype = SLUICE_DTYPE_F32,
                                             .grad_dtype = SLUICE_DTYPE_F32};
  }
  DEFAULTS(sluice_optimizer_group, group);
  group.tensors = tensors, group.num_tensors = VIRTUAL, group.comm = column;
  const sluice_optimizer_group_t* list[] = {&group};
  DEFAULTS(sluice_optimizer_step_args, args);
  args.groups = list, args.num_groups = 1, args.comm = me->all, args.loss_scale = REPLICAS;
  DEFAULTS(sluice_optimizer_step_result, result);
  if (sluice_optimizer_step(me->optimizer, &args, &result) != SLUICE_OK) pw_wrong(me->rank, "a step failed");
  return result.skipped;
}

static void step_both(pw_rank_t* rank) {
  host_t* me = hosts + rank->rank;
  for (int32_t k = 0; k < VIRTUAL; ++k) pthread_join(me->threads[pw_layer_of(rank->world, rank->stage, k)], NULL);
  const states_t before = me->sums_given;
  const int32_t skipped = step(me, &me->sums_given, me->sum, me->own);
  if (step(me, &me->sums_itself, me->grad, me->column) != skipped) pw_wrong(rank, "one of two steps was skipped");
  if (memcmp(&me->sums_given, &me->sums_itself, sizeof before) != 0) pw_wrong(rank, "two steps differ in their bits");
  me->is_unchanged[me->step] = memcmp(&me->sums_given, &before, sizeof before) == 0;
  me->skipped[me->step++] = skipped;
}

/* ---- cases ---- */

static sluice_comm_t* join(sluice_local_group_t* group, int32_t rank, int32_t size) {
  DEFAULTS(sluice_comm_config, config);
  config.rank = rank, config.world_size = size;
  config.timeout_ns = UINT64_C(60000000000);
  sluice_comm_t* comm = NULL;
  assert_int_equal(sluice_comm_create_local(group, &config, &comm), SLUICE_OK);
  return comm;
}

/* Runs a batch and a step, STEPS times. */
static void train(int32_t bad) {
  bad_step = bad;
  memset(hosts, 0, sizeof hosts);
  sluice_local_group_t *all, *columns[STAGES], *owns[RANKS];
  assert_int_equal(sluice_local_group_create(RANKS, &all), SLUICE_OK);
  for (int s = 0; s < STAGES; ++s) assert_int_equal(sluice_local_group_create(REPLICAS, &columns[s]), SLUICE_OK);
  for (int c = 0; c < LAYERS; ++c) assert_int_equal(pthread_barrier_init(&met[c], NULL, REPLICAS), 0);
  for (int r = 0; r < RANKS; ++r) {
    assert_int_equal(sluice_local_group_create(1, &owns[r]), SLUICE_OK);
    hosts[r].all = join(all, r, RANKS);
    hosts[r].column = join(columns[r % STAGES], r / STAGES, REPLICAS);
    hosts[r].own = join(owns[r], 0, 1);
    DEFAULTS(sluice_optimizer_config, config);
    assert_int_equal(sluice_optimizer_create(&config, &hosts[r].optimizer), SLUICE_OK);
  }
  pw_world_t* world = pw_world_new("local", STAGES);
  world->num_replicas = REPLICAS;
  world->config.num_virtual = VIRTUAL;
  world->reduces = ALL_RANKS;
  world->in_call = begin_sum;
  world->after = step_both;
  world->num_pipelines = STEPS;
  for (int b = 0; b < STEPS; ++b) pw_world_add(world, 5, 0);
  pw_world_run(world);
  for (int r = 0; r < RANKS; ++r) {
    const pw_rank_t* rank = &world->ranks[r];
    if (rank->num_wrong > 0) fail_msg("rank %d: %s", r, rank->wrong);
    assert_int_equal(hosts[r].step, STEPS);
    for (int s = 0; s < STEPS; ++s) {
      assert_int_equal(rank->ended[s], SLUICE_OK);
      assert_int_equal(hosts[r].skipped[s], s == bad);
      assert_int_equal(hosts[r].is_unchanged[s], s == bad);
    }
    sluice_optimizer_destroy(hosts[r].optimizer);
    sluice_comm_destroy(hosts[r].all);
    sluice_comm_destroy(hosts[r].column);
    sluice_comm_destroy(hosts[r].own);
    sluice_local_group_destroy(owns[r]);
  }
  for (int s = 0; s < STAGES; ++s) sluice_local_group_destroy(columns[s]);
  for (int c = 0; c < LAYERS; ++c) pthread_barrier_destroy(&met[c]);
  sluice_local_group_destroy(all);
  pw_world_free(world);
}

TEST(Step_GradientsSummedWhileThePipelineDrains_HasTheBitsOfOneThatSums) { train(-1); }

TEST(Step_InfiniteGradientInOneStage_LeavesEveryByteOnAllStages) { train(1); }
