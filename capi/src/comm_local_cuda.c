// SPDX-License-Identifier: Apache-2.0
/* A local communicator over memory of CUDA devices: ranks that are threads of one process, on one GPU or several. It
 * uses the device of the first CUDA context that is created on it. */
#include "backend/comm/local/local_device.h"
#include "capi/src/own_device.h"

static sluice_device_t* device_of(void* user) { return ((sluice_own_device_t*)user)->device; }

static sluice_status_t leave_with(sluice_device_t* device, int code, const char* what) {
  const sluice_cuda_driver_t* driver = sluice_cuda_device_driver(device);
  return sluice_cuda_leave_with(device, code == 0 ? SLUICE_OK : sluice_cuda_fail(driver, code, "%s", what));
}

static sluice_status_t create_event(void* user, void** out_event) {
  sluice_device_t* device = device_of(user);
  SLUICE_TRY(sluice_cuda_enter(device));
  int code = sluice_cuda_device_driver(device)->cuEventCreate(out_event, SLUICE_CU_EVENT_DISABLE_TIMING);
  return leave_with(device, code, "no event for a local communicator");
}

static void destroy_event(void* user, void* event) {
  sluice_device_t* device = device_of(user);
  if (sluice_cuda_is_inherited(device)) return;
  int is_current = sluice_cuda_enter(device) == SLUICE_OK;
  (void)sluice_cuda_device_driver(device)->cuEventDestroy_v2(event);
  if (is_current) (void)sluice_cuda_leave(device);
}

static sluice_status_t record(void* user, void* event, sluice_stream_t stream) {
  sluice_device_t* device = device_of(user);
  const sluice_cuda_driver_t* driver = sluice_cuda_device_driver(device);
  int capturing = SLUICE_CU_CAPTURE_NONE;
  SLUICE_TRY(sluice_cuda_enter(device));
  int code = driver->cuStreamIsCapturing(stream, &capturing);
  if (code == 0 && capturing != SLUICE_CU_CAPTURE_NONE) {
    (void)sluice_cuda_leave(device);
    return SLUICE_FAIL(
        SLUICE_E_STATE,
        "cuda: the stream is being captured into a graph; ranks that are threads synchronize on the host: use "
        "an nccl communicator for a captured layer");
  }
  if (code == 0) code = driver->cuEventRecord(event, stream);
  return leave_with(device, code, "an exchange between threads cannot be recorded");
}

static sluice_status_t wait(void* user, sluice_stream_t stream, void* event) {
  sluice_device_t* device = device_of(user);
  SLUICE_TRY(sluice_cuda_enter(device));
  int code = sluice_cuda_device_driver(device)->cuStreamWaitEvent(stream, event, 0);
  return leave_with(device, code, "a stream cannot wait for another rank's copy");
}

static sluice_status_t copy(void* user, sluice_stream_t stream, void* to, const void* from, uint64_t bytes) {
  return sluice_cuda_copy(device_of(user), stream, to, from, bytes);
}

static void drain(void* user, sluice_stream_t stream, void* event) {
  sluice_device_t* device = device_of(user);
  const sluice_cuda_driver_t* driver = sluice_cuda_device_driver(device);
  int is_current = sluice_cuda_enter(device) == SLUICE_OK;
  (void)(event != NULL ? driver->cuEventSynchronize(event) : driver->cuStreamSynchronize(stream));
  if (is_current) (void)sluice_cuda_leave(device);
}

sluice_status_t sluice_comm_local_use_cuda(sluice_comm_t* comm, int32_t device_id,
                                           const sluice_cuda_sources_t* sources) {
  const sluice_own_device_t* before = sluice_local_comm_device(comm);
  if (before != NULL) {
    int32_t ordinal = sluice_cuda_device_ordinal(before->device);
    if (ordinal == device_id) return SLUICE_OK;
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "context: device_id is %d, and another context on this local communicator is on device %d: a "
                       "rank has one device",
                       device_id, ordinal);
  }
  sluice_own_device_t* own = NULL;
  SLUICE_TRY(sluice_own_device_create(device_id, sources, &own));
  const sluice_local_device_t there = {own,  create_event, destroy_event, record,
                                       wait, copy,         drain,         sluice_own_device_release};
  return sluice_local_comm_set_device(comm, &there);
}
