// SPDX-License-Identifier: Apache-2.0
/* The suite on the host transport, whose callbacks call the local transport. Messages use a mailbox; with the argument
 * "tcp" the host has no messages, and they use TCP. */
#include <stdlib.h>
#include <string.h>

#include "backend/base/clock.h"
#include "backend/base/test/last_error.h"
#include "backend/comm/host/host_comm.h"
#include "backend/cts/comm/comm_suite.h"
#include "backend/cts/comm/sized_mailbox.h"

static int has_mailbox;

typedef struct shared_s {
  sluice_local_group_t* group;
  sized_mailbox_t* mailbox;
} shared_t;

typedef struct end_s {
  sized_rank_t sized; /* first member: also the user of the messages */
  sluice_comm_t* group;
} end_t;

static sluice_status_t tell(sluice_status_t status, sluice_host_failure_t* out_failure) {
  if (status != SLUICE_OK && status != SLUICE_E_TIMED_OUT) {
    out_failure->peer = last_error()->peer;
    memcpy(out_failure->message, last_message(), sizeof out_failure->message - 1);
  }
  return status;
}

static sluice_status_t exchange_start(void* user, const sluice_exchange_t* exchange, void** out_request,
                                      sluice_host_failure_t* out_failure) {
  sluice_comm_t* group = ((end_t*)user)->group;
  sluice_comm_request_t* request = NULL;
  sluice_status_t status = group->vtable->exchange_start(group, exchange, &request);
  *out_request = request;
  return tell(status, out_failure);
}

static sluice_status_t exchange_wait(void* user, void* request, uint64_t timeout_ns,
                                     sluice_host_failure_t* out_failure) {
  sluice_comm_t* group = ((end_t*)user)->group;
  return tell(group->vtable->exchange_wait(group, request, sluice_now_ns() + timeout_ns, &out_failure->peer),
              out_failure);
}

static void abort_group(void* user) {
  sluice_comm_t* group = ((end_t*)user)->group;
  group->vtable->abort(group);
}
static void publish(void* user, const char* key, const char* value) {
  sluice_comm_t* group = ((end_t*)user)->group;
  group->vtable->publish(group, key, value);
}
static int32_t lookup(void* user, const char* key, char* out, int32_t out_bytes) {
  sluice_comm_t* group = ((end_t*)user)->group;
  return group->vtable->lookup(group, key, out, out_bytes);
}
static void destroy(void* user) {
  sluice_comm_destroy(((end_t*)user)->group);
  free(user);
}

static void close_group(void* opaque) {
  shared_t* shared = opaque;
  sluice_local_group_destroy(shared->group);
  sized_mailbox_destroy(shared->mailbox);
  free(shared);
}
static void* open_group(int32_t world_size) {
  shared_t* shared = calloc(1, sizeof *shared);
  shared->mailbox = sized_mailbox_create(world_size);
  if (sluice_local_group_create(world_size, &shared->group) == SLUICE_OK) return shared;
  sized_mailbox_destroy(shared->mailbox);
  free(shared);
  return NULL;
}
static sluice_status_t create(void* opaque, const sluice_comm_config_t* config, sluice_comm_t** out_comm) {
  static const sluice_host_comm_vtable_t vtable = {.struct_size = sizeof vtable,
                                                   .exchange_start = exchange_start,
                                                   .exchange_wait = exchange_wait,
                                                   .abort = abort_group,
                                                   .publish = publish,
                                                   .lookup = lookup,
                                                   .destroy = destroy};
  shared_t* shared = opaque;
  sluice_comm_t* group;
  SLUICE_TRY(sluice_comm_create_local(shared->group, config, &group));
  end_t* end = calloc(1, sizeof *end);
  *end = (end_t){.sized = {.mailbox = shared->mailbox, .rank = config->rank}, .group = group};
  sluice_status_t status = sluice_comm_create_host(config, &vtable, end, out_comm);
  if (status == SLUICE_OK) {
    if (has_mailbox) sluice_host_comm_set_messages(*out_comm, &sized_mailbox_messages);
  } else {
    destroy(end);
  }
  return status;
}

int main(int argc, char** argv) {
  const int is_tcp = argc > 1 && strcmp(argv[1], "tcp") == 0;
  has_mailbox = !is_tcp;
  static const cts_transport_t transport = {.name = "host", .open = open_group, .close = close_group, .create = create};
  return cts_comm_suite_main(&transport, argc - is_tcp, argv + is_tcp);
}
