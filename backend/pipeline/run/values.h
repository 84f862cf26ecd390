// SPDX-License-Identifier: Apache-2.0
/* The contents of a stage's slots during a batch: tensors that the host gave, and tensors that arrived, each until its
 * last reader has ended. Private to backend/pipeline/run. */
#pragma once

#include "backend/pipeline/run/endpoint.h"
#include "backend/pipeline/run/wire.h"

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
