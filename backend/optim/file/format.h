// SPDX-License-Identifier: Apache-2.0
/* The layout of a file of states, and the struct of an open file. Private to backend/optim/file. */
#pragma once

#include <limits.h>
#include <stdint.h>
#include <sys/types.h>

#include "backend/base/file_io.h"
#include "backend/optim/file/state_file.h"

enum { PAGE = 4096, RECORD_AT = 512, NUM_ROOMS = 2, NO_ROOM = -1, FORM = 2 };
enum { EMPTY = 0, BEGUN = 1, WHOLE = 2, DAMAGED = 3 }; /* DAMAGED is never written */
#define MAGIC      UINT64_C(0x31654d7453636c53)        /* "SlcStMe1" */
#define MOST_STEPS (INT64_C(1) << 62)

/* Each record is in a sector of its own, which a disk writes whole or not at all. The checksum detects a partial
 * one. */
typedef struct head_s {
  uint64_t magic;
  int64_t form, count;
  int64_t rank, world_size;
  int64_t num_words; /* of the model */
  uint64_t model_sum;
  uint64_t sum;
} head_t;
typedef struct record_s {
  int64_t state, step;
  uint64_t sums[SLUICE_NUM_STATES]; /* of a whole step */
  uint64_t sum;
} record_t;

struct sluice_state_file_s {
  sluice_allocator_t* allocator;
  char path[PATH_MAX];
  sluice_descriptor_t descriptor;
  pid_t pid;
  int32_t is_durable;
  int32_t is_new;   /* the file is at PATH.unfinished, and is removed on close */
  int32_t replaces; /* it replaces an existing file at its path */
  sluice_state_model_t model;
  int64_t count;
  record_t records[NUM_ROOMS];
  int32_t room;                               /* the one that is read; NO_ROOM: none yet */
  int32_t is_writing, is_sealed;              /* of the other room, by a step that has begun */
  sluice_state_sum_t sums[SLUICE_NUM_STATES]; /* of what is written */
  int64_t unfinished;
  int32_t is_mixed;
};

static inline uint64_t sluice_state_pages(uint64_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }
static inline uint64_t sluice_state_rooms_at(const sluice_state_file_t* f) {
  return PAGE + sluice_state_pages((uint64_t)f->model.num_words * sizeof(int64_t));
}
static inline uint64_t sluice_state_array_bytes(const sluice_state_file_t* f) {
  return sluice_state_pages((uint64_t)f->count * sizeof(float));
}
static inline uint64_t sluice_state_file_bytes(const sluice_state_file_t* f) {
  return sluice_state_rooms_at(f) + (uint64_t)NUM_ROOMS * SLUICE_NUM_STATES * sluice_state_array_bytes(f);
}
static inline uint64_t sluice_state_file_at(const sluice_state_file_t* f, int32_t room, int32_t state, int64_t first) {
  return sluice_state_rooms_at(f) + (uint64_t)(room * SLUICE_NUM_STATES + state) * sluice_state_array_bytes(f) +
         (uint64_t)first * sizeof(float);
}

/* Returns EXTERNAL with the system's error message. */
sluice_status_t sluice_state_file_says(const sluice_state_file_t* file, const char* doing);

/* Steps of opening a file. Errors: EXTERNAL, and NOT_FOUND if the step is not in the file. */
sluice_status_t sluice_state_file_read_record(sluice_state_file_t* file, int32_t room);
sluice_status_t sluice_state_file_verify(sluice_state_file_t* file, int32_t room);
sluice_status_t sluice_state_file_choose(sluice_state_file_t* file, int64_t step);
