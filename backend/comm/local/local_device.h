// SPDX-License-Identifier: Apache-2.0
/* What a local communicator needs of a device to exchange its memory in the order of streams: private to the library,
 * filled by whoever knows the device (capi/src/comm_local_cuda.c).
 *
 * Each rank copies what its peers have posted into its own buffers, on its own stream: after an event that says when
 * the sender's bytes are there, and before one for which the sender's stream waits. Both events are recorded before
 * anybody waits for them, so ranks meet on the host and no stream ever waits for a peer that never comes. */
#ifndef SLUICE_BACKEND_COMM_LOCAL_LOCAL_DEVICE_H_
#define SLUICE_BACKEND_COMM_LOCAL_LOCAL_DEVICE_H_

#include "backend/comm/comm.h"

/* Called by the rank's own thread alone. Streams are this rank's, events any rank's of the process. */
typedef struct sluice_local_device_s {
  void* user;
  sluice_status_t (*create_event)(void* user, void** out_event);
  void (*destroy_event)(void* user, void* event);
  /* STATE where the stream is being captured: a graph of one rank cannot wait for another rank's. */
  sluice_status_t (*record)(void* user, void* event, sluice_stream_t stream);
  sluice_status_t (*wait)(void* user, sluice_stream_t stream, void* event);
  sluice_status_t (*copy)(void* user, sluice_stream_t stream, void* to, const void* from, uint64_t bytes);
  /* After a failure: waits on the host for the event, or where it is NULL for the stream. */
  void (*drain)(void* user, sluice_stream_t stream, void* event);
  void (*released)(void* user); /* last, when the communicator is gone, also where set_device fails */
} sluice_local_device_t;

/* Gives `comm`, which is a local one, its device. Again: the new one is released and the first stays.
 * Errors: NO_MEMORY, EXTERNAL. */
sluice_status_t sluice_local_comm_set_device(sluice_comm_t* comm, const sluice_local_device_t* there);
/* The user of its device, or NULL: there is none, or `comm` is no local communicator. */
void* sluice_local_comm_device(sluice_comm_t* comm);
int sluice_comm_is_local(const sluice_comm_t* comm);

#endif /* SLUICE_BACKEND_COMM_LOCAL_LOCAL_DEVICE_H_ */
