// SPDX-License-Identifier: Apache-2.0
/* The queues of streams: work runs as soon as it can, streams with high numbers first. */
#include <assert.h>
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

static int run_head(fake_stream_t* stream) {
  queued_t* item = stream->head;
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
