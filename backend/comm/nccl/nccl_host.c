// SPDX-License-Identifier: Apache-2.0
/* Exchanges of host memory through staging, with a wait. */
#include <string.h>

#include "backend/base/clock.h"
#include "backend/base/math.h"
#include "backend/comm/nccl/nccl_state.h"

enum { HOST = 0, DEVICE = 1 };
#define LEAST_STAGING UINT64_C(65536) /* growing frees the old staging, which waits for all exchanges */

static sluice_status_t reserve_staging(nccl_comm_t* comm, staging_t* s, uint64_t bytes) {
  if (bytes <= s->bytes) return SLUICE_OK;
  if (s->pinned != NULL) (void)comm->driver->cuMemFreeHost(s->pinned);
  sluice_free(comm->memory, s->on_device, s->bytes);
  *s = (staging_t){.pinned = NULL};
  bytes = sluice_align_up(sluice_max_u64(bytes, LEAST_STAGING));
  s->on_device = sluice_alloc(comm->memory, bytes, "nccl staging");
  if (s->on_device == NULL) return sluice_alloc_status();
  s->bytes = bytes;
  void* pinned = NULL;
  int code = comm->driver->cuMemHostAlloc(&pinned, bytes, SLUICE_CU_MEMHOSTALLOC_PORTABLE);
  if (code != 0) {
    sluice_free(comm->memory, s->on_device, s->bytes);
    *s = (staging_t){.pinned = NULL};
    return sluice_cuda_fail(comm->driver, code, "%llu bytes of pinned staging for nccl", (unsigned long long)bytes);
  }
  s->pinned = pinned;
  return SLUICE_OK;
}

static int where(const nccl_comm_t* comm, const void* data) {
  unsigned int type = 0;
  int code =
      comm->driver->cuPointerGetAttribute(&type, SLUICE_CU_POINTER_MEMORY_TYPE, (unsigned long long)(uintptr_t)data);
  return code == 0 && type == SLUICE_CU_MEMORY_DEVICE ? DEVICE : HOST;
}

static unsigned long long address(const void* data) { return (unsigned long long)(uintptr_t)data; }

/* Replaces host buffers by places in the staging, copies the sends to the device, posts, and copies receives back to
 * pinned memory. send and recv: [W], scratch of the caller. */
static sluice_status_t run_staged(nccl_comm_t* comm, sluice_comm_request_t* r, const sluice_exchange_t* e,
                                  const void** send, void** recv) {
  int32_t world_size = comm->base.world_size;
  uint64_t sent = 0, all = 0;
  for (int32_t p = 0; p < world_size; ++p) {
    send[p] = NULL;
    recv[p] = NULL;
    r->received[p].to = NULL;
    if (p == comm->base.rank) continue;
    send[p] = e->send[p];
    recv[p] = e->recv[p];
    if (e->send_bytes[p] > 0 && where(comm, e->send[p]) == HOST) all += sluice_align_up(e->send_bytes[p]);
  }
  sent = all;
  for (int32_t p = 0; p < world_size; ++p) {
    if (p == comm->base.rank || e->recv_bytes[p] == 0 || where(comm, e->recv[p]) == DEVICE) continue;
    r->received[p] = (received_t){.to = e->recv[p], .bytes = e->recv_bytes[p], .at = all};
    all += sluice_align_up(e->recv_bytes[p]);
  }
  SLUICE_TRY(reserve_staging(comm, &r->staging, all));
  uint64_t at = 0;
  for (int32_t p = 0; p < world_size; ++p) {
    if (r->received[p].to != NULL) recv[p] = r->staging.on_device + r->received[p].at;
    if (send[p] == NULL || e->send_bytes[p] == 0 || where(comm, send[p]) == DEVICE) continue;
    if (r->staging.pinned == NULL) continue; /* nothing is staged */
    memcpy(r->staging.pinned + at, send[p], e->send_bytes[p]);
    send[p] = r->staging.on_device + at;
    at += sluice_align_up(e->send_bytes[p]);
  }
  int code = sent == 0 ? 0
                       : comm->driver->cuMemcpyAsync(address(r->staging.on_device), address(r->staging.pinned), sent,
                                                     comm->stream);
  if (code != 0) return sluice_cuda_fail(comm->driver, code, "a header on its way to the device");
  const sluice_exchange_t on_device = {send, e->send_bytes, recv, e->recv_bytes};
  SLUICE_TRY(sluice_nccl_run_group(comm, &on_device, comm->stream));
  if (all > sent) {
    code = comm->driver->cuMemcpyAsync(address(r->staging.pinned + sent), address(r->staging.on_device + sent),
                                       all - sent, comm->stream);
  }
  if (code == 0) code = comm->driver->cuEventRecord(r->done, comm->stream);
  return code == 0 ? SLUICE_OK : sluice_cuda_fail(comm->driver, code, "a header on its way from the device");
}

static uint64_t places_bytes(const nccl_comm_t* comm) {
  return (uint64_t)comm->base.world_size * (sizeof(const void*) + sizeof(void*));
}

sluice_status_t sluice_nccl_exchange_start(sluice_comm_t* base, const sluice_exchange_t* exchange,
                                           sluice_comm_request_t** out_request) {
  nccl_comm_t* comm = sluice_nccl_downcast(base);
  sluice_comm_request_t* request = SLUICE_FREE_REQUEST(comm->requests);
  if (request == NULL) return sluice_comm_fail_third(base);
  const void** send = sluice_alloc(sluice_process_allocator(), places_bytes(comm), "nccl exchange");
  if (send == NULL) return sluice_alloc_status();
  sluice_status_t status = sluice_cuda_enter(comm->device);
  if (status == SLUICE_OK) {
    status = sluice_cuda_leave_with(comm->device,
                                    run_staged(comm, request, exchange, send, (void**)(send + base->world_size)));
  }
  sluice_free(sluice_process_allocator(), send, places_bytes(comm));
  if (status != SLUICE_OK) return status;
  request->is_used = 1;
  *out_request = request;
  return SLUICE_OK;
}

static void take_received(const nccl_comm_t* comm, sluice_comm_request_t* request) {
  for (int32_t p = 0; p < comm->base.world_size; ++p) {
    const received_t* received = &request->received[p];
    if (received->to != NULL) memcpy(received->to, request->staging.pinned + received->at, received->bytes);
  }
}

static sluice_status_t wait_staged(nccl_comm_t* comm, sluice_comm_request_t* request, uint64_t deadline_ns) {
  for (;;) {
    if (atomic_load(&comm->is_aborted)) return sluice_nccl_fail_aborted(comm);
    int code = comm->driver->cuEventQuery(request->done);
    if (code == 0) {
      if (comm->comm == NULL)
        return sluice_nccl_fail_aborted(comm); /* an abort freed the stream: nothing was received */
      take_received(comm, request);
      return SLUICE_OK;
    }
    if (code != SLUICE_CU_NOT_READY) {
      sluice_status_t status = sluice_cuda_fail(comm->driver, code, "an exchange failed on the device");
      sluice_error_info_t why;
      sluice_error_capture(&why);
      sluice_nccl_abort_group(comm);
      (void)sluice_error_adopt(&why);
      return status;
    }
    int state = sluice_nccl_state(comm);
    if (state != 0 && state != SLUICE_NCCL_IN_PROGRESS) return sluice_nccl_fail(comm, state, "an exchange");
    if (sluice_now_ns() >= deadline_ns) return SLUICE_E_TIMED_OUT;
    sluice_nccl_nap();
  }
}

sluice_status_t sluice_nccl_exchange_wait(sluice_comm_t* base, sluice_comm_request_t* request, uint64_t deadline_ns,
                                          int32_t* out_peer) {
  nccl_comm_t* comm = sluice_nccl_downcast(base);
  if (out_peer != NULL) *out_peer = -1;
  if (request->header != NULL) return sluice_nccl_headers_wait(comm, request, deadline_ns, out_peer);
  SLUICE_TRY(sluice_cuda_enter(comm->device));
  sluice_status_t status = wait_staged(comm, request, deadline_ns);
  if (status == SLUICE_E_TIMED_OUT) {
    (void)sluice_cuda_leave(comm->device);
    return status;
  }
  request->is_used = 0;
  return sluice_cuda_leave_with(comm->device, status);
}

void sluice_nccl_abandon(sluice_comm_t* base, sluice_comm_request_t* request) {
  nccl_comm_t* comm = sluice_nccl_downcast(base);
  if (request->header != NULL) {
    sluice_nccl_headers_abandon(comm, request);
    return;
  }
  sluice_nccl_abort_group(comm);
  request->is_used = 0;
}
