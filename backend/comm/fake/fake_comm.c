// SPDX-License-Identifier: Apache-2.0
#include "backend/comm/fake/fake_comm.h"

#include <assert.h>

#include "backend/comm/requests.h"

struct sluice_comm_request_s { /* of this implementation; the inner one's request is opaque here */
  int32_t is_used;
  int32_t is_waited; /* the wait has been counted */
  sluice_comm_request_t* inner;
  const sluice_fake_fault_t* fault; /* the fault of this wait, or NULL */
};

typedef struct fake_comm_s {
  sluice_comm_t base;
  sluice_comm_t* inner;
  uint64_t num_started;
  uint64_t num_waited;
  uint64_t num_calls;
  int32_t num_faults;
  sluice_comm_request_t requests[SLUICE_MAX_IN_FLIGHT];
  sluice_fake_fault_t faults[SLUICE_FAKE_MAX_FAULTS];
  sluice_fake_call_t calls[SLUICE_FAKE_MAX_CALLS];
} fake_comm_t;

static const sluice_comm_vtable_t fake_comm_vtable;

static fake_comm_t* downcast(sluice_comm_t* comm) {
  assert(comm->vtable == &fake_comm_vtable);
  return (fake_comm_t*)comm;
}

sluice_status_t sluice_fake_comm_create(sluice_comm_t* inner, sluice_comm_t** out_comm) {
  *out_comm = NULL;
  fake_comm_t* comm = sluice_alloc_zeroed(sluice_process_allocator(), sizeof *comm, "fake communicator");
  if (comm == NULL) return sluice_alloc_status();
  sluice_comm_config_t config;
  sluice_comm_config_init(&config, sizeof config);
  config.rank = inner->rank;
  config.world_size = inner->world_size;
  config.timeout_ns = inner->timeout_ns;
  config.warn_ns = inner->warn_ns;
  sluice_comm_init_base(&comm->base, &fake_comm_vtable, "fake", &config);
  sluice_comm_retain(inner);
  comm->inner = inner;
  *out_comm = &comm->base;
  return SLUICE_OK;
}

void sluice_fake_comm_inject(sluice_comm_t* comm, const sluice_fake_fault_t* fault) {
  fake_comm_t* fake = downcast(comm);
  assert(fake->num_faults < SLUICE_FAKE_MAX_FAULTS);
  fake->faults[fake->num_faults++] = *fault;
}

uint64_t sluice_fake_comm_calls(sluice_comm_t* comm, const sluice_fake_call_t** out_calls) {
  *out_calls = downcast(comm)->calls;
  return downcast(comm)->num_calls;
}

static const sluice_fake_fault_t* find_fault(const fake_comm_t* comm, int32_t on, uint64_t nth) {
  for (int32_t i = 0; i < comm->num_faults; ++i) {
    if (comm->faults[i].on == on && comm->faults[i].nth == nth) return &comm->faults[i];
  }
  return NULL;
}

static void add_call(fake_comm_t* comm, int32_t op, uint64_t send_bytes) {
  const uint64_t index = comm->num_calls++;
  if (index < SLUICE_FAKE_MAX_CALLS) comm->calls[index] = (sluice_fake_call_t){op, send_bytes};
}

static sluice_status_t strike(const fake_comm_t* comm, const sluice_fake_fault_t* fault, const char* where) {
  return SLUICE_FAIL_PEER(fault->status, comm->base.rank, fault->peer, "rank %d: %s %llu failed on command",
                          comm->base.rank, where, (unsigned long long)fault->nth);
}

static sluice_status_t fake_exchange_start(sluice_comm_t* base, const sluice_exchange_t* exchange,
                                           sluice_comm_request_t** out_request) {
  fake_comm_t* comm = downcast(base);
  uint64_t number = comm->num_started++;
  uint64_t send_bytes = 0;
  for (int32_t r = 0; r < base->world_size; ++r) send_bytes += r == base->rank ? 0 : exchange->send_bytes[r];
  add_call(comm, SLUICE_FAKE_START, send_bytes);
  sluice_comm_request_t* request = SLUICE_FREE_REQUEST(comm->requests);
  const sluice_fake_fault_t* fault = find_fault(comm, SLUICE_FAKE_START, number);
  if (request == NULL) return sluice_comm_fail_third(base);
  if (fault != NULL) return strike(comm, fault, "start");
  *request = (sluice_comm_request_t){0};
  SLUICE_TRY(comm->inner->vtable->exchange_start(comm->inner, exchange, &request->inner));
  request->is_used = 1;
  *out_request = request;
  return SLUICE_OK;
}

static void put_away(fake_comm_t* comm, sluice_comm_request_t* request) {
  const sluice_comm_vtable_t* inner = comm->inner->vtable;
  if (inner->exchange_wait(comm->inner, request->inner, 0, NULL) == SLUICE_E_TIMED_OUT && inner->abandon != NULL) {
    inner->abandon(comm->inner, request->inner);
  }
  request->is_used = 0;
}

static sluice_status_t fake_exchange_wait(sluice_comm_t* base, sluice_comm_request_t* request, uint64_t deadline_ns,
                                          int32_t* out_peer) {
  fake_comm_t* comm = downcast(base);
  if (!request->is_waited) {
    request->is_waited = 1;
    request->fault = find_fault(comm, SLUICE_FAKE_WAIT, comm->num_waited++);
    add_call(comm, SLUICE_FAKE_WAIT, 0);
  }
  if (atomic_load(&comm->base.broken) == SLUICE_OK && request->fault != NULL) {
    put_away(comm, request);
    return strike(comm, request->fault, "wait");
  }
  sluice_status_t status = comm->inner->vtable->exchange_wait(comm->inner, request->inner, deadline_ns, out_peer);
  if (status != SLUICE_E_TIMED_OUT) request->is_used = 0;
  return status;
}

static void fake_abort(sluice_comm_t* base) { sluice_comm_abort(downcast(base)->inner); }

static void fake_abandon(sluice_comm_t* base, sluice_comm_request_t* request) { put_away(downcast(base), request); }

static void fake_publish(sluice_comm_t* base, const char* key, const char* value) {
  sluice_comm_t* inner = downcast(base)->inner;
  if (inner->vtable->publish != NULL) inner->vtable->publish(inner, key, value);
}

static int32_t fake_lookup(sluice_comm_t* base, const char* key, char* out, int32_t out_bytes) {
  sluice_comm_t* inner = downcast(base)->inner;
  return inner->vtable->lookup != NULL ? inner->vtable->lookup(inner, key, out, out_bytes) : 0;
}

static void fake_destroy(sluice_comm_t* base) {
  fake_comm_t* comm = downcast(base);
  for (int i = 0; i < SLUICE_MAX_IN_FLIGHT; ++i) {
    if (!comm->requests[i].is_used) continue;
    if (comm->inner->vtable->abort != NULL) comm->inner->vtable->abort(comm->inner); /* as a host would */
    put_away(comm, &comm->requests[i]);
  }
  sluice_comm_release(comm->inner);
  sluice_free(sluice_process_allocator(), comm, sizeof *comm);
}

static const sluice_comm_vtable_t fake_comm_vtable = {
    .destroy = fake_destroy,
    .exchange_start = fake_exchange_start,
    .exchange_wait = fake_exchange_wait,
    .abort = fake_abort,
    .publish = fake_publish,
    .lookup = fake_lookup,
    .abandon = fake_abandon,
};
