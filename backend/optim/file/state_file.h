// SPDX-License-Identifier: Apache-2.0
/* Masters and moments in a file [own]. It has room for two steps: one is the last whole step and is only read, into the
 * other the next one is written. What is in which room, and whether it is whole, a record of each room says, which is
 * written before the first byte of a step and after its last, with a checksum of each array. So a process that ends in
 * mid-step leaves the last whole step, and the file says that there was one more; and a step that was damaged, or that
 * a crash of the machine has left in part, is found when the file is opened.
 *
 *     byte 0       what the file is: magic, form, elements, rank and world size, length and checksum of the model
 *     byte 512     the record of room 0
 *     byte 1024    the record of room 1
 *     byte 4096    the model: shapes and dtypes of its tensors (model.h)
 *     then         room 0: masters, m, v, each from a multiple of 4096 on
 *     then         room 1
 *
 * A new file is made under the name PATH.unfinished, and has its own once a step in it is whole.
 *
 * Read and written by calls at a place, since a memory map leaves it to the system when. Numbers as they lie in memory;
 * another byte order is refused by the magic. After a fork the file is the parent's: the child's descriptor is closed,
 * and calls return STATE there. */
#ifndef SLUICE_BACKEND_OPTIM_FILE_STATE_FILE_H_
#define SLUICE_BACKEND_OPTIM_FILE_STATE_FILE_H_

#include <stdint.h>

#include "backend/base/alloc.h"
#include "backend/base/status.h"
#include "backend/optim/file/model.h"
#include "backend/optim/file/sum.h"

typedef struct sluice_state_file_s sluice_state_file_t;

enum { SLUICE_STATE_MASTER = 0, SLUICE_STATE_EXP_AVG, SLUICE_STATE_EXP_AVG_SQ, SLUICE_NUM_STATES };
enum { SLUICE_NO_STEP = -1 };

/* Which file, and of which rank. A path that is a link means what the link leads to. */
typedef struct sluice_state_place_s {
  const char* path; /* read during the call */
  int32_t is_durable;
  int32_t rank, world_size;
} sluice_state_place_t;

/* A new file, whose disk has room for all of it from now on. It has its name, and outlives its close, from _publish on.
 * An unfinished one that a process has left is taken. Errors: INVALID_ARGUMENT, EXTERNAL (it is there already and
 * `replaces` is 0, a full disk, what the system says), BUSY (another process makes it), NO_MEMORY: then nothing has
 * changed. out_file: new, sluice_state_file_close. */
sluice_status_t sluice_state_file_create(const sluice_state_place_t* place, const sluice_state_model_t* model,
                                         int32_t replaces, sluice_allocator_t* allocator,
                                         sluice_state_file_t** out_file);
/* Of a new file in which a step is whole. Errors: EXTERNAL: then it has no name. */
sluice_status_t sluice_state_file_publish(sluice_state_file_t* file);

/* Reads both steps, to see whether they are whole. step: which of the two, SLUICE_NO_STEP: the later. Errors: NOT_FOUND
 * (no such file, no such step in it), EXTERNAL (not such a file, cut, no step in it is whole), MISMATCH (of another
 * rank), BUSY (another process has it open), NO_MEMORY. */
sluice_status_t sluice_state_file_open(const sluice_state_place_t* place, int64_t step, sluice_allocator_t* allocator,
                                       sluice_state_file_t** out_file);
void sluice_state_file_close(sluice_state_file_t* file); /* accepts NULL */
/* STATE in a forked child. */
sluice_status_t sluice_state_file_check_process(const sluice_state_file_t* file);

typedef struct sluice_state_file_info_s {
  int64_t count;
  int64_t step;            /* the whole step that is read */
  int64_t other_step;      /* another whole one; SLUICE_NO_STEP: none */
  int64_t unfinished_step; /* found when it was opened: begun and never ended; SLUICE_NO_STEP: none */
  uint64_t bytes;          /* of the file */
} sluice_state_file_info_t;
sluice_state_file_info_t sluice_state_file_info(const sluice_state_file_t* file);
const sluice_state_model_t* sluice_state_file_model(const sluice_state_file_t* file);
const char* sluice_state_file_path(const sluice_state_file_t* file);
/* The other whole step becomes the one that is read. Errors: NOT_FOUND. */
sluice_status_t sluice_state_file_go_to(sluice_state_file_t* file, int64_t step);

/* Elements of the step that is there; any thread, also during _write. sum: that they are added to; NULL: none. Errors:
 * EXTERNAL. */
sluice_status_t sluice_state_file_read(const sluice_state_file_t* file, int32_t state, int64_t first, int64_t count,
                                       float* out, sluice_state_sum_t* sum);
/* Whether the sums over all of that step, [SLUICE_NUM_STATES], are those that it was written with. Errors: EXTERNAL. */
sluice_status_t sluice_state_file_check_sums(const sluice_state_file_t* file, const sluice_state_sum_t* sums);

/* Of the next step, which _begin has named; one thread at a time, each state from its first element to its last.
 * Errors: EXTERNAL. */
sluice_status_t sluice_state_file_begin(sluice_state_file_t* file, int64_t step);
sluice_status_t sluice_state_file_write(sluice_state_file_t* file, int32_t state, int64_t first, int64_t count,
                                        const float* data);
/* All of it is written; where the file is durable, to the disk. Errors: EXTERNAL. */
sluice_status_t sluice_state_file_seal(sluice_state_file_t* file);
/* From now on it is the step that is there; seals it first. Errors: EXTERNAL; then the old one still is. */
sluice_status_t sluice_state_file_end(sluice_state_file_t* file);
/* The step that has just ended is none: the one before is there again, and the file says so, as far as it can still be
 * written; else the log says what to do. */
void sluice_state_file_take_back(sluice_state_file_t* file);
/* The next step is given up; begin may come again. */
void sluice_state_file_give_up(sluice_state_file_t* file);

/* 1: a step failed and so did giving parameters back, so these are partly of another step: until they are loaded. */
void sluice_state_file_set_mixed(sluice_state_file_t* file, int32_t is_mixed);
/* STATE where parameters are so. */
sluice_status_t sluice_state_file_check_mixed(const sluice_state_file_t* file);

#endif /* SLUICE_BACKEND_OPTIM_FILE_STATE_FILE_H_ */
