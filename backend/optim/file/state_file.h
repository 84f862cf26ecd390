// SPDX-License-Identifier: Apache-2.0
/* Masters and moments in a file [own]. The file has room for two steps: one room has the last whole step and is only
 * read, the next step is written to the other. A record for each room says which step it has and whether that step is
 * whole, with a checksum of each array. The record is written before the first byte of a step and after its last. If a
 * process ends during a step, the file keeps the last whole step, and its records show that another step had begun. A
 * step that is damaged, or incomplete after a crash of the machine, is detected when the file is opened.
 *
 *     byte 0       file header: magic, form, elements, rank and world size, length and checksum of the model
 *     byte 512     the record of room 0
 *     byte 1024    the record of room 1
 *     byte 4096    the model: shapes and dtypes of its tensors (model.c)
 *     then         room 0: masters, m, v, each aligned to 4096
 *     then         room 1
 *
 * A new file is created as PATH.unfinished, and gets its own name when a step in it is whole.
 *
 * The file is accessed by pread and pwrite, since with a memory map the system decides when to write. Numbers are
 * stored in native byte order; the magic rejects any other. After a fork the file belongs to the parent: the child's
 * descriptor is closed, and calls return STATE there. */
#pragma once

#include <stdint.h>

#include "backend/base/alloc.h"
#include "backend/base/status.h"
#include "backend/optim/adam.h"

/* ---- sum.c ---- */

/* A checksum of consecutive floats, which may be added in parts of any size [own; rounds as in xxHash]. It costs a
 * small part of the time to read or write them. Eight words are processed at once, each in a lane of its own, by
 * invertible rounds. Damage to one lane alone is always detected, and any other damage except with probability
 * 2^-64. */
enum { SLUICE_STATE_SUM_LANES = 8, SLUICE_STATE_SUM_STRIPE = 16 }; /* in words; in floats */

typedef struct sluice_state_sum_s {
  uint64_t lanes[SLUICE_STATE_SUM_LANES];
  float rest[SLUICE_STATE_SUM_STRIPE]; /* the last count % STRIPE elements */
  int64_t count;                       /* elements so far */
} sluice_state_sum_t;

void sluice_state_sum_begin(sluice_state_sum_t* sum);
void sluice_state_sum_add(sluice_state_sum_t* sum, const float* data, int64_t count);
/* Returns the checksum of all elements in the order in which they were added. It does not depend on the sizes of the
 * parts. */
uint64_t sluice_state_sum_end(const sluice_state_sum_t* sum);

/* ---- model.c ---- */

/* The tensors that a file of states is for: group, dtype and shape of each tensor, in order. They are stored as 64-bit
 * words, in memory and in the file: for each tensor its group, its dtype, its number of dimensions, and the
 * dimensions. */
enum { SLUICE_STATE_MODEL_MOST_DIMS = 64 };

typedef struct sluice_state_model_s {
  int64_t* words;
  int64_t num_words;
  int64_t num_tensors, count; /* of elements of all tensors */
} sluice_state_model_t;

/* The shapes that a caller gives, for all tensors in order. num_dims NULL: each tensor has one dimension. */
typedef struct sluice_state_shapes_s {
  const int32_t* num_dims;
  const int64_t* dims;
} sluice_state_shapes_t;

/* out_model: new, release with sluice_state_model_free. Errors: INVALID_ARGUMENT naming the tensor whose shape does not
 * match its count, NO_MEMORY. */
sluice_status_t sluice_state_model_make(const sluice_adam_group_t* groups, int64_t num_groups,
                                        sluice_state_shapes_t shapes, sluice_allocator_t* allocator,
                                        sluice_state_model_t* out_model);
void sluice_state_model_free(sluice_state_model_t* model, sluice_allocator_t* allocator);

/* Counts the tensors and elements of words that were read from a file. Returns 0 if _make cannot have written them. */
int sluice_state_model_read(sluice_state_model_t* model);

/* Return MISMATCH with the first difference between the tensors of an optimizer and those of a file. path: for
 * messages. _compare_tensors knows no shapes and compares counts. */
sluice_status_t sluice_state_model_compare(const sluice_state_model_t* of_file, const sluice_state_model_t* wanted,
                                           const char* path);
sluice_status_t sluice_state_model_compare_tensors(const sluice_state_model_t* of_file,
                                                   const sluice_adam_group_t* groups, int64_t num_groups,
                                                   const char* path);

/* ---- life.c, steps.c ---- */

typedef struct sluice_state_file_s sluice_state_file_t;

enum { SLUICE_STATE_MASTER = 0, SLUICE_STATE_EXP_AVG, SLUICE_STATE_EXP_AVG_SQ, SLUICE_NUM_STATES };
enum { SLUICE_NO_STEP = -1 };

/* A path, and the rank whose states the file has. Symbolic links are followed. */
typedef struct sluice_state_place_s {
  const char* path; /* read during the call */
  int32_t is_durable;
  int32_t rank, world_size;
} sluice_state_place_t;

/* Creates a file and reserves disk space for all of it. It gets its name, and survives close, when it is published. An
 * unfinished file that a process has left is reused. Errors: INVALID_ARGUMENT, EXTERNAL (the file exists and `replaces`
 * is 0, a full disk, other system errors), BUSY (another process is creating it), NO_MEMORY: then nothing has changed.
 * out_file: new, release with sluice_state_file_close. */
sluice_status_t sluice_state_file_create(const sluice_state_place_t* place, const sluice_state_model_t* model,
                                         int32_t replaces, sluice_allocator_t* allocator,
                                         sluice_state_file_t** out_file);
/* Gives a new file its name, once a step in it is whole. Errors: EXTERNAL: then it has no name. */
sluice_status_t sluice_state_file_publish(sluice_state_file_t* file);

/* Opens a file, and reads both steps to check that they are whole. step: which of the two; SLUICE_NO_STEP: the later
 * one. Errors: NOT_FOUND (no such file, or no such step in it), EXTERNAL (not a file of states, truncated, or no step
 * in it is whole), MISMATCH (of another rank), BUSY (another process has it open), NO_MEMORY. */
sluice_status_t sluice_state_file_open(const sluice_state_place_t* place, int64_t step, sluice_allocator_t* allocator,
                                       sluice_state_file_t** out_file);
void sluice_state_file_close(sluice_state_file_t* file); /* accepts NULL */
/* Returns STATE in a forked child. */
sluice_status_t sluice_state_file_check_process(const sluice_state_file_t* file);

typedef struct sluice_state_file_info_s {
  int64_t count;
  int64_t step;            /* the whole step that is read */
  int64_t other_step;      /* the other whole step; SLUICE_NO_STEP: none */
  int64_t unfinished_step; /* a step that had begun and not ended when the file was opened; SLUICE_NO_STEP: none */
  uint64_t bytes;          /* of the file */
} sluice_state_file_info_t;
sluice_state_file_info_t sluice_state_file_info(const sluice_state_file_t* file);
const sluice_state_model_t* sluice_state_file_model(const sluice_state_file_t* file);
const char* sluice_state_file_path(const sluice_state_file_t* file);
/* Reads the other whole step from now on. Errors: NOT_FOUND. */
sluice_status_t sluice_state_file_go_to(sluice_state_file_t* file, int64_t step);

/* Reads elements of the current step. Threads: any thread, also during _write. sum: checksum to add them to; NULL:
 * none. Errors: EXTERNAL. */
sluice_status_t sluice_state_file_read(const sluice_state_file_t* file, int32_t state, int64_t first, int64_t count,
                                       float* out, sluice_state_sum_t* sum);
/* Checks that the checksums over all of the current step, [SLUICE_NUM_STATES], are those that it was written with.
 * Errors: EXTERNAL. */
sluice_status_t sluice_state_file_check_sums(const sluice_state_file_t* file, const sluice_state_sum_t* sums);

/* Begin and write the next step. One thread at a time writes each state from its first element to its last. Errors:
 * EXTERNAL. */
sluice_status_t sluice_state_file_begin(sluice_state_file_t* file, int64_t step);
sluice_status_t sluice_state_file_write(sluice_state_file_t* file, int32_t state, int64_t first, int64_t count,
                                        const float* data);
/* Completes the writes; a durable file is flushed to the disk. Errors: EXTERNAL. */
sluice_status_t sluice_state_file_seal(sluice_state_file_t* file);
/* Seals the next step and makes it the current one. Errors: EXTERNAL; then the old step remains the current one. */
sluice_status_t sluice_state_file_end(sluice_state_file_t* file);
/* Undoes _end: the step before is the current one again. The file is marked accordingly if it can still be written;
 * otherwise the log says what to do. */
void sluice_state_file_take_back(sluice_state_file_t* file);
/* Gives up the next step; _begin may be called again. */
void sluice_state_file_give_up(sluice_state_file_t* file);

/* 1: a step failed, and restoring the parameters failed too, so they are partly of another step until they are
 * loaded. */
void sluice_state_file_set_mixed(sluice_state_file_t* file, int32_t is_mixed);
/* Returns STATE if parameters are mixed. */
sluice_status_t sluice_state_file_check_mixed(const sluice_state_file_t* file);

/* ---- load.c: copies between a file and tensors in memory. The file has the elements in the order of groups and
 * tensors ---- */

/* Sets parameters to the file's masters, rounded to nearest even, and fills the masters and moments that a tensor has.
 * Errors: EXTERNAL. Then the tensors before the failing place are filled, or all of them if the file was damaged. */
sluice_status_t sluice_states_load(const sluice_state_file_t* file, const sluice_adam_group_t* groups,
                                   int64_t num_groups);
/* Loads only the parameters of elements [0, end). */
sluice_status_t sluice_states_load_params(const sluice_state_file_t* file, const sluice_adam_group_t* groups,
                                          int64_t num_groups, int64_t end);
/* Writes the file's next step, from _begin to _end. Masters are the tensors' masters, or else their parameters; moments
 * are the tensors' moments, or else 0. */
sluice_status_t sluice_states_store(sluice_state_file_t* file, int64_t step, const sluice_adam_group_t* groups,
                                    int64_t num_groups);

/* Returns whether elements [first, first + count) of a parameter are these masters, rounded. */
int sluice_param_is_rounded(const sluice_adam_tensor_t* tensor, int64_t first, int64_t count, const float* masters);
/* Sets masters to the parameter where they differ. */
void sluice_param_to_masters(const sluice_adam_tensor_t* tensor, int64_t first, int64_t count, float* masters);
