// SPDX-License-Identifier: Apache-2.0
/* The suite on the tcp transport. Ranks are threads, which connect through the local transport or, if the first
 * argument is "at", through the address of rank 0 and a secret. */
#include <stdlib.h>
#include <string.h>

#include "backend/comm/test/tcp_place.h"
#include "backend/cts/comm/comm_suite.h"

static void* open_group(int32_t world_size) {
  sluice_local_group_t* group;
  return sluice_local_group_create(world_size, &group) == SLUICE_OK ? group : NULL;
}
static void close_group(void* shared) { sluice_local_group_destroy(shared); }
static sluice_status_t create(void* shared, const sluice_comm_config_t* config, sluice_comm_t** out_comm) {
  sluice_comm_t* parent;
  SLUICE_TRY(sluice_comm_create_local(shared, config, &parent));
  const sluice_status_t status = sluice_comm_create_tcp(parent, NULL, out_comm);
  sluice_comm_destroy(parent);
  return status;
}

static void* open_place(int32_t world_size) {
  char* address = malloc(TCP_PLACE_BYTES);
  (void)world_size;
  if (address != NULL) tcp_place_init(address);
  return address;
}
static void close_place(void* shared) { free(shared); }
static sluice_status_t create_at(void* shared, const sluice_comm_config_t* config, sluice_comm_t** out_comm) {
  return sluice_comm_create_tcp_at(config, shared, tcp_place_secret, sizeof tcp_place_secret, NULL, out_comm);
}

int main(int argc, char** argv) {
  static const cts_transport_t transport = {.name = "tcp", .open = open_group, .close = close_group, .create = create};
  static const cts_transport_t at = {.name = "tcp", .open = open_place, .close = close_place, .create = create_at};
  const int is_at = argc > 1 && strcmp(argv[1], "at") == 0;
  return cts_comm_suite_main(is_at ? &at : &transport, argc - is_at, argv + is_at);
}
