#include "sluice/base.h"

void sluice_version(int32_t* out_major, int32_t* out_minor, int32_t* out_patch) {
  if (out_major != NULL) *out_major = SLUICE_VERSION_MAJOR;
  if (out_minor != NULL) *out_minor = SLUICE_VERSION_MINOR;
  if (out_patch != NULL) *out_patch = SLUICE_VERSION_PATCH;
}

#define TEXT_(x) #x
#define TEXT(x)  TEXT_(x)

const char* sluice_build_info(void) {
  return "sluice " TEXT(SLUICE_VERSION_MAJOR) "." TEXT(SLUICE_VERSION_MINOR) "." TEXT(
      SLUICE_VERSION_PATCH) ", compiler " __VERSION__
                            ", devices: cpu, comm: local host mpi(on demand), gemm: native ref onednn blas host";
}
