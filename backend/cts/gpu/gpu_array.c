// SPDX-License-Identifier: Apache-2.0
#include "backend/cts/gpu/gpu_array.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "backend/base/test/elements.h"
#include "backend/cts/gpu/gpu_rig.h"
#include "backend/device/cuda/cuda_memory.h"

enum { MOST_DRAWN = 1 << 20 };

static gpu_array_t array_at(int64_t skipped, int64_t bytes) {
  gpu_array_t a = {.bytes = bytes, .skipped = skipped};
  a.host = calloc(1, (size_t)bytes + 1);
  a.back = calloc(1, (size_t)bytes + 1);
  char* block = sluice_alloc(&gpu_rig.memory, (uint64_t)(skipped + bytes + 1), "an array of the suite");
  if (a.host == NULL || a.back == NULL || block == NULL) gpu_die("memory");
  a.there = block + skipped;
  return a;
}

gpu_array_t gpu_array(int64_t bytes) { return array_at(0, bytes); }

void gpu_send(const gpu_array_t* a) {
  if (sluice_cuda_copy(gpu_rig.device, NULL, a->there, a->host, (uint64_t)a->bytes) != SLUICE_OK) gpu_die("copy");
  if (gpu_rig.driver->cuStreamSynchronize(NULL) != 0) gpu_die("synchronize");
}

void gpu_fetch(const gpu_array_t* a) {
  if (sluice_cuda_copy(gpu_rig.device, NULL, a->back, a->there, (uint64_t)a->bytes) != SLUICE_OK) gpu_die("copy");
  if (gpu_rig.driver->cuStreamSynchronize(NULL) != 0) gpu_die("synchronize");
}

gpu_array_t gpu_zeros(int64_t bytes) {
  gpu_array_t a = gpu_array(bytes);
  gpu_send(&a);
  return a;
}

void gpu_drop(gpu_array_t* a) {
  sluice_free(&gpu_rig.memory, (char*)a->there - a->skipped, (uint64_t)(a->skipped + a->bytes + 1));
  free(a->host);
  free(a->back);
}

static uint64_t seed = 1;
uint32_t gpu_random_bits(void) {
  seed = seed * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(seed >> 33);
}

static double drawn(void) { return ((double)gpu_random_bits() / 2147483648.0 - 0.5) * 6; }

int64_t gpu_misaligned;

gpu_array_t gpu_randoms(int32_t dtype, int64_t count) {
  int64_t size = (int64_t)sluice_dtype_bytes(dtype);
  gpu_array_t a = array_at(gpu_misaligned * size, count * size);
  for (int64_t i = 0; i < count; ++i) set_element(a.host, i, dtype, drawn());
  gpu_send(&a);
  return a;
}

const char* gpu_differs(const gpu_array_t* a, int32_t dtype, double relative, double absolute) {
  static char text[160];
  gpu_fetch(a);
  for (int64_t i = 0; i < a->bytes / (int64_t)sluice_dtype_bytes(dtype); ++i) {
    double want = get_element(a->host, i, dtype), got = get_element(a->back, i, dtype);
    if (want == got || (isnan(want) && isnan(got))) continue;
    if (fabs(want - got) <= relative * fabs(want) + absolute) continue;
    snprintf(text, sizeof text, "%s element %lld is %.9g, want %.9g", sluice_dtype_name(dtype), (long long)i, got,
             want);
    return text;
  }
  return NULL;
}

gpu_array_t gpu_repeated(int32_t dtype, int64_t count) {
  gpu_array_t a = gpu_array(count * (int64_t)sluice_dtype_bytes(dtype));
  int64_t first = count < MOST_DRAWN ? count : MOST_DRAWN, done = first * (int64_t)sluice_dtype_bytes(dtype);
  for (int64_t i = 0; i < first; ++i) set_element(a.host, i, dtype, drawn());
  if (sluice_cuda_copy(gpu_rig.device, NULL, a.there, a.host, (uint64_t)done) != SLUICE_OK) gpu_die("copy");
  for (int64_t more; done < a.bytes; done += more) {
    more = a.bytes - done < done ? a.bytes - done : done;
    char* next = (char*)a.there + done;
    if (sluice_cuda_copy(gpu_rig.device, NULL, next, a.there, (uint64_t)more) != SLUICE_OK) gpu_die("copy");
  }
  if (gpu_rig.driver->cuStreamSynchronize(NULL) != 0) gpu_die("synchronize");
  return a;
}
