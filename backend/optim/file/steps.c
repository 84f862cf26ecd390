// SPDX-License-Identifier: Apache-2.0
/* The steps of a file of states: its records and checksums, reading and writing. */
#include "backend/optim/file/state_file.h"

#include <stddef.h>
#include <unistd.h>

#include "backend/base/hash.h"
#include "backend/base/log.h"
#include "backend/base/math.h"
#include "backend/optim/file/format.h"

static int32_t next_room(const sluice_state_file_t* f) { return f->room == NO_ROOM ? 0 : 1 - f->room; }
static int is_whole(const sluice_state_file_t* f, int32_t room) { return f->records[room].state == WHOLE; }

sluice_status_t sluice_state_file_check_process(const sluice_state_file_t* f) {
  if (f->pid == getpid()) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_STATE,
                     "optimizer: %s was opened before fork() and is the parent's; the child may open another file",
                     f->path);
}

static sluice_status_t sync_data(const sluice_state_file_t* f) {
  return !f->is_durable || fdatasync(f->descriptor.fd) == 0 ? SLUICE_OK : sluice_state_file_says(f, "syncing it");
}

/* ---- records ---- */

static sluice_status_t write_record(sluice_state_file_t* f, int32_t room, record_t record) {
  record.sum = sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, &record, offsetof(record_t, sum));
  SLUICE_TRY(sluice_file_write_at(f->descriptor.fd, "optimizer", f->path, (uint64_t)(room + 1) * RECORD_AT, &record,
                                  sizeof record));
  f->records[room] = record;
  return SLUICE_OK;
}

/* If the checksum of a record is wrong, none of its fields is used, not even the step number. */
sluice_status_t sluice_state_file_read_record(sluice_state_file_t* f, int32_t room) {
  record_t* record = f->records + room;
  SLUICE_TRY(sluice_file_read_at(f->descriptor.fd, "optimizer", f->path, (uint64_t)(room + 1) * RECORD_AT, record,
                                 sizeof *record));
  if (record->state == EMPTY && record->sum == 0) return SLUICE_OK;
  if (record->sum == sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, record, offsetof(record_t, sum)) && record->step >= 0 &&
      record->step <= MOST_STEPS && (record->state == BEGUN || record->state == WHOLE))
    return SLUICE_OK;
  *record = (record_t){.state = DAMAGED, .step = SLUICE_NO_STEP};
  sluice_log(SLUICE_LOG_WARN, "optimizer: %s: the record of one of its two steps is damaged: that step is not used",
             f->path);
  return SLUICE_OK;
}

enum { PIECE = 8192 }; /* elements, on the stack */

/* Reads all of a room whose record says that it is whole, and verifies the checksums. */
sluice_status_t sluice_state_file_verify(sluice_state_file_t* f, int32_t room) {
  float piece[PIECE];
  if (!is_whole(f, room)) return SLUICE_OK;
  for (int32_t state = 0; state < SLUICE_NUM_STATES; ++state) {
    sluice_state_sum_t sum;
    sluice_state_sum_begin(&sum);
    for (int64_t first = 0; first < f->count; first += PIECE) {
      const int64_t count = sluice_min(PIECE, f->count - first);
      SLUICE_TRY(sluice_file_read_at(f->descriptor.fd, "optimizer", f->path,
                                     sluice_state_file_at(f, room, state, first), piece,
                                     (uint64_t)count * sizeof *piece));
      sluice_state_sum_add(&sum, piece, count);
    }
    if (sluice_state_sum_end(&sum) == f->records[room].sums[state]) continue;
    f->records[room].state = DAMAGED;
    sluice_log(
        SLUICE_LOG_WARN,
        "optimizer: %s: step %lld is damaged, or was not yet on the disk when the machine stopped: it is not used",
        f->path, (long long)f->records[room].step);
    return SLUICE_OK;
  }
  return SLUICE_OK;
}

sluice_status_t sluice_state_file_choose(sluice_state_file_t* f, int64_t step) {
  for (int32_t room = 0; room < NUM_ROOMS; ++room) {
    const record_t* record = f->records + room;
    if (record->state == BEGUN) f->unfinished = record->step;
    if (!is_whole(f, room) || (step != SLUICE_NO_STEP && record->step != step)) continue;
    if (f->room == NO_ROOM || record->step > f->records[f->room].step) f->room = room;
  }
  if (f->room == NO_ROOM && step != SLUICE_NO_STEP) {
    return SLUICE_FAIL(SLUICE_E_NOT_FOUND, "optimizer: %s does not have step %lld, or not all of it", f->path,
                       (long long)step);
  }
  if (f->room == NO_ROOM) {
    return SLUICE_FAIL(SLUICE_E_EXTERNAL, "optimizer: %s: neither of its two steps is complete: the file is damaged",
                       f->path);
  }
  if (f->unfinished != SLUICE_NO_STEP) {
    sluice_log(SLUICE_LOG_WARN, "optimizer: %s: step %lld was not completed; step %lld is used", f->path,
               (long long)f->unfinished, (long long)f->records[f->room].step);
  }
  return SLUICE_OK;
}

sluice_state_file_info_t sluice_state_file_info(const sluice_state_file_t* f) {
  const int32_t other = next_room(f);
  return (sluice_state_file_info_t){
      .count = f->count,
      .step = f->room == NO_ROOM ? SLUICE_NO_STEP : f->records[f->room].step,
      .other_step = f->room != NO_ROOM && is_whole(f, other) ? f->records[other].step : SLUICE_NO_STEP,
      .unfinished_step = f->unfinished,
      .bytes = sluice_state_file_bytes(f),
  };
}

const sluice_state_model_t* sluice_state_file_model(const sluice_state_file_t* f) { return &f->model; }
const char* sluice_state_file_path(const sluice_state_file_t* f) { return f->path; }

sluice_status_t sluice_state_file_go_to(sluice_state_file_t* f, int64_t step) {
  const int32_t other = next_room(f);
  if (f->records[f->room].step == step) return SLUICE_OK;
  if (!is_whole(f, other) || f->records[other].step != step)
    return SLUICE_FAIL(SLUICE_E_NOT_FOUND, "optimizer: %s does not have step %lld, or not all of it", f->path,
                       (long long)step);
  f->room = other;
  return SLUICE_OK;
}

/* ---- reading ---- */

/* Elements that are summed while they are in the caches. */
enum { SUMMED_AT_ONCE = 1 << 15 };

sluice_status_t sluice_state_file_read(const sluice_state_file_t* f, int32_t state, int64_t first, int64_t count,
                                       float* out, sluice_state_sum_t* sum) {
  for (int64_t done = 0; done < count; done += SUMMED_AT_ONCE) {
    const int64_t size = sluice_min(SUMMED_AT_ONCE, count - done);
    SLUICE_TRY(sluice_file_read_at(f->descriptor.fd, "optimizer", f->path,
                                   sluice_state_file_at(f, f->room, state, first + done), out + done,
                                   (uint64_t)size * sizeof *out));
    if (sum != NULL) sluice_state_sum_add(sum, out + done, size);
  }
  return SLUICE_OK;
}

sluice_status_t sluice_state_file_check_sums(const sluice_state_file_t* f, const sluice_state_sum_t* sums) {
  static const char* const names[SLUICE_NUM_STATES] = {"masters", "exp_avg", "exp_avg_sq"};
  const record_t* record = f->records + f->room;
  for (int32_t state = 0; state < SLUICE_NUM_STATES; ++state) {
    if (sums[state].count == f->count && sluice_state_sum_end(sums + state) == record->sums[state]) continue;
    return SLUICE_FAIL(SLUICE_E_EXTERNAL,
                       "optimizer: %s: %s of step %lld differ from what was written: the file was damaged after it was "
                       "opened; open it again, at the previous step if that is complete",
                       f->path, names[state], (long long)record->step);
  }
  return SLUICE_OK;
}

/* ---- writing ---- */

/* This record must be on the disk before the first byte of the room is written, or an old record could say that the
 * room is whole. */
sluice_status_t sluice_state_file_begin(sluice_state_file_t* f, int64_t step) {
  SLUICE_TRY(SLUICE_REQUIRE(step >= 0 && step <= MOST_STEPS,
                            "optimizer: step %lld is out of the range that a file can hold", (long long)step));
  SLUICE_TRY(write_record(f, next_room(f), (record_t){.state = BEGUN, .step = step}));
  SLUICE_TRY(sync_data(f));
  for (int32_t state = 0; state < SLUICE_NUM_STATES; ++state) sluice_state_sum_begin(f->sums + state);
  f->is_writing = 1;
  f->is_sealed = 0;
  return SLUICE_OK;
}

sluice_status_t sluice_state_file_write(sluice_state_file_t* f, int32_t state, int64_t first, int64_t count,
                                        const float* data) {
  if (first != f->sums[state].count) {
    return SLUICE_FAIL(SLUICE_E_INTERNAL, "optimizer: %s: element %lld is written, but element %lld is next", f->path,
                       (long long)first, (long long)f->sums[state].count);
  }
  for (int64_t done = 0; done < count; done += SUMMED_AT_ONCE) {
    const int64_t size = sluice_min(SUMMED_AT_ONCE, count - done);
    sluice_state_sum_add(f->sums + state, data + done, size);
    SLUICE_TRY(sluice_file_write_at(f->descriptor.fd, "optimizer", f->path,
                                    sluice_state_file_at(f, next_room(f), state, first + done), data + done,
                                    (uint64_t)size * sizeof *data));
  }
  return SLUICE_OK;
}

sluice_status_t sluice_state_file_seal(sluice_state_file_t* f) {
  if (!f->is_writing) return SLUICE_FAIL(SLUICE_E_STATE, "optimizer: %s: no step was begun", f->path);
  for (int32_t state = 0; state < SLUICE_NUM_STATES; ++state) {
    if (f->sums[state].count == f->count) continue;
    return SLUICE_FAIL(SLUICE_E_STATE, "optimizer: %s: %lld elements of %lld were written", f->path,
                       (long long)f->sums[state].count, (long long)f->count);
  }
  SLUICE_TRY(sync_data(f));
  f->is_sealed = 1;
  return SLUICE_OK;
}

/* The caller is told that the step failed, so the record must not say that it is whole. */
static sluice_status_t call_begun(sluice_state_file_t* f, int32_t room) {
  const record_t begun = {.state = BEGUN, .step = f->records[room].step};
  f->records[room].state = BEGUN;
  SLUICE_TRY(write_record(f, room, begun));
  return sync_data(f);
}

static sluice_status_t write_whole(sluice_state_file_t* f, int32_t room) {
  record_t record = {.state = WHOLE, .step = f->records[room].step};
  for (int32_t state = 0; state < SLUICE_NUM_STATES; ++state) {
    record.sums[state] = sluice_state_sum_end(f->sums + state);
  }
  SLUICE_TRY(write_record(f, room, record));
  return sync_data(f);
}

static void say_what_to_do(const sluice_state_file_t* f, int32_t room) {
  sluice_error_info_t why;
  sluice_error_capture(&why);
  sluice_log(SLUICE_LOG_ERROR,
             "optimizer: step %lld was undone, but the file may still hold it: %s; open it at step %lld",
             (long long)f->records[room].step, why.message, (long long)(f->records[room].step - 1));
}

sluice_status_t sluice_state_file_end(sluice_state_file_t* f) {
  const int32_t room = next_room(f);
  if (!f->is_sealed) SLUICE_TRY(sluice_state_file_seal(f));
  const sluice_status_t status = write_whole(f, room);
  if (status != SLUICE_OK) {
    sluice_error_info_t why;
    sluice_error_capture(&why);
    if (call_begun(f, room) != SLUICE_OK) say_what_to_do(f, room);
    return sluice_error_adopt(&why);
  }
  f->room = room;
  f->is_writing = f->is_sealed = 0;
  f->unfinished = SLUICE_NO_STEP;
  return SLUICE_OK;
}

void sluice_state_file_take_back(sluice_state_file_t* f) {
  const int32_t room = f->room;
  f->room = 1 - room;
  if (call_begun(f, room) != SLUICE_OK) say_what_to_do(f, room);
}

void sluice_state_file_give_up(sluice_state_file_t* f) { f->is_writing = f->is_sealed = 0; }

void sluice_state_file_set_mixed(sluice_state_file_t* f, int32_t is_mixed) { f->is_mixed = is_mixed; }

sluice_status_t sluice_state_file_check_mixed(const sluice_state_file_t* f) {
  if (!f->is_mixed) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_STATE,
                     "optimizer: %s: an earlier step failed, and parameters could not be restored: load them from the "
                     "file before the next step",
                     f->path);
}
