// SPDX-License-Identifier: Apache-2.0
/* The driver's streams and events, and the waits that a test drops. */
#include <stdlib.h>
#include <string.h>

#include "backend/device/cuda/fake/fake_world.h"

fake_stream_t* sluice_fake_new_stream(int32_t ordinal, int32_t is_hosts) {
  for (int32_t i = SLUICE_FAKE_CUDA_DEVICES; i < MAX_STREAMS; ++i) {
    fake_stream_t* stream = &sluice_fake_world.streams[i];
    if (stream->live) continue;
    int64_t count = stream->clock.at[i]; /* of the previous stream in this entry */
    *stream = (fake_stream_t){.live = 1, .index = i, .ordinal = ordinal, .is_hosts = is_hosts};
    stream->queue = sluice_fake_next_queue(ordinal);
    stream->clock.at[i] = count;
    stream->tail = &stream->head;
    return stream;
  }
  return NULL;
}

void sluice_fake_end_stream(fake_stream_t* stream) {
  while (stream->head != NULL) {
    queued_t* item = stream->head;
    stream->head = item->next;
    sluice_fake_drop_queued(item);
  }
  stream->tail = &stream->head;
  stream->live = 0;
}

int sluice_fake_cuStreamCreateWithPriority(void** out_stream, unsigned int flags, int priority) {
  if (flags != SLUICE_CU_STREAM_NON_BLOCKING || priority > 0 || priority < -5) return INVALID_VALUE;
  if (sluice_fake_current_device() < 0) return INVALID_CONTEXT;
  int code = sluice_fake_begin("cuStreamCreateWithPriority");
  if (code == 0) {
    *out_stream = sluice_fake_new_stream(sluice_fake_current_device(), 0);
    if (*out_stream == NULL) code = SLUICE_CU_OUT_OF_MEMORY;
    if (*out_stream != NULL) sluice_fake_stream_of(*out_stream)->priority = priority;
  }
  return sluice_fake_end(code);
}

void sluice_fake_note_priorities(void) {
  for (int32_t i = 0; i < MAX_STREAMS; ++i) {
    const fake_stream_t* stream = &sluice_fake_world.streams[i];
    if (!stream->live || stream->priority == 0) continue;
    (void)sluice_fake_note_event(
        &(sluice_fake_event_t){
            .kind = SLUICE_FAKE_PRIORITY, .rank = stream->ordinal, .stream = stream->index, .number = stream->priority},
        NULL);
  }
}

int sluice_fake_cuda_priority(void* stream) { return sluice_fake_stream_of(stream)->priority; }

int32_t sluice_fake_stream_rank(void* stream) { return sluice_fake_stream_of(stream)->ordinal; }
int32_t sluice_fake_stream_number(void* stream) { return sluice_fake_stream_of(stream)->index; }

int sluice_fake_cuStreamDestroy_v2(void* stream) {
  sluice_fake_cuda_lock();
  int code = sluice_fake_planned_once("cuStreamDestroy");
  sluice_fake_cuda_pump();
  sluice_fake_end_stream(stream);
  return sluice_fake_end(code);
}

int sluice_fake_cuStreamGetCtx(void* stream, void** out_context) {
  *out_context = sluice_fake_context_of(sluice_fake_stream_of(stream)->ordinal);
  return sluice_fake_simple();
}

int sluice_fake_cuStreamIsCapturing(void* handle, int* out_status) {
  const fake_stream_t* stream = sluice_fake_stream_of(handle);
  *out_status = stream->graph != NULL ? 1 + stream->graph->is_spoiled : 0;
  return sluice_fake_simple();
}

int sluice_fake_cuEventCreate(void** out_event, unsigned int flags) {
  if (flags != SLUICE_CU_EVENT_DISABLE_TIMING && flags != SLUICE_CU_EVENT_DEFAULT) return INVALID_VALUE;
  if (sluice_fake_current_device() < 0) return INVALID_CONTEXT;
  const int code = sluice_fake_begin("cuEventCreate");
  if (code == 0) {
    fake_event_t* event = calloc(1, sizeof *event);
    event->is_timed = flags == SLUICE_CU_EVENT_DEFAULT;
    *out_event = event;
    ++sluice_fake_world.num_events;
  }
  return sluice_fake_end(code);
}

int sluice_fake_cuEventDestroy_v2(void* handle) {
  fake_event_t* event = handle;
  sluice_fake_cuda_lock();
  int code = sluice_fake_planned_once("cuEventDestroy");
  sluice_fake_drop_ticket(event->last);
  free(event);
  --sluice_fake_world.num_events;
  return sluice_fake_end(code);
}

static void note_ticket(sluice_fake_event_kind_t kind, const fake_stream_t* stream, const ticket_t* ticket) {
  (void)sluice_fake_note_event(
      &(sluice_fake_event_t){.kind = kind, .rank = stream->ordinal, .stream = stream->index, .ticket = ticket->number},
      NULL);
}

static void note_host_wait(const ticket_t* ticket, const char* how) {
  (void)sluice_fake_note_event(
      &(sluice_fake_event_t){
          .kind = SLUICE_FAKE_HOST_WAIT, .rank = ticket->rank, .ticket = ticket->number, .name = how},
      NULL);
}

int sluice_fake_cuEventRecord(void* handle, void* stream_handle) {
  fake_event_t* event = handle;
  sluice_fake_cuda_lock();
  int code = sluice_fake_planned();
  fake_stream_t* stream = sluice_fake_stream_of(stream_handle);
  if (code == 0 && stream->graph != NULL) {
    sluice_fake_record_in_capture(stream, event);
  } else if (code == 0) {
    queued_t* item = sluice_fake_push(stream);
    item->records = sluice_fake_new_ticket(stream);
    note_ticket(SLUICE_FAKE_RECORD, stream, item->records);
    sluice_fake_drop_ticket(event->last);
    event->last = item->records;
    event->graph_id = 0;
    sluice_fake_cuda_pump();
  }
  return sluice_fake_end(code);
}

static _Thread_local int32_t this_rank;

/* Counts a wait; returns whether to drop it. */
static int is_left_out(void) {
  const int64_t of_all = sluice_fake_world.waits++, of_rank = sluice_fake_world.waits_of[this_rank]++;
  if (sluice_fake_world.drop_rank < 0) return of_all == sluice_fake_world.drop_at;
  return sluice_fake_world.drop_rank == this_rank && of_rank == sluice_fake_world.drop_at;
}

int sluice_fake_cuStreamWaitEvent(void* stream_handle, void* handle, unsigned int flags) {
  const fake_event_t* event = handle;
  (void)flags;
  sluice_fake_cuda_lock();
  int code = sluice_fake_planned();
  fake_stream_t* stream = sluice_fake_stream_of(stream_handle);
  int is_any = event->last != NULL || event->graph_id != 0;
  if (code == 0 && is_any && !is_left_out()) {
    if (stream->graph != NULL || event->graph_id != 0) {
      code = sluice_fake_wait_in_capture(stream, event);
    } else {
      note_ticket(SLUICE_FAKE_WAIT, stream, event->last);
      sluice_fake_wait_for_ticket(stream, event->last);
    }
  }
  return sluice_fake_end(code);
}

int sluice_fake_cuEventQuery(void* handle) {
  const fake_event_t* event = handle;
  sluice_fake_cuda_lock();
  int code = sluice_fake_planned();
  ++sluice_fake_world.queries;
  if (code == 0 && sluice_fake_spoils(NULL)) code = CAPTURE_UNSUPPORTED;
  sluice_fake_cuda_pump();
  if (code == 0 && event->last != NULL) {
    if (event->last->done) {
      sluice_fake_merge(&sluice_fake_world.host, &event->last->clock);
      note_host_wait(event->last, "query");
    } else {
      code = SLUICE_CU_NOT_READY;
    }
  }
  return sluice_fake_end(code);
}

int sluice_fake_cuEventElapsedTime(float* out_milliseconds, void* start, void* end) {
  const fake_event_t *from = start, *to = end;
  int code = sluice_fake_begin("cuEventElapsedTime");
  ++sluice_fake_world.queries;
  sluice_fake_cuda_pump();
  int is_recorded = from->last != NULL && to->last != NULL && from->is_timed && to->is_timed;
  if (code == 0 && !is_recorded) code = INVALID_HANDLE;
  if (code == 0 && (!from->last->done || !to->last->done)) code = SLUICE_CU_NOT_READY;
  if (code == 0) *out_milliseconds = (float)(to->last->done_ns - from->last->done_ns) * 1e-6f;
  return sluice_fake_end(code);
}

static int is_done(const void* ticket) { return ((const ticket_t*)ticket)->done; }
static int is_empty(const void* stream) { return ((const fake_stream_t*)stream)->head == NULL; }

int sluice_fake_cuEventSynchronize(void* handle) {
  const fake_event_t* event = handle;
  sluice_fake_cuda_lock();
  int code = sluice_fake_planned();
  ++sluice_fake_world.host_waits;
  if (code == 0 && sluice_fake_spoils(NULL)) code = CAPTURE_UNSUPPORTED;
  if (code == 0 && event->last != NULL) {
    code = sluice_fake_wait_until(is_done, event->last);
    if (code == 0) sluice_fake_merge(&sluice_fake_world.host, &event->last->clock);
    if (code == 0) note_host_wait(event->last, "synchronize");
  }
  return sluice_fake_end(code);
}

int sluice_fake_cuStreamSynchronize(void* handle) {
  sluice_fake_cuda_lock();
  int code = sluice_fake_planned();
  ++sluice_fake_world.host_waits;
  fake_stream_t* stream = sluice_fake_stream_of(handle);
  if (code == 0 && sluice_fake_spoils(stream)) code = CAPTURE_UNSUPPORTED;
  if (code == 0) {
    code = sluice_fake_wait_until(is_empty, stream);
  }
  if (code == 0) {
    (void)sluice_fake_note_event(
        &(sluice_fake_event_t){.kind = SLUICE_FAKE_HOST_DRAIN, .rank = stream->ordinal, .stream = stream->index}, NULL);
    sluice_fake_merge(&sluice_fake_world.host, &stream->clock);
  }
  return sluice_fake_end(code);
}

void* sluice_fake_cuda_open_stream(int32_t ordinal) {
  sluice_fake_cuda_lock();
  void* stream = sluice_fake_new_stream(ordinal, 1);
  sluice_fake_cuda_unlock();
  return stream;
}

void sluice_fake_cuda_close_stream(void* stream) {
  sluice_fake_cuda_lock();
  sluice_fake_cuda_pump();
  sluice_fake_end_stream(stream);
  sluice_fake_cuda_unlock();
}

int sluice_fake_cuda_idle(void* handle) {
  sluice_fake_cuda_lock();
  sluice_fake_cuda_pump();
  int idle = sluice_fake_stream_of(handle)->head == NULL;
  sluice_fake_cuda_unlock();
  return idle;
}

void sluice_fake_cuda_drop_wait(int64_t nth) { sluice_fake_cuda_drop_wait_of(-1, nth); }

int sluice_fake_cuda_may_drop_waits(void) {
#if defined(__SANITIZE_THREAD__)
  return 0;
#else
  return 1;
#endif
}

int64_t sluice_fake_cuda_waits(void) { return sluice_fake_locked_count(&sluice_fake_world.waits); }

void sluice_fake_cuda_this_is(int32_t rank) { this_rank = rank; }

void sluice_fake_cuda_drop_wait_of(int32_t rank, int64_t nth) {
  sluice_fake_cuda_lock();
  sluice_fake_world.waits = 0;
  memset(sluice_fake_world.waits_of, 0, sizeof sluice_fake_world.waits_of);
  sluice_fake_world.drop_rank = rank;
  sluice_fake_world.drop_at = nth;
  sluice_fake_cuda_unlock();
}

int64_t sluice_fake_cuda_waits_of(int32_t rank) { return sluice_fake_world.waits_of[rank]; }
