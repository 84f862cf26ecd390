// SPDX-License-Identifier: Apache-2.0
/* A communicator with one real rank, for fuzz targets. The other ranks answer each exchange with the real rank's own
 * data, which a test may change, and send the messages that the test chooses. All runs on the calling thread. */
#pragma once

#include "backend/comm/comm.h"
#include "backend/comm/messages.h"
#include "backend/comm/messages_wire.h"

typedef struct said_s {
  sluice_comm_t base; /* sluice_comm_release does not free it */
  sluice_wire_t wire;
  sluice_messages_t* messages; /* the real rank's endpoint, while it is open */
  /* Changes a record of `bytes` that `rank` returns to the real rank; NULL: records are returned unchanged. */
  void (*answer)(int32_t rank, void* record, uint64_t bytes);
  /* Called when the real rank has sent a message. May be NULL. */
  void (*heard)(struct said_s* said, const sluice_outgoing_t* out);
} said_t;

/* timeout_ns: of waits that no rank ends. */
void said_init(said_t* said, int32_t rank, int32_t world_size, uint64_t timeout_ns);

/* Delivers a message from `peer`, if the real rank's endpoint is open and has not failed. */
void said_message(said_t* said, int32_t peer, uint64_t tag, const void* head, uint64_t head_bytes, const void* payload,
                  uint64_t payload_bytes);
void said_frame(said_t* said, int32_t peer, const sluice_frame_t* frame);
/* All other ranks leave, so that waits for them fail at once. */
void said_all_leave(said_t* said);
