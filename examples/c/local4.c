// SPDX-License-Identifier: Apache-2.0
/* Expert parallelism in one process: the ranks are threads, 1, 2, 4 (the default) or 8.
 *
 *   examples/c/build.sh /tmp/out && /tmp/out/local4 [ranks] */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "rank.h"

typedef struct {
  sluice_local_group_t* group;
  int rank, world_size, bad;
  double losses[RANK_STEPS];
} rank_t;

static void* rank_main(void* argument) {
  rank_t* me = argument;
  sluice_comm_config_t config;
  sluice_comm_t* comm = NULL;
  sluice_comm_config_init(&config, sizeof config);
  config.rank = me->rank, config.world_size = me->world_size;
  me->bad = sluice_comm_create_local(me->group, &config, &comm) != SLUICE_OK || rank_train(comm, me->losses);
  sluice_comm_destroy(comm);
  return NULL;
}

int main(int argc, char** argv) {
  static rank_t ranks[RANK_EXPERTS];
  pthread_t threads[RANK_EXPERTS];
  sluice_local_group_t* group = NULL;
  int W = argc > 1 ? atoi(argv[1]) : 4, bad = 0;
  if (W < 1 || RANK_EXPERTS % W != 0 || sluice_local_group_create(W, &group) != SLUICE_OK) return 2;
  for (int r = 0; r < W; ++r) {
    ranks[r].group = group, ranks[r].rank = r, ranks[r].world_size = W;
    if (pthread_create(&threads[r], NULL, rank_main, &ranks[r]) != 0) return 2;
  }
  for (int r = 0; r < W; ++r) pthread_join(threads[r], NULL), bad |= ranks[r].bad;
  sluice_local_group_destroy(group);
  if (bad) return 1;
  for (int step = 0; step < RANK_STEPS; ++step) {
    double loss = 0;
    for (int r = 0; r < W; ++r) loss += ranks[r].losses[step];
    if (step % 10 == 0 || step == RANK_STEPS - 1) printf("step %2d loss %.6f (%d ranks)\n", step, loss, W);
  }
  return 0;
}
