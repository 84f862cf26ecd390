// SPDX-License-Identifier: Apache-2.0
#include "backend/device/cuda/cuda_launch.h"

#include <unistd.h>

#include "backend/base/math.h"
#include "backend/device/cuda/cuda_state.h"

/* The device that this thread has entered, whose kernels it launches. */
static _Thread_local cuda_device_t* entered;

int sluice_cuda_is_inherited(const sluice_device_t* device) { return ((const cuda_device_t*)device)->pid != getpid(); }

static sluice_status_t check_process(const cuda_device_t* device) {
  if (!sluice_cuda_is_inherited(&device->base)) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_STATE,
                     "cuda: this device was made before fork, in process %d; CUDA does not survive a fork: make a new "
                     "one in the child, or start it by spawn",
                     (int)device->pid);
}

/* Devices may be nested: a communicator has its own device object on the same GPU as the context whose job calls it. */
sluice_status_t sluice_cuda_enter(sluice_device_t* base) {
  cuda_device_t* device = sluice_cuda_cast(base);
  SLUICE_TRY(check_process(device));
  CU_TRY(device, cuCtxPushCurrent_v2(device->context), "the context of device %d cannot be made current",
         device->ordinal);
  if (device->depth++ == 0) {
    device->launch_status = SLUICE_OK;
    device->outer = entered;
  }
  entered = device;
  return SLUICE_OK;
}

sluice_status_t sluice_cuda_leave(sluice_device_t* base) {
  cuda_device_t* device = sluice_cuda_cast(base);
  void* context = NULL;
  if (--device->depth == 0) entered = device->outer;
  int code = device->driver->cuCtxPopCurrent_v2(&context);
  if (device->launch_status != SLUICE_OK) {
    sluice_status_t status = sluice_error_adopt(&device->launch_error);
    device->launch_status = SLUICE_OK;
    return status;
  }
  return code == 0 ? SLUICE_OK : sluice_cuda_fail(device->driver, code, "the context cannot be given back");
}

sluice_status_t sluice_cuda_leave_with(sluice_device_t* device, sluice_status_t status) {
  sluice_error_info_t why;
  if (status != SLUICE_OK) sluice_error_capture(&why);
  sluice_status_t left = sluice_cuda_leave(device);
  return status == SLUICE_OK ? left : sluice_error_adopt(&why);
}

static const char* const kernel_names[SLUICE_CUDA_NUM_KERNELS] = {
#define KERNEL(name, args) "sluice_" #name,
#define KERNEL_DTYPES(name, args) \
  "sluice_" #name "_f32", "sluice_" #name "_bf16", "sluice_" #name "_f16", "sluice_" #name "_f64",
#include "backend/device/cuda/kernels/kernel_list.inc"
#undef KERNEL
#undef KERNEL_DTYPES
};

/* Looks a kernel up for its first launch, when the driver may load it: a capture does not allow that, and would become
 * invalid. */
static sluice_status_t look_up(const cuda_device_t* device, int32_t kernel, sluice_stream_t stream, void** out_kernel) {
  int state = SLUICE_CU_CAPTURE_NONE;
  CU_TRY(device, cuStreamIsCapturing(stream, &state), "the state of the stream of %s is unknown", kernel_names[kernel]);
  if (state != SLUICE_CU_CAPTURE_NONE) {
    return SLUICE_FAIL(SLUICE_E_STATE,
                       "cuda: the stream is being captured into a graph, but %s has not run outside of a capture yet: "
                       "run the same call once before the capture",
                       kernel_names[kernel]);
  }
  CU_TRY(device, cuLibraryGetKernel(out_kernel, device->library, kernel_names[kernel]),
         "the kernel %s is not in the image", kernel_names[kernel]);
  return SLUICE_OK;
}

static sluice_status_t launch(cuda_device_t* device, int32_t kernel, sluice_stream_t stream, const void* args,
                              int64_t units) {
  const int64_t warps_per_block = SLUICE_CUDA_BLOCK / SLUICE_CUDA_WARP, most = 1 << 20;
  if (units <= 0) return SLUICE_OK;
  void* loaded = device->kernels[kernel];
  if (loaded == NULL) SLUICE_TRY(look_up(device, kernel, stream, &loaded));
  int64_t blocks = sluice_min(sluice_ceil_div(units, warps_per_block), most); /* then each warp takes several units */
  void* parameters[1] = {(void*)(uintptr_t)args};
  ++device->stats.num_launches;
  CU_TRY(device, cuLaunchKernel(loaded, (unsigned)blocks, 1, 1, SLUICE_CUDA_BLOCK, 1, 1, 0, stream, parameters, NULL),
         "launch of %s over %lld units", kernel_names[kernel], (long long)units);
  device->kernels[kernel] = loaded;
  return SLUICE_OK;
}

void sluice_cuda_launch(int32_t kernel, sluice_stream_t stream, const void* args, int64_t units) {
  cuda_device_t* device = entered;
  if (device == NULL) {
    (void)SLUICE_FAIL(SLUICE_E_INTERNAL, "cuda: %s launched outside sluice_cuda_enter", kernel_names[kernel]);
    return;
  }
  if (device->launch_status != SLUICE_OK) return;
  device->launch_status = launch(device, kernel, stream, args, units);
  if (device->launch_status != SLUICE_OK) sluice_error_capture(&device->launch_error);
}

sluice_status_t sluice_cuda_launch_status(void) {
  if (entered == NULL || entered->launch_status == SLUICE_OK) return SLUICE_OK;
  return sluice_error_adopt(&entered->launch_error);
}
