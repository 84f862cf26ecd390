// SPDX-License-Identifier: Apache-2.0
/* A pipeline of expert-parallel layers over MPI: each process is a rank; the default is two stages in W / 2 replicas.
 *
 *   examples/c/build.sh /tmp/out && mpirun -n 4 /tmp/out/pipeline_mpi [stages: 1, 2 or 4] [path of libsluice_mpi.so] */
#include <mpi.h>
#include <stdlib.h>

#include "host.h"
#include "stage.h"

static sluice_comm_t* open_comm(int rank, MPI_Comm of, const char* library) {
  sluice_comm_config_t config;
  sluice_comm_t* comm = NULL;
  sluice_comm_config_init(&config, sizeof config);
  if (failed(rank, sluice_comm_create_mpi(&config, MPI_Comm_c2f(of), library, &comm))) MPI_Abort(MPI_COMM_WORLD, 2);
  return comm;
}

int main(int argc, char** argv) {
  int provided = 0, rank = 0, W = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided); /* because another thread moves the messages */
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &W);
  const int stages = argc > 1 ? atoi(argv[1]) : 2;
  const char* library = argc > 2 ? argv[2] : NULL;
  if (stages < 1 || STAGE_LAYERS % stages != 0 || W % stages != 0) MPI_Abort(MPI_COMM_WORLD, 2);
  MPI_Comm of_column;
  MPI_Comm_split(MPI_COMM_WORLD, rank % stages, rank / stages, &of_column); /* the replicas of a stage */
  sluice_comm_t *all = open_comm(rank, MPI_COMM_WORLD, library), *column = open_comm(rank, of_column, library);
  double mine[STAGE_STEPS], sums[STAGE_STEPS];
  if (stage_train(all, column, stages, mine) != 0) MPI_Abort(MPI_COMM_WORLD, 1);
  MPI_Reduce(mine, sums, STAGE_STEPS, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
  for (int step = 0; step < STAGE_STEPS && rank == 0; ++step) {
    if (step % 10 != 0 && step != STAGE_STEPS - 1) continue;
    printf("step %2d loss %.6f (%d stages in %d replicas)\n", step, sums[step], stages, W / stages);
  }
  sluice_comm_destroy(column);
  sluice_comm_destroy(all);
  MPI_Comm_free(&of_column);
  MPI_Finalize();
  return 0;
}
