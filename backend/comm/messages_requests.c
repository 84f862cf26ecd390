// SPDX-License-Identifier: Apache-2.0
/* Sends and receives: how they start, and how they are cancelled. */
#include <stdatomic.h>
#include <string.h>

#include "backend/base/math.h"
#include "backend/comm/comm_life.h"
#include "backend/comm/messages_state.h"

/* ---- operations -------------------------------------------------------------------------------------------------- */

/* Gets an operation, from the free list if possible. Only the first calls on an endpoint allocate. Error: NO_MEMORY. */
static sluice_status_t get_operation(sluice_messages_t* m, sluice_message_operation_t** out_operation) {
  pthread_mutex_lock(&m->mutex);
  sluice_link_t* first = sluice_list_first(&m->free_operations);
  if (first != NULL) sluice_list_remove(first);
  pthread_mutex_unlock(&m->mutex);
  *out_operation = first != NULL ? SLUICE_ENTRY_OF(first, sluice_message_operation_t, place) : NULL;
  if (first != NULL) return SLUICE_OK;
  sluice_message_operation_t* o = sluice_alloc_zeroed(sluice_process_allocator(), sizeof *o, "message request");
  if (o == NULL) return sluice_alloc_status();
  sluice_list_init(&o->place);
  pthread_mutex_lock(&m->mutex);
  o->next_of_all = m->all_operations;
  m->all_operations = o;
  pthread_mutex_unlock(&m->mutex);
  *out_operation = o;
  return SLUICE_OK;
}

void sluice_messages_recycle(sluice_messages_t* m, sluice_message_operation_t* o) {
  sluice_list_remove(&o->place);
  o->number = 0;
  o->arrival = NULL;
  sluice_list_append(&m->free_operations, &o->place);
}

static void put_back(sluice_messages_t* m, sluice_message_operation_t* o) {
  pthread_mutex_lock(&m->mutex);
  sluice_messages_recycle(m, o);
  pthread_mutex_unlock(&m->mutex);
}

void sluice_messages_free_operations(sluice_messages_t* m) {
  sluice_message_operation_t* next;
  for (sluice_message_operation_t* o = m->all_operations; o != NULL; o = next) {
    next = o->next_of_all;
    sluice_free(sluice_process_allocator(), o->many, o->capacity * sizeof *o->many);
    sluice_free(sluice_process_allocator(), o, sizeof *o);
  }
  m->all_operations = NULL;
}

void sluice_messages_complete(sluice_messages_t* m, sluice_message_operation_t* o) {
  sluice_list_remove(&o->place);
  sluice_list_append(&m->completed, &o->place);
  pthread_cond_broadcast(&m->changed);
}

/* Call with the mutex held. If the endpoint fails after this, the next call reports it. */
static void number(sluice_messages_t* m, sluice_message_operation_t* o, sluice_message_request_t* out_request) {
  o->number = ++m->last_number;
  if (out_request != NULL) *out_request = o->number;
  atomic_fetch_add(&m->outstanding, 1);
}

/* Fails the endpoint if a rank has left that a request needs. */
static sluice_status_t check_left(sluice_messages_t* m) {
  pthread_mutex_lock(&m->mutex);
  const int32_t left = sluice_messages_find_left(m);
  pthread_mutex_unlock(&m->mutex);
  if (left < 0) return SLUICE_OK;
  (void)sluice_messages_record_loss(m, left, 0, "it has left");
  sluice_messages_fail(m, left);
  return sluice_messages_check(m);
}

static sluice_status_t check_peer(const sluice_messages_t* m, int32_t peer, const char* function) {
  return SLUICE_REQUIRE(peer >= 0 && peer < m->comm->world_size, "%s: peer %d of %d ranks; peers are [0, %d)", function,
                        peer, m->comm->world_size, m->comm->world_size);
}

/* ---- sends ------------------------------------------------------------------------------------------------------- */

/* Checks the spans. The receiver gets their sum as the size. */
static sluice_status_t check_message(const sluice_messages_t* m, const sluice_message_t* message,
                                     uint64_t* out_payload_bytes) {
  *out_payload_bytes = 0;
  SLUICE_TRY(check_peer(m, message->peer, "sluice_messages_send"));
  SLUICE_TRY(SLUICE_REQUIRE(message->head_bytes <= SLUICE_MESSAGE_MAX_HEAD_BYTES,
                            "sluice_messages_send: head_bytes is %llu; give at most %d",
                            (unsigned long long)message->head_bytes, SLUICE_MESSAGE_MAX_HEAD_BYTES));
  SLUICE_TRY(SLUICE_REQUIRE(message->head != NULL || message->head_bytes == 0,
                            "sluice_messages_send: head is NULL and head_bytes is %llu",
                            (unsigned long long)message->head_bytes));
  SLUICE_TRY(SLUICE_REQUIRE(message->num_spans >= 0 && message->num_spans <= SLUICE_MESSAGE_MAX_SPANS &&
                                (message->spans != NULL || message->num_spans == 0),
                            "sluice_messages_send: %d spans at %p; there may be 0 to %d, and a list for them",
                            message->num_spans, (const void*)message->spans, SLUICE_MESSAGE_MAX_SPANS));
  uint64_t bytes = 0;
  for (int32_t i = 0; i < message->num_spans; ++i) {
    const sluice_message_span_t* span = &message->spans[i];
    SLUICE_TRY(SLUICE_REQUIRE(span->data != NULL || span->bytes == 0,
                              "sluice_messages_send: span %d is NULL and has %llu bytes", i,
                              (unsigned long long)span->bytes));
    bytes = sluice_add_saturating(bytes, span->bytes);
  }
  SLUICE_TRY(SLUICE_REQUIRE(bytes < UINT64_C(1) << 48,
                            "sluice_messages_send: the payload has %llu bytes; give less than 2^48",
                            (unsigned long long)bytes));
  *out_payload_bytes = bytes;
  return SLUICE_OK;
}

static sluice_status_t reserve_spans(sluice_message_operation_t* o, int32_t num_spans) {
  if (num_spans <= SLUICE_FEW_SPANS || (uint64_t)num_spans <= o->capacity) return SLUICE_OK;
  const uint64_t capacity = sluice_round_up_u64((uint64_t)num_spans, 64);
  sluice_message_span_t* many = sluice_alloc(sluice_process_allocator(), capacity * sizeof *many, "spans of a message");
  if (many == NULL) return sluice_alloc_status();
  sluice_free(sluice_process_allocator(), o->many, o->capacity * sizeof *many);
  o->many = many;
  o->capacity = capacity;
  return SLUICE_OK;
}

static sluice_status_t fill(sluice_message_operation_t* o, const sluice_message_t* message, uint64_t payload_bytes) {
  SLUICE_TRY(reserve_spans(o, message->num_spans));
  sluice_message_span_t* spans = message->num_spans <= SLUICE_FEW_SPANS ? o->few : o->many;
  sluice_outgoing_t* out = &o->outgoing;
  int32_t num_spans = 0;
  for (int32_t i = 0; i < message->num_spans; ++i) {
    if (message->spans[i].bytes > 0) spans[num_spans++] = message->spans[i];
  }
  out->progress = 0;
  out->peer = message->peer;
  out->num_spans = num_spans;
  out->spans = spans;
  out->frame = (sluice_frame_t){.kind = SLUICE_FRAME_MESSAGE,
                                .head_bytes = (uint32_t)message->head_bytes,
                                .tag = message->tag,
                                .payload_bytes = payload_bytes};
  if (message->head_bytes > 0) memcpy(out->head, message->head, message->head_bytes);
  return SLUICE_OK;
}

/* Sends from this rank to itself, in place of a wire. */
static void send_to_self(sluice_messages_t* m, sluice_outgoing_t* out) {
  sluice_message_arrival_t* arrival;
  if (sluice_messages_arrive(m, out->peer, &out->frame, &arrival) != SLUICE_OK) return;
  memcpy(sluice_messages_head_of(arrival), out->head, out->frame.head_bytes);
  char* to = sluice_messages_payload_of(arrival);
  for (int32_t i = 0; i < out->num_spans; ++i) {
    memcpy(to, out->spans[i].data, out->spans[i].bytes);
    to += out->spans[i].bytes;
  }
  sluice_messages_arrived(m, arrival);
  sluice_messages_sent(m, out);
}

sluice_status_t sluice_messages_send(sluice_messages_t* m, const sluice_message_t* message, uint64_t user,
                                     sluice_message_request_t* out_request) {
  if (out_request != NULL) *out_request = 0;
  uint64_t payload_bytes;
  sluice_message_operation_t* o;
  SLUICE_TRY(check_message(m, message, &payload_bytes));
  SLUICE_TRY(sluice_messages_check(m));
  SLUICE_TRY(get_operation(m, &o));
  const sluice_status_t status = fill(o, message, payload_bytes);
  if (status != SLUICE_OK) {
    put_back(m, o);
    return status;
  }
  o->kind = SLUICE_MESSAGE_SENT;
  o->peer = message->peer;
  o->tag = message->tag;
  o->user = user;
  pthread_mutex_lock(&m->mutex);
  number(m, o, out_request);
  o->outgoing.number = o->number;
  sluice_list_append(&m->sends, &o->place);
  ++m->peers[o->peer].num_sending;
  pthread_mutex_unlock(&m->mutex);
  SLUICE_TRY(check_left(m));
  /* From here on the operation may have completed, and may already be reused for another request. */
  if (message->peer == m->comm->rank) {
    send_to_self(m, &o->outgoing);
  } else {
    m->wire->vtable->send(m->wire, &o->outgoing);
  }
  return SLUICE_OK;
}

void sluice_messages_set_gives_way(sluice_messages_t* m, int32_t gives_way) {
  if (m->wire != NULL && m->wire->vtable->give_way != NULL) m->wire->vtable->give_way(m->wire, gives_way);
}

void sluice_messages_sent(sluice_messages_t* m, sluice_outgoing_t* out) {
  pthread_mutex_lock(&m->mutex);
  if (out->number != 0) {
    sluice_message_operation_t* o = SLUICE_ENTRY_OF(out, sluice_message_operation_t, outgoing);
    --m->peers[o->peer].num_sending;
    sluice_messages_complete(m, o);
  } else {
    sluice_message_peer_t* p = &m->peers[out->peer];
    *(out == p->waits ? &p->waits_is_out : &p->goes_on_is_out) = 0;
  }
  pthread_mutex_unlock(&m->mutex);
}

/* ---- receives ---------------------------------------------------------------------------------------------------- */

sluice_status_t sluice_messages_receive(sluice_messages_t* m, int32_t peer, uint64_t tag, uint64_t user,
                                        sluice_message_request_t* out_request) {
  return sluice_messages_receive_up_to(m, peer, tag, UINT64_MAX, user, out_request);
}

sluice_status_t sluice_messages_receive_up_to(sluice_messages_t* m, int32_t peer, uint64_t tag, uint64_t max_bytes,
                                              uint64_t user, sluice_message_request_t* out_request) {
  if (out_request != NULL) *out_request = 0;
  sluice_message_operation_t* o;
  SLUICE_TRY(check_peer(m, peer, "sluice_messages_receive"));
  SLUICE_TRY(sluice_messages_check(m));
  SLUICE_TRY(get_operation(m, &o));
  o->kind = SLUICE_MESSAGE_RECEIVED;
  o->peer = peer;
  o->tag = tag;
  o->user = user;
  o->max_bytes = max_bytes;
  pthread_mutex_lock(&m->mutex);
  number(m, o, out_request);
  o->arrival = sluice_messages_take_unexpected(m, peer, tag);
  if (o->arrival != NULL) {
    sluice_messages_complete(m, o);
  } else {
    sluice_list_append(&m->peers[peer].receives, &o->place);
  }
  pthread_mutex_unlock(&m->mutex);
  return check_left(m);
}

/* ---- cancel ------------------------------------------------------------------------------------------------------ */

static sluice_message_operation_t* find_in(const sluice_link_t* list, uint64_t request) {
  for (sluice_link_t* l = list->next; l != list; l = l->next) {
    sluice_message_operation_t* o = SLUICE_ENTRY_OF(l, sluice_message_operation_t, place);
    if (o->number == request) return o;
  }
  return NULL;
}

/* Call with the mutex held. */
static void take_back(sluice_messages_t* m, sluice_message_operation_t* o) {
  sluice_messages_recycle(m, o);
  atomic_fetch_sub(&m->outstanding, 1);
}

int32_t sluice_outgoing_cancel(const sluice_link_t* queue, uint64_t request) {
  for (sluice_link_t* l = queue->next; l != queue; l = l->next) {
    const sluice_outgoing_t* out = SLUICE_ENTRY_OF(l, sluice_outgoing_t, place);
    if (out->number != request || out->progress > 0) continue;
    sluice_list_remove(l);
    return 1;
  }
  return 0;
}

static int32_t cancel_send(sluice_messages_t* m, int32_t peer, sluice_message_request_t request) {
  if (m->wire == NULL || m->wire->vtable->cancel == NULL) return 0;
  if (!m->wire->vtable->cancel(m->wire, peer, request)) return 0;
  /* The wire has returned it, so the operation is still in its list. */
  pthread_mutex_lock(&m->mutex);
  sluice_message_operation_t* o = find_in(&m->sends, request);
  if (o != NULL) {
    --m->peers[peer].num_sending;
    take_back(m, o);
  }
  pthread_mutex_unlock(&m->mutex);
  return o != NULL;
}

int32_t sluice_messages_cancel(sluice_messages_t* m, sluice_message_request_t request) {
  if (request == 0 || sluice_comm_is_inherited(m->comm)) return 0;
  int32_t peer = -1, is_back = 0;
  pthread_mutex_lock(&m->mutex);
  for (int32_t r = 0; r < m->comm->world_size && !m->is_failing && !is_back; ++r) {
    sluice_message_operation_t* receive = find_in(&m->peers[r].receives, request);
    if (receive == NULL) continue;
    take_back(m, receive);
    is_back = 1;
  }
  const sluice_message_operation_t* send = m->is_failing ? NULL : find_in(&m->sends, request);
  if (send != NULL) peer = send->peer;
  pthread_mutex_unlock(&m->mutex);
  return is_back || (peer >= 0 && cancel_send(m, peer, request));
}

int64_t sluice_messages_outstanding(const sluice_messages_t* m) { return atomic_load(&m->outstanding); }
