// SPDX-License-Identifier: Apache-2.0
/* Expert parallelism over MPI: each process is a rank; there are 1, 2, 4 or 8.
 *
 *   examples/c/build.sh /tmp/out && mpirun -n 2 /tmp/out/mpi [path of libsluice_mpi.so] */
#include <mpi.h>

#include "host.h"
#include "rank.h"

int main(int argc, char** argv) {
  int provided = 0, rank = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided); /* because the communication lane is another thread */
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  sluice_comm_config_t config;
  sluice_comm_t* comm = NULL;
  sluice_comm_config_init(&config, sizeof config);
  if (failed(rank, sluice_comm_create_mpi(&config, MPI_Comm_c2f(MPI_COMM_WORLD), argc > 1 ? argv[1] : NULL, &comm))) {
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  double mine[RANK_STEPS], all[RANK_STEPS];
  if (rank_train(comm, mine) != 0) MPI_Abort(MPI_COMM_WORLD, 1);
  MPI_Reduce(mine, all, RANK_STEPS, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
  for (int step = 0; step < RANK_STEPS && rank == 0; ++step) {
    if (step % 10 != 0 && step != RANK_STEPS - 1) continue;
    printf("step %2d loss %.6f (%d ranks)\n", step, all[step], sluice_comm_world_size(comm));
  }
  sluice_comm_destroy(comm);
  MPI_Finalize();
  return 0;
}
