// SPDX-License-Identifier: Apache-2.0
/* A rank that trains a layer, in turns: for each it gets streams to the other ranks and the step to begin with, makes
 * its communicators and its layer, reads its weights of that step, and goes on until it is told to end, or one of the
 * calls fails; then it gives everything back and waits for the next turn. soak.py tells it, kills it and stops it.
 *
 *   rank CONTROL FOLDER RANK RANKS TIMEOUT_MS
 *
 * It says, one line each: `step TURN STEP LOSS` (the loss in hexadecimal: all of its bits), `made TURN`,
 * `end TURN STATUS PEER MS DESCRIPTORS THREADS MESSAGE`. MS: from the beginning of the call that failed to its end. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "capi/test/migration/mesh.h"
#include "trainer.h"

typedef struct {
  int32_t turn, first_step, num_steps, world_size;
} order_t;

static trainer_t trainer;
static uint64_t timeout_ns;

static sluice_status_t join(const order_t* order, const int* fds, sluice_error_info_t* why) {
  sluice_comm_t *mesh = NULL, *comm = NULL;
  mesh_end_t end = {.rank = trainer.rank, .world = trainer.world_size};
  memcpy(end.sockets, fds, sizeof end.sockets);
  sluice_tcp_config_t config;
  sluice_tcp_config_init(&config, sizeof config);
  config.connect_timeout_ns = timeout_ns;
  trainer.began_ms = trainer_now_ms();
  sluice_status_t status = mesh_comm(&end, timeout_ns, &mesh);
  if (status == SLUICE_OK) status = sluice_comm_create_tcp(mesh, &config, &comm);
  if (status == SLUICE_OK) status = trainer_run(&trainer, comm, order->turn, order->first_step, order->num_steps);
  sluice_error_info_init(why, sizeof *why);
  if (status != SLUICE_OK) sluice_error_last(why);
  const uint64_t ended_ms = trainer_now_ms();
  sluice_comm_destroy(comm);
  sluice_comm_destroy(mesh);
  for (int r = 0; r < trainer.world_size; ++r) {
    if (r != trainer.rank) close(fds[r]);
  }
  trainer.began_ms = ended_ms - trainer.began_ms; /* what the last call took */
  return status;
}

static int count_entries(const char* name) {
  DIR* entries = opendir(name);
  int count = 0;
  while (entries != NULL && readdir(entries) != NULL) ++count;
  if (entries != NULL) closedir(entries);
  return count;
}

/* 0: there is none to come. */
static int receive(int control, order_t* order, int* fds) {
  char room[CMSG_SPACE(MESH_MAX_RANKS * sizeof(int))];
  struct iovec part = {.iov_base = order, .iov_len = sizeof *order};
  struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
  if (recvmsg(control, &message, MSG_WAITALL | MSG_CMSG_CLOEXEC) != (ssize_t)sizeof *order) return 0;
  const struct cmsghdr* c = CMSG_FIRSTHDR(&message);
  const int* given = c != NULL ? (const int*)(const void*)CMSG_DATA(c) : NULL;
  for (int r = 0; r < order->world_size; ++r) fds[r] = r == trainer.rank || given == NULL ? -1 : *given++;
  return 1;
}

int main(int argc, char** argv) {
  order_t order;
  int fds[MESH_MAX_RANKS];
  if (argc != 6) return 2;
  const int control = atoi(argv[1]);
  trainer = (trainer_t){.folder = argv[2], .rank = atoi(argv[3]), .world_size = atoi(argv[4])};
  timeout_ns = (uint64_t)atoi(argv[5]) * 1000000;
  setvbuf(stdout, NULL, _IOLBF, 0);
  while (receive(control, &order, fds)) {
    sluice_error_info_t why;
    const sluice_status_t status = join(&order, fds, &why);
    printf("end %d %s %d %llu %d %d %s\n", order.turn, sluice_status_name(status), status == SLUICE_OK ? -1 : why.peer,
           (unsigned long long)trainer.began_ms, count_entries("/proc/self/fd"), count_entries("/proc/self/task"),
           status == SLUICE_OK ? "" : why.message);
  }
  return 0;
}
