// SPDX-License-Identifier: Apache-2.0
/* The suite on the local transport. */
#include "backend/cts/comm/comm_suite.h"

static void* open_group(int32_t world_size) {
  sluice_local_group_t* group;
  return sluice_local_group_create(world_size, &group) == SLUICE_OK ? group : NULL;
}
static void close_group(void* shared) { sluice_local_group_destroy(shared); }
static sluice_status_t create(void* shared, const sluice_comm_config_t* config, sluice_comm_t** out_comm) {
  return sluice_comm_create_local(shared, config, out_comm);
}

int main(int argc, char** argv) {
  static const cts_transport_t transport = {
      .name = "local", .open = open_group, .close = close_group, .create = create};
  return cts_comm_suite_main(&transport, argc, argv);
}
