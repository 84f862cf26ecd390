// SPDX-License-Identifier: Apache-2.0
#include "backend/device/cuda/fake/fake_record.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "backend/device/cuda/fake/fake_cuda.h"

/* Headers, counts and tables of routes are smaller. Rows of at most this size are copied needlessly, which does no
 * harm. */
#define MOST_CARRIED ((uint64_t)1 << 20)
/* A step keeps its tables of routes by a copy, and some begin with a fill. */
#define MOST_COPIED ((uint64_t)1 << 24)

static struct {
  int is_dry, is_on;
  sluice_fake_event_t* events;
  sluice_fake_part_t* parts;
  int64_t num_events, room_events, num_parts, room_parts;
  int64_t counted; /* event whose bytes are being counted */
} record = {.counted = -1};

int sluice_fake_is_dry(void) { return record.is_dry; }
int sluice_fake_is_recorded(void) { return record.is_on; }
int sluice_fake_is_carried(uint64_t bytes) { return !record.is_dry || bytes <= MOST_CARRIED; }
int sluice_fake_is_copied(uint64_t bytes) { return !record.is_dry || bytes <= MOST_COPIED; }

int sluice_fake_is_executed(const char* kernel) {
  static const char* const orders[] = {"sluice_route_", "sluice_token_copy_", "sluice_write_words"};
  for (size_t i = 0; i < sizeof orders / sizeof orders[0]; ++i) {
    if (strncmp(kernel, orders[i], strlen(orders[i])) == 0) return 1;
  }
  return !record.is_dry;
}

void sluice_fake_cuda_make_dry(void) {
  sluice_fake_cuda_lock();
  record.is_dry = 1;
  sluice_fake_cuda_unlock();
}

void sluice_fake_forget_record(void) {
  free(record.events);
  free(record.parts);
  memset(&record, 0, sizeof record);
  record.counted = -1;
}

void sluice_fake_cuda_record(int on) {
  sluice_fake_cuda_lock();
  const int is_dry = record.is_dry;
  if (on) sluice_fake_forget_record();
  record.is_dry = is_dry;
  record.is_on = on;
  if (on) sluice_fake_note_priorities();
  sluice_fake_cuda_unlock();
}

static void* with_room(void* list, int64_t count, int64_t* room, size_t bytes) {
  if (count <= *room) return list;
  *room = 2 * count + 256;
  list = realloc(list, (size_t)*room * bytes);
  assert(list != NULL);
  return list;
}

int64_t sluice_fake_note_event(const sluice_fake_event_t* event, const sluice_fake_part_t* parts) {
  if (!record.is_on) return -1;
  record.events = with_room(record.events, record.num_events + 1, &record.room_events, sizeof *record.events);
  record.parts = with_room(record.parts, record.num_parts + event->count, &record.room_parts, sizeof *record.parts);
  sluice_fake_event_t* kept = &record.events[record.num_events];
  *kept = *event;
  kept->first = record.num_parts;
  if (event->count > 0) memcpy(&record.parts[record.num_parts], parts, (size_t)event->count * sizeof *parts);
  record.num_parts += event->count;
  return record.num_events++;
}

void sluice_fake_count_bytes_for(int64_t event) { record.counted = event; }

void sluice_fake_count_bytes(uint64_t bytes, int is_write) {
  if (record.counted < 0 || record.counted >= record.num_events) return;
  sluice_fake_event_t* event = &record.events[record.counted];
  *(is_write ? &event->writes : &event->reads) += bytes;
}

int64_t sluice_fake_cuda_recorded(sluice_fake_event_kind_t kind) {
  int64_t count = 0;
  sluice_fake_cuda_lock();
  for (int64_t i = 0; i < record.num_events; ++i) count += record.events[i].kind == kind;
  sluice_fake_cuda_unlock();
  return count;
}

void sluice_fake_cuda_mark(int32_t rank, const char* name) {
  sluice_fake_cuda_lock();
  (void)sluice_fake_note_event(&(sluice_fake_event_t){.kind = SLUICE_FAKE_MARK, .rank = rank, .name = name}, NULL);
  sluice_fake_cuda_unlock();
}

void sluice_fake_cuda_header(int32_t rank) {
  sluice_fake_cuda_lock();
  (void)sluice_fake_note_event(&(sluice_fake_event_t){.kind = SLUICE_FAKE_HEADER, .rank = rank}, NULL);
  sluice_fake_cuda_unlock();
}

static void write_parts(FILE* out, const sluice_fake_event_t* e) {
  fputs(", [", out);
  for (int64_t i = 0; i < e->count; ++i) {
    const int64_t* of = record.parts[e->first + i].of;
    fprintf(out, "%s[%lld, %lld, %lld]", i == 0 ? "" : ", ", (long long)of[0], (long long)of[1], (long long)of[2]);
  }
  fputc(']', out);
}

static void write_event(FILE* out, const sluice_fake_event_t* e) {
  static const char* const kinds[] = {[SLUICE_FAKE_LAUNCH] = "launch",
                                      [SLUICE_FAKE_COPY] = "copy",
                                      [SLUICE_FAKE_FILL] = "fill",
                                      [SLUICE_FAKE_GEMM] = "gemm",
                                      [SLUICE_FAKE_MESSAGES] = "messages",
                                      [SLUICE_FAKE_RECORD] = "record",
                                      [SLUICE_FAKE_WAIT] = "wait",
                                      [SLUICE_FAKE_HOST_WAIT] = "host_wait",
                                      [SLUICE_FAKE_HOST_DRAIN] = "host_drain",
                                      [SLUICE_FAKE_HOST_CALL] = "host_call",
                                      [SLUICE_FAKE_HEADER] = "header",
                                      [SLUICE_FAKE_PRIORITY] = "priority",
                                      [SLUICE_FAKE_MARK] = "mark"};
  fprintf(out, "[\"%s\", %d", kinds[e->kind], e->rank);
  switch (e->kind) {
    case SLUICE_FAKE_LAUNCH:
      fprintf(out, ", %d, \"%s\", %lld, %lld, %llu, %llu", e->stream, e->name, (long long)e->units,
              (long long)e->length, (unsigned long long)e->reads, (unsigned long long)e->writes);
      break;
    case SLUICE_FAKE_COPY: fprintf(out, ", %d, \"%s\", %llu", e->stream, e->name, (unsigned long long)e->writes); break;
    case SLUICE_FAKE_FILL: fprintf(out, ", %d, %llu", e->stream, (unsigned long long)e->writes); break;
    case SLUICE_FAKE_GEMM:
      fprintf(out, ", %d, \"%s\", %lld, %lld", e->stream, e->name, (long long)e->units, (long long)e->length);
      write_parts(out, e);
      fprintf(out, ", %lld", (long long)e->number);
      break;
    case SLUICE_FAKE_MESSAGES:
      fprintf(out, ", %d, %lld, %lld", e->stream, (long long)e->comm, (long long)e->number);
      write_parts(out, e);
      fprintf(out, ", %lld", (long long)e->units);
      break;
    case SLUICE_FAKE_RECORD:
    case SLUICE_FAKE_WAIT: fprintf(out, ", %d, %lld", e->stream, (long long)e->ticket); break;
    case SLUICE_FAKE_HOST_WAIT: fprintf(out, ", %lld, \"%s\"", (long long)e->ticket, e->name); break;
    case SLUICE_FAKE_HOST_DRAIN: fprintf(out, ", %d", e->stream); break;
    case SLUICE_FAKE_HEADER: break;
    case SLUICE_FAKE_PRIORITY: fprintf(out, ", %d, %lld", e->stream, (long long)e->number); break;
    case SLUICE_FAKE_MARK:
    case SLUICE_FAKE_HOST_CALL: fprintf(out, ", \"%s\"", e->name); break;
  }
  fputc(']', out);
}

void sluice_fake_cuda_write_record(FILE* out) {
  sluice_fake_cuda_lock();
  fputs("[", out);
  for (int64_t i = 0; i < record.num_events; ++i) {
    fputs(i == 0 ? "\n" : ",\n", out);
    write_event(out, &record.events[i]);
  }
  fputs("\n]", out);
  sluice_fake_cuda_unlock();
}
