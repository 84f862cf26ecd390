// SPDX-License-Identifier: Apache-2.0
/* Messages between ranks that are threads: the sender copies into memory of the receiver's endpoint and tells that
 * endpoint that the message has arrived. A message has arrived when its send returns, whatever the receiver does, and
 * no thread is needed. */
#include <string.h>

#include "backend/comm/local/local_group.h"
#include "backend/comm/messages_wire.h"

typedef struct local_wire_s {
  sluice_wire_t base;
  local_comm_t* comm;
  sluice_messages_t* messages;
  int32_t users;   /* number of threads that use it now; guarded by the group's mutex, as is `is_dead` */
  int32_t is_dead; /* nothing is sent or received any more */
} local_wire_t;

static local_wire_t* downcast(sluice_wire_t* wire) { return (local_wire_t*)wire; }

/* Returns that rank's end, which exists until `leave`; NULL: there is none any more. */
static local_wire_t* enter(local_wire_t* wire, int32_t peer) {
  sluice_local_group_t* group = wire->comm->group;
  pthread_mutex_lock(&group->mutex);
  local_wire_t* there = wire->is_dead ? NULL : downcast(group->ends[peer].wire);
  if (there != NULL && there->is_dead) there = NULL;
  if (there != NULL) ++there->users;
  pthread_mutex_unlock(&group->mutex);
  return there;
}

static void leave(local_wire_t* there) {
  sluice_local_group_t* group = there->comm->group;
  pthread_mutex_lock(&group->mutex);
  --there->users;
  pthread_cond_broadcast(&group->changed);
  pthread_mutex_unlock(&group->mutex);
}

/* An error of the delivery fails the receiver's endpoint, which tells this one. */
static void deliver(local_wire_t* there, int32_t from, const sluice_outgoing_t* out) {
  sluice_message_arrival_t* arrival;
  if (out->frame.kind != SLUICE_FRAME_MESSAGE) {
    sluice_messages_hear(there->messages, from, &out->frame);
    return;
  }
  if (sluice_messages_arrive(there->messages, from, &out->frame, &arrival) != SLUICE_OK) return;
  memcpy(sluice_messages_head_of(arrival), out->head, out->frame.head_bytes);
  char* to = sluice_messages_payload_of(arrival);
  for (int32_t i = 0; i < out->num_spans; ++i) {
    memcpy(to, out->spans[i].data, out->spans[i].bytes);
    to += out->spans[i].bytes;
  }
  sluice_messages_arrived(there->messages, arrival);
}

static void local_send(sluice_wire_t* base, sluice_outgoing_t* out) {
  local_wire_t* wire = downcast(base);
  local_wire_t* there = enter(wire, out->peer);
  if (there == NULL) return; /* it has left or failed: this endpoint has been told */
  deliver(there, wire->comm->base.rank, out);
  sluice_messages_sent(wire->messages, out); /* before that rank can say that it leaves */
  leave(there);
}

static void tell_all(local_wire_t* wire, const sluice_frame_t* frame) {
  for (int32_t r = 0; r < wire->comm->base.world_size; ++r) {
    local_wire_t* there = r != wire->comm->base.rank ? enter(wire, r) : NULL;
    if (there == NULL) continue;
    sluice_messages_hear(there->messages, wire->comm->base.rank, frame);
    leave(there);
  }
}

static void local_fail(sluice_wire_t* base, int32_t culprit) {
  local_wire_t* wire = downcast(base);
  const sluice_frame_t lost = {.kind = SLUICE_FRAME_LOST, .tag = (uint64_t)culprit};
  sluice_error_info_t why; /* saved, because this thread may report for other endpoints than its own */
  sluice_error_capture(&why);
  tell_all(wire, &lost);
  (void)sluice_error_adopt(&why);
  pthread_mutex_lock(&wire->comm->group->mutex);
  wire->is_dead = 1;
  pthread_mutex_unlock(&wire->comm->group->mutex);
}

static void local_close(sluice_wire_t* base, int32_t is_orderly) {
  local_wire_t* wire = downcast(base);
  sluice_local_group_t* group = wire->comm->group;
  const sluice_frame_t leaves = {.kind = SLUICE_FRAME_LEAVES};
  pthread_mutex_lock(&group->mutex);
  group->ends[wire->comm->base.rank].wire = NULL;
  while (wire->users > 0) pthread_cond_wait(&group->changed, &group->mutex);
  pthread_mutex_unlock(&group->mutex);
  if (is_orderly) tell_all(wire, &leaves); /* now: a receiver of a message knows that the send has completed */
  sluice_free(sluice_process_allocator(), wire, sizeof *wire);
}

sluice_status_t sluice_local_messages_open(sluice_comm_t* base, sluice_messages_t* messages, sluice_wire_t** out_wire) {
  static const sluice_wire_vtable_t vtable = {.send = local_send, .fail = local_fail, .close = local_close};
  local_comm_t* comm = sluice_local_downcast(base);
  local_wire_t* wire = sluice_alloc_zeroed(sluice_process_allocator(), sizeof *wire, "messages");
  *out_wire = NULL;
  if (wire == NULL) return sluice_alloc_status();
  *wire = (local_wire_t){.base = {.vtable = &vtable}, .comm = comm, .messages = messages};
  *out_wire = &wire->base; /* set before other ranks find it and may fail the endpoint, which calls this wire */
  pthread_mutex_lock(&comm->group->mutex);
  comm->group->ends[base->rank].wire = &wire->base;
  pthread_mutex_unlock(&comm->group->mutex);
  return SLUICE_OK;
}
