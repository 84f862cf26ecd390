// SPDX-License-Identifier: Apache-2.0
/* The queues of streams: work runs as soon as it can, streams with high numbers first. Streams of a device may share a
 * hardware queue, which runs their work in the order of submission. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/clock.h"
#include "backend/device/cuda/fake/fake_world.h"

void sluice_fake_merge(fake_clock_t* into, const fake_clock_t* from) {
  for (int i = 0; i < MAX_STREAMS; ++i) {
    if (from->at[i] > into->at[i]) into->at[i] = from->at[i];
  }
}

void sluice_fake_drop_ticket(ticket_t* ticket) {
  if (ticket != NULL && --ticket->references == 0) free(ticket);
}

void sluice_fake_drop_queued(queued_t* item) {
  if (item->op.drop != NULL) item->op.drop(item->op.user);
  sluice_fake_drop_ticket(item->waits_for);
  sluice_fake_drop_ticket(item->records);
  free(item);
}

static int32_t num_queues = 8;

void sluice_fake_cuda_set_queues(int32_t queues) {
  sluice_fake_cuda_lock();
  num_queues = queues;
  sluice_fake_cuda_unlock();
}

int32_t sluice_fake_next_queue(int32_t ordinal) {
  return (int32_t)(sluice_fake_world.num_streams[ordinal]++ % num_queues);
}

/* Returns the stream whose head is the first item of the queue of this one; itself, if it has that item. */
static fake_stream_t* first_of_queue(fake_stream_t* stream) {
  fake_stream_t* first = stream;
  for (int i = 0; i < MAX_STREAMS; ++i) {
    fake_stream_t* other = &sluice_fake_world.streams[i];
    if (!other->live || other->head == NULL || other->ordinal != stream->ordinal || other->queue != stream->queue)
      continue;
    if (other->head->number < first->head->number) first = other;
  }
  return first;
}

static int run_head(fake_stream_t* stream) {
  queued_t* item = stream->head;
  if (first_of_queue(stream) != stream) return 0;
  if (item->waits_for != NULL && !item->waits_for->done) return 0;
  if (item->op.ready != NULL && !item->op.ready(item->op.user)) return 0;
  stream->head = item->next;
  if (stream->head == NULL) stream->tail = &stream->head;
  if (item->op.run != NULL) item->op.run(item->op.user);
  if (item->records != NULL) {
    item->records->done = 1;
    item->records->done_ns = sluice_now_ns();
  }
  sluice_fake_drop_queued(item);
  return 1;
}

/* Streams with high numbers first, so that no test relies on an order between streams. */
void sluice_fake_cuda_pump(void) {
  for (int moved = 1; moved;) {
    moved = 0;
    for (int i = MAX_STREAMS - 1; i >= 0; --i) {
      fake_stream_t* stream = &sluice_fake_world.streams[i];
      while (stream->live && stream->head != NULL && run_head(stream)) moved = 1;
    }
  }
}

fake_stream_t* sluice_fake_stream_of(void* handle) {
  if (handle != NULL) return handle;
  int32_t ordinal = sluice_fake_current_device() < 0 ? 0 : sluice_fake_current_device();
  return &sluice_fake_world.streams[ordinal];
}

queued_t* sluice_fake_push(fake_stream_t* stream) {
  queued_t* item = calloc(1, sizeof *item);
  assert(item != NULL && stream->live);
  item->number = sluice_fake_world.num_queued++;
  *stream->tail = item;
  stream->tail = &item->next;
  sluice_fake_merge(&stream->clock, &sluice_fake_world.host); /* enqueued after the host waited for these events */
  ++stream->clock.at[stream->index];
  return item;
}

static void moment_of(const fake_stream_t* stream, sluice_fake_moment_t* out) {
  out->stream = stream->index;
  out->count = stream->clock.at[stream->index];
  memcpy(out->clock, stream->clock.at, sizeof out->clock);
}

void sluice_fake_put(fake_stream_t* stream, const sluice_fake_op_t* op) {
  sluice_fake_moment_t moment;
  sluice_fake_push(stream)->op = *op;
  moment_of(stream, &moment);
  if (op->note != NULL) op->note(op->user, &moment);
}

void sluice_fake_cuda_enqueue(void* handle, const sluice_fake_op_t* op) {
  fake_stream_t* stream = sluice_fake_stream_of(handle);
  if (stream->graph != NULL) {
    sluice_fake_capture_op(stream, op);
  } else {
    sluice_fake_put(stream, op);
  }
  sluice_fake_cuda_pump();
}

ticket_t* sluice_fake_new_ticket(const fake_stream_t* stream) {
  ticket_t* ticket = calloc(1, sizeof *ticket);
  ticket->references = 2;
  ticket->rank = stream->ordinal;
  ticket->number = ++sluice_fake_world.num_tickets;
  ticket->clock = stream->clock;
  return ticket;
}

void sluice_fake_wait_for_ticket(fake_stream_t* stream, ticket_t* ticket) {
  queued_t* item = sluice_fake_push(stream);
  item->waits_for = ticket;
  ++ticket->references;
  sluice_fake_merge(&stream->clock, &ticket->clock);
  sluice_fake_cuda_pump();
}

/* ---- deadlocks ------------------------------------------------------------------------------------------------- */

/* Whether the first item of one stream cannot run before `item`. */
static int waits_for_item(const queued_t* head, const queued_t* item) {
  if (head->waits_for != NULL) return item->records == head->waits_for;
  if (head->op.waits_for == NULL || head->op.waits_for != item->op.waits_for || head == item) return 0;
  return head->op.waits_for(head->op.user, item->op.user);
}

/* Whether the first item of a stream cannot run before the first one of another stream. */
static int waits_for_stream(fake_stream_t* stream, const fake_stream_t* other) {
  if (other == stream) return 0;
  if (first_of_queue(stream) != stream) return first_of_queue(stream) == other;
  for (const queued_t* item = other->head; item != NULL; item = item->next) {
    if (waits_for_item(stream->head, item)) return 1;
  }
  return 0;
}

static const char* name_of(const queued_t* item) {
  return item->op.name != NULL ? item->op.name : "a wait for an event";
}

static void describe_cycle(const int* path, int length) {
  const size_t room = sizeof sluice_fake_world.deadlock;
  size_t at = 0;
  for (int i = 0; i < length && at < room; ++i) {
    fake_stream_t* stream = &sluice_fake_world.streams[path[i]];
    const char* why = first_of_queue(stream) != stream ? "comes in its queue after" : "waits for work of";
    at += (size_t)snprintf(sluice_fake_world.deadlock + at, room - at,
                           "%s %s (stream %d, queue %d of device %d) %s stream %d", i == 0 ? "deadlock:" : ", and",
                           name_of(stream->head), stream->index, stream->queue, stream->ordinal, why,
                           path[(i + 1) % length]);
  }
}

/* Follows what a stream waits for. Everything must happen, so a way back to a stream of the path is a deadlock. */
static int find_cycle(int* path, int length, int* is_known) {
  fake_stream_t* stream = &sluice_fake_world.streams[path[length - 1]];
  is_known[stream->index] = 1;
  for (int i = 0; i < MAX_STREAMS; ++i) {
    const fake_stream_t* other = &sluice_fake_world.streams[i];
    if (!other->live || other->head == NULL || !waits_for_stream(stream, other)) continue;
    for (int from = 0; from < length; ++from) {
      if (path[from] != i) continue;
      describe_cycle(path + from, length - from);
      return 1;
    }
    path[length] = i;
    if (!is_known[i] && find_cycle(path, length + 1, is_known)) return 1;
  }
  return 0;
}

int sluice_fake_is_deadlocked(void) {
  int is_known[MAX_STREAMS] = {0}, path[MAX_STREAMS + 1];
  for (int i = 0; i < MAX_STREAMS && sluice_fake_world.deadlock[0] == '\0'; ++i) {
    const fake_stream_t* stream = &sluice_fake_world.streams[i];
    path[0] = i;
    if (stream->live && stream->head != NULL && !is_known[i]) (void)find_cycle(path, 1, is_known);
  }
  return sluice_fake_world.deadlock[0] != '\0';
}

int sluice_fake_wait_until(int (*is_over)(const void* user), const void* user) {
  for (sluice_fake_cuda_pump(); !is_over(user); sluice_fake_cuda_pump()) {
    if (sluice_fake_is_deadlocked()) return LAUNCH_TIMEOUT;
    sluice_fake_sleep();
  }
  return 0;
}

int sluice_fake_cuda_deadlocked(char* out, size_t out_bytes) {
  sluice_fake_cuda_lock();
  sluice_fake_cuda_pump();
  const int found = sluice_fake_is_deadlocked();
  if (out_bytes > 0) snprintf(out, out_bytes, "%s", sluice_fake_world.deadlock);
  sluice_fake_cuda_unlock();
  return found;
}
