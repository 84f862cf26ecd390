// SPDX-License-Identifier: Apache-2.0
/* The device functions that a local communicator needs to exchange device memory in stream order. Private to the
 * library; filled by the code that knows the device (capi/src/comm_cuda.c).
 *
 * Each rank copies what its peers have posted into its own buffers, on its own stream: after an event that marks the
 * sender's bytes as ready, and before an event that the sender's stream waits for. Both events are recorded before any
 * stream waits for them: ranks synchronize on the host, and no stream ever waits for a peer that never comes. */
#pragma once

#include "backend/comm/comm.h"

/* Called only by the rank's own thread. Streams belong to this rank, events to any rank of the process. */
typedef struct sluice_local_device_s {
  void* user;
  sluice_status_t (*create_event)(void* user, void** out_event);
  void (*destroy_event)(void* user, void* event);
  /* Returns STATE if the stream is being captured: a graph of one rank cannot wait for that of another rank. */
  sluice_status_t (*record)(void* user, void* event, sluice_stream_t stream);
  sluice_status_t (*wait)(void* user, sluice_stream_t stream, void* event);
  sluice_status_t (*copy)(void* user, sluice_stream_t stream, void* to, const void* from, uint64_t bytes);
  /* After a failure: waits on the host for the event, or for the stream if the event is NULL. */
  void (*drain)(void* user, sluice_stream_t stream, void* event);
  void (*released)(void* user); /* called last, when the communicator is destroyed, and if set_device fails */
} sluice_local_device_t;

/* Sets the device of `comm`, which is a local communicator. If it already has one, the new one is released and the
 * first stays. Errors: NO_MEMORY, EXTERNAL. */
sluice_status_t sluice_local_comm_set_device(sluice_comm_t* comm, const sluice_local_device_t* there);
/* Returns the user of its device, or NULL: there is none, or `comm` is no local communicator. */
void* sluice_local_comm_device(sluice_comm_t* comm);
int sluice_comm_is_local(const sluice_comm_t* comm);
