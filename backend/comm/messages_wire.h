// SPDX-License-Identifier: Apache-2.0
/* The interface between a transport and the messages that it carries (messages.h). The endpoint implements requests,
 * matching, memory and failures; a *wire* moves bytes.
 *
 * Locks. The endpoint holds none of its locks when it calls a wire. A wire may hold its own lock when it calls `sent`;
 * when it calls any other function below, it holds none. */
#pragma once

#include <stddef.h>

#include "backend/comm/messages.h"

/* The head of an intrusive list, or a link in an entry, which is removed in one step wherever it is. A link is in one
 * list, or points to itself. */
typedef struct sluice_link_s {
  struct sluice_link_s* prev;
  struct sluice_link_s* next;
} sluice_link_t;

#define SLUICE_ENTRY_OF(link, type, member) ((type*)(void*)((char*)(link)-offsetof(type, member)))

static inline void sluice_list_init(sluice_link_t* list) { list->prev = list->next = list; }

static inline void sluice_list_append(sluice_link_t* list, sluice_link_t* link) {
  link->prev = list->prev;
  link->next = list;
  list->prev->next = link;
  list->prev = link;
}

static inline void sluice_list_remove(sluice_link_t* link) {
  link->prev->next = link->next;
  link->next->prev = link->prev;
  sluice_list_init(link);
}

/* Returns the oldest entry, or NULL. */
static inline sluice_link_t* sluice_list_first(const sluice_link_t* list) {
  return list->next != list ? list->next : NULL;
}

enum {
  SLUICE_FRAME_MESSAGE = 0x736c756d,
  /* The sender waits for rank `tag`; UINT64_MAX: for none. */
  SLUICE_FRAME_WAITS = 0x736c7577,
  SLUICE_FRAME_LEAVES = 0x736c7565, /* the sender leaves: nothing follows */
  SLUICE_FRAME_LOST = 0x736c756c    /* the sender gives up because it has lost rank `tag` */
};

/* Precedes each message: fixed size, native byte order. Followed by head_bytes of head and payload_bytes of payload. */
typedef struct sluice_frame_s {
  uint32_t kind; /* SLUICE_FRAME_* */
  uint32_t head_bytes;
  uint64_t tag;
  uint64_t payload_bytes;
} sluice_frame_t;

/* An outgoing message. It belongs to the endpoint. A wire may use it from `send` until the wire calls `sent`, returns
 * it in `cancel`, or returns from `fail` or `close`. */
typedef struct sluice_outgoing_s {
  sluice_link_t place; /* in the wire's queue */
  uint64_t progress;   /* for the wire; 0 at the call of `send`, and until it begins to send */
  uint64_t number;     /* of the request; 0: a frame of the endpoint itself */
  int32_t peer;        /* never the own rank */
  int32_t num_spans;
  const sluice_message_span_t* spans;
  sluice_frame_t frame; /* directly followed by: */
  unsigned char head[SLUICE_MESSAGE_MAX_HEAD_BYTES];
} sluice_outgoing_t;

/* A queue of outgoing messages to one peer is a list, for wires that send them one after the other. Returns the oldest,
 * or NULL. */
static inline sluice_outgoing_t* sluice_outgoing_first(const sluice_link_t* queue) {
  sluice_link_t* first = sluice_list_first(queue);
  return first != NULL ? SLUICE_ENTRY_OF(first, sluice_outgoing_t, place) : NULL;
}
/* Removes the message with this number if nothing of it was sent. Returns whether it did. */
int32_t sluice_outgoing_cancel(const sluice_link_t* queue, uint64_t number);

typedef struct sluice_wire_s sluice_wire_t;

typedef struct sluice_wire_vtable_s {
  /* Sends frame, head and payload, after earlier messages for this peer. Never waits for the peer. */
  void (*send)(sluice_wire_t* wire, sluice_outgoing_t* outgoing);
  /* Cancels the message with this number. Returns 1 if nothing of it was or will be sent; 0 if it has begun, or is not
   * queued here. Never waits. NULL: always 0, since `send` sends at once. */
  int32_t (*cancel)(sluice_wire_t* wire, int32_t peer, uint64_t number);
  /* From now on, sends give way to all other traffic of this process (1), or share with it (0). NULL: not supported. */
  void (*give_way)(sluice_wire_t* wire, int32_t gives_way);
  /* The endpoint has failed, once; `culprit`: the rank at fault, possibly this one. Tells the peers if that is possible
   * at once. When it returns, nothing reads spans any more. Any thread, including the wire's own. */
  void (*fail)(sluice_wire_t* wire, int32_t culprit);
  /* Ends threads and releases everything. is_orderly: the endpoint has not failed; messages for which `sent` was called
   * still reach the peers, and the peers are told that this rank leaves, unless a half-sent message prevents that. */
  void (*close)(sluice_wire_t* wire, int32_t is_orderly);
} sluice_wire_vtable_t;

struct sluice_wire_s {
  const sluice_wire_vtable_t* vtable;
};

/* ---- called by wires, from any thread ---------------------------------------------------------------------------- */

struct sluice_message_arrival_s;

/* A message from `peer` begins. out_arrival: memory for head and payload (sluice_messages_head_of, _payload_of), to be
 * returned with `arrived` or `drop`. After an error the endpoint has failed. */
sluice_status_t sluice_messages_arrive(sluice_messages_t* messages, int32_t peer, const sluice_frame_t* frame,
                                       sluice_message_arrival_t** out_arrival);
void* sluice_messages_head_of(sluice_message_arrival_t* arrival);    /* frame.head_bytes */
void* sluice_messages_payload_of(sluice_message_arrival_t* arrival); /* frame.payload_bytes */
/* The message is complete. Messages of one peer arrive in the order in which they were sent. */
void sluice_messages_arrived(sluice_messages_t* messages, sluice_message_arrival_t* arrival);
/* The rest of the message will not come. Accepts NULL. */
void sluice_messages_drop(sluice_messages_t* messages, sluice_message_arrival_t* arrival);
/* The transport may write into it until the process ends, so it is never freed. Accepts NULL. */
void sluice_messages_forget(sluice_messages_t* messages, sluice_message_arrival_t* arrival);
/* Handles any other frame of `peer`; an unknown kind fails the endpoint. Report that a peer leaves only after calling
 * `sent` for everything that it can have received: a send that has not completed then counts as lost. */
void sluice_messages_hear(sluice_messages_t* messages, int32_t peer, const sluice_frame_t* frame);
/* The wire no longer needs the memory of this message, and delivers it even if the endpoint is closed now. */
void sluice_messages_sent(sluice_messages_t* messages, sluice_outgoing_t* outgoing);
/* Fails the endpoint with this thread's error record; only the first failure is kept. `culprit` as in the vtable's
 * fail. */
void sluice_messages_fail(sluice_messages_t* messages, int32_t culprit);
/* Records a loss, for sluice_messages_fail. how: "its connection was closed". Returns PEER_LOST. */
sluice_status_t sluice_messages_record_loss(const sluice_messages_t* messages, int32_t peer, int32_t native_error,
                                            const char* how);
int sluice_messages_has_failed(sluice_messages_t* messages);
