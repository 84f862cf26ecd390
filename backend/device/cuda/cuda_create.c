// SPDX-License-Identifier: Apache-2.0
/* Creates and destroys a device, and describes it. */
#include <stdio.h>
#include <unistd.h>

#include "backend/device/cuda/cuda_state.h"

const sluice_cuda_driver_t* sluice_cuda_device_driver(const sluice_device_t* device) {
  return ((const cuda_device_t*)device)->driver;
}
int32_t sluice_cuda_device_ordinal(const sluice_device_t* device) { return ((const cuda_device_t*)device)->ordinal; }
int32_t sluice_cuda_device_sms(const sluice_device_t* base) {
  const cuda_device_t* device = (const cuda_device_t*)base;
  int32_t sms = 0;
  const int code = device->driver->cuDeviceGetAttribute(&sms, SLUICE_CU_ATTRIBUTE_SMS, device->device);
  return code == 0 && sms > 0 ? sms : 132;
}
sluice_cuda_numa_t sluice_cuda_device_numa(const sluice_device_t* device) {
  return sluice_cuda_numa_of(((const cuda_device_t*)device)->driver, ((const cuda_device_t*)device)->device);
}
void sluice_cuda_device_name(const sluice_device_t* base, char* out_name, int32_t bytes) {
  const cuda_device_t* device = (const cuda_device_t*)base;
  if (device->driver->cuDeviceGetName(out_name, bytes, device->device) == 0 && out_name[0] != '\0') return;
  snprintf(out_name, (size_t)bytes, "unknown GPU");
}
sluice_cuda_stats_t sluice_cuda_device_stats(const sluice_device_t* device) {
  return ((const cuda_device_t*)device)->stats;
}

static void destroy_event(cuda_device_t* device, void* event) {
  if (event != NULL) (void)device->driver->cuEventDestroy_v2(event);
}

/* Handles know their context: they are released even if it cannot be made current. */
static void release_driver_objects(cuda_device_t* device) {
  void* context = NULL;
  int is_current = device->driver->cuCtxPushCurrent_v2(device->context) == 0;
  sluice_cuda_memory_release(&device->base);
  sluice_cuda_times_release(&device->base, &device->memory.times);
  destroy_event(device, device->memory.end);
  destroy_event(device, device->entry);
  destroy_event(device, device->forked);
  destroy_event(device, device->rejoined);
  destroy_event(device, device->read_done);
  for (int32_t i = 0; i < device->num_events; ++i) destroy_event(device, device->events[i]);
  for (int32_t lane = 0; lane < SLUICE_CUDA_NUM_LANES; ++lane) {
    destroy_event(device, device->exits[lane]);
    if (lane == SLUICE_LANE_COMPUTE || device->lanes[lane] == NULL) continue;
    (void)device->driver->cuStreamDestroy_v2(device->lanes[lane]);
  }
  if (device->library != NULL) (void)device->driver->cuLibraryUnload(device->library);
  if (is_current) (void)device->driver->cuCtxPopCurrent_v2(&context);
  (void)device->driver->cuDevicePrimaryCtxRelease_v2(device->device);
}

static void cuda_destroy(sluice_device_t* base) {
  cuda_device_t* device = sluice_cuda_cast(base);
  if (!sluice_cuda_is_inherited(base)) release_driver_objects(device);
  sluice_free(base->allocator, device->events, (uint64_t)device->num_events * sizeof *device->events);
  sluice_free(base->allocator, device, sizeof *device);
}

static const sluice_device_vtable_t cuda_vtable = {
    .destroy = cuda_destroy,
    .begin = sluice_cuda_begin,
    .submit = sluice_cuda_submit,
    .join = sluice_cuda_join,
};

static sluice_status_t load_image(cuda_device_t* device, sluice_cuda_image_t image) {
  if (image.bytes == 0) {
    return SLUICE_FAIL(SLUICE_E_NOT_FOUND,
                       "cuda: this libsluice was built without nvcc and has no CUDA kernels: build it where nvcc is");
  }
  int major = 0, minor = 0;
  CU_TRY(device, cuDeviceGetAttribute(&major, SLUICE_CU_ATTRIBUTE_MAJOR, device->device), "compute capability");
  CU_TRY(device, cuDeviceGetAttribute(&minor, SLUICE_CU_ATTRIBUTE_MINOR, device->device), "compute capability");
  CU_TRY(device, cuLibraryLoadData(&device->library, image.data, NULL, NULL, 0, NULL, NULL, 0),
         "device %d (sm_%d%d) with a driver of CUDA %d.%d cannot load the kernels, which were built for sm_80, sm_90, "
         "sm_100 and as PTX by the compiler of this build (that of CUDA 12.9 needs driver R525, PTX R575; that of 13 "
         "for R580): update the driver, or build with this machine's nvcc",
         device->ordinal, major, minor, device->driver->version / 1000, device->driver->version % 1000 / 10);
  return SLUICE_OK;
}

static sluice_status_t take_context(cuda_device_t* device) {
  int count = 0;
  CU_TRY(device, cuDeviceGetCount(&count), "the number of devices cannot be read");
  if (device->ordinal < 0 || device->ordinal >= count) {
    return SLUICE_FAIL(SLUICE_E_NOT_FOUND, "cuda: there is no device %d, this process sees %d", device->ordinal, count);
  }
  CU_TRY(device, cuDeviceGet(&device->device, device->ordinal), "device %d", device->ordinal);
  CU_TRY(device, cuDevicePrimaryCtxRetain(&device->context, device->device), "the primary context of device %d",
         device->ordinal);
  return SLUICE_OK;
}

static sluice_status_t create(cuda_device_t* device, sluice_cuda_image_t image, int32_t ordinal,
                              sluice_allocator_t* allocator, sluice_device_t** out_device) {
  device->base = (sluice_device_t){.vtable = &cuda_vtable,
                                   .kernels = sluice_cuda_kernels(),
                                   .allocator = allocator,
                                   .name = "cuda",
                                   .memory = &sluice_cuda_memory};
  device->ordinal = ordinal;
  device->pid = getpid();
  sluice_status_t status = take_context(device);
  if (status != SLUICE_OK) goto err_free;
  status = sluice_cuda_enter(&device->base);
  if (status != SLUICE_OK) goto err_release;
  status = sluice_cuda_leave_with(&device->base, load_image(device, image));
  if (status != SLUICE_OK) goto err_release;
  *out_device = &device->base;
  return SLUICE_OK;

err_release:
  release_driver_objects(device);
err_free:
  sluice_free(allocator, device, sizeof *device);
  return status;
}

sluice_status_t sluice_cuda_device_create_from(const sluice_cuda_driver_t* driver, sluice_cuda_image_t image,
                                               int32_t ordinal, sluice_allocator_t* allocator,
                                               sluice_device_t** out_device) {
  *out_device = NULL;
  cuda_device_t* device = sluice_alloc_zeroed(allocator, sizeof *device, "cuda device");
  if (device == NULL) return sluice_alloc_status();
  device->driver = driver;
  return create(device, image, ordinal, allocator, out_device);
}

/* The image of the kernels, which the build puts into read-only data (cuda_image.S). */
extern const char sluice_cuda_image_begin[];
extern const char sluice_cuda_image_end[];

sluice_cuda_image_t sluice_cuda_image(void) {
  return (sluice_cuda_image_t){sluice_cuda_image_begin, (uint64_t)(sluice_cuda_image_end - sluice_cuda_image_begin)};
}

sluice_status_t sluice_cuda_device_create(int32_t ordinal, sluice_allocator_t* allocator,
                                          sluice_device_t** out_device) {
  *out_device = NULL;
  cuda_device_t* device = sluice_alloc_zeroed(allocator, sizeof *device, "cuda device");
  if (device == NULL) return sluice_alloc_status();
  sluice_status_t status = sluice_cuda_driver_open(NULL, &device->own_driver);
  if (status != SLUICE_OK) {
    sluice_free(allocator, device, sizeof *device);
    return status;
  }
  device->driver = &device->own_driver;
  return create(device, sluice_cuda_image(), ordinal, allocator, out_device);
}
