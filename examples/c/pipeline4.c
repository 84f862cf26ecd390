// SPDX-License-Identifier: Apache-2.0
/* A pipeline of expert-parallel layers in one process: the ranks are threads; the default is two stages in two
 * replicas.
 *
 *   examples/c/build.sh /tmp/out && /tmp/out/pipeline4 [stages: 1, 2 or 4] [replicas: 1, 2 or 4] */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "stage.h"

enum { MAX_RANKS = 16 };

typedef struct {
  sluice_local_group_t *all, *column;
  int rank, stages, replicas, bad;
  double losses[STAGE_STEPS];
} rank_t;

static void* rank_main(void* argument) {
  rank_t* me = argument;
  sluice_comm_config_t config;
  sluice_comm_t *all = NULL, *column = NULL;
  sluice_comm_config_init(&config, sizeof config);
  config.rank = me->rank, config.world_size = me->stages * me->replicas;
  me->bad = sluice_comm_create_local(me->all, &config, &all) != SLUICE_OK;
  config.rank = me->rank / me->stages, config.world_size = me->replicas;
  me->bad = me->bad || sluice_comm_create_local(me->column, &config, &column) != SLUICE_OK;
  me->bad = me->bad || stage_train(all, column, me->stages, me->losses);
  sluice_comm_destroy(column);
  sluice_comm_destroy(all);
  return NULL;
}

int main(int argc, char** argv) {
  static rank_t ranks[MAX_RANKS];
  pthread_t threads[MAX_RANKS];
  sluice_local_group_t *all = NULL, *columns[STAGE_LAYERS];
  const int stages = argc > 1 ? atoi(argv[1]) : 2, replicas = argc > 2 ? atoi(argv[2]) : 2, W = stages * replicas;
  if (stages < 1 || STAGE_LAYERS % stages != 0 || replicas < 1 || 4 % replicas != 0) return 2;
  if (sluice_local_group_create(W, &all) != SLUICE_OK) return 2;
  for (int s = 0; s < stages; ++s) {
    if (sluice_local_group_create(replicas, &columns[s]) != SLUICE_OK) return 2;
  }
  for (int r = 0; r < W; ++r) {
    ranks[r].all = all, ranks[r].column = columns[r % stages];
    ranks[r].rank = r, ranks[r].stages = stages, ranks[r].replicas = replicas;
    if (pthread_create(&threads[r], NULL, rank_main, &ranks[r]) != 0) return 2;
  }
  int bad = 0;
  for (int r = 0; r < W; ++r) pthread_join(threads[r], NULL), bad |= ranks[r].bad;
  for (int s = 0; s < stages; ++s) sluice_local_group_destroy(columns[s]);
  sluice_local_group_destroy(all);
  if (bad) return 1;
  for (int step = 0; step < STAGE_STEPS; ++step) {
    double loss = 0;
    for (int r = 0; r < W; ++r) loss += ranks[r].losses[step];
    if (step % 10 == 0 || step == STAGE_STEPS - 1) {
      printf("step %2d loss %.6f (%d stages in %d replicas)\n", step, loss, stages, replicas);
    }
  }
  return 0;
}
