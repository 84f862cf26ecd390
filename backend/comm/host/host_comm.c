// SPDX-License-Identifier: Apache-2.0
#include "backend/comm/host/host_comm.h"

#include <string.h>

#include "backend/base/clock.h"
#include "backend/base/structs.h"
#include "backend/comm/host/host_messages.h"
#include "backend/comm/requests.h"
#include "backend/comm/tcp/tcp_side_channel.h"

/* The time that a request has to complete after a timeout: first by itself, while the other ranks reach their own
 * deadlines and name the same straggler; then after the host's abort, which they may see as a loss of this rank. */
#define GRACE_NS    UINT64_C(1000000000)
#define PUT_AWAY_NS UINT64_C(2000000000)

struct sluice_comm_request_s {
  int32_t is_used;
  void* native; /* the host's request; may be NULL */
};

typedef struct host_comm_s {
  sluice_comm_t base;
  sluice_host_comm_vtable_t host;
  void* user;
  sluice_comm_vtable_t vtable; /* of this object: without the callbacks that the host lacks */
  sluice_sized_messages_t sized;
  sluice_comm_request_t requests[SLUICE_MAX_IN_FLIGHT];
} host_comm_t;

static host_comm_t* downcast(sluice_comm_t* comm) { return (host_comm_t*)comm; }

static void failure_init(sluice_host_failure_t* failure) {
  memset(failure, 0, sizeof *failure);
  failure->peer = -1;
}

/* Records the failure that a callback reported. A status that callbacks may not return becomes EXTERNAL. */
static sluice_status_t record(const host_comm_t* comm, const char* callback, sluice_status_t status,
                              sluice_host_failure_t* failure) {
  failure->message[sizeof failure->message - 1] = '\0';
  const char* text = failure->message[0] != '\0' ? failure->message : "the callback gave no message";
  int32_t peer = failure->peer >= 0 && failure->peer < comm->base.world_size ? failure->peer : -1;
  if (status > 0 || status < SLUICE_E_INTERNAL || status == SLUICE_E_INVALID_ARGUMENT) {
    return sluice_error_record(
        SLUICE_E_EXTERNAL, comm->base.rank, peer, failure->native_code,
        "rank %d: %s of the %s process group returned status %d, which is not one of its statuses: %s", comm->base.rank,
        callback, comm->base.name, status, text);
  }
  if (status == SLUICE_E_PEER_LOST && peer >= 0) {
    return sluice_error_record(status, comm->base.rank, peer, failure->native_code,
                               "rank %d lost rank %d, which died or left: see its log. " SLUICE_COMM_BROKEN
                               " (%s of the %s process group: %s)",
                               comm->base.rank, peer, callback, comm->base.name, text);
  }
  return sluice_error_record(status, comm->base.rank, peer, failure->native_code,
                             "rank %d: %s of the %s process group failed: %s", comm->base.rank, callback,
                             comm->base.name, text);
}

static sluice_status_t host_exchange_start(sluice_comm_t* base, const sluice_exchange_t* exchange,
                                           sluice_comm_request_t** out_request) {
  host_comm_t* comm = downcast(base);
  sluice_comm_request_t* request = SLUICE_FREE_REQUEST(comm->requests);
  if (request == NULL) return sluice_comm_fail_third(base);
  sluice_host_failure_t failure;
  failure_init(&failure);
  request->native = NULL;
  sluice_status_t status = comm->host.exchange_start(comm->user, exchange, &request->native, &failure);
  if (status != SLUICE_OK) return record(comm, "exchange_start", status, &failure);
  request->is_used = 1;
  *out_request = request;
  return SLUICE_OK;
}

static sluice_status_t wait_native(host_comm_t* comm, sluice_comm_request_t* request, uint64_t timeout_ns,
                                   sluice_host_failure_t* out_failure) {
  failure_init(out_failure);
  sluice_status_t status = comm->host.exchange_wait(comm->user, request->native, timeout_ns, out_failure);
  if (status != SLUICE_E_TIMED_OUT) request->is_used = 0;
  return status;
}

static sluice_status_t host_exchange_wait(sluice_comm_t* base, sluice_comm_request_t* request, uint64_t deadline_ns,
                                          int32_t* out_peer) {
  host_comm_t* comm = downcast(base);
  uint64_t now_ns = sluice_now_ns();
  sluice_host_failure_t failure;
  sluice_status_t status = wait_native(comm, request, deadline_ns > now_ns ? deadline_ns - now_ns : 0, &failure);
  if (status == SLUICE_E_TIMED_OUT) {
    if (out_peer != NULL) *out_peer = failure.peer >= 0 && failure.peer < base->world_size ? failure.peer : -1;
    return status;
  }
  return status == SLUICE_OK ? SLUICE_OK : record(comm, "exchange_wait", status, &failure);
}

static void host_abort(sluice_comm_t* base) { downcast(base)->host.abort(downcast(base)->user); }

/* The host still knows the buffers, so the request should complete. If it does not, it is left to the host's
 * destroy. */
static void put_away(host_comm_t* comm, sluice_comm_request_t* request, uint64_t grace_ns) {
  sluice_host_failure_t failure;
  if (wait_native(comm, request, grace_ns, &failure) != SLUICE_E_TIMED_OUT || comm->host.abort == NULL) return;
  comm->host.abort(comm->user);
  (void)wait_native(comm, request, PUT_AWAY_NS, &failure);
}

static void host_abandon(sluice_comm_t* base, sluice_comm_request_t* request) {
  put_away(downcast(base), request, atomic_load(&base->broken) == SLUICE_E_TIMED_OUT ? GRACE_NS : 0);
}

static void host_publish(sluice_comm_t* base, const char* key, const char* value) {
  downcast(base)->host.publish(downcast(base)->user, key, value);
}

static int32_t host_lookup(sluice_comm_t* base, const char* key, char* out, int32_t out_bytes) {
  return downcast(base)->host.lookup(downcast(base)->user, key, out, out_bytes);
}

static int32_t host_is_interrupted(sluice_comm_t* base) {
  return downcast(base)->host.is_interrupted(downcast(base)->user);
}

static void host_destroy(sluice_comm_t* base) {
  host_comm_t* comm = downcast(base);
  for (int i = 0; i < SLUICE_MAX_IN_FLIGHT; ++i) {
    if (comm->requests[i].is_used) put_away(comm, &comm->requests[i], 0);
  }
  if (comm->host.destroy != NULL) comm->host.destroy(comm->user);
  sluice_free(sluice_process_allocator(), comm, sizeof *comm);
}

static sluice_status_t host_messages_open(sluice_comm_t* base, sluice_messages_t* messages, sluice_wire_t** out_wire) {
  host_comm_t* comm = downcast(base);
  return sluice_host_messages_open(base, &comm->sized, comm->user, messages, out_wire);
}

void sluice_host_comm_set_messages(sluice_comm_t* base, const sluice_sized_messages_t* sized) {
  host_comm_t* comm = downcast(base);
  comm->sized = *sized;
  comm->vtable.messages_open = host_messages_open;
}

sluice_status_t sluice_host_comm_create(const sluice_comm_config_t* config, const sluice_host_comm_vtable_t* vtable,
                                        void* user, const char* name, sluice_comm_t** out_comm) {
  *out_comm = NULL;
  sluice_comm_config_t c;
  SLUICE_TRY(sluice_comm_config_read(config, &c));
  sluice_host_comm_vtable_t host;
  memset(&host, 0, sizeof host);
  SLUICE_TRY(sluice_struct_copy(&host, sizeof host, vtable, offsetof(sluice_host_comm_vtable_t, abort),
                                "sluice_host_comm_vtable_t"));
  if (host.exchange_start == NULL || host.exchange_wait == NULL) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "sluice_host_comm_vtable_t: exchange_start and exchange_wait are "
                       "required, only the others may be NULL");
  }
  host_comm_t* comm = sluice_alloc_zeroed(sluice_process_allocator(), sizeof *comm, "host communicator");
  if (comm == NULL) return sluice_alloc_status();
  comm->host = host;
  comm->user = user;
  comm->vtable = (sluice_comm_vtable_t){
      .destroy = host_destroy,
      .exchange_start = host_exchange_start,
      .exchange_wait = host_exchange_wait,
      .abort = host.abort != NULL ? host_abort : NULL,
      .publish = host.publish != NULL ? host_publish : NULL,
      .lookup = host.lookup != NULL ? host_lookup : NULL,
      .is_interrupted = host.is_interrupted != NULL ? host_is_interrupted : NULL,
      .abandon = host_abandon,
      .messages_open = sluice_tcp_open_side_channel, /* until sluice_host_comm_set_messages */
  };
  sluice_comm_init_base(&comm->base, &comm->vtable, name, &c);
  *out_comm = &comm->base;
  return SLUICE_OK;
}

sluice_status_t sluice_comm_create_host(const sluice_comm_config_t* config, const sluice_host_comm_vtable_t* vtable,
                                        void* user, sluice_comm_t** out_comm) {
  if (out_comm == NULL) return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_comm_create_host: out_comm is NULL");
  return sluice_host_comm_create(config, vtable, user, "host", out_comm);
}
