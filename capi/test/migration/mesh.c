// SPDX-License-Identifier: Apache-2.0
#include "capi/test/migration/mesh.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef struct mesh_s {
  int world;
  int sockets[MESH_MAX_RANKS][MESH_MAX_RANKS];
} mesh_t;

static int mesh_open(mesh_t* mesh, int world) {
  memset(mesh, -1, sizeof *mesh);
  mesh->world = world;
  for (int a = 0; a < world; ++a) {
    for (int b = a + 1; b < world; ++b) {
      int pair[2];
      if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) return 0;
      mesh->sockets[a][b] = pair[0];
      mesh->sockets[b][a] = pair[1];
    }
  }
  return 1;
}

static void mesh_close(mesh_t* mesh) {
  for (int a = 0; a < mesh->world; ++a) {
    for (int b = 0; b < mesh->world; ++b) {
      if (mesh->sockets[a][b] >= 0) close(mesh->sockets[a][b]);
    }
  }
  mesh->world = 0;
}

/* Called in a child: keeps the ends of `rank` and closes all other sockets. */
static void mesh_take(mesh_t* mesh, int rank, mesh_end_t* out_end) {
  *out_end = (mesh_end_t){.rank = rank, .world = mesh->world};
  memcpy(out_end->sockets, mesh->sockets[rank], sizeof out_end->sockets);
  memset(mesh->sockets[rank], -1, sizeof mesh->sockets[rank]);
  mesh_close(mesh);
}

void* mesh_share(uint64_t bytes) {
  void* shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) abort();
  return shared;
}

void mesh_unshare(void* shared, uint64_t bytes) { munmap(shared, bytes); }

int mesh_run(int world, int victim, mesh_rank_fn_t rank, void* shared) {
  pid_t pids[MESH_MAX_RANKS];
  mesh_t mesh;
  if (!mesh_open(&mesh, world)) return 0;
  for (int r = 0; r < world; ++r) {
    pids[r] = fork();
    if (pids[r] < 0) abort();
    if (pids[r] != 0) continue;
    static mesh_end_t end;
    mesh_take(&mesh, r, &end);
    _exit(rank(&end, shared) & 0xff);
  }
  mesh_close(&mesh);
  int good = 1, status = 0;
  for (int r = 0; r < world; ++r) {
    if (r == victim) continue;
    if (waitpid(pids[r], &status, 0) == pids[r] && WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
    fprintf(stderr, "rank %d of %d ended with %#x\n", r, world, (unsigned)status);
    good = 0;
  }
  (void)kill(pids[victim], SIGKILL);
  return waitpid(pids[victim], NULL, 0) == pids[victim] && good;
}

void mesh_leave_out(const mesh_end_t* end, int rank, mesh_end_t* out_end) {
  *out_end = (mesh_end_t){.rank = end->rank - (end->rank > rank), .world = end->world - 1};
  for (int r = 0, to = 0; r < end->world; ++r) {
    if (r != rank) out_end->sockets[to++] = end->sockets[r];
  }
}

static int move_all(int fd, void* data, uint64_t bytes, int is_send) {
  for (uint64_t done = 0; done < bytes;) {
    const ssize_t moved = is_send ? send(fd, (char*)data + done, bytes - done, MSG_NOSIGNAL)
                                  : recv(fd, (char*)data + done, bytes - done, 0);
    if (moved <= 0) return 0;
    done += (uint64_t)moved;
  }
  return 1;
}

static sluice_status_t exchange_start(void* user, const sluice_exchange_t* exchange, void** out_request,
                                      sluice_host_failure_t* out_failure) {
  mesh_end_t* me = user;
  for (int r = 0; r < me->world; ++r) {
    if (r == me->rank) continue;
    me->recv[r] = exchange->recv[r];
    me->recv_bytes[r] = exchange->recv_bytes[r];
    out_failure->peer = r;
    if (!move_all(me->sockets[r], (void*)exchange->send[r], exchange->send_bytes[r], 1)) return SLUICE_E_PEER_LOST;
  }
  *out_request = me;
  return SLUICE_OK;
}

static int64_t now_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static sluice_status_t exchange_wait(void* user, void* request, uint64_t timeout_ns,
                                     sluice_host_failure_t* out_failure) {
  mesh_end_t* me = user;
  const int64_t until_ms = now_ms() + (int64_t)(timeout_ns / 1000000);
  (void)request;
  for (int r = 0; r < me->world; ++r) {
    out_failure->peer = r;
    while (r != me->rank && me->recv_bytes[r] > 0) {
      struct pollfd arrived = {.fd = me->sockets[r], .events = POLLIN};
      const int64_t left_ms = until_ms - now_ms();
      if (poll(&arrived, 1, left_ms > 0 ? (int)left_ms : 0) == 0) return SLUICE_E_TIMED_OUT;
      const ssize_t moved = recv(me->sockets[r], me->recv[r], me->recv_bytes[r], MSG_DONTWAIT);
      if (moved < 0 && (errno == EAGAIN || errno == EINTR)) continue;
      if (moved <= 0) return SLUICE_E_PEER_LOST;
      me->recv[r] = (char*)me->recv[r] + moved, me->recv_bytes[r] -= (uint64_t)moved;
    }
  }
  return SLUICE_OK;
}

sluice_status_t mesh_comm(mesh_end_t* end, uint64_t timeout_ns, sluice_comm_t** out_comm) {
  static const sluice_host_comm_vtable_t vtable = {
      .struct_size = sizeof vtable, .exchange_start = exchange_start, .exchange_wait = exchange_wait};
  sluice_comm_config_t config;
  sluice_comm_config_init(&config, sizeof config);
  config.rank = end->rank;
  config.world_size = end->world;
  config.timeout_ns = timeout_ns;
  return sluice_comm_create_host(&config, &vtable, end, out_comm);
}

int mesh_meet(mesh_end_t* end) {
  char byte = 0;
  for (int r = 0; r < end->world; ++r) {
    if (r != end->rank && !move_all(end->sockets[r], &byte, 1, 1)) return 0;
  }
  for (int r = 0; r < end->world; ++r) {
    if (r != end->rank && !move_all(end->sockets[r], &byte, 1, 0)) return 0;
  }
  return 1;
}
