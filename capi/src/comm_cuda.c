// SPDX-License-Identifier: Apache-2.0
/* Communicators over memory of CUDA devices: the public calls for NCCL communicators, and the device of a local
 * communicator. */
#include "backend/comm/nccl/nccl_comm.h"

#include <assert.h>
#include <string.h>

#include "backend/base/structs.h"
#include "backend/comm/local/local_device.h"
#include "backend/device/cuda/cuda_memory.h"
#include "capi/src/context_on_device.h"

/* ---- the device of a communicator ---- */

/* The CUDA device object that a communicator owns, for its staging, its events and its stream. */
typedef struct own_device_s {
  sluice_device_t* device;
  sluice_allocator_t memory; /* of the device */
} own_device_t;

/* A communicator's `released`, hence void*. */
static void release_device(void* user) {
  own_device_t* own = user;
  sluice_allocator_deinit(&own->memory);
  own->device->vtable->destroy(own->device);
  sluice_free(sluice_process_allocator(), own, sizeof *own);
}

/* sources NULL: the driver of this machine. Errors: as sluice_cuda_device_create. */
static sluice_status_t create_device(int32_t device_id, const sluice_cuda_sources_t* sources, own_device_t** out_own) {
  *out_own = NULL;
  own_device_t* own = sluice_alloc_zeroed(sluice_process_allocator(), sizeof *own, "device of a communicator");
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

/* ---- NCCL ---- */

SLUICE_DEFINE_INIT(sluice_nccl_group, 0)

sluice_status_t sluice_nccl_id_create(const char* library, void* out_id) {
  if (out_id == NULL) return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_nccl_id_create: out_id is NULL");
  sluice_nccl_symbols_t symbols;
  sluice_nccl_id_t id;
  static_assert(sizeof id == SLUICE_NCCL_ID_BYTES, "NCCL's id");
  SLUICE_TRY(sluice_nccl_open(library, &symbols));
  SLUICE_TRY(sluice_nccl_make_id(&symbols, &id));
  memcpy(out_id, &id, sizeof id);
  return SLUICE_OK;
}

static sluice_status_t read_group(const sluice_nccl_group_t* group, sluice_nccl_group_t* out) {
  SLUICE_READ_INTO(sluice_nccl_group, out, group, sizeof *out);
  SLUICE_TRY(
      SLUICE_REQUIRE((out->id == NULL) != (out->parent == NULL),
                     "sluice_nccl_group_t: id is %s and parent is %s; give one of them: an id that one rank made "
                     "(sluice_nccl_id_create), or the host's communicator to split",
                     out->id == NULL ? "NULL" : "set", out->parent == NULL ? "NULL" : "set"));
  SLUICE_TRY(SLUICE_REQUIRE((out->publish == NULL) == (out->lookup == NULL),
                            "sluice_nccl_group_t: set publish and lookup together, or neither"));
  return SLUICE_REQUIRE(out->device_id >= 0 && out->color >= 0,
                        "sluice_nccl_group_t: device_id is %d and color %d; both count from 0", out->device_id,
                        out->color);
}

sluice_status_t sluice_comm_create_nccl_from(const sluice_comm_config_t* config, const sluice_nccl_group_t* group,
                                             const sluice_cuda_sources_t* sources, sluice_comm_t** out_comm) {
  if (out_comm == NULL) return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_comm_create_nccl: out_comm is NULL");
  *out_comm = NULL;
  sluice_nccl_group_t g;
  SLUICE_TRY(read_group(group, &g));
  sluice_nccl_symbols_t symbols;
  if (sources != NULL) {
    symbols = *sources->nccl;
  } else {
    SLUICE_TRY(sluice_nccl_open(g.library, &symbols));
  }
  own_device_t* own = NULL;
  SLUICE_TRY(create_device(g.device_id, sources, &own));
  sluice_nccl_id_t id;
  if (g.id != NULL) memcpy(&id, g.id, sizeof id);
  const sluice_nccl_store_t store = {g.store_user, g.publish, g.lookup};
  const sluice_nccl_options_t options = {
      .symbols = &symbols,
      .device = own->device,
      .memory = &own->memory,
      .id = g.id != NULL ? &id : NULL,
      .parent = g.parent,
      .color = g.color,
      .open_headers = sources != NULL ? sources->open_headers : NULL,
      .store = g.publish != NULL ? &store : NULL,
      .released = release_device,
      .released_user = own,
  };
  return sluice_nccl_comm_create(&options, config, out_comm);
}

sluice_status_t sluice_comm_create_nccl(const sluice_comm_config_t* config, const sluice_nccl_group_t* group,
                                        sluice_comm_t** out_comm) {
  return sluice_comm_create_nccl_from(config, group, NULL, out_comm);
}

/* ---- local: ranks that are threads of one process, on one GPU or several ---- */

/* It uses the device of the first CUDA context that is created on it. */

static sluice_device_t* device_of(void* user) { return ((own_device_t*)user)->device; }

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
  const own_device_t* before = sluice_local_comm_device(comm);
  if (before != NULL) {
    int32_t ordinal = sluice_cuda_device_ordinal(before->device);
    if (ordinal == device_id) return SLUICE_OK;
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "context: device_id is %d, and another context on this local communicator is on device %d: a "
                       "rank has one device",
                       device_id, ordinal);
  }
  own_device_t* own = NULL;
  SLUICE_TRY(create_device(device_id, sources, &own));
  const sluice_local_device_t there = {own, create_event, destroy_event, record, wait, copy, drain, release_device};
  return sluice_local_comm_set_device(comm, &there);
}
