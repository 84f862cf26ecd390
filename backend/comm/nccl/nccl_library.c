// SPDX-License-Identifier: Apache-2.0
#include "backend/comm/nccl/nccl_library.h"

#include <dlfcn.h>
#include <string.h>

#include "backend/base/file_trust.h"

sluice_status_t sluice_nccl_make_id(const sluice_nccl_symbols_t* symbols, sluice_nccl_id_t* out_id) {
  int code = symbols->ncclGetUniqueId(out_id);
  if (code == 0) return SLUICE_OK;
  return sluice_error_record(SLUICE_E_EXTERNAL, -1, -1, code, "nccl: no id for a group: %s (%d)",
                             symbols->ncclGetErrorString(code), code);
}

sluice_status_t sluice_nccl_check_version(const sluice_nccl_symbols_t* symbols) {
  int version = 0;
  int code = symbols->ncclGetVersion(&version);
  if (code != 0) {
    return sluice_error_record(SLUICE_E_EXTERNAL, -1, -1, code, "nccl: its version cannot be read (%d)", code);
  }
  if (version >= SLUICE_NCCL_MIN_VERSION) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_NOT_FOUND, "nccl: version %d is too old, Sluice needs 2.18.0 (21800) or later", version);
}

sluice_status_t sluice_nccl_open(const char* library, sluice_nccl_symbols_t* out_symbols) {
  memset(out_symbols, 0, sizeof *out_symbols);
  const char* name = library != NULL ? library : "libnccl.so.2";
  sluice_warn_if_others_write(name);
  void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  if (handle == NULL) handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (handle == NULL) {
    return SLUICE_FAIL(SLUICE_E_NOT_FOUND, "nccl: no library: %s; install NCCL 2.18 or later, or give its path",
                       dlerror());
  }
#define SYMBOL(result, name_, parameters)                                                                        \
  *(void**)&out_symbols->name_ = dlsym(handle, #name_);                                                          \
  if (out_symbols->name_ == NULL) {                                                                              \
    return SLUICE_FAIL(SLUICE_E_NOT_FOUND, "nccl: %s has no symbol " #name_ ": Sluice needs NCCL 2.18 or later", \
                       name);                                                                                    \
  }
#include "backend/comm/nccl/nccl_symbols.inc"
#undef SYMBOL
#define SYMBOL(result, name_, parameters) *(void**)&out_symbols->name_ = dlsym(handle, #name_);
#include "backend/comm/nccl/nccl_register_symbols.inc"
#undef SYMBOL
  return sluice_nccl_check_version(out_symbols);
}
