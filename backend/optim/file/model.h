// SPDX-License-Identifier: Apache-2.0
/* The tensors that a file of states is for: group, dtype and shape of each tensor, in order. They are stored as 64-bit
 * words, in memory and in the file: for each tensor its group, its dtype, its number of dimensions, and the
 * dimensions. */
#pragma once

#include "backend/base/alloc.h"
#include "backend/optim/adam.h"

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
