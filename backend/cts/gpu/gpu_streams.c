// SPDX-License-Identifier: Apache-2.0
/* Passes on streams, whose order shows in their results. */
#include "backend/cts/gpu/gpu_array.h"
#include "backend/cts/gpu/gpu_parts.h"
#include "backend/cts/gpu/gpu_rig.h"
#include "backend/device/cuda/cuda_memory.h"

/* Each job adds its number to the value it waits for, on its lane, through a chain over all lanes: the result depends
 * on the order.
 */
typedef struct chain_s {
  float* cell; /* on the device */
  float* ones;
} chain_t;
static sluice_status_t chain_job(void* user, int32_t index, sluice_stream_t stream) {
  const chain_t* chain = user;
  const sluice_kernels_t* kernels = gpu_rig.device->kernels;
  if (index % 2 == 0) {
    kernels->add_bias(stream, SLUICE_DTYPE_F32, 1, 1024, chain->cell, chain->ones);
  } else {
    kernels->scale_rows(stream, SLUICE_DTYPE_F32, 1, 1024, chain->cell, chain->ones + 1024, chain->cell);
  }
  return SLUICE_OK;
}

void gpu_part_streams(void) {
  enum { JOBS = 200 };
  sluice_device_t* device = gpu_rig.device;
  gpu_array_t cell = gpu_array(1024 * 4), ones = gpu_array(2048 * 4);
  sluice_cuda_stats_t before = sluice_cuda_device_stats(device);
  for (int i = 0; i < 1024; ++i) ((float*)cell.host)[i] = 0;
  for (int i = 0; i < 2048; ++i) ((float*)ones.host)[i] = i < 1024 ? 1.0f : 0.5f;
  gpu_send(&cell), gpu_send(&ones);
  chain_t chain = {cell.there, ones.there};
  int32_t waits[JOBS];
  sluice_status_t status = device->vtable->begin(device, JOBS, chain_job, &chain, NULL);
  for (int32_t i = 0; i < JOBS && status == SLUICE_OK; ++i) {
    waits[i] = i - 1;
    const sluice_job_t job = {i, (i * 7) % 4, &waits[i], i > 0, 0};
    status = device->vtable->submit(device, &job);
  }
  if (status == SLUICE_OK) status = device->vtable->join(device);
  gpu_report("a chain of 200 jobs over four lanes is enqueued", status == SLUICE_OK ? NULL : last_message());
  float want = 0;
  for (int i = 0; i < JOBS; ++i) want = i % 2 == 0 ? want + 1 : want * 0.5f;
  for (int i = 0; i < 1024; ++i) ((float*)cell.host)[i] = want;
  gpu_report("and runs in order", gpu_differs(&cell, SLUICE_DTYPE_F32, 0, 0));
  sluice_cuda_stats_t after = sluice_cuda_device_stats(device);
  gpu_report("without a host wait", after.num_host_waits == before.num_host_waits ? NULL : "it waited");
  float got[4] = {0};
  status = sluice_cuda_read(device, NULL, cell.there, got, sizeof got);
  gpu_report("one read is host-complete", status == SLUICE_OK && got[3] == want ? NULL : last_message());
  gpu_drop(&cell), gpu_drop(&ones);
}
