// SPDX-License-Identifier: Apache-2.0
/* The tensors of a step as lines of elements. A line is consecutive groups whose gradients are summed over the same
 * ranks. */
#pragma once

#include "backend/base/alloc.h"
#include "backend/optim/adam.h"
#include "sluice/comm.h"

/* A tensor, its first element and its first piece (SLUICE_ADAM_PIECE), both counted over all lines. */
typedef struct sluice_line_tensor_s {
  const sluice_adam_tensor_t* tensor;
  const sluice_adam_group_t* group;
  int64_t first, first_piece;
} sluice_line_tensor_t;

typedef struct sluice_lines_s {
  int32_t num_lines;
  int64_t num_tensors, num_elements, num_pieces;
  /* [num_lines] */
  sluice_comm_t** comms;
  int64_t* counts;               /* elements */
  int64_t* first_pieces;         /* [num_lines + 1], the last is num_pieces */
  sluice_line_tensor_t* tensors; /* [num_tensors], without empty tensors */
  void* block;
  uint64_t bytes;
} sluice_lines_t;

/* comms: [num_groups], the ranks over which the gradients of each group are summed; NULL: one rank, and so one line.
 * Groups are borrowed until sluice_lines_free. Errors: NO_MEMORY. */
sluice_status_t sluice_lines_make(const sluice_adam_group_t* groups, int64_t num_groups, sluice_comm_t* const* comms,
                                  sluice_allocator_t* allocator, sluice_lines_t* out_lines);
void sluice_lines_free(sluice_lines_t* lines, sluice_allocator_t* allocator);

/* Consecutive elements of one tensor. */
typedef struct sluice_line_run_s {
  const sluice_line_tensor_t* of;
  int64_t first; /* in the tensor */
  int64_t count;
} sluice_line_run_t;

/* Returns the run that begins at element `at` (over all lines) and ends at `end` at the latest. */
sluice_line_run_t sluice_lines_run(const sluice_lines_t* lines, int64_t at, int64_t end);
/* Returns a piece as a run. */
sluice_line_run_t sluice_lines_piece(const sluice_lines_t* lines, int64_t piece);
/* Returns the number of pieces that end at or before element `at`. */
int64_t sluice_lines_pieces_before(const sluice_lines_t* lines, int64_t at);
