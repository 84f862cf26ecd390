// SPDX-License-Identifier: Apache-2.0
/* The state of a communicator and its requests, and the functions that its files share. Private to this folder;
 * nccl_comm.h is the public interface. */
#pragma once

#include <pthread.h>
#include <stdatomic.h>

#include "backend/comm/nccl/nccl_comm.h"
#include "backend/comm/requests.h"
#include "backend/device/cuda/cuda_device.h"

/* The staging of a request's host buffers: the same layout in pinned and in device memory. */
typedef struct staging_s {
  char* pinned;
  char* on_device;
  uint64_t bytes;
} staging_t;

/* Bytes of a peer that are copied to host memory in the wait. */
typedef struct received_s {
  void* to;           /* NULL: none */
  uint64_t bytes, at; /* `at` in the staging */
} received_t;

struct sluice_comm_request_s {
  int32_t is_used;
  sluice_comm_request_t* header; /* of the TCP connections; then no other member is used. Or NULL */
  void* done;                    /* event */
  staging_t staging;
  received_t* received; /* [W] */
};

/* A registered buffer. */
typedef struct sluice_nccl_block_s {
  struct sluice_nccl_block_s* next;
  void* data;
  void* handle; /* of the registration */
} sluice_nccl_block_t;

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
  sluice_comm_vtable_t vtable; /* of this object: without a store no publish and lookup */
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
  char refusal_text[160];
  sluice_nccl_block_t* blocks;
  sluice_nccl_posted_t posted;
  sluice_status_t (*open_headers)(sluice_comm_t* comm, sluice_comm_t** out_tcp);
  _Atomic(sluice_comm_t*) headers; /* NULL: not yet made, or none */
  int32_t has_connected;           /* has tried to connect */
  sluice_comm_request_t requests[SLUICE_MAX_IN_FLIGHT];
} nccl_comm_t;

static inline nccl_comm_t* sluice_nccl_downcast(sluice_comm_t* comm) { return (nccl_comm_t*)comm; }

/* ---- nccl_split.c: makes the communicator from the host's own ---- */

/* Sets comm->comm from the host's communicator; waits until the split is complete, or until the deadline. */
sluice_status_t sluice_nccl_split(nccl_comm_t* comm, void* parent, int32_t color, sluice_nccl_config_t* config);

/* ---- nccl_failure.c: errors, the rank at fault, and the end of the group ---- */

/* Publishes why this rank is gone: "aborted", "left", or "because N" if it gives up because of rank N. */
void sluice_nccl_note_gone(nccl_comm_t* comm, const char* why);
/* Aborts NCCL's communicator, which frees streams from kernels that would wait for ever. May be called repeatedly. */
void sluice_nccl_end_kernels(nccl_comm_t* comm);
/* The same, and aborts the connections for headers. For a rank that is at fault: the other ranks learn it at once. */
void sluice_nccl_abort_group(nccl_comm_t* comm);
/* Records NCCL's error, with the rank at fault if notes name one, and aborts. */
sluice_status_t sluice_nccl_fail(nccl_comm_t* comm, int code, const char* what);
sluice_status_t sluice_nccl_fail_aborted(nccl_comm_t* comm);

/* ---- nccl_settle.c: waits for background work of NCCL ---- */

/* Returns the state of the communicator: 0, IN_PROGRESS, or an error. */
int sluice_nccl_state(nccl_comm_t* comm);
void sluice_nccl_nap(void);
uint64_t sluice_nccl_deadline_of(const nccl_comm_t* comm);
/* Waits for background work of NCCL: creation, connection, launch. */
sluice_status_t sluice_nccl_settle(nccl_comm_t* comm, const char* what, uint64_t deadline_ns);
/* Waits until all ranks of the group have joined. The device is entered. */
sluice_status_t sluice_nccl_make_ready(nccl_comm_t* comm, uint64_t deadline_ns);

/* ---- nccl_stream.c: exchanges in stream order ---- */

/* Enqueues one exchange of device memory. The device is entered. */
sluice_status_t sluice_nccl_run_group(nccl_comm_t* comm, const sluice_exchange_t* e, void* stream);
/* Entries of the vtable. Waits on the host only while NCCL sets up connections (the first exchange with a peer), until
 * the deadline. */
sluice_status_t sluice_nccl_exchange_enqueue(sluice_comm_t* comm, const sluice_exchange_t* exchange,
                                             sluice_stream_t stream);
void sluice_nccl_group_begin(sluice_comm_t* base);
sluice_status_t sluice_nccl_group_end(sluice_comm_t* base, sluice_stream_t stream, sluice_status_t status);
sluice_status_t sluice_nccl_poll(sluice_comm_t* comm);
/* Frees the list of messages. */
void sluice_nccl_forget_posted(nccl_comm_t* comm);

/* ---- nccl_host.c: exchanges of host memory through staging, with a wait ---- */

sluice_status_t sluice_nccl_exchange_start(sluice_comm_t* base, const sluice_exchange_t* exchange,
                                           sluice_comm_request_t** out_request);
sluice_status_t sluice_nccl_exchange_wait(sluice_comm_t* base, sluice_comm_request_t* request, uint64_t deadline_ns,
                                          int32_t* out_peer);
void sluice_nccl_abandon(sluice_comm_t* base, sluice_comm_request_t* request);

/* ---- nccl_headers.c: headers, over TCP connections ---- */

/* The vtable's entry. The first call makes the connections, on all ranks or on none; without them headers are
 * staged. */
sluice_status_t sluice_nccl_headers_start(sluice_comm_t* base, const sluice_exchange_t* exchange,
                                          sluice_comm_request_t** out_request);
/* The parts of exchange_wait and abandon for a request of headers_start that uses the connections. */
sluice_status_t sluice_nccl_headers_wait(nccl_comm_t* comm, sluice_comm_request_t* request, uint64_t deadline_ns,
                                         int32_t* out_peer);
void sluice_nccl_headers_abandon(nccl_comm_t* comm, sluice_comm_request_t* request);
/* Closes the connections. The other ranks learn whether this one leaves or has failed. */
void sluice_nccl_headers_close(nccl_comm_t* comm);

/* ---- nccl_register.c: registered buffers ---- */

const char* sluice_nccl_refusal_of_memory(sluice_comm_t* base);
sluice_status_t sluice_nccl_allocate(sluice_comm_t* base, uint64_t bytes, void** out_data);
void sluice_nccl_release(sluice_comm_t* base, void* data);
