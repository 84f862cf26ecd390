// SPDX-License-Identifier: Apache-2.0
/* The version and build information of the library. */
#include <pthread.h>
#include <stdio.h>

#include "backend/device/cuda/cuda_device.h"
#include "sluice/base.h"

void sluice_version(int32_t* out_major, int32_t* out_minor, int32_t* out_patch) {
  if (out_major != NULL) *out_major = SLUICE_VERSION_MAJOR;
  if (out_minor != NULL) *out_minor = SLUICE_VERSION_MINOR;
  if (out_patch != NULL) *out_patch = SLUICE_VERSION_PATCH;
}

#define TEXT_(x) #x
#define TEXT(x)  TEXT_(x)

/* Written once, by whichever thread comes first; every thread would write the same. */
static char build_info[256];
static pthread_once_t build_info_once = PTHREAD_ONCE_INIT;

static void write_build_info(void) {
  unsigned long long bytes = (unsigned long long)sluice_cuda_image().bytes;
  snprintf(build_info, sizeof build_info,
           "sluice " TEXT(SLUICE_VERSION_MAJOR) "." TEXT(SLUICE_VERSION_MINOR) "." TEXT(
               SLUICE_VERSION_PATCH) ", compiler " __VERSION__
                                     ", devices: cpu, cuda (so far on fakes only), comm: local host tcp mpi nccl, "
                                     "gemm: native ref onednn blas "
                                     "host cublas (foreign libraries on demand), cuda kernels: %llu bytes",
           bytes);
}

const char* sluice_build_info(void) {
  pthread_once(&build_info_once, write_build_info);
  return build_info;
}
