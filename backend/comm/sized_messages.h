// SPDX-License-Identifier: Apache-2.0
/* Messages of known sizes between two ranks, in order for each pair and direction, beside the exchanges: what MPI and
 * process groups have. host/host_messages.h makes messages (messages.h) of them. Includes nothing of the library's, for
 * the MPI plugin, which links nothing of it. */
#ifndef SLUICE_BACKEND_COMM_SIZED_MESSAGES_H_
#define SLUICE_BACKEND_COMM_SIZED_MESSAGES_H_

#include "sluice/comm.h"

/* For one endpoint these are called one at a time, from any thread. They return OK, or EXTERNAL, PEER_LOST, NO_MEMORY
 * with out_failure filled. */
typedef struct sluice_sized_messages_s {
  /* Collective over the group, which is idle. *out_endpoint is given to all others. */
  sluice_status_t (*open)(void* user, void** out_endpoint, sluice_host_failure_t* out_failure);
  /* Begin and return at once. bytes: 1 to 1 GiB, the same on both sides; the buffer stays until the request is over. */
  sluice_status_t (*send)(void* endpoint, int32_t peer, const void* data, uint64_t bytes, void** out_request,
                          sluice_host_failure_t* out_failure);
  sluice_status_t (*receive)(void* endpoint, int32_t peer, void* data, uint64_t bytes, void** out_request,
                             sluice_host_failure_t* out_failure);
  /* Never waits. *out_is_done: the request is released; so it is on a failure. */
  sluice_status_t (*test)(void* endpoint, void* request, int32_t* out_is_done, sluice_host_failure_t* out_failure);
  /* Releases a request that is not done, in bounded time. 1: its buffer is free; 0: it may be used for as long as the
   * process lives. */
  int32_t (*give_up)(void* endpoint, void* request);
  /* is_clean: all that was sent on any rank to this one, and here, has been received. */
  void (*close)(void* endpoint, int32_t is_clean);
} sluice_sized_messages_t;

#endif /* SLUICE_BACKEND_COMM_SIZED_MESSAGES_H_ */
