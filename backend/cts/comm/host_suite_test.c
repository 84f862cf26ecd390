/* The host's process group of this test is the local transport: callbacks straight into its vtable. */
#include <string.h>

#include "backend/base/clock.h"
#include "backend/cts/comm/comm_suite.h"

static sluice_status_t tell(sluice_status_t status, sluice_host_failure_t* out_failure) {
  if (status != SLUICE_OK && status != SLUICE_E_TIMED_OUT) {
    sluice_error_info_t why;
    sluice_error_info_init(&why, sizeof why);
    sluice_error_last(&why);
    out_failure->peer = why.peer;
    memcpy(out_failure->message, why.message, sizeof out_failure->message - 1);
  }
  return status;
}

static sluice_status_t exchange_start(void* user, const sluice_exchange_t* exchange, void** out_request,
                                      sluice_host_failure_t* out_failure) {
  sluice_comm_t* group = user;
  sluice_comm_request_t* request = NULL;
  sluice_status_t status = group->vtable->exchange_start(group, exchange, &request);
  *out_request = request;
  return tell(status, out_failure);
}

static sluice_status_t exchange_wait(void* user, void* request, uint64_t timeout_ns,
                                     sluice_host_failure_t* out_failure) {
  sluice_comm_t* group = user;
  return tell(group->vtable->exchange_wait(group, request, sluice_now_ns() + timeout_ns, &out_failure->peer),
              out_failure);
}

static void abort_group(void* user) { ((sluice_comm_t*)user)->vtable->abort(user); }
static void publish(void* user, const char* key, const char* value) {
  ((sluice_comm_t*)user)->vtable->publish(user, key, value);
}
static int32_t lookup(void* user, const char* key, char* out, int32_t out_bytes) {
  return ((sluice_comm_t*)user)->vtable->lookup(user, key, out, out_bytes);
}
static void destroy(void* user) { sluice_comm_destroy(user); }

static void* open_group(int32_t world_size) {
  sluice_local_group_t* group;
  return sluice_local_group_create(world_size, &group) == SLUICE_OK ? group : NULL;
}
static void close_group(void* shared) { sluice_local_group_destroy(shared); }
static sluice_status_t create(void* shared, const sluice_comm_config_t* config, sluice_comm_t** out_comm) {
  static const sluice_host_comm_vtable_t vtable = {.struct_size = sizeof vtable,
                                                   .exchange_start = exchange_start,
                                                   .exchange_wait = exchange_wait,
                                                   .abort = abort_group,
                                                   .publish = publish,
                                                   .lookup = lookup,
                                                   .destroy = destroy};
  sluice_comm_t* group;
  SLUICE_TRY(sluice_comm_create_local(shared, config, &group));
  sluice_status_t status = sluice_comm_create_host(config, &vtable, group, out_comm);
  if (status != SLUICE_OK) sluice_comm_destroy(group);
  return status;
}

int main(void) {
  static const int32_t world_sizes[] = {1, 2, 3, 4};
  static const cts_transport_t transport = {
      .name = "host", .no_messages = "not written yet", .open = open_group, .close = close_group, .create = create};
  return cts_comm_suite_run(&transport, world_sizes, 4);
}
