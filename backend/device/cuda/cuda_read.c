// SPDX-License-Identifier: Apache-2.0
/* Reads device memory on the host, and checks that pointers and streams belong to the device. */
#include "backend/device/cuda/cuda_state.h"

static sluice_status_t read_inside(cuda_device_t* device, sluice_stream_t stream, const void* data, void* out,
                                   uint64_t bytes) {
  int capturing = SLUICE_CU_CAPTURE_NONE;
  CU_TRY(device, cuStreamIsCapturing(stream, &capturing), "the state of stream %p is unknown", stream);
  if (capturing != SLUICE_CU_CAPTURE_NONE) {
    return SLUICE_FAIL(SLUICE_E_STATE,
                       "cuda: the stream is being captured into a graph, which cannot wait for counts: use graph mode");
  }
  SLUICE_TRY(sluice_cuda_make_event(device, &device->read_done));
  CU_TRY(device, cuMemcpyAsync((unsigned long long)(uintptr_t)out, (unsigned long long)(uintptr_t)data, bytes, stream),
         "copy of %llu bytes to the host", (unsigned long long)bytes);
  CU_TRY(device, cuEventRecord(device->read_done, stream), "the copy's end cannot be recorded");
  ++device->stats.num_host_waits;
  CU_TRY(device, cuEventSynchronize(device->read_done), "wait for %llu bytes from the device",
         (unsigned long long)bytes);
  return SLUICE_OK;
}

sluice_status_t sluice_cuda_read(sluice_device_t* base, sluice_stream_t stream, const void* data, void* out,
                                 uint64_t bytes) {
  SLUICE_TRY(sluice_cuda_enter(base));
  return sluice_cuda_leave_with(base, read_inside(sluice_cuda_cast(base), stream, data, out, bytes));
}

sluice_status_t sluice_cuda_check_stream(sluice_device_t* base, sluice_stream_t stream) {
  cuda_device_t* device = sluice_cuda_cast(base);
  void* context = NULL;
  if (stream == NULL) return SLUICE_OK; /* the default stream of the current context, which is ours */
  CU_TRY(device, cuStreamGetCtx(stream, &context), "the stream %p is not a stream of this process", stream);
  if (context == device->context) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                     "cuda: the stream %p belongs to another context or device than device %d: pass a stream of the "
                     "device that holds the tensors",
                     stream, device->ordinal);
}

sluice_status_t sluice_cuda_check_memory(sluice_device_t* base, const void* data, uint64_t bytes, uint64_t alignment,
                                         const char* name) {
  cuda_device_t* device = sluice_cuda_cast(base);
  unsigned long long at = (unsigned long long)(uintptr_t)data;
  unsigned int type = 0;
  int ordinal = -1;
  if (bytes == 0) return SLUICE_OK;
  if (at % alignment != 0) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "%s is at %p: want an address that is a multiple of %llu", name, data,
                       (unsigned long long)alignment);
  }
  const int code = device->driver->cuPointerGetAttribute(&type, SLUICE_CU_POINTER_MEMORY_TYPE, at);
  /* Other codes report errors of work that was enqueued earlier. */
  if (code != 0 && code != SLUICE_CU_INVALID_VALUE) {
    return sluice_cuda_fail(device->driver, code, "the place of %s", name);
  }
  if (code != 0 || type != SLUICE_CU_MEMORY_DEVICE) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "%s is at %p in host memory: want memory of CUDA device %d", name,
                       data, device->ordinal);
  }
  CU_TRY(device, cuPointerGetAttribute(&ordinal, SLUICE_CU_POINTER_DEVICE_ORDINAL, at), "the device of %s", name);
  if (ordinal == device->ordinal) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                     "%s is on CUDA device %d: want device %d, where the other tensors of this context are", name,
                     ordinal, device->ordinal);
}
