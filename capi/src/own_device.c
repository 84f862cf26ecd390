// SPDX-License-Identifier: Apache-2.0
#include "capi/src/own_device.h"

void sluice_own_device_release(void* user) {
  sluice_own_device_t* own = user;
  sluice_allocator_deinit(&own->memory);
  own->device->vtable->destroy(own->device);
  sluice_free(sluice_process_allocator(), own, sizeof *own);
}

sluice_status_t sluice_own_device_create(int32_t device_id, const sluice_cuda_sources_t* sources,
                                         sluice_own_device_t** out_own) {
  *out_own = NULL;
  sluice_own_device_t* own = sluice_alloc_zeroed(sluice_process_allocator(), sizeof *own, "device of a communicator");
  if (own == NULL) return sluice_alloc_status();
  sluice_status_t status = sources != NULL
                               ? sluice_cuda_device_create_from(sources->driver, sources->image, device_id,
                                                                sluice_process_allocator(), &own->device)
                               : sluice_cuda_device_create(device_id, sluice_process_allocator(), &own->device);
  if (status != SLUICE_OK) {
    sluice_free(sluice_process_allocator(), own, sizeof *own);
    return status;
  }
  sluice_cuda_allocator_init(own->device, &own->memory);
  *out_own = own;
  return SLUICE_OK;
}
