// SPDX-License-Identifier: Apache-2.0
/* One rank of the suite over MPI; mpi_suite_test.sh starts several under mpirun. Arguments: the plugin's path, and the
 * length at which blocks are split. */
#include <stdio.h>
#include <stdlib.h>

#include "backend/base/test/last_error.h"
#include "backend/comm/mpi_loader/mpi_loader.h"
#include "backend/cts/comm/comm_suite.h"

static const char* plugin;
static uint64_t max_message_bytes;

static void* open_group(int32_t world_size) {
  (void)world_size;
  return &max_message_bytes; /* nothing to share: any pointer but NULL */
}
static void close_group(void* shared) { (void)shared; }
static sluice_status_t create(void* shared, const sluice_comm_config_t* config, sluice_comm_t** out_comm) {
  (void)shared;
  return sluice_mpi_comm_create(config, -1, plugin, max_message_bytes, out_comm);
}

int main(int argc, char** argv) {
  static const cts_exception_t cannot[] = {
      {"Destroy_WhilePeersWait_IsPeerLostNamingIt", "MPI tells nobody that a rank has left: the wait times out"},
      {NULL, NULL}};
  sluice_comm_config_t config;
  sluice_comm_t* meeting;
  if (argc != 3) return 2;
  plugin = argv[1];
  max_message_bytes = strtoull(argv[2], NULL, 10);
  sluice_comm_config_init(&config, sizeof config);
  config.timeout_ns = UINT64_C(60000000000);
  if (sluice_comm_create_mpi(&config, -1, plugin, &meeting) != SLUICE_OK) {
    printf("%s: %s\n", sluice_status_name(last_error()->status), last_message());
    return last_error()->status == SLUICE_E_UNSUPPORTED ? 77 : 1;
  }
  cts_transport_t transport = {
      .name = "mpi", .open = open_group, .close = close_group, .create = create, .cannot = cannot, .meeting = meeting};
  int failures = cts_comm_suite_run(&transport, sluice_comm_world_size(meeting));
  sluice_comm_destroy(meeting);
  return failures != 0;
}
