// SPDX-License-Identifier: Apache-2.0
/* Copies, pinned memory and its bounds, a device that continues when it is out of memory; passes on streams, whose
 * order shows in their results. */
#include <string.h>

#include "backend/cts/gpu/gpu_array.h"
#include "backend/cts/gpu/gpu_parts.h"
#include "backend/cts/gpu/gpu_rig.h"
#include "backend/device/cuda/cuda_memory.h"

void gpu_part_memory(void) {
  sluice_pinned_pool_t* pool = NULL;
  sluice_pinned_block_t block;
  gpu_array_t a = gpu_randoms(SLUICE_DTYPE_F32, 100000), b = gpu_array(400000);
  if (sluice_pinned_pool_create(gpu_rig.device, 1 << 20, &pool) != SLUICE_OK) gpu_die("pool");
  sluice_status_t status = sluice_pinned_pool_take(pool, 400000, 0, NULL, &block);
  if (status == SLUICE_OK) status = sluice_cuda_copy(gpu_rig.device, NULL, block.data, a.there, 400000);
  if (status == SLUICE_OK) status = sluice_cuda_copy(gpu_rig.device, NULL, b.there, block.data, 400000);
  if (status == SLUICE_OK) status = sluice_pinned_pool_give(pool, &block, NULL);
  memcpy(b.host, a.host, 400000);
  gpu_report("offload and back", status == SLUICE_OK ? gpu_differs(&b, SLUICE_DTYPE_F32, 0, 0) : last_message());
  status = sluice_pinned_pool_take(pool, 2 << 20, 0, NULL, &block);
  gpu_report("the pool is bounded", status == SLUICE_E_OVER_BUDGET ? NULL : "no error");
  sluice_pinned_pool_destroy(pool);
  status = sluice_cuda_check_memory(gpu_rig.device, a.host, 4, 4, "host");
  gpu_report("host memory is refused", status == SLUICE_E_INVALID_ARGUMENT ? NULL : "taken");
  status = sluice_cuda_check_memory(gpu_rig.device, a.there, 4, 64, "device");
  gpu_report("device memory is taken", status == SLUICE_OK ? NULL : last_message());
  gpu_drop(&a), gpu_drop(&b);
  size_t free_bytes = 0, total = 0;
  gpu_enter();
  if (gpu_rig.driver->cuMemGetInfo_v2(&free_bytes, &total) != 0) gpu_die("memory info");
  gpu_leave();
  gpu_report("too much memory is NO_MEMORY",
             sluice_alloc(&gpu_rig.memory, (uint64_t)total * 2, "too much") == NULL ? NULL : "taken");
  gpu_report("the device goes on", gpu_route(100, 2, 8));
}

/* ---- streams --------------------------------------------------------------------------------------------------- */

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
