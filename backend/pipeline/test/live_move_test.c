// SPDX-License-Identifier: Apache-2.0
/* A layer changes its stage while a batch runs, without a drain: losses, weights and moments have the same bits as a
 * loop in which nothing moves. The layer moves in every second batch, down and up alternately. */
#include <pthread.h>

#include "backend/pipeline/test/live_host.h"
#include "third_party/bazel/test.h"

enum { BATCHES = LIVE_MOST_BATCHES };

typedef struct world_s {
  int32_t p, upper, run; /* L is at the cut between the stages upper and upper + 1 */
  int is_tcp;
  uint64_t rate;
  sluice_local_group_t *of_batches, *of_moves;
  int32_t in_batch, at_flush; /* how often L moved in a batch, or at a flush */
  int32_t summed_early;       /* and how often its gradients arrived before the commit */
} world_t;

typedef struct rank_s {
  world_t* world;
  live_stage_t stage;
  pthread_t thread;
  sluice_pipeline_t* pipeline;
  int bad; /* the line of the failed check */
} rank_t;

#define EXPECT(condition)                                     \
  do {                                                        \
    if (!(condition) && rank->bad == 0) rank->bad = __LINE__; \
  } while (0)

static void run_batches(rank_t* rank) {
  live_stage_t* stage = &rank->stage;
  DEFAULTS(sluice_pipeline_batch, batch);
  batch.num_micro_batches = LIVE_MICRO_BATCHES;
  for (int32_t b = 0; b < BATCHES && rank->bad == 0; ++b) {
    const int moves = b % 2;
    stage->batch = b;
    if (moves) EXPECT(live_set_out(stage, b / 2 % 2 == 0, (uint64_t)b + 1) == SLUICE_OK);
    EXPECT(sluice_pipeline_run_batch(rank->pipeline, &batch) == SLUICE_OK);
    if (moves) EXPECT(sluice_migration_commit(stage->migration, NULL) == SLUICE_OK);
    if (moves) live_arrive(stage);
    live_update(stage);
  }
  EXPECT(stage->early == SLUICE_OK);
}

static sluice_comm_t* comm_of(rank_t* rank, sluice_local_group_t* group, sluice_comm_t** out_parent) {
  DEFAULTS(sluice_comm_config, config);
  sluice_comm_t* tcp = NULL;
  config.rank = rank->stage.stage;
  config.world_size = rank->world->p;
  EXPECT(sluice_comm_create_local(group, &config, out_parent) == SLUICE_OK);
  if (rank->world->is_tcp) EXPECT(sluice_comm_create_tcp(*out_parent, NULL, &tcp) == SLUICE_OK);
  return tcp != NULL ? tcp : *out_parent;
}

static void* be_rank(void* data) {
  rank_t* rank = data;
  sluice_comm_t* parents[2] = {NULL, NULL};
  sluice_comm_t* comms[2] = {comm_of(rank, rank->world->of_batches, &parents[0]),
                             comm_of(rank, rank->world->of_moves, &parents[1])};
  DEFAULTS(sluice_pipeline_config, config);
  sluice_migration_config_t moves;
  sluice_migration_config_init(&moves, sizeof moves);
  config.in_flight = 2;
  moves.bytes_per_second = rank->world->rate;
  moves.chunk_bytes = 4096;
  EXPECT(sluice_pipeline_create(&config, comms[0], live_callbacks(), &rank->stage, &rank->pipeline) == SLUICE_OK);
  EXPECT(sluice_migration_create(comms[1], &moves, &rank->stage.migration) == SLUICE_OK);
  if (rank->bad == 0) run_batches(rank);
  sluice_migration_destroy(rank->stage.migration);
  sluice_pipeline_destroy(rank->pipeline);
  for (int32_t i = 0; i < 2; ++i) {
    if (comms[i] != parents[i]) sluice_comm_destroy(comms[i]);
    sluice_comm_destroy(parents[i]);
  }
  return NULL;
}

static void check_bits(world_t* world, rank_t* ranks) {
  static live_layer_t own[LIVE_MOST_STAGES], moving[LIVE_MOST_RUN];
  static float losses[BATCHES][LIVE_MICRO_BATCHES];
  live_reference(world->p, world->upper, world->run, BATCHES, own, moving, losses);
  assert_memory_equal(ranks[world->p - 1].stage.losses, losses, sizeof losses);
  int32_t owners = 0;
  for (int32_t s = 0; s < world->p; ++s) {
    const live_stage_t* stage = &ranks[s].stage;
    assert_memory_equal(&stage->own, &own[s], sizeof own[s]);
    world->in_batch += stage->in_batch;
    world->at_flush += stage->at_flush;
    world->summed_early += stage->summed_early;
    if (!stage->has_moving) continue;
    ++owners;
    assert_memory_equal(stage->moving, moving, (size_t)world->run * sizeof *moving);
  }
  assert_int_equal(owners, 1);
}

static world_t run_world(int32_t p, int32_t upper, int32_t run, int is_tcp, uint64_t rate) {
  world_t world = {.p = p, .upper = upper, .run = run, .is_tcp = is_tcp, .rate = rate};
  rank_t* ranks = calloc((size_t)p, sizeof *ranks);
  assert_non_null(ranks);
  assert_int_equal(sluice_local_group_create(p, &world.of_batches), SLUICE_OK);
  assert_int_equal(sluice_local_group_create(p, &world.of_moves), SLUICE_OK);
  for (int32_t s = 0; s < p; ++s) {
    ranks[s].world = &world;
    live_stage_init(&ranks[s].stage, upper, run, s);
    assert_int_equal(pthread_create(&ranks[s].thread, NULL, be_rank, &ranks[s]), 0);
  }
  for (int32_t s = 0; s < p; ++s) pthread_join(ranks[s].thread, NULL);
  for (int32_t s = 0; s < p; ++s) {
    if (ranks[s].bad != 0) fail_msg("p %d, cut %d: line %d does not hold on stage %d", p, upper, ranks[s].bad, s);
  }
  check_bits(&world, ranks);
  sluice_local_group_destroy(world.of_batches);
  sluice_local_group_destroy(world.of_moves);
  free(ranks);
  return world;
}

TEST(Layer_ThatMovesInABatch_HasTheBitsOfOneLoop) {
  int32_t in_batch = 0, summed_early = 0;
  for (int32_t is_tcp = 0; is_tcp < 2; ++is_tcp) {
    for (int32_t p = 2; p <= LIVE_MOST_STAGES; ++p) {
      for (int32_t upper = 0; upper + 1 < p; ++upper) {
        const world_t world = run_world(p, upper, 1 + (p + upper) % LIVE_MOST_RUN, is_tcp, 0);
        in_batch += world.in_batch, summed_early += world.summed_early;
      }
    }
  }
  print_message("%d moves in batches, without a drain; gradients of %d before the commit\n", in_batch, summed_early);
  assert_true(in_batch >= 12);
  assert_true(summed_early >= 6);
}

TEST(Layer_WhoseParametersComeLate_MovesAtTheFlush) {
  for (int32_t run = 1; run <= LIVE_MOST_RUN; ++run) {
    const world_t world = run_world(2, 0, run, 0, 100 * 1000); /* 12 kB at 100 kB a second: after the batch */
    assert_true(world.at_flush > 0);
  }
}
