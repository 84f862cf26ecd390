// SPDX-License-Identifier: Apache-2.0
/* The host communicator, and how it reports the results of the host's callbacks. */
#include "backend/comm/host/host_comm.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "backend/base/test/refused.h"

typedef struct host_s {
  sluice_status_t start_status;
  sluice_status_t wait_status;
  int num_destroyed;
} host_t;

static sluice_status_t exchange_start(void* user, const sluice_exchange_t* exchange, void** out_request,
                                      sluice_host_failure_t* out_failure) {
  (void)exchange;
  *out_request = NULL; /* a host may number its requests from NULL */
  out_failure->peer = 1;
  out_failure->native_code = 104;
  snprintf(out_failure->message, sizeof out_failure->message, "Connection reset by peer");
  return ((host_t*)user)->start_status;
}
static sluice_status_t exchange_wait(void* user, void* request, uint64_t timeout_ns,
                                     sluice_host_failure_t* out_failure) {
  (void)request, (void)timeout_ns;
  out_failure->peer = 99;                                         /* out of range, so unknown */
  memset(out_failure->message, 'x', sizeof out_failure->message); /* not terminated */
  return ((host_t*)user)->wait_status;
}
static void destroy(void* user) { ++((host_t*)user)->num_destroyed; }

static sluice_comm_t* open_host(host_t* host) {
  sluice_host_comm_vtable_t vtable = {.struct_size = sizeof vtable,
                                      .exchange_start = exchange_start,
                                      .exchange_wait = exchange_wait,
                                      .destroy = destroy};
  DEFAULTS(sluice_comm_config, config);
  sluice_comm_t* comm;
  config.world_size = 2;
  config.timeout_ns = 20000000;
  assert_int_equal(sluice_comm_create_host(&config, &vtable, host, &comm), SLUICE_OK);
  return comm;
}

static const sluice_exchange_t none = {NULL, NULL, NULL, NULL};

TEST(Host_StartFails_TextPeerAndCodeAreRecorded) {
  host_t host = {.start_status = SLUICE_E_PEER_LOST};
  sluice_comm_t* comm = open_host(&host);
  sluice_comm_request_t* request;
  assert_int_equal(sluice_comm_exchange_start(comm, &none, &request), SLUICE_E_PEER_LOST);
  assert_int_equal(last_error()->rank, 0);
  assert_int_equal(last_error()->peer, 1);
  assert_int_equal(last_error()->native_code, 104);
  assert_non_null(strstr(last_message(), "Connection reset by peer"));
  assert_non_null(strstr(last_message(), "lost rank 1"));
  assert_non_null(strstr(last_message(), "make a new one"));
  sluice_comm_destroy(comm);
  assert_int_equal(host.num_destroyed, 1);
}

TEST(Host_UnknownStatus_IsExternal) {
  static const sluice_status_t bad[] = {1, -999, SLUICE_E_INVALID_ARGUMENT};
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; ++i) {
    host_t host = {.wait_status = bad[i]};
    sluice_comm_t* comm = open_host(&host);
    sluice_comm_request_t* request;
    assert_int_equal(sluice_comm_exchange_start(comm, &none, &request), SLUICE_OK);
    assert_int_equal(sluice_comm_exchange_wait(comm, request, NULL), SLUICE_E_EXTERNAL);
    assert_int_equal(last_error()->peer, -1);
    sluice_comm_destroy(comm);
  }
}

TEST(Host_RequestNeverReturns_EndsAtTheDeadline) {
  host_t host = {.wait_status = SLUICE_E_TIMED_OUT}; /* there is no abort callback, so the host keeps the request */
  sluice_comm_t* comm = open_host(&host);
  sluice_comm_request_t* request;
  assert_int_equal(sluice_comm_exchange_start(comm, &none, &request), SLUICE_OK);
  assert_int_equal(sluice_comm_exchange_wait(comm, request, NULL), SLUICE_E_TIMED_OUT);
  sluice_comm_destroy(comm);
  assert_int_equal(host.num_destroyed, 1);
}

/* capi/test/refused checks what is refused. */
TEST(HostCreate_RequiredCallbacksOnly_CallsNoOther) {
  host_t host = {0};
  sluice_comm_t* comm = NULL;
  DEFAULTS(sluice_comm_config, config);
  const sluice_host_comm_vtable_t vtable = {.struct_size = offsetof(sluice_host_comm_vtable_t, abort),
                                            .exchange_start = exchange_start,
                                            .exchange_wait = exchange_wait,
                                            .destroy = destroy};
  assert_int_equal(sluice_comm_create_host(&config, &vtable, &host, &comm), SLUICE_OK);
  sluice_comm_abort(comm);
  sluice_comm_destroy(comm);
  assert_int_equal(host.num_destroyed, 0); /* destroy is beyond struct_size */
}
