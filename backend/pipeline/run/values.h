// SPDX-License-Identifier: Apache-2.0
/* The endpoint of a pipeline, its requests, the arrivals that a host keeps, possibly longer than the endpoint; and the
 * values of a batch. Private to backend/pipeline/run. */
#pragma once

#include <stdatomic.h>

#include "backend/comm/messages.h"
#include "backend/pipeline/run/wire.h"

/* An arrival that the host keeps. It is released with its last holder, the batch or the host. */
typedef struct sluice_stage_kept_s {
  _Atomic int32_t holders;
  struct sluice_stage_endpoint_s* endpoint;
  sluice_message_arrival_t* arrival;
  const void* data; /* any address in it */
  void* block;      /* the block of a kept arrival, after the endpoint was closed; else NULL */
  struct sluice_stage_kept_s *previous, *next;
} sluice_stage_kept_t;

typedef struct sluice_stage_endpoint_s {
  sluice_messages_t* messages; /* NULL: closed */
  sluice_comm_t* comm;
  sluice_allocator_t memory;  /* for arriving messages */
  _Atomic int32_t references; /* the pipeline and the kept arrivals */
  _Atomic int32_t is_closing;
  pthread_mutex_t mutex; /* guards the list, and setting is_closing */
  sluice_stage_kept_t* kept;
} sluice_stage_endpoint_t;

/* The user word of a request: its kind, and the op or rank that it is for. */
enum {
  SLUICE_STAGE_REQUEST_SEND = 1, /* an op */
  SLUICE_STAGE_REQUEST_RECEIVE,  /* an op */
  SLUICE_STAGE_REQUEST_TELL,     /* a control message to a rank */
  SLUICE_STAGE_REQUEST_CONTROL,  /* the next control message of a rank */
  SLUICE_STAGE_REQUEST_DRAIN     /* a message of a rank in a batch that has failed */
};

static inline uint64_t sluice_stage_request(int32_t kind, int32_t index) {
  return (uint64_t)kind << 32 | (uint32_t)index;
}
static inline int32_t sluice_stage_request_kind(uint64_t user) { return (int32_t)(user >> 32); }
static inline int32_t sluice_stage_request_index(uint64_t user) { return (int32_t)(uint32_t)user; }

/* The endpoint has no messages yet. comm is retained. Returns NULL for NO_MEMORY. */
sluice_stage_endpoint_t* sluice_stage_endpoint_new(sluice_comm_t* comm);
/* Closes the endpoint. Accepts NULL. */
void sluice_stage_endpoint_close(sluice_stage_endpoint_t* endpoint);

/* Returns the peak of unreleased arrivals, in bytes, since it was last reset. Messages may arrive during the call. */
uint64_t sluice_stage_endpoint_peak(sluice_stage_endpoint_t* endpoint);

/* out_kept: with one holder, release with sluice_stage_kept_release. Errors: NO_MEMORY. */
sluice_status_t sluice_stage_keep(sluice_stage_endpoint_t* endpoint, sluice_message_arrival_t* arrival,
                                  const void* data, sluice_stage_kept_t** out_kept);
/* Removes one holder. Any thread. Accepts NULL. */
void sluice_stage_kept_release(sluice_stage_kept_t* kept);

/* ---- values ---- */

enum {
  SLUICE_STAGE_VALUE_INPUT = 0,   /* received */
  SLUICE_STAGE_VALUE_OUTPUT,      /* given by the host */
  SLUICE_STAGE_VALUE_OUTPUT_GRAD, /* received */
  SLUICE_STAGE_VALUE_INPUT_GRAD,  /* given by the host */
  SLUICE_STAGE_VALUE_COUNT
};

typedef struct sluice_stage_value_s {
  sluice_stage_tensors_t view;
  int32_t readers;   /* ops that have not ended; 0: the slot is empty */
  uint64_t bytes;    /* of the tensors */
  uint64_t since_ns; /* when it was received or sent; kept after the value is released */
  sluice_stage_packed_t packed;
  sluice_message_arrival_t* arrival;
  sluice_stage_kept_t* kept;
} sluice_stage_value_t;

/* Stores tensors that a host gave. Errors: as sluice_stage_pack. */
sluice_status_t sluice_stage_value_give(sluice_stage_value_t* value, const sluice_stage_tensors_t* given,
                                        const char* where, int32_t readers);
/* Stores the tensors of a message, whose memory belongs to the value from now on, even on an error. Errors: as
 * sluice_stage_unpack. */
sluice_status_t sluice_stage_value_arrive(sluice_stage_value_t* value, sluice_stage_endpoint_t* endpoint,
                                          const sluice_message_completion_t* completion, const char* where);
/* Removes one reader. Returns 1 if it was the last: the value is released, and tensors of the host may be returned. */
int sluice_stage_value_leave(sluice_stage_value_t* value, sluice_stage_endpoint_t* endpoint);
/* Releases the value, whatever readers it has. */
int sluice_stage_value_drop(sluice_stage_value_t* value, sluice_stage_endpoint_t* endpoint);
/* Errors: NO_MEMORY. */
sluice_status_t sluice_stage_value_keep(sluice_stage_value_t* value, sluice_stage_endpoint_t* endpoint,
                                        sluice_stage_kept_t** out_kept);
