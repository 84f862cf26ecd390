// SPDX-License-Identifier: Apache-2.0
#include "backend/comm/host/host_messages.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/clock.h"
#include "backend/base/math.h"

/* Transports send smaller messages eagerly, without waiting for the receive. */
enum { FRONT_BYTES = 2048, INLINE_BYTES = FRONT_BYTES - sizeof(sluice_frame_t) };

#define PART_BYTES  (UINT64_C(1) << 30) /* of one message of the host */
#define LINGER_NS   UINT64_C(2000000000)
#define FAREWELL_NS UINT64_C(200000000)
#define MIN_NAP_NS  UINT64_C(20000)
#define MAX_NAP_NS  UINT64_C(500000) /* bounds the cost of an idle endpoint to two thousand polls per second */

/* The first message of each frame: fixed size. */
typedef struct front_s {
  sluice_frame_t frame;
  unsigned char inside[INLINE_BYTES]; /* the head, then the payload if it fits */
} front_t;

/* A message that is being sent, in memory of its own. */
typedef struct departure_s {
  sluice_outgoing_t* outgoing; /* NULL: a frame of the wire itself, or the endpoint has failed */
  uint64_t bytes;              /* after the front */
  uint64_t offset;             /* start of the part that is being sent */
  void* request;               /* for the front, then for each part; NULL: not started */
  int32_t is_front_out;
  front_t front;
  unsigned char payload[];
} departure_t;

typedef struct host_peer_s {
  sluice_link_t queue;
  departure_t* departure; /* of the first in the queue, until it is sent; NULL: none */
  sluice_frame_t word;    /* of the wire itself, to be sent after the queue; kind 0: none */
  void* request;          /* incoming: for the front, or for a part of the payload; NULL: no more can be posted */
  sluice_message_arrival_t* arrival;
  unsigned char* trash; /* receives the payload after the endpoint has failed */
  uint64_t offset;
  int32_t is_front_in;
  int32_t is_over;      /* the peer has said that nothing follows */
  uint64_t farewell_ns; /* when the peer said that it leaves, until the endpoint is told; else 0 */
  front_t front;
} host_peer_t;

typedef struct host_wire_s {
  sluice_wire_t base;
  sluice_messages_t* messages;
  const sluice_sized_messages_t* host;
  void* endpoint;
  const char* name;
  int32_t rank;
  int32_t world_size;
  uint64_t bytes;
  pthread_t thread;
  int32_t has_thread;
  pthread_mutex_t mutex; /* guards all members below, and is held while the host is called */
  pthread_cond_t changed;
  int32_t is_dead;
  int32_t is_closing;
  uint64_t closing_ns;
  int32_t is_dirty; /* a message may be in flight that will not be received */
  int32_t is_held;  /* the transport may write into this block until the process ends */
  host_peer_t peers[];
} host_wire_t;

static host_wire_t* downcast(sluice_wire_t* wire) { return (host_wire_t*)wire; }

static sluice_status_t record(const host_wire_t* wire, sluice_status_t status, int32_t peer,
                              sluice_host_failure_t* failure) {
  failure->message[sizeof failure->message - 1] = '\0';
  if (status == SLUICE_E_PEER_LOST) {
    return sluice_messages_record_loss(wire->messages, peer, failure->native_code, failure->message);
  }
  return sluice_error_record(status, wire->rank, peer, failure->native_code,
                             "rank %d: messages over %s failed, with rank %d: %s", wire->rank, wire->name, peer,
                             failure->message);
}

/* ---- out --------------------------------------------------------------------------------------------------------- */

/* Copies the head and payload. Uses malloc rather than the allocator: memory that the transport cannot release stays in
 * use until the process ends. */
static departure_t* pack(const sluice_outgoing_t* out) {
  const uint64_t inside = out->frame.head_bytes + out->frame.payload_bytes;
  const uint64_t bytes = inside <= INLINE_BYTES ? 0 : out->frame.payload_bytes;
  departure_t* d = malloc(sizeof *d + bytes);
  if (d == NULL) return NULL;
  memset(d, 0, sizeof *d);
  d->bytes = bytes;
  d->front.frame = out->frame;
  memcpy(d->front.inside, out->head, out->frame.head_bytes);
  unsigned char* to = bytes > 0 ? d->payload : d->front.inside + out->frame.head_bytes;
  for (int32_t i = 0; i < out->num_spans; ++i) {
    memcpy(to, out->spans[i].data, out->spans[i].bytes);
    to += out->spans[i].bytes;
  }
  return d;
}

/* Makes a departure of the next message or frame for this peer, if there is one. */
static sluice_status_t depart(host_wire_t* wire, int32_t peer) {
  host_peer_t* p = &wire->peers[peer];
  sluice_outgoing_t* out = sluice_outgoing_first(&p->queue);
  if (out != NULL) {
    p->departure = pack(out);
    if (p->departure == NULL) {
      return SLUICE_FAIL_PEER(SLUICE_E_NO_MEMORY, wire->rank, peer,
                              "rank %d has no memory for the copy of a message of %llu bytes to rank %d", wire->rank,
                              (unsigned long long)out->frame.payload_bytes, peer);
    }
    p->departure->outgoing = out;
    out->progress = 1;
  } else if (p->word.kind != 0) {
    p->departure = calloc(1, sizeof *p->departure); /* without memory, peers find out by themselves */
    if (p->departure != NULL) p->departure->front.frame = p->word;
    p->word.kind = 0;
  }
  return SLUICE_OK;
}

/* Call with the mutex held. Sends the messages to this peer as far as possible without waiting. */
static sluice_status_t push(host_wire_t* wire, int32_t peer, int* out_has_moved) {
  host_peer_t* p = &wire->peers[peer];
  sluice_host_failure_t failure = {.peer = -1};
  for (;;) {
    if (p->departure == NULL) SLUICE_TRY(depart(wire, peer));
    departure_t* d = p->departure;
    if (d == NULL) return SLUICE_OK;
    sluice_status_t status = SLUICE_OK;
    if (d->request == NULL) {
      const void* data = d->is_front_out ? (const void*)(d->payload + d->offset) : &d->front;
      const uint64_t bytes = d->is_front_out ? sluice_min_u64(d->bytes - d->offset, PART_BYTES) : sizeof d->front;
      status = wire->host->send(wire->endpoint, peer, data, bytes, &d->request, &failure);
    }
    int32_t is_done = 0;
    if (status == SLUICE_OK) status = wire->host->test(wire->endpoint, d->request, &is_done, &failure);
    if (status != SLUICE_OK) {
      d->request = NULL;
      return record(wire, status, peer, &failure);
    }
    if (!is_done) return SLUICE_OK;
    *out_has_moved = 1;
    d->request = NULL;
    if (d->is_front_out) d->offset += sluice_min_u64(d->bytes - d->offset, PART_BYTES);
    d->is_front_out = 1;
    if (d->offset < d->bytes) continue;
    p->departure = NULL;
    if (d->outgoing != NULL) {
      sluice_list_remove(&d->outgoing->place);
      sluice_messages_sent(wire->messages, d->outgoing);
    }
    free(d);
  }
}

/* ---- in ---------------------------------------------------------------------------------------------------------- */

static sluice_status_t post_front(host_wire_t* wire, int32_t peer, sluice_host_failure_t* failure) {
  host_peer_t* p = &wire->peers[peer];
  p->is_front_in = 0;
  p->offset = 0;
  return wire->host->receive(wire->endpoint, peer, &p->front, sizeof p->front, &p->request, failure);
}

static sluice_status_t post_part(host_wire_t* wire, int32_t peer, sluice_host_failure_t* failure) {
  host_peer_t* p = &wire->peers[peer];
  /* A discarded payload goes to one buffer, part by part: its sender has announced its length. */
  unsigned char* to =
      p->arrival != NULL ? (unsigned char*)sluice_messages_payload_of(p->arrival) + p->offset : p->trash;
  const uint64_t bytes = sluice_min_u64(p->front.frame.payload_bytes - p->offset, PART_BYTES);
  return wire->host->receive(wire->endpoint, peer, to, bytes, &p->request, failure);
}

/* Events collected with the mutex held, because the endpoint must not be called with the mutex held. */
typedef struct news_s {
  enum { NOTHING, FRONT_CAME, ALL_CAME } what;
  sluice_message_arrival_t* arrival;
} news_t;

static sluice_status_t look(host_wire_t* wire, int32_t peer, news_t* out_news) {
  host_peer_t* p = &wire->peers[peer];
  sluice_host_failure_t failure = {.peer = -1};
  int32_t is_done = 0;
  out_news->what = NOTHING;
  if (p->request == NULL) return SLUICE_OK;
  const sluice_status_t status = wire->host->test(wire->endpoint, p->request, &is_done, &failure);
  if (status != SLUICE_OK || is_done) p->request = NULL;
  if (status != SLUICE_OK) return record(wire, status, peer, &failure);
  if (!is_done) return SLUICE_OK;
  if (!p->is_front_in) {
    p->is_front_in = 1;
    out_news->what = FRONT_CAME;
    return SLUICE_OK;
  }
  p->offset += sluice_min_u64(p->front.frame.payload_bytes - p->offset, PART_BYTES);
  if (p->offset < p->front.frame.payload_bytes) {
    const sluice_status_t posted = post_part(wire, peer, &failure);
    return posted == SLUICE_OK ? SLUICE_OK : record(wire, posted, peer, &failure);
  }
  out_news->what = ALL_CAME;
  out_news->arrival = p->arrival;
  p->arrival = NULL;
  free(p->trash);
  p->trash = NULL;
  return SLUICE_OK;
}

/* Handles a front. The mutex is not needed: until the next receive is posted, only this thread uses the front.
 * *out_whole: set if the front contained the whole message. *out_follows: a payload will follow. */
static void read_front(host_wire_t* wire, int32_t peer, sluice_message_arrival_t** out_whole, int* out_follows) {
  host_peer_t* p = &wire->peers[peer];
  const sluice_frame_t* frame = &p->front.frame;
  sluice_message_arrival_t* arrival = NULL;
  *out_whole = NULL;
  *out_follows = 0;
  if (frame->kind == SLUICE_FRAME_LEAVES || frame->kind == SLUICE_FRAME_LOST) p->is_over = 1;
  if (frame->kind == SLUICE_FRAME_LEAVES) {
    p->farewell_ns = sluice_now_ns();
    return;
  }
  if (frame->kind != SLUICE_FRAME_MESSAGE) {
    if (!sluice_messages_has_failed(wire->messages)) sluice_messages_hear(wire->messages, peer, frame);
    return;
  }
  const int has_failed = sluice_messages_has_failed(wire->messages);
  if (!has_failed && sluice_messages_arrive(wire->messages, peer, frame, &arrival) == SLUICE_OK) {
    memcpy(sluice_messages_head_of(arrival), p->front.inside, frame->head_bytes);
  }
  if (frame->head_bytes + frame->payload_bytes <= INLINE_BYTES) {
    if (arrival == NULL) return;
    memcpy(sluice_messages_payload_of(arrival), p->front.inside + frame->head_bytes, frame->payload_bytes);
    *out_whole = arrival;
    return;
  }
  p->arrival = arrival;
  if (arrival == NULL)
    p->trash = malloc(sluice_min_u64(frame->payload_bytes, PART_BYTES)); /* received so that the sender can close */
  if (arrival == NULL && p->trash == NULL) p->is_over = 1;               /* then the sender has to give it up */
  *out_follows = !p->is_over;
}

/* Receives what this peer has sent. Call without the mutex. */
static sluice_status_t pull(host_wire_t* wire, int32_t peer, int* out_has_moved) {
  host_peer_t* p = &wire->peers[peer];
  for (;;) {
    news_t news;
    sluice_message_arrival_t* whole = NULL;
    int follows = 0;
    pthread_mutex_lock(&wire->mutex);
    sluice_status_t status = look(wire, peer, &news);
    pthread_mutex_unlock(&wire->mutex);
    if (status != SLUICE_OK || news.what == NOTHING) return status;
    *out_has_moved = 1;
    if (news.what == FRONT_CAME) read_front(wire, peer, &whole, &follows);
    if (news.what == ALL_CAME) whole = news.arrival;
    if (whole != NULL) sluice_messages_arrived(wire->messages, whole);
    if (p->is_over) return SLUICE_OK;
    sluice_host_failure_t failure = {.peer = -1};
    pthread_mutex_lock(&wire->mutex);
    status = follows ? post_part(wire, peer, &failure) : post_front(wire, peer, &failure);
    if (status != SLUICE_OK) status = record(wire, status, peer, &failure);
    pthread_mutex_unlock(&wire->mutex);
    if (status != SLUICE_OK) return status;
  }
}

/* ---- the thread -------------------------------------------------------------------------------------------------- */

/* Fails the endpoint. For an error of the transport itself, no rank is known to be at fault unless the transport names
 * one. */
static void fail(host_wire_t* wire, sluice_status_t status, int32_t peer) {
  if (status == SLUICE_OK || sluice_messages_has_failed(wire->messages)) return;
  sluice_messages_fail(wire->messages, status == SLUICE_E_PEER_LOST ? peer : wire->rank);
}

/* Sends a frame of the wire itself: that this rank leaves, or has lost another rank. Call with the mutex held. */
static void tell_all(host_wire_t* wire, uint32_t kind, uint64_t tag) {
  for (int32_t r = 0; r < wire->world_size; ++r) {
    if (r != wire->rank) wire->peers[r].word = (sluice_frame_t){.kind = kind, .tag = tag};
  }
}

/* Call with the mutex held. */
static int is_sending(const host_peer_t* p) {
  return p->departure != NULL || sluice_list_first(&p->queue) != NULL || p->word.kind != 0;
}

/* Delays the farewell of a peer: sends that it has received may not yet be known as sent here. */
static void hear_farewell(host_wire_t* wire, int32_t peer) {
  host_peer_t* p = &wire->peers[peer];
  if (p->farewell_ns == 0) return;
  pthread_mutex_lock(&wire->mutex);
  const int is_through = !is_sending(p);
  pthread_mutex_unlock(&wire->mutex);
  if (!is_through && sluice_now_ns() < p->farewell_ns + FAREWELL_NS) return;
  p->farewell_ns = 0;
  if (!sluice_messages_has_failed(wire->messages)) sluice_messages_hear(wire->messages, peer, &p->front.frame);
}

/* Call with the mutex held. */
static int is_over(const host_wire_t* wire) {
  if (!wire->is_closing || sluice_now_ns() >= wire->closing_ns + LINGER_NS) return wire->is_closing;
  for (int32_t r = 0; r < wire->world_size; ++r) {
    if (is_sending(&wire->peers[r])) return 0;
  }
  return 1;
}

static void* run(void* argument) {
  host_wire_t* wire = argument;
  uint64_t nap_ns = MIN_NAP_NS;
  for (;;) {
    int has_moved = 0;
    for (int32_t r = 0; r < wire->world_size; ++r) {
      if (r == wire->rank) continue;
      pthread_mutex_lock(&wire->mutex);
      const sluice_status_t status = push(wire, r, &has_moved);
      pthread_mutex_unlock(&wire->mutex);
      fail(wire, status, r);
      fail(wire, pull(wire, r, &has_moved), r);
      hear_farewell(wire, r);
    }
    pthread_mutex_lock(&wire->mutex);
    const int is_through = is_over(wire);
    nap_ns = has_moved ? MIN_NAP_NS : sluice_min_u64(nap_ns * 2, MAX_NAP_NS);
    /* A send wakes the thread: then it polls again soon. */
    if (!is_through && !has_moved &&
        sluice_cond_wait_until(&wire->changed, &wire->mutex, sluice_now_ns() + nap_ns) == 0) {
      nap_ns = MIN_NAP_NS;
    }
    pthread_mutex_unlock(&wire->mutex);
    if (is_through) return NULL;
  }
}

/* ---- what the endpoint calls ------------------------------------------------------------------------------------- */

static void host_send(sluice_wire_t* base, sluice_outgoing_t* out) {
  host_wire_t* wire = downcast(base);
  const int32_t peer = out->peer;
  sluice_status_t status = SLUICE_OK;
  int has_moved = 0;
  pthread_mutex_lock(&wire->mutex);
  if (!wire->is_dead) {
    sluice_list_append(&wire->peers[peer].queue, &out->place);
    status = push(wire, peer, &has_moved);
    pthread_cond_signal(&wire->changed);
  }
  pthread_mutex_unlock(&wire->mutex);
  fail(wire, status, peer);
}

static int32_t host_cancel(sluice_wire_t* base, int32_t peer, uint64_t number) {
  host_wire_t* wire = downcast(base);
  pthread_mutex_lock(&wire->mutex);
  const int32_t is_back = sluice_outgoing_cancel(&wire->peers[peer].queue, number);
  pthread_mutex_unlock(&wire->mutex);
  return is_back;
}

static void host_fail(sluice_wire_t* base, int32_t culprit) {
  host_wire_t* wire = downcast(base);
  pthread_mutex_lock(&wire->mutex);
  wire->is_dead = 1;
  for (int32_t r = 0; r < wire->world_size; ++r) {
    host_peer_t* p = &wire->peers[r];
    sluice_list_init(&p->queue);
    if (p->departure != NULL) p->departure->outgoing = NULL;
  }
  tell_all(wire, SLUICE_FRAME_LOST, (uint64_t)culprit);
  pthread_cond_signal(&wire->changed);
  pthread_mutex_unlock(&wire->mutex);
}

/* ---- life -------------------------------------------------------------------------------------------------------- */

static void give_up_all(host_wire_t* wire) {
  for (int32_t r = 0; r < wire->world_size; ++r) {
    host_peer_t* p = &wire->peers[r];
    departure_t* d = p->departure;
    if (d != NULL) wire->is_dirty = 1;
    if (d != NULL && (d->request == NULL || wire->host->give_up(wire->endpoint, d->request))) free(d);
    if (p->request == NULL || wire->host->give_up(wire->endpoint, p->request)) {
      free(p->trash);
      sluice_messages_drop(wire->messages, p->arrival);
      if (!p->is_over && r != wire->rank) wire->is_dirty = 1; /* at least its farewell is outstanding */
    } else {                                                  /* the transport may still write into it */
      wire->is_held = 1;
      sluice_messages_forget(wire->messages, p->arrival);
    }
  }
}

static void host_close(sluice_wire_t* base, int32_t is_orderly) {
  host_wire_t* wire = downcast(base);
  if (wire->has_thread) {
    pthread_mutex_lock(&wire->mutex);
    if (is_orderly) tell_all(wire, SLUICE_FRAME_LEAVES, 0);
    wire->is_closing = 1;
    wire->closing_ns = sluice_now_ns();
    pthread_cond_signal(&wire->changed);
    pthread_mutex_unlock(&wire->mutex);
    pthread_join(wire->thread, NULL);
  }
  if (wire->endpoint != NULL) {
    give_up_all(wire);
    wire->host->close(wire->endpoint, !wire->is_dirty && !wire->is_held);
  }
  pthread_cond_destroy(&wire->changed);
  pthread_mutex_destroy(&wire->mutex);
  if (!wire->is_held) sluice_free(sluice_process_allocator(), wire, wire->bytes);
}

static sluice_status_t start(host_wire_t* wire) {
  sigset_t all, old;
  for (int32_t r = 0; r < wire->world_size; ++r) {
    sluice_host_failure_t failure = {.peer = -1};
    const sluice_status_t status = r != wire->rank ? post_front(wire, r, &failure) : SLUICE_OK;
    if (status != SLUICE_OK) return record(wire, status, r, &failure);
  }
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  const int error = pthread_create(&wire->thread, NULL, run, wire);
  pthread_sigmask(SIG_SETMASK, &old, NULL);
  wire->has_thread = error == 0;
  return error == 0 ? SLUICE_OK
                    : sluice_error_record(SLUICE_E_EXTERNAL, wire->rank, -1, error,
                                          "messages over %s: rank %d cannot start a thread for them: %s", wire->name,
                                          wire->rank, strerror(error));
}

sluice_status_t sluice_host_messages_open(sluice_comm_t* comm, const sluice_sized_messages_t* host, void* user,
                                          sluice_messages_t* messages, sluice_wire_t** out_wire) {
  static const sluice_wire_vtable_t vtable = {
      .send = host_send, .cancel = host_cancel, .fail = host_fail, .close = host_close};
  const uint64_t bytes = sizeof(host_wire_t) + (uint64_t)comm->world_size * sizeof(host_peer_t);
  *out_wire = NULL;
  host_wire_t* wire = sluice_alloc_zeroed(sluice_process_allocator(), bytes, "messages");
  if (wire == NULL) {
    sluice_comm_abort(comm); /* the other ranks would wait for this rank in the host's open */
    return sluice_alloc_status();
  }
  wire->base.vtable = &vtable;
  wire->messages = messages;
  wire->host = host;
  wire->name = comm->name;
  wire->rank = comm->rank;
  wire->world_size = comm->world_size;
  wire->bytes = bytes;
  for (int32_t r = 0; r < comm->world_size; ++r) sluice_list_init(&wire->peers[r].queue);
  pthread_mutex_init(&wire->mutex, NULL);
  sluice_cond_init(&wire->changed);
  sluice_host_failure_t failure = {.peer = -1};
  sluice_status_t status = host->open(user, &wire->endpoint, &failure);
  if (status != SLUICE_OK) status = record(wire, status, -1, &failure);
  *out_wire = &wire->base; /* set before the thread starts, which may fail the endpoint, which calls this wire */
  if (status == SLUICE_OK) status = start(wire);
  if (status == SLUICE_OK) return SLUICE_OK;
  host_close(&wire->base, 0);
  *out_wire = NULL;
  return status;
}
