// SPDX-License-Identifier: Apache-2.0
/* The endpoint of a pipeline, and what a host keeps of that which arrived there: longer than the endpoint, if it likes.
 * Private to backend/pipeline/run. */
#ifndef SLUICE_BACKEND_PIPELINE_RUN_ENDPOINT_H_
#define SLUICE_BACKEND_PIPELINE_RUN_ENDPOINT_H_

#include <stdatomic.h>

#include "backend/comm/messages.h"

/* Memory of an arrival that the host keeps: released with its last holder, the batch or the host. */
typedef struct sluice_stage_kept_s {
  _Atomic int32_t holders;
  struct sluice_stage_endpoint_s* endpoint;
  sluice_message_arrival_t* arrival;
  const void* data; /* anywhere in it */
  void* block;      /* what the endpoint left behind when it was closed, and was kept; else NULL */
  struct sluice_stage_kept_s *previous, *next;
} sluice_stage_kept_t;

typedef struct sluice_stage_endpoint_s {
  sluice_messages_t* messages; /* NULL: closed */
  sluice_comm_t* comm;
  sluice_allocator_t memory;  /* of what arrives */
  _Atomic int32_t references; /* the pipeline and what is kept */
  _Atomic int32_t is_closing;
  pthread_mutex_t mutex; /* of the list, and of is_closing being set */
  sluice_stage_kept_t* kept;
} sluice_stage_endpoint_t;

/* Without messages yet. comm is retained. NULL: NO_MEMORY. */
sluice_stage_endpoint_t* sluice_stage_endpoint_new(sluice_comm_t* comm);
/* Closes it. Accepts NULL. */
void sluice_stage_endpoint_close(sluice_stage_endpoint_t* endpoint);

/* The most that had arrived and was not released since the peak was last reset. Messages may arrive meanwhile. */
uint64_t sluice_stage_endpoint_peak(sluice_stage_endpoint_t* endpoint);

/* out_kept: with one holder, sluice_stage_kept_release. Errors: NO_MEMORY. */
sluice_status_t sluice_stage_keep(sluice_stage_endpoint_t* endpoint, sluice_message_arrival_t* arrival,
                                  const void* data, sluice_stage_kept_t** out_kept);
/* One holder less. Any thread. Accepts NULL. */
void sluice_stage_kept_release(sluice_stage_kept_t* kept);

#endif /* SLUICE_BACKEND_PIPELINE_RUN_ENDPOINT_H_ */
