// SPDX-License-Identifier: Apache-2.0
/* Errors if the MPI library cannot be loaded. //backend/cts/comm:mpi_suite_* tests the library. */

#include "backend/base/test/refused.h"
#include "sluice/comm.h"

static void expect(const char* library, sluice_status_t status, const char* text) {
  sluice_comm_config_t config;
  sluice_comm_t* comm = (sluice_comm_t*)&config;
  sluice_comm_config_init(&config, sizeof config);
  REFUSED(sluice_comm_create_mpi(&config, -1, library, &comm), status, text);
  assert_null(comm);
}

TEST(MpiLoader_NoPath_NamesTheDefault) {
  expect(NULL, SLUICE_E_NOT_FOUND, "libsluice_mpi.so"); /* there is none in this folder */
}
TEST(MpiLoader_OtherLibrary_IsNotFound) {
  expect("libc.so.6", SLUICE_E_NOT_FOUND, "libc.so.6 is not Sluice's MPI library");
}
