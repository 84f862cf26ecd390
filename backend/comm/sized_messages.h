// SPDX-License-Identifier: Apache-2.0
/* Messages of known sizes between two ranks, ordered for each pair and direction, next to the exchanges: what MPI and
 * process groups provide. host/host_messages.h builds messages (messages.h) on them. This header includes nothing of
 * the library, because the MPI plugin does not link it. */
#pragma once

#include "sluice/comm.h"

/* Calls for one endpoint come one at a time, from any thread. They return OK, or EXTERNAL, PEER_LOST, NO_MEMORY with
 * out_failure filled. */
typedef struct sluice_sized_messages_s {
  /* Collective over the group, which is idle. *out_endpoint is passed to all other functions. */
  sluice_status_t (*open)(void* user, void** out_endpoint, sluice_host_failure_t* out_failure);
  /* Start and return at once. bytes: 1 to 1 GiB, the same on both sides; the buffer stays valid until the request
   * ends. */
  sluice_status_t (*send)(void* endpoint, int32_t peer, const void* data, uint64_t bytes, void** out_request,
                          sluice_host_failure_t* out_failure);
  sluice_status_t (*receive)(void* endpoint, int32_t peer, void* data, uint64_t bytes, void** out_request,
                             sluice_host_failure_t* out_failure);
  /* Never waits. *out_is_done: the request is complete and released. It is also released after a failure. */
  sluice_status_t (*test)(void* endpoint, void* request, int32_t* out_is_done, sluice_host_failure_t* out_failure);
  /* Releases a request that is not done, in bounded time. Returns 1 if its buffer is free; 0 if it may be used until
   * the process ends. */
  int32_t (*give_up)(void* endpoint, void* request);
  /* is_clean: everything that was sent to or by this rank has been received. */
  void (*close)(void* endpoint, int32_t is_clean);
} sluice_sized_messages_t;
