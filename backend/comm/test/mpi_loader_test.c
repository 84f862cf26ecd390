/* What is said when the MPI library cannot be used; with it, see //backend/cts/comm:mpi_suite_*. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "sluice/comm.h"

static void expect(const char* library, sluice_status_t status, const char* text) {
  sluice_comm_config_t config;
  sluice_comm_t* comm = (sluice_comm_t*)&config;
  sluice_error_info_t why;
  sluice_comm_config_init(&config, sizeof config);
  assert_int_equal(sluice_comm_create_mpi(&config, -1, library, &comm), status);
  assert_null(comm);
  sluice_error_info_init(&why, sizeof why);
  sluice_error_last(&why);
  assert_non_null(strstr(why.message, text));
}

static void library_missing(void** state) {
  (void)state;
  expect("/nowhere/libsluice_mpi.so", SLUICE_E_NOT_FOUND, "/nowhere/libsluice_mpi.so");
  expect("/nowhere/libsluice_mpi.so", SLUICE_E_NOT_FOUND, "apt-get install");
}
static void library_default(void** state) {
  (void)state;
  expect(NULL, SLUICE_E_NOT_FOUND, "libsluice_mpi.so"); /* none beside this test */
}
static void library_foreign(void** state) {
  (void)state;
  expect("libc.so.6", SLUICE_E_NOT_FOUND, "libc.so.6 is not Sluice's MPI library");
}
static void arguments_bad(void** state) {
  (void)state;
  sluice_comm_t* comm;
  assert_int_equal(sluice_comm_create_mpi(NULL, -1, NULL, &comm), SLUICE_E_INVALID_ARGUMENT);
  assert_int_equal(sluice_comm_create_mpi(NULL, -1, NULL, NULL), SLUICE_E_INVALID_ARGUMENT);
}

int main(void) {
  static const struct CMUnitTest tests[] = {
      {"MpiLoader_LibraryMissing_IsNotFoundAndSaysWhatToInstall", library_missing},
      {"MpiLoader_NoPath_NamesTheDefault", library_default},
      {"MpiLoader_OtherLibrary_IsNotFound", library_foreign},
      {"MpiLoader_NullArguments_AreInvalid", arguments_bad},
  };
  return cmocka_run_group_tests_name("mpi_loader", tests, NULL, NULL);
}
