// SPDX-License-Identifier: Apache-2.0
/* A communicator of which one rank is real, for fuzz targets: the others answer its exchanges with its own words, and
 * their messages are what a test says. Everything happens on the calling thread. */
#ifndef SLUICE_BACKEND_COMM_TEST_SAID_H_
#define SLUICE_BACKEND_COMM_TEST_SAID_H_

#include "backend/comm/comm.h"
#include "backend/comm/messages.h"
#include "backend/comm/messages_wire.h"

typedef struct said_s {
  sluice_comm_t base; /* the communicator: sluice_comm_release does not free it */
  sluice_wire_t wire;
  sluice_messages_t* messages; /* of the real rank, while it has some */
  /* Before a record of `bytes` goes from `rank` to the real one; NULL: it is the real rank's own. */
  void (*answer)(int32_t rank, void* record, uint64_t bytes);
  /* The real rank has sent a message. May be NULL. */
  void (*heard)(struct said_s* said, const sluice_outgoing_t* out);
} said_t;

/* timeout_ns: of waits that no rank ends. */
void said_init(said_t* said, int32_t rank, int32_t world_size, uint64_t timeout_ns);

/* What `peer` says, if the real rank has messages and they have not failed. */
void said_message(said_t* said, int32_t peer, uint64_t tag, const void* head, uint64_t head_bytes, const void* payload,
                  uint64_t payload_bytes);
void said_frame(said_t* said, int32_t peer, const sluice_frame_t* frame);
/* Every other rank leaves: who waits for one then fails at once. */
void said_all_leave(said_t* said);

#endif /* SLUICE_BACKEND_COMM_TEST_SAID_H_ */
