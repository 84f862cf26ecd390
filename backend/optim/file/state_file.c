#include "backend/optim/file/state_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "backend/base/check.h"
#include "backend/base/hash.h"
#include "backend/base/log.h"
#include "backend/optim/file/io.h"

enum { PAGE = 4096, RECORD_AT = 512, NUM_ROOMS = 2, NO_ROOM = -1, FORM = 1 };
enum { EMPTY = 0, BEGUN = 1, WHOLE = 2 };
#define MAGIC UINT64_C(0x31654d7453636c53) /* "SlcStMe1" */

/* Each in a sector of its own: the disk writes it whole or not at all. The sum says which. */
typedef struct head_s {
  uint64_t magic;
  int64_t form, count;
  uint64_t sum;
} head_t;
typedef struct record_s {
  int64_t state, step;
  uint64_t sum;
} record_t;

struct sluice_state_file_s {
  sluice_allocator_t* allocator;
  char* path;
  uint64_t path_bytes;
  int fd;
  int32_t is_durable;
  int64_t count;
  record_t records[NUM_ROOMS];
  int32_t room;       /* that is read; NO_ROOM: none yet */
  int32_t is_writing; /* the other one, by a step that is begun */
  int64_t unfinished;
};

static uint64_t sum_of(const void* data, size_t bytes) {
  return sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, data, bytes);
}

static uint64_t state_bytes(int64_t count) { return ((uint64_t)count * sizeof(float) + PAGE - 1) / PAGE * PAGE; }
static uint64_t file_bytes(int64_t count) {
  return PAGE + (uint64_t)NUM_ROOMS * SLUICE_NUM_STATES * state_bytes(count);
}
static uint64_t place(const sluice_state_file_t* f, int32_t room, int32_t state, int64_t first) {
  return PAGE + (uint64_t)(room * SLUICE_NUM_STATES + state) * state_bytes(f->count) + (uint64_t)first * sizeof(float);
}
static int32_t next_room(const sluice_state_file_t* f) { return f->room == NO_ROOM ? 0 : 1 - f->room; }

/* ---- life ---- */

static sluice_status_t system_says(const sluice_state_file_t* f, const char* doing) {
  return SLUICE_FAIL(SLUICE_E_FOREIGN, "optimizer: %s: %s: %s", f->path, doing, strerror(errno));
}

static sluice_status_t make(const char* path, int32_t is_durable, sluice_allocator_t* allocator,
                            sluice_state_file_t** out_file) {
  *out_file = NULL;
  const uint64_t path_bytes = strlen(path) + 1;
  sluice_state_file_t* f = sluice_alloc_zeroed(allocator, sizeof *f, "optimizer: a file of states");
  if (f == NULL) return sluice_alloc_status();
  *f = (sluice_state_file_t){.allocator = allocator,
                             .path_bytes = path_bytes,
                             .fd = -1,
                             .is_durable = is_durable,
                             .room = NO_ROOM,
                             .unfinished = SLUICE_NO_STEP};
  f->path = sluice_alloc(allocator, path_bytes, "optimizer: a file of states");
  if (f->path == NULL) {
    sluice_state_file_close(f);
    return sluice_alloc_status();
  }
  memcpy(f->path, path, path_bytes);
  *out_file = f;
  return SLUICE_OK;
}

void sluice_state_file_close(sluice_state_file_t* f) {
  if (f == NULL) return;
  if (f->fd >= 0) (void)close(f->fd);
  sluice_free(f->allocator, f->path, f->path_bytes);
  sluice_free(f->allocator, f, sizeof *f);
}

void sluice_state_file_remove(sluice_state_file_t* f) {
  if (f == NULL) return;
  (void)unlink(f->path);
  sluice_state_file_close(f);
}

/* A file has one process: two would write over each other's steps. */
static sluice_status_t lock(const sluice_state_file_t* f) {
  if (flock(f->fd, LOCK_EX | LOCK_NB) == 0) return SLUICE_OK;
  if (errno != EWOULDBLOCK) return system_says(f, "locking it");
  return SLUICE_FAIL(SLUICE_E_BUSY, "optimizer: %s: another process, or another optimizer of this one, has it open",
                     f->path);
}

static sluice_status_t sync_data(const sluice_state_file_t* f) {
  return !f->is_durable || fdatasync(f->fd) == 0 ? SLUICE_OK : system_says(f, "bringing it to the disk");
}

/* ---- records ---- */

static sluice_status_t write_head(const sluice_state_file_t* f) {
  head_t head = {.magic = MAGIC, .form = FORM, .count = f->count};
  head.sum = sum_of(&head, offsetof(head_t, sum));
  return sluice_file_write_at(f->fd, f->path, 0, &head, sizeof head);
}

static sluice_status_t write_record(sluice_state_file_t* f, int32_t room, int64_t state, int64_t step) {
  record_t record = {.state = state, .step = step};
  record.sum = sum_of(&record, offsetof(record_t, sum));
  SLUICE_TRY(sluice_file_write_at(f->fd, f->path, (uint64_t)(room + 1) * RECORD_AT, &record, sizeof record));
  f->records[room] = record;
  return SLUICE_OK;
}

/* One that is torn counts as begun: its room was not whole when it was written. */
static sluice_status_t read_record(sluice_state_file_t* f, int32_t room) {
  record_t* record = f->records + room;
  SLUICE_TRY(sluice_file_read_at(f->fd, f->path, (uint64_t)(room + 1) * RECORD_AT, record, sizeof *record));
  if (record->state == EMPTY && record->sum == 0) return SLUICE_OK;
  if (record->sum != sum_of(record, offsetof(record_t, sum))) record->state = BEGUN;
  return SLUICE_OK;
}

static sluice_status_t read_head(sluice_state_file_t* f) {
  head_t head;
  struct stat stat_of;
  if (fstat(f->fd, &stat_of) != 0) return system_says(f, "looking at it");
  if (stat_of.st_size < PAGE) {
    return SLUICE_FAIL(SLUICE_E_FOREIGN, "optimizer: %s has %lld bytes: it is no file of states", f->path,
                       (long long)stat_of.st_size);
  }
  SLUICE_TRY(sluice_file_read_at(f->fd, f->path, 0, &head, sizeof head));
  if (head.magic != MAGIC || head.sum != sum_of(&head, offsetof(head_t, sum)) || head.count < 1 ||
      head.count > INT64_C(1) << 48) {
    return SLUICE_FAIL(SLUICE_E_FOREIGN, "optimizer: %s is no file of states, or of another kind of machine", f->path);
  }
  if (head.form != FORM) {
    return SLUICE_FAIL(SLUICE_E_FOREIGN, "optimizer: %s has form %lld; this version reads %d", f->path,
                       (long long)head.form, FORM);
  }
  f->count = head.count;
  if ((uint64_t)stat_of.st_size < file_bytes(head.count)) {
    return SLUICE_FAIL(SLUICE_E_FOREIGN, "optimizer: %s has %lld bytes of %llu: something has cut it", f->path,
                       (long long)stat_of.st_size, (unsigned long long)file_bytes(head.count));
  }
  return SLUICE_OK;
}

static int is_whole(const sluice_state_file_t* f, int32_t room) { return f->records[room].state == WHOLE; }

static sluice_status_t choose(sluice_state_file_t* f, int64_t step) {
  for (int32_t room = 0; room < NUM_ROOMS; ++room) {
    const record_t* record = f->records + room;
    if (record->state == BEGUN) f->unfinished = record->step;
    if (!is_whole(f, room) || (step != SLUICE_NO_STEP && record->step != step)) continue;
    if (f->room == NO_ROOM || record->step > f->records[f->room].step) f->room = room;
  }
  if (f->room == NO_ROOM && step != SLUICE_NO_STEP) {
    return SLUICE_FAIL(SLUICE_E_NOT_FOUND, "optimizer: %s does not hold step %lld whole", f->path, (long long)step);
  }
  if (f->room == NO_ROOM) {
    return SLUICE_FAIL(SLUICE_E_FOREIGN, "optimizer: %s: no step in it is whole: it was never filled", f->path);
  }
  if (f->unfinished != SLUICE_NO_STEP) {
    sluice_log(SLUICE_LOG_WARN, "optimizer: %s: step %lld was begun and not ended; step %lld is there", f->path,
               (long long)f->unfinished, (long long)f->records[f->room].step);
  }
  return SLUICE_OK;
}

/* ---- making and opening ---- */

static sluice_status_t fill_new(sluice_state_file_t* f) {
  SLUICE_TRY(lock(f));
  const uint64_t bytes = file_bytes(f->count);
  const int error = posix_fallocate(f->fd, 0, (off_t)bytes);
  if (error != 0) {
    return SLUICE_FAIL(SLUICE_E_FOREIGN, "optimizer: %s: no room for %llu bytes (%lld elements, two steps): %s",
                       f->path, (unsigned long long)bytes, (long long)f->count, strerror(error));
  }
  return write_head(f);
}

sluice_status_t sluice_state_file_create(const char* path, int64_t count, int32_t is_durable,
                                         sluice_allocator_t* allocator, sluice_state_file_t** out_file) {
  *out_file = NULL;
  SLUICE_TRY(SLUICE_REQUIRE(count >= 1 && count <= INT64_C(1) << 48, "optimizer: %s: %lld elements; give 1 to 2^48",
                            path, (long long)count));
  sluice_state_file_t* f;
  SLUICE_TRY(make(path, is_durable, allocator, &f));
  f->count = count;
  f->fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (f->fd < 0) {
    const sluice_status_t status = system_says(f, "making it");
    sluice_state_file_close(f);
    return status;
  }
  const sluice_status_t status = fill_new(f);
  if (status != SLUICE_OK) {
    sluice_state_file_remove(f);
    return status;
  }
  *out_file = f;
  return SLUICE_OK;
}

static sluice_status_t read_all(sluice_state_file_t* f, int64_t step) {
  SLUICE_TRY(lock(f));
  SLUICE_TRY(read_head(f));
  for (int32_t room = 0; room < NUM_ROOMS; ++room) SLUICE_TRY(read_record(f, room));
  return choose(f, step);
}

sluice_status_t sluice_state_file_open(const char* path, int64_t step, int32_t is_durable,
                                       sluice_allocator_t* allocator, sluice_state_file_t** out_file) {
  *out_file = NULL;
  sluice_state_file_t* f;
  SLUICE_TRY(make(path, is_durable, allocator, &f));
  f->fd = open(path, O_RDWR | O_CLOEXEC);
  sluice_status_t status = SLUICE_OK;
  if (f->fd < 0 && errno == ENOENT) {
    status = SLUICE_FAIL(SLUICE_E_NOT_FOUND, "optimizer: there is no file %s", path);
  } else if (f->fd < 0) {
    status = system_says(f, "opening it");
  }
  if (status == SLUICE_OK) status = read_all(f, step);
  if (status != SLUICE_OK) {
    sluice_state_file_close(f);
    return status;
  }
  *out_file = f;
  return SLUICE_OK;
}

sluice_state_file_info_t sluice_state_file_info(const sluice_state_file_t* f) {
  const int32_t other = next_room(f);
  return (sluice_state_file_info_t){
      .count = f->count,
      .step = f->room == NO_ROOM ? SLUICE_NO_STEP : f->records[f->room].step,
      .other_step = f->room != NO_ROOM && is_whole(f, other) ? f->records[other].step : SLUICE_NO_STEP,
      .unfinished_step = f->unfinished,
      .bytes = file_bytes(f->count),
  };
}

/* ---- steps ---- */

sluice_status_t sluice_state_file_read(const sluice_state_file_t* f, int32_t state, int64_t first, int64_t count,
                                       float* out) {
  return sluice_file_read_at(f->fd, f->path, place(f, f->room, state, first), out, (uint64_t)count * sizeof *out);
}

/* On the disk before the room's first byte is, lest an old record say that it is whole. */
sluice_status_t sluice_state_file_begin(sluice_state_file_t* f, int64_t step) {
  SLUICE_TRY(write_record(f, next_room(f), BEGUN, step));
  SLUICE_TRY(sync_data(f));
  f->is_writing = 1;
  return SLUICE_OK;
}

sluice_status_t sluice_state_file_write(sluice_state_file_t* f, int32_t state, int64_t first, int64_t count,
                                        const float* data) {
  return sluice_file_write_at(f->fd, f->path, place(f, next_room(f), state, first), data,
                              (uint64_t)count * sizeof *data);
}

/* Where that fails the step is taken back, as far as the file can still be written: who asked is told that it is not.
 */
static sluice_status_t bring_record_to_disk(sluice_state_file_t* f, int32_t room) {
  const sluice_status_t status = sync_data(f);
  if (status == SLUICE_OK) return SLUICE_OK;
  sluice_error_info_t why;
  sluice_error_capture(&why);
  (void)write_record(f, room, BEGUN, f->records[room].step);
  f->records[room].state = BEGUN;
  return sluice_error_adopt(&why);
}

sluice_status_t sluice_state_file_end(sluice_state_file_t* f) {
  const int32_t room = next_room(f);
  if (!f->is_writing) return SLUICE_FAIL(SLUICE_E_STATE, "optimizer: %s: no step was begun", f->path);
  SLUICE_TRY(sync_data(f));
  SLUICE_TRY(write_record(f, room, WHOLE, f->records[room].step));
  SLUICE_TRY(bring_record_to_disk(f, room));
  f->room = room;
  f->is_writing = 0;
  f->unfinished = SLUICE_NO_STEP;
  return SLUICE_OK;
}

void sluice_state_file_give_up(sluice_state_file_t* f) { f->is_writing = 0; }
