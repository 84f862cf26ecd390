// SPDX-License-Identifier: Apache-2.0
/* What a transport gives to carry messages (messages.h), and what it calls in return. The endpoint has all requests,
 * matching, memory and failures; a *wire* moves bytes.
 *
 * Locks. The endpoint calls a wire with none of its locks held. A wire may hold its own lock when it calls `sent`; when
 * it calls anything else below it holds none. */
#ifndef SLUICE_BACKEND_COMM_MESSAGES_WIRE_H_
#define SLUICE_BACKEND_COMM_MESSAGES_WIRE_H_

#include "backend/comm/messages.h"

enum {
  SLUICE_FRAME_MESSAGE = 0x736c756d,
  /* The sender waits for rank `tag`; none: UINT64_MAX. */
  SLUICE_FRAME_WAITS = 0x736c7577,
  SLUICE_FRAME_LEAVES = 0x736c7565, /* the sender is through: nothing follows */
  SLUICE_FRAME_LOST = 0x736c756c    /* the sender gives up, since it has lost rank `tag` */
};

/* Goes ahead of a message: fixed size, this machine's byte order. head_bytes of the head and payload_bytes follow. */
typedef struct sluice_frame_s {
  uint32_t kind; /* SLUICE_FRAME_* */
  uint32_t head_bytes;
  uint64_t tag;
  uint64_t payload_bytes;
} sluice_frame_t;

/* One message on its way out. The endpoint's; a wire has it from `send` until it calls `sent`, gives it back by
 * `cancel`, or `fail` or `close` has returned. */
typedef struct sluice_outgoing_s {
  struct sluice_outgoing_s* next; /* the wire's, as the next one */
  uint64_t progress;              /* 0 when the wire gets it */
  uint64_t number;                /* of the request; 0: none, a frame of the endpoint's own */
  int32_t peer;                   /* never the own rank */
  int32_t num_spans;
  const sluice_message_span_t* spans;
  sluice_frame_t frame; /* and directly after it: */
  unsigned char head[SLUICE_MESSAGE_MAX_HEAD_BYTES];
} sluice_outgoing_t;

typedef struct sluice_wire_s sluice_wire_t;

typedef struct sluice_wire_vtable_s {
  /* Sends frame, head and payload, after what it got before for this peer. Never waits for the peer. */
  void (*send)(sluice_wire_t* wire, sluice_outgoing_t* outgoing);
  /* Gives the message of this number back: 1, and nothing of it has gone out or will. 0: it has begun, or is not here.
   * Never waits. */
  int32_t (*cancel)(sluice_wire_t* wire, int32_t peer, uint64_t number);
  /* What goes out from now on gives way to all else of this process, or does not any more. NULL: it cannot. */
  void (*give_way)(sluice_wire_t* wire, int32_t gives_way);
  /* The endpoint has failed, once; `culprit`: the rank at fault, maybe the own one. Tells the peers, as far as it can
   * at once. When it returns nothing reads spans any more. From any thread, the wire's own too. */
  void (*fail)(sluice_wire_t* wire, int32_t culprit);
  /* Ends threads and releases all. is_orderly: the endpoint has not failed; what `sent` was called for reaches the
   * peers, and they hear that this rank leaves, where no half of a message stands in the way. */
  void (*close)(sluice_wire_t* wire, int32_t is_orderly);
} sluice_wire_vtable_t;

struct sluice_wire_s {
  const sluice_wire_vtable_t* vtable;
};

/* ---- what wires call, from any thread ---------------------------------------------------------------------------- */

struct sluice_message_arrival_s;

/* A message from `peer` begins. out_arrival: memory for head and payload (sluice_messages_head_of, _payload_of), to be
 * given back by `arrived` or `drop`. On an error the endpoint has failed. */
sluice_status_t sluice_messages_arrive(sluice_messages_t* messages, int32_t peer, const sluice_frame_t* frame,
                                       sluice_message_arrival_t** out_arrival);
void* sluice_messages_head_of(sluice_message_arrival_t* arrival);    /* frame.head_bytes */
void* sluice_messages_payload_of(sluice_message_arrival_t* arrival); /* frame.payload_bytes */
/* All of it is there. Messages of one peer arrive in the order in which it sent them. */
void sluice_messages_arrived(sluice_messages_t* messages, sluice_message_arrival_t* arrival);
/* The rest of it will not come. Accepts NULL. */
void sluice_messages_drop(sluice_messages_t* messages, sluice_message_arrival_t* arrival);
/* The transport may write into it for as long as the process lives: it is never freed. Accepts NULL. */
void sluice_messages_forget(sluice_messages_t* messages, sluice_message_arrival_t* arrival);
/* Any other frame of `peer`; one of no known kind fails the endpoint. That a peer leaves is told when `sent` has been
 * called for all that it can have received: a send that is not over then has lost it. */
void sluice_messages_hear(sluice_messages_t* messages, int32_t peer, const sluice_frame_t* frame);
/* The wire needs the memory of this message no more, and delivers it also when the endpoint is closed now. */
void sluice_messages_sent(sluice_messages_t* messages, sluice_outgoing_t* outgoing);
/* The endpoint fails with this thread's error record; the first failure stays. `culprit` as in the vtable's fail. */
void sluice_messages_fail(sluice_messages_t* messages, int32_t culprit);
/* The record of a loss, for sluice_messages_fail. how: "its connection was closed". Returns PEER_LOST. */
sluice_status_t sluice_messages_record_loss(const sluice_messages_t* messages, int32_t peer, int32_t native_error,
                                            const char* how);
int sluice_messages_has_failed(sluice_messages_t* messages);

#endif /* SLUICE_BACKEND_COMM_MESSAGES_WIRE_H_ */
