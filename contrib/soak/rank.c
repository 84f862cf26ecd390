// SPDX-License-Identifier: Apache-2.0
/* Trains a layer as one rank, in turns that soak.py orders. In each turn the rank receives sockets to the other ranks
 * and the first step, creates its communicators and its layer, loads its weights of that step, and trains until the
 * last step, or until a call fails; then it releases everything and waits for the next turn.
 *
 *   rank CONTROL FOLDER RANK RANKS TIMEOUT_MS
 *
 * Prints lines: `made TURN`, `step TURN STEP LOSS` (the loss in hexadecimal, with all of its bits), and
 * `end TURN STATUS PEER MS DESCRIPTORS THREADS MESSAGE`. MS: the duration of the last call, which may have failed. */
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
  trainer.began_ms = ended_ms - trainer.began_ms; /* the duration of the last call */
  return status;
}

static int count_entries(const char* name) {
  DIR* entries = opendir(name);
  int count = 0;
  while (entries != NULL && readdir(entries) != NULL) ++count;
  if (entries != NULL) closedir(entries);
  return count;
}

/* Receives the next order and its sockets. Returns 0 if soak.py has closed the connection. */
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
