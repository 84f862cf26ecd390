// SPDX-License-Identifier: Apache-2.0
/* What lies in the slots of a stage while a batch runs: tensors that the host gave, and those that arrived, each until
 * its last reader has ended. Private to backend/pipeline/run. */
#ifndef SLUICE_BACKEND_PIPELINE_RUN_VALUES_H_
#define SLUICE_BACKEND_PIPELINE_RUN_VALUES_H_

#include "backend/pipeline/run/endpoint.h"
#include "backend/pipeline/run/wire.h"

enum {
  SLUICE_STAGE_VALUE_INPUT = 0,   /* arrived */
  SLUICE_STAGE_VALUE_OUTPUT,      /* the host's */
  SLUICE_STAGE_VALUE_OUTPUT_GRAD, /* arrived */
  SLUICE_STAGE_VALUE_INPUT_GRAD,  /* the host's */
  SLUICE_STAGE_VALUE_COUNT
};

typedef struct sluice_stage_value_s {
  sluice_stage_tensors_t view;
  int32_t readers;   /* ops that have not ended; 0: nothing lies here */
  uint64_t bytes;    /* of the tensors */
  uint64_t since_ns; /* when it was taken or sent; stays when the value goes */
  sluice_stage_packed_t packed;
  sluice_message_arrival_t* arrival;
  sluice_stage_kept_t* kept;
} sluice_stage_value_t;

/* From what a host gave. Errors: as sluice_stage_pack. */
sluice_status_t sluice_stage_value_give(sluice_stage_value_t* value, const sluice_stage_tensors_t* given,
                                        const char* where, int32_t readers);
/* From a message, whose memory is the value's from now on, also where this fails. Errors: as sluice_stage_unpack. */
sluice_status_t sluice_stage_value_arrive(sluice_stage_value_t* value, sluice_stage_endpoint_t* endpoint,
                                          const sluice_message_completion_t* completion, const char* where);
/* One reader less. Returns 1 where it was the last: the value is gone, and where the host gave tensors it may have them
 * back. */
int sluice_stage_value_leave(sluice_stage_value_t* value, sluice_stage_endpoint_t* endpoint);
/* The same whoever reads it. */
int sluice_stage_value_drop(sluice_stage_value_t* value, sluice_stage_endpoint_t* endpoint);
/* Errors: NO_MEMORY. */
sluice_status_t sluice_stage_value_keep(sluice_stage_value_t* value, sluice_stage_endpoint_t* endpoint,
                                        sluice_stage_kept_t** out_kept);

#endif /* SLUICE_BACKEND_PIPELINE_RUN_VALUES_H_ */
