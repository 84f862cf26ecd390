// SPDX-License-Identifier: Apache-2.0
#include "backend/comm/mpi_loader/mpi_loader.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "backend/base/file_trust.h"
#include "backend/base/structs.h"
#include "backend/comm/host/host_comm.h"
#include "backend/comm/mpi/mpi_plugin.h"

#define LIBRARY_NAME "libsluice_mpi.so"

/* Returns the plugin in libsluice's own folder if it exists, else its bare name for the loader's search. */
static const char* default_library(char* path, size_t path_bytes) {
  Dl_info self;
  if (dladdr(__extension__(void*) sluice_mpi_comm_create, &self) == 0 || self.dli_fname == NULL) return LIBRARY_NAME;
  const char* slash = strrchr(self.dli_fname, '/');
  int length = slash != NULL ? (int)(slash - self.dli_fname) : 0;
  if (slash == NULL || snprintf(path, path_bytes, "%.*s/" LIBRARY_NAME, length, self.dli_fname) >= (int)path_bytes) {
    return LIBRARY_NAME;
  }
  return access(path, R_OK) == 0 ? path : LIBRARY_NAME;
}

/* Returns the plugin's open function, or NULL with an error record. The library is never closed, because MPI leaves
 * threads and exit handlers. */
static sluice_mpi_plugin_open_fn_t open_library(const char* library, sluice_status_t* out_status) {
  sluice_warn_if_others_write(library);
  void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == NULL) {
    const char* text = dlerror();
    *out_status = SLUICE_FAIL(
        SLUICE_E_NOT_FOUND,
        "cannot load %s for the mpi communicator: %s. It is a separate library of Sluice and needs Open MPI 4 (Debian: "
        "apt-get install libopenmpi3 openmpi-bin); put it next to libsluice or pass its path",
        library, text != NULL ? text : "no reason given");
    return NULL;
  }
  sluice_mpi_plugin_version_fn_t version;
  sluice_mpi_plugin_open_fn_t open_plugin;
  void* version_symbol = dlsym(handle, "sluice_mpi_plugin_version");
  void* open_symbol = dlsym(handle, "sluice_mpi_plugin_open");
  memcpy(&version, &version_symbol, sizeof version);
  memcpy(&open_plugin, &open_symbol, sizeof open_plugin);
  if (version == NULL || open_plugin == NULL) {
    *out_status =
        SLUICE_FAIL(SLUICE_E_NOT_FOUND, "%s is not Sluice's MPI library: it lacks sluice_mpi_plugin_open", library);
    return NULL;
  }
  if (version() != SLUICE_MPI_PLUGIN_VERSION) {
    *out_status =
        SLUICE_FAIL(SLUICE_E_ABI, "%s has plugin version %d, but this libsluice needs %d; install both from one build",
                    library, version(), SLUICE_MPI_PLUGIN_VERSION);
    return NULL;
  }
  return open_plugin;
}

sluice_status_t sluice_mpi_comm_create(const sluice_comm_config_t* config, int64_t mpi_comm_f, const char* library,
                                       uint64_t max_message_bytes, sluice_comm_t** out_comm) {
  char path[PATH_MAX];
  *out_comm = NULL;
  sluice_comm_config_t c;
  sluice_comm_config_init(&c, sizeof c);
  SLUICE_TRY(
      sluice_struct_copy(&c, sizeof c, config, offsetof(sluice_comm_config_t, timeout_ns), "sluice_comm_config_t"));
  if (library == NULL) library = default_library(path, sizeof path);
  sluice_status_t status = SLUICE_OK;
  sluice_mpi_plugin_open_fn_t open_plugin = open_library(library, &status);
  if (open_plugin == NULL) return status;

  sluice_mpi_plugin_t plugin;
  sluice_host_failure_t failure;
  memset(&failure, 0, sizeof failure);
  status = open_plugin(mpi_comm_f, max_message_bytes, &plugin, &failure);
  if (status != SLUICE_OK) {
    return sluice_error_record(status, -1, -1, failure.native_code, "mpi communicator: %s", failure.message);
  }
  c.rank = plugin.rank;
  c.world_size = plugin.world_size;
  status = sluice_host_comm_create(&c, &plugin.vtable, plugin.user, "mpi", out_comm);
  if (status == SLUICE_OK) {
    sluice_host_comm_set_messages(*out_comm, &plugin.messages);
  } else {
    plugin.vtable.destroy(plugin.user);
  }
  return status;
}

sluice_status_t sluice_comm_create_mpi(const sluice_comm_config_t* config, int64_t mpi_comm_f, const char* library,
                                       sluice_comm_t** out_comm) {
  if (out_comm == NULL) return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_comm_create_mpi: out_comm is NULL");
  return sluice_mpi_comm_create(config, mpi_comm_f, library, 0, out_comm);
}
