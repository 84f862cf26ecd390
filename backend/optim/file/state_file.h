/* Masters and moments in a file [own]. It has room for two steps: one is the last whole step and is only read, into the
 * other the next one is written. What is in which room, and whether it is whole, a record of each room says, which is
 * written before the first byte of a step and behind its last. So a process that ends in mid-step leaves the last whole
 * step, and the file says that there was one more.
 *
 *     byte 0       what the file is: magic, form, elements
 *     byte 512     the record of room 0
 *     byte 1024    the record of room 1
 *     byte 4096    room 0: masters, m, v, each from a multiple of 4096 on
 *     then         room 1
 *
 * Read and written by calls at a place, since a memory map leaves it to the system when. Numbers as they lie in memory;
 * another byte order is refused by the magic. */
#ifndef SLUICE_BACKEND_OPTIM_FILE_STATE_FILE_H_
#define SLUICE_BACKEND_OPTIM_FILE_STATE_FILE_H_

#include <stdint.h>

#include "backend/base/alloc.h"
#include "backend/base/status.h"

typedef struct sluice_state_file_s sluice_state_file_t;

enum { SLUICE_STATE_MASTER = 0, SLUICE_STATE_EXP_AVG, SLUICE_STATE_EXP_AVG_SQ, SLUICE_NUM_STATES };
enum { SLUICE_NO_STEP = -1 };

/* A new file, whose disk has room for all of it from now on; it holds no step until the first _end. Errors:
 * INVALID_ARGUMENT, FOREIGN (it is there already, a full disk, what the system says), NO_MEMORY: then there is no file.
 * out_file: new, sluice_state_file_close. */
sluice_status_t sluice_state_file_create(const char* path, int64_t count, int32_t is_durable,
                                         sluice_allocator_t* allocator, sluice_state_file_t** out_file);

/* step: which of the two, SLUICE_NO_STEP: the later. Errors: NOT_FOUND (no such file, no such step in it), FOREIGN (not
 * such a file, cut, no step in it is whole), BUSY (another process has it open), NO_MEMORY. */
sluice_status_t sluice_state_file_open(const char* path, int64_t step, int32_t is_durable,
                                       sluice_allocator_t* allocator, sluice_state_file_t** out_file);
void sluice_state_file_close(sluice_state_file_t* file); /* accepts NULL */
/* Closes it and takes it away. */
void sluice_state_file_remove(sluice_state_file_t* file);

typedef struct sluice_state_file_info_s {
  int64_t count;
  int64_t step;            /* the whole step that is read */
  int64_t other_step;      /* another whole one; SLUICE_NO_STEP: none */
  int64_t unfinished_step; /* found when it was opened: begun and never ended; SLUICE_NO_STEP: none */
  uint64_t bytes;          /* of the file */
} sluice_state_file_info_t;
sluice_state_file_info_t sluice_state_file_info(const sluice_state_file_t* file);

/* Elements of the step that is there; any thread, beside _write. Errors: FOREIGN. */
sluice_status_t sluice_state_file_read(const sluice_state_file_t* file, int32_t state, int64_t first, int64_t count,
                                       float* out);
/* Of the next step, which _begin has named; one thread at a time. Errors: FOREIGN. */
sluice_status_t sluice_state_file_begin(sluice_state_file_t* file, int64_t step);
sluice_status_t sluice_state_file_write(sluice_state_file_t* file, int32_t state, int64_t first, int64_t count,
                                        const float* data);
/* All of it is written: from now on it is the step that is there. Errors: FOREIGN; then the old one still is. */
sluice_status_t sluice_state_file_end(sluice_state_file_t* file);
/* The next step is given up; begin may come again. */
void sluice_state_file_give_up(sluice_state_file_t* file);

#endif /* SLUICE_BACKEND_OPTIM_FILE_STATE_FILE_H_ */
