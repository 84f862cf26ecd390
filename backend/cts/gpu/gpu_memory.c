// SPDX-License-Identifier: Apache-2.0
/* Copies, pinned memory and its bounds, and a device that continues when it is out of memory. */
#include <string.h>

#include "backend/cts/gpu/gpu_array.h"
#include "backend/cts/gpu/gpu_parts.h"
#include "backend/cts/gpu/gpu_rig.h"
#include "backend/cts/gpu/gpu_routing.h"
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
