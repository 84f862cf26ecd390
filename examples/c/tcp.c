// SPDX-License-Identifier: Apache-2.0
/* Expert parallelism over TCP, without MPI: each process is a rank, on one machine or several; there are 1, 2, 4 or 8.
 *
 *   examples/c/build.sh /tmp/out
 *   export SLUICE_SECRET=$(openssl rand -hex 16)       # the same for all ranks
 *   /tmp/out/tcp 0 2 10.0.0.1:29500 & /tmp/out/tcp 1 2 10.0.0.1:29500
 *
 * The address is that of rank 0, or a list with one for each rank. Each rank prints its part of the losses. */
#include <stdlib.h>

#include "host.h"
#include "rank.h"

int main(int argc, char** argv) {
  const char* secret = getenv("SLUICE_SECRET"); /* not an argument, which all users of the machine can see */
  if (argc != 4 || secret == NULL) {
    fprintf(stderr, "usage: SLUICE_SECRET=... %s RANK WORLD_SIZE HOST:PORT[,HOST:PORT...]\n", argv[0]);
    return 2;
  }
  sluice_comm_config_t config;
  sluice_comm_t* comm = NULL;
  sluice_comm_config_init(&config, sizeof config);
  config.rank = atoi(argv[1]);
  config.world_size = atoi(argv[2]);
  if (failed(config.rank, sluice_comm_create_tcp_at(&config, argv[3], secret, strlen(secret), NULL, &comm))) return 2;
  double mine[RANK_STEPS];
  const int bad = rank_train(comm, mine);
  for (int step = 0; step < RANK_STEPS && !bad; ++step) {
    if (step % 10 != 0 && step != RANK_STEPS - 1) continue;
    printf("step %2d loss %.6f (rank %d of %d)\n", step, mine[step], config.rank, config.world_size);
  }
  sluice_comm_destroy(comm);
  return bad;
}
