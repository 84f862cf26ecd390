// SPDX-License-Identifier: Apache-2.0
/* The state of a communicator and its requests. nccl_comm.h is the public interface; each file here has its header:
 *
 * nccl_create.c    creates and destroys it
 * nccl_split.c     makes it from the host's own
 * nccl_failure.c   errors, the rank at fault, and the end of the group
 * nccl_settle.c    waits for background work of NCCL
 * nccl_stream.c    exchanges in stream order
 * nccl_host.c      exchanges of host memory through staging, with a wait
 * nccl_headers.c   headers, over TCP connections
 * nccl_register.c  the registered buffers of a communicator
 * nccl_memory.c    one registered buffer
 * nccl_library.c   the library and its version */
#pragma once

#include <pthread.h>
#include <stdatomic.h>

#include "backend/comm/nccl/nccl_comm.h"
#include "backend/comm/nccl/nccl_memory.h"
#include "backend/comm/requests.h"
#include "backend/device/cuda/cuda_device.h"

/* The staging of a request's host buffers: the same layout in pinned and in device memory. */
typedef struct staging_s {
  char* pinned;
  char* on_device;
  uint64_t bytes;
} staging_t;

struct sluice_comm_request_s {
  int32_t is_used;
  sluice_comm_request_t* header; /* of the TCP connections; then no other member is used. Or NULL */
  void* done;                    /* event */
  staging_t staging;
  void** host_recv; /* [W], where received bytes are copied in the wait; NULL: nothing to do */
  uint64_t* recv_bytes;
  uint64_t* recv_at; /* offsets in the staging */
};

typedef struct sluice_nccl_message_s {
  void* data;
  uint64_t bytes;
  int32_t peer, is_send;
} sluice_nccl_message_t;

/* The messages of the next group, in the order of its exchanges. */
typedef struct sluice_nccl_posted_s {
  sluice_nccl_message_t* messages;
  int64_t count, room;
  int32_t is_open; /* more exchanges will follow */
} sluice_nccl_posted_t;

typedef struct sluice_nccl_comm_s {
  sluice_comm_t base;
  sluice_nccl_symbols_t nccl;
  sluice_device_t* device;
  const sluice_cuda_driver_t* driver;
  sluice_allocator_t* memory;
  pthread_mutex_t mutex; /* held around every use of `comm`, because abort comes from any thread */
  void* comm;            /* NULL after ncclCommAbort */
  int32_t is_ready;
  int32_t has_note;
  _Atomic int32_t is_aborted; /* by this rank's abort() */
  void* stream;
  sluice_nccl_store_t store;
  void (*released)(void* user);
  void* released_user;
  uint64_t arrays_bytes;
  char refusal_text[160];
  sluice_nccl_block_t* blocks;
  sluice_nccl_posted_t posted;
  sluice_status_t (*open_headers)(sluice_comm_t* comm, sluice_comm_t** out_tcp);
  _Atomic(sluice_comm_t*) headers; /* NULL: not yet made, or none */
  int32_t has_connected;           /* has tried to connect */
  sluice_comm_request_t requests[SLUICE_MAX_IN_FLIGHT];
} nccl_comm_t;

static inline nccl_comm_t* sluice_nccl_downcast(sluice_comm_t* comm) { return (nccl_comm_t*)comm; }
