// SPDX-License-Identifier: Apache-2.0
/* The messages between stages, as bytes: heads, tags, and lists of tensors. All ranks have the same build, so structs
 * are sent as they are. Private to backend/pipeline/run. */
#pragma once

#include "backend/comm/messages.h"
#include "backend/pipeline/program.h"
#include "sluice/pipeline.h"

enum {
  SLUICE_STAGE_HEAD_TENSORS = 1, /* an activation or a gradient */
  SLUICE_STAGE_HEAD_DONE,        /* all ops of the sender's batch have ended. Payload: sluice_stage_times_t [v], then
                                    the host's note, doubles */
  SLUICE_STAGE_HEAD_STOP,        /* the batch has failed. Payload: the tags of the sender's messages to the receiver */
  SLUICE_STAGE_HEAD_WAITING,     /* the sender has waited long for rank `about` */
  SLUICE_STAGE_HEAD_ORDER        /* the first replica has begun op `about` */
};

typedef struct sluice_stage_head_s {
  uint32_t magic; /* SLUICE_STAGE_MAGIC */
  int32_t kind;   /* SLUICE_STAGE_HEAD_* */
  uint64_t batch; /* its number on every rank, from 1 */
  uint64_t program;
  int32_t num_micro_batches;
  int32_t forward_only;
  int32_t num_tensors;
  int32_t about;
  uint64_t word;     /* the host's */
  uint64_t dwell_ns; /* of a gradient: time since the activation of this micro-batch was received; not counted as time
                        of the link */
} sluice_stage_head_t;

#define SLUICE_STAGE_MAGIC 0x45564c53u /* "SLVE" */

/* Why a batch has failed; follows the head of a STOP. */
typedef struct sluice_stage_reason_s {
  int32_t status;
  int32_t rank; /* the rank that failed, or that was lost */
  int32_t native_code;
  int32_t is_final; /* the pipeline ends */
  char message[768];
} sluice_stage_reason_t;

/* Seconds of one micro-batch in a virtual stage, and of its message to the next one; 0: not measured. */
typedef struct sluice_stage_times_s {
  double forward_s, backward_s, weight_s, link_s;
  uint64_t message_bytes;
} sluice_stage_times_t;

/* Returns the tag of the message of which op, a send or a receive, is one end: the same at both ends. */
uint64_t sluice_stage_tag(uint64_t batch, const sluice_stage_op_t* op);
/* The tag of all control messages; those of one peer arrive in the order in which they were sent. */
#define SLUICE_STAGE_CONTROL_TAG UINT64_MAX
/* The largest one: more than the times of 128 virtual stages and metadata, or the tags of 2048 sends. */
#define SLUICE_STAGE_CONTROL_BYTES UINT64_C(65536)

/* ---- lists of tensors ---- */

/* Tensors of a host in a block of memory: descriptors, and spans that send them. The host owns the data. */
typedef struct sluice_stage_packed_s {
  sluice_tensor_t* tensors;
  const sluice_message_span_t* spans;
  int32_t num_spans;
  uint64_t tensor_bytes;
  void* block;
  uint64_t block_bytes;
} sluice_stage_packed_t;

/* where: "the output of micro-batch 3 in virtual stage 1". out_packed: release with sluice_stage_packed_free. Errors:
 * INVALID_ARGUMENT (a tensor that cannot be sent: names it and says why), NO_MEMORY. */
sluice_status_t sluice_stage_pack(const sluice_stage_tensors_t* given, const char* where,
                                  sluice_stage_packed_t* out_packed);
void sluice_stage_packed_free(sluice_stage_packed_t* packed);

/* Turns a payload into tensors in place, if it is valid. out_bytes: of the tensors. Errors: INTERNAL naming `where`. */
sluice_status_t sluice_stage_unpack(void* payload, uint64_t bytes, int32_t num_tensors, const char* where,
                                    sluice_tensor_t** out_tensors, uint64_t* out_bytes);
