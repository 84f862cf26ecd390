// SPDX-License-Identifier: Apache-2.0
/* What a communicator and its requests hold. nccl_comm.h is what others see; of the files here each has its header:
 *
 * nccl_create.c    making and ending it
 * nccl_split.c     making it from the host's own
 * nccl_failure.c   errors, whose fault they are, and the end of the group
 * nccl_settle.c    waiting until NCCL has done in the background what it was asked
 * nccl_stream.c    exchanges in the order of a stream
 * nccl_host.c      exchanges of host memory through staging, with a wait
 * nccl_headers.c   headers, over TCP connections
 * nccl_register.c  registered buffers: the blocks of a communicator
 * nccl_memory.c    one such block
 * nccl_library.c   the library and its version */
#ifndef SLUICE_BACKEND_COMM_NCCL_NCCL_STATE_H_
#define SLUICE_BACKEND_COMM_NCCL_NCCL_STATE_H_

#include <pthread.h>
#include <stdatomic.h>

#include "backend/comm/nccl/nccl_comm.h"
#include "backend/comm/nccl/nccl_memory.h"
#include "backend/comm/requests.h"
#include "backend/device/cuda/cuda_device.h"

/* Where a request's host buffers pass through: the same layout in pinned and in device memory. */
typedef struct staging_s {
  char* pinned;
  char* on_device;
  uint64_t bytes;
} staging_t;

struct sluice_comm_request_s {
  int32_t is_used;
  sluice_comm_request_t* header; /* of the TCP connections: all there is of it, or NULL */
  void* done;                    /* event */
  staging_t staging;
  void** host_recv; /* [W] where received bytes go in the wait, NULL: nothing to do */
  uint64_t* recv_bytes;
  uint64_t* recv_at; /* in the staging */
};

typedef struct sluice_nccl_message_s {
  void* data;
  uint64_t bytes;
  int32_t peer, is_send;
} sluice_nccl_message_t;

/* Messages of the group that is about to be posted, in the order of its exchanges. */
typedef struct sluice_nccl_posted_s {
  sluice_nccl_message_t* messages;
  int64_t count, room;
  int32_t is_open; /* more exchanges are to come */
} sluice_nccl_posted_t;

typedef struct sluice_nccl_comm_s {
  sluice_comm_t base;
  sluice_nccl_symbols_t nccl;
  sluice_device_t* device;
  const sluice_cuda_driver_t* driver;
  sluice_allocator_t* memory;
  pthread_mutex_t mutex; /* around every use of `comm`: abort comes from any thread */
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
  _Atomic(sluice_comm_t*) headers; /* NULL: none yet, or none at all */
  int32_t has_connected;           /* has tried to */
  sluice_comm_request_t requests[SLUICE_MAX_IN_FLIGHT];
} nccl_comm_t;

static inline nccl_comm_t* sluice_nccl_downcast(sluice_comm_t* comm) { return (nccl_comm_t*)comm; }

#endif /* SLUICE_BACKEND_COMM_NCCL_NCCL_STATE_H_ */
