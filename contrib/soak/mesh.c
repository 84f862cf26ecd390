#include "mesh.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

typedef struct {
  void* recv[MESH_MOST_RANKS];
  uint64_t left[MESH_MOST_RANKS];
} request_t;

typedef struct {
  int fds[MESH_MOST_RANKS];
  int rank, world_size;
} mesh_t;

static sluice_status_t lose(sluice_host_failure_t* failure, int peer, int error) {
  failure->peer = peer;
  failure->native_code = error;
  snprintf(failure->message, sizeof failure->message, "rank %d is gone: %s", peer,
           error != 0 ? strerror(error) : "its stream has ended");
  return SLUICE_E_PEER_LOST;
}

/* What is sent are addresses and sums: the streams' buffers have room for all of it. */
static sluice_status_t start(void* user, const sluice_exchange_t* exchange, void** out_request,
                             sluice_host_failure_t* failure) {
  mesh_t* mesh = user;
  request_t* request = calloc(1, sizeof *request);
  if (request == NULL) return SLUICE_E_NO_MEMORY;
  for (int r = 0; r < mesh->world_size; ++r) {
    if (r == mesh->rank) continue;
    request->recv[r] = exchange->recv[r], request->left[r] = exchange->recv_bytes[r];
    if (exchange->send_bytes[r] == 0) continue;
    if (send(mesh->fds[r], exchange->send[r], exchange->send_bytes[r], MSG_NOSIGNAL) < 0) {
      free(request);
      return lose(failure, r, errno);
    }
  }
  *out_request = request;
  return SLUICE_OK;
}

static uint64_t now_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

static sluice_status_t wait_for(void* user, void* given, uint64_t timeout_ns, sluice_host_failure_t* failure) {
  mesh_t* mesh = user;
  request_t* request = given;
  const uint64_t until_ms = now_ms() + timeout_ns / 1000000;
  for (int r = 0; r < mesh->world_size; ++r) {
    while (request->left[r] > 0) {
      struct pollfd p = {.fd = mesh->fds[r], .events = POLLIN};
      const uint64_t at_ms = now_ms();
      if (poll(&p, 1, at_ms < until_ms ? (int)(until_ms - at_ms) : 0) == 0) {
        failure->peer = r;
        return SLUICE_E_TIMED_OUT;
      }
      const ssize_t n = recv(p.fd, request->recv[r], request->left[r], MSG_DONTWAIT);
      if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
      if (n <= 0) {
        free(request);
        return lose(failure, r, n < 0 ? errno : 0);
      }
      request->recv[r] = (char*)request->recv[r] + n, request->left[r] -= (uint64_t)n;
    }
  }
  free(request);
  return SLUICE_OK;
}

static void stop(void* user) {
  mesh_t* mesh = user;
  for (int r = 0; r < mesh->world_size; ++r) {
    if (r != mesh->rank) (void)shutdown(mesh->fds[r], SHUT_RDWR);
  }
}

static void destroy(void* user) {
  mesh_t* mesh = user;
  for (int r = 0; r < mesh->world_size; ++r) {
    if (r != mesh->rank) close(mesh->fds[r]);
  }
  free(mesh);
}

sluice_status_t mesh_create(const int* fds, int rank, int world_size, uint64_t timeout_ns, sluice_comm_t** out_comm) {
  const sluice_host_comm_vtable_t vtable = {.struct_size = sizeof vtable,
                                            .exchange_start = start,
                                            .exchange_wait = wait_for,
                                            .abort = stop,
                                            .destroy = destroy};
  sluice_comm_config_t config;
  mesh_t* mesh = calloc(1, sizeof *mesh);
  if (mesh == NULL) return SLUICE_E_NO_MEMORY;
  mesh->rank = rank, mesh->world_size = world_size;
  memcpy(mesh->fds, fds, (size_t)world_size * sizeof *fds);
  sluice_comm_config_init(&config, sizeof config);
  config.rank = rank, config.world_size = world_size, config.timeout_ns = timeout_ns;
  const sluice_status_t status = sluice_comm_create_host(&config, &vtable, mesh, out_comm);
  if (status != SLUICE_OK) destroy(mesh);
  return status;
}
