// SPDX-License-Identifier: Apache-2.0
/* Trains a layer as one rank of an MPI job, from its last weights. soak_mpi.py starts the job, and kills and stops its
 * ranks.
 *
 *   mpirun -n RANKS rank_mpi FOLDER FIRST_STEP STEPS TIMEOUT_MS PLUGIN
 *
 * Writes its process ID to FOLDER/pid-RANK, and its lines (trainer.h) to FOLDER/said-RANK, and at the end
 * `end TURN STATUS PEER MS MESSAGE`. Exits with 1 if a call fails; mpirun then ends the other ranks. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "trainer.h"

static void open_files(const char* folder, int rank) {
  char path[512], part[512];
  snprintf(path, sizeof path, "%s/said-%d", folder, rank);
  if (freopen(path, "w", stdout) == NULL) exit(2);
  setvbuf(stdout, NULL, _IOLBF, 0);
  snprintf(path, sizeof path, "%s/pid-%d", folder, rank), snprintf(part, sizeof part, "%s/new-%d", folder, rank);
  FILE* file = fopen(part, "w");
  if (file == NULL || fprintf(file, "%ld", (long)getpid()) < 0 || fclose(file) != 0) exit(2);
  if (rename(part, path) != 0) exit(2);
}

int main(int argc, char** argv) {
  int provided, rank, world_size;
  if (argc != 6 || MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided) != MPI_SUCCESS) return 2;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world_size);
  open_files(argv[1], rank);
  trainer_t trainer = {.folder = argv[1], .rank = rank, .world_size = world_size, .began_ms = trainer_now_ms()};
  sluice_comm_config_t config;
  sluice_comm_t* comm = NULL;
  sluice_error_info_t why;
  sluice_comm_config_init(&config, sizeof config);
  config.timeout_ns = (uint64_t)atoi(argv[4]) * 1000000;
  sluice_status_t status = sluice_comm_create_mpi(&config, -1, argv[5], &comm);
  if (status == SLUICE_OK) status = trainer_run(&trainer, comm, 0, atoi(argv[2]), atoi(argv[3]));
  sluice_error_info_init(&why, sizeof why);
  if (status != SLUICE_OK) sluice_error_last(&why);
  printf("end 0 %s %d %llu %s\n", sluice_status_name(status), status == SLUICE_OK ? -1 : why.peer,
         (unsigned long long)(trainer_now_ms() - trainer.began_ms), status == SLUICE_OK ? "" : why.message);
  if (status != SLUICE_OK) exit(1); /* MPI_Finalize would wait for ranks that never call it */
  sluice_comm_destroy(comm);
  MPI_Finalize();
  return 0;
}
