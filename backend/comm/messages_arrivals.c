// SPDX-License-Identifier: Apache-2.0
/* Memory of arriving messages, and their matching with receives. */

#include "backend/base/math.h"
#include "backend/comm/comm_life.h"
#include "backend/comm/messages_state.h"

/* Each payload is preceded by the arrival itself and by room for the largest head. */
#define ARRIVAL_BYTES ((sizeof(sluice_message_arrival_t) + SLUICE_ALIGNMENT - 1) / SLUICE_ALIGNMENT * SLUICE_ALIGNMENT)
#define FRONT_BYTES   (ARRIVAL_BYTES + SLUICE_MESSAGE_MAX_HEAD_BYTES)
/* A block is reused for payloads down to half of its own size; small blocks are reused for all small payloads. */
#define SMALL_BYTES UINT64_C(65536)
#define MAX_BYTES   (UINT64_C(1) << 48) /* of one payload; a larger number is invalid */

void* sluice_messages_head_of(sluice_message_arrival_t* arrival) { return (char*)arrival + ARRIVAL_BYTES; }
void* sluice_messages_payload_of(sluice_message_arrival_t* arrival) { return (char*)arrival + FRONT_BYTES; }

/* ---- memory ------------------------------------------------------------------------------------------------------ */

/* Shapes change from one micro-batch to the next. Capacities are rounded up so that a block can be reused for similar
 * sizes. */
static uint64_t capacity_for(uint64_t bytes) {
  uint64_t step = SLUICE_ALIGNMENT;
  while (step * 16 < bytes) step *= 2;
  return sluice_round_up_u64(bytes, step);
}

static int serves(const sluice_message_arrival_t* arrival, uint64_t bytes) {
  return arrival->capacity >= bytes && (arrival->capacity <= SMALL_BYTES || arrival->capacity / 2 <= bytes);
}

/* Call with the mutex held. */
static sluice_message_arrival_t* take_free(sluice_messages_t* m, uint64_t bytes) {
  sluice_message_arrival_t* best = NULL;
  for (sluice_link_t* l = m->free_arrivals.next; l != &m->free_arrivals; l = l->next) {
    sluice_message_arrival_t* a = SLUICE_ENTRY_OF(l, sluice_message_arrival_t, place);
    if (serves(a, bytes) && (best == NULL || a->capacity < best->capacity)) best = a;
  }
  if (best == NULL) return NULL;
  sluice_list_remove(&best->place);
  m->free_arrival_bytes -= best->capacity;
  --m->num_free_arrivals;
  return best;
}

/* Call with the mutex held. Keeps the arrival for reuse, unless the kept memory would exceed the peak of memory in use.
 * Returns 0 if the caller must free it. */
static int keep_free(sluice_messages_t* m, sluice_message_arrival_t* arrival) {
  m->arrival_bytes -= arrival->capacity;
  const uint64_t kept = m->arrival_bytes + m->free_arrival_bytes + arrival->capacity;
  if (kept > m->peak_arrival_bytes || m->num_free_arrivals == SLUICE_MAX_FREE_ARRIVALS) {
    sluice_list_remove(&arrival->all);
    return 0;
  }
  sluice_list_append(&m->free_arrivals, &arrival->place);
  m->free_arrival_bytes += arrival->capacity;
  ++m->num_free_arrivals;
  return 1;
}

static void free_arrival(sluice_messages_t* m, sluice_message_arrival_t* arrival) {
  sluice_free(m->memory, arrival, FRONT_BYTES + arrival->capacity);
}

/* Frees unused blocks of other sizes to make room for a new block. */
static void free_unused(sluice_messages_t* m) {
  for (;;) {
    pthread_mutex_lock(&m->mutex);
    sluice_link_t* first = sluice_list_first(&m->free_arrivals);
    sluice_message_arrival_t* arrival = first != NULL ? SLUICE_ENTRY_OF(first, sluice_message_arrival_t, place) : NULL;
    if (arrival != NULL) {
      sluice_list_remove(&arrival->place);
      sluice_list_remove(&arrival->all);
      m->free_arrival_bytes -= arrival->capacity;
      --m->num_free_arrivals;
    }
    pthread_mutex_unlock(&m->mutex);
    if (arrival == NULL) return;
    free_arrival(m, arrival);
  }
}

void sluice_messages_free_arrivals(sluice_messages_t* m) {
  sluice_link_t* first;
  while ((first = sluice_list_first(&m->all_arrivals)) != NULL) {
    sluice_message_arrival_t* arrival = SLUICE_ENTRY_OF(first, sluice_message_arrival_t, all);
    sluice_list_remove(&arrival->all);
    free_arrival(m, arrival);
  }
}

/* Call with the mutex held. */
static int would_be_too_much(const sluice_messages_t* m, uint64_t bytes) {
  const uint64_t more = m->arrival_bytes + m->free_arrival_bytes + bytes;
  return m->num_free_arrivals > 0 && more > m->peak_arrival_bytes;
}

static sluice_message_arrival_t* allocate(sluice_messages_t* m, uint64_t bytes) {
  const uint64_t capacity = capacity_for(bytes);
  pthread_mutex_lock(&m->mutex);
  sluice_message_arrival_t* arrival = take_free(m, bytes);
  const int is_tight = arrival == NULL && would_be_too_much(m, capacity);
  pthread_mutex_unlock(&m->mutex);
  if (arrival == NULL) {
    if (is_tight) free_unused(m); /* the kept blocks do not fit the new message */
    arrival = sluice_alloc(m->memory, FRONT_BYTES + capacity, "message");
    if (arrival == NULL) return NULL;
    arrival->capacity = capacity;
    sluice_list_init(&arrival->place);
    sluice_list_init(&arrival->all);
  }
  pthread_mutex_lock(&m->mutex);
  if (arrival->all.next == &arrival->all) sluice_list_append(&m->all_arrivals, &arrival->all);
  m->arrival_bytes += arrival->capacity;
  m->peak_arrival_bytes = sluice_max_u64(m->peak_arrival_bytes, m->arrival_bytes);
  pthread_mutex_unlock(&m->mutex);
  return arrival;
}

/* ---- matching ---------------------------------------------------------------------------------------------------- */

static sluice_message_operation_t* find_receive(const sluice_messages_t* m, int32_t peer, uint64_t tag) {
  const sluice_link_t* list = &m->peers[peer].receives;
  for (sluice_link_t* l = list->next; l != list; l = l->next) {
    sluice_message_operation_t* o = SLUICE_ENTRY_OF(l, sluice_message_operation_t, place);
    if (o->tag == tag) return o;
  }
  return NULL;
}

static uint64_t bytes_of(const sluice_message_arrival_t* arrival) {
  return arrival->payload_bytes + arrival->head_bytes;
}

/* Call with the mutex held. */
static void uncount(sluice_messages_t* m, sluice_message_arrival_t* arrival) {
  if (arrival->is_counted) m->unexpected_bytes -= bytes_of(arrival);
  arrival->is_counted = 0;
}

sluice_message_arrival_t* sluice_messages_take_unexpected(sluice_messages_t* m, int32_t peer, uint64_t tag) {
  sluice_link_t* list = &m->peers[peer].unexpected;
  for (sluice_link_t* l = list->next; l != list; l = l->next) {
    sluice_message_arrival_t* a = SLUICE_ENTRY_OF(l, sluice_message_arrival_t, place);
    if (a->tag != tag) continue;
    sluice_list_remove(&a->place);
    uncount(m, a);
    return a;
  }
  return NULL;
}

static sluice_status_t refuse(sluice_messages_t* m, sluice_status_t status) {
  sluice_messages_fail(m, m->comm->rank);
  return status;
}

static sluice_status_t refuse_long(sluice_messages_t* m, int32_t peer, const sluice_frame_t* frame, uint64_t limit,
                                   const char* whose) {
  const int32_t rank = m->comm->rank;
  return refuse(
      m, SLUICE_FAIL_PEER(
             SLUICE_E_OVER_BUDGET, rank, peer,
             "rank %d announces a message of %llu bytes to rank %d (tag %#llx); %s at most %llu: rank %d is faulty, or "
             "the ranks run different configurations. These messages can no longer be used: close them on all ranks",
             peer, (unsigned long long)frame->payload_bytes, rank, (unsigned long long)frame->tag, whose,
             (unsigned long long)limit, peer));
}

sluice_status_t sluice_messages_arrive(sluice_messages_t* m, int32_t peer, const sluice_frame_t* frame,
                                       sluice_message_arrival_t** out_arrival) {
  *out_arrival = NULL;
  const int32_t rank = m->comm->rank;
  if (frame->kind != SLUICE_FRAME_MESSAGE || frame->head_bytes > SLUICE_MESSAGE_MAX_HEAD_BYTES ||
      frame->payload_bytes > MAX_BYTES) {
    return refuse(m, SLUICE_FAIL_PEER(SLUICE_E_INTERNAL, rank, peer,
                                      "rank %d received an invalid frame from rank %d (kind %#x, head of %u bytes, "
                                      "payload of %llu); please report it",
                                      rank, peer, (unsigned)frame->kind, (unsigned)frame->head_bytes,
                                      (unsigned long long)frame->payload_bytes));
  }
  const uint64_t bytes = frame->payload_bytes + frame->head_bytes;
  if (frame->payload_bytes > m->max_message_bytes)
    return refuse_long(m, peer, frame, m->max_message_bytes, "max_message_bytes is");
  pthread_mutex_lock(&m->mutex);
  const sluice_message_operation_t* receive = find_receive(m, peer, frame->tag);
  const int is_expected = receive != NULL;
  const uint64_t wanted = is_expected ? receive->max_bytes : UINT64_MAX;
  const uint64_t unexpected = m->unexpected_bytes;
  const int is_over = !is_expected && (bytes > m->max_unexpected_bytes || unexpected > m->max_unexpected_bytes - bytes);
  if (!is_expected && !is_over) m->unexpected_bytes += bytes;
  pthread_mutex_unlock(&m->mutex);
  if (frame->payload_bytes > wanted) return refuse_long(m, peer, frame, wanted, "its receive is for");
  if (is_over) {
    return refuse(m, SLUICE_FAIL_PEER(
                         SLUICE_E_OVER_BUDGET, rank, peer,
                         "rank %d holds %llu bytes of messages without a posted receive; %llu more from rank %d (tag "
                         "%#llx) exceed the limit of %llu: rank %d sends too far ahead, or max_unexpected_bytes is too "
                         "small. These messages can no longer be used: close them on all ranks",
                         rank, (unsigned long long)unexpected, (unsigned long long)bytes, peer,
                         (unsigned long long)frame->tag, (unsigned long long)m->max_unexpected_bytes, peer));
  }
  sluice_message_arrival_t* arrival = allocate(m, frame->payload_bytes);
  if (arrival == NULL) {
    const sluice_status_t why = sluice_alloc_status();
    if (!is_expected) {
      pthread_mutex_lock(&m->mutex);
      m->unexpected_bytes -= bytes;
      pthread_mutex_unlock(&m->mutex);
    }
    return refuse(
        m, SLUICE_FAIL_PEER(
               why, rank, peer,
               "rank %d has no memory for a message of %llu bytes from rank %d (tag %#llx): allow fewer micro-batches "
               "in flight, or more memory. These messages can no longer be used: close them on all ranks",
               rank, (unsigned long long)frame->payload_bytes, peer, (unsigned long long)frame->tag));
  }
  arrival->tag = frame->tag;
  arrival->payload_bytes = frame->payload_bytes;
  arrival->head_bytes = frame->head_bytes;
  arrival->peer = peer;
  arrival->is_counted = !is_expected;
  *out_arrival = arrival;
  return SLUICE_OK;
}

void sluice_messages_arrived(sluice_messages_t* m, sluice_message_arrival_t* arrival) {
  pthread_mutex_lock(&m->mutex);
  sluice_message_operation_t* receive = find_receive(m, arrival->peer, arrival->tag);
  if (receive != NULL) {
    uncount(m, arrival);
    receive->arrival = arrival;
    sluice_messages_complete(m, receive);
  } else {
    if (!arrival->is_counted) m->unexpected_bytes += bytes_of(arrival); /* its receive was cancelled */
    arrival->is_counted = 1;
    sluice_list_append(&m->peers[arrival->peer].unexpected, &arrival->place);
  }
  pthread_mutex_unlock(&m->mutex);
}

void sluice_messages_drop(sluice_messages_t* m, sluice_message_arrival_t* arrival) {
  if (arrival == NULL) return;
  pthread_mutex_lock(&m->mutex);
  uncount(m, arrival);
  const int is_kept = keep_free(m, arrival);
  pthread_mutex_unlock(&m->mutex);
  if (!is_kept) free_arrival(m, arrival);
}

void sluice_messages_forget(sluice_messages_t* m, sluice_message_arrival_t* arrival) {
  if (arrival == NULL) return;
  pthread_mutex_lock(&m->mutex);
  uncount(m, arrival);
  m->arrival_bytes -= arrival->capacity;
  sluice_list_remove(&arrival->all);
  pthread_mutex_unlock(&m->mutex);
}

void sluice_messages_release(sluice_messages_t* m, sluice_message_arrival_t* arrival) {
  if (arrival == NULL || sluice_comm_is_inherited(m->comm)) return;
  sluice_messages_drop(m, arrival);
}
