// SPDX-License-Identifier: Apache-2.0
/* What a file of states is of: each tensor's group, dtype and shape, in order. As words of 64 bits, which the file
 * holds: for each tensor group, dtype, number of dimensions, and these. */
#ifndef SLUICE_BACKEND_OPTIM_FILE_MODEL_H_
#define SLUICE_BACKEND_OPTIM_FILE_MODEL_H_

#include "backend/base/alloc.h"
#include "backend/optim/adam_request.h"

enum { SLUICE_STATE_MODEL_MOST_DIMS = 64 };

typedef struct sluice_state_model_s {
  int64_t* words;
  int64_t num_words;
  int64_t num_tensors, count; /* of elements of all of them */
} sluice_state_model_t;

/* The shapes that a caller gives, of all tensors in order. num_dims NULL: each has one dimension. */
typedef struct sluice_state_shapes_s {
  const int32_t* num_dims;
  const int64_t* dims;
} sluice_state_shapes_t;

/* out_model: new, sluice_state_model_free. Errors: INVALID_ARGUMENT naming the tensor whose shape is not its count,
 * NO_MEMORY. */
sluice_status_t sluice_state_model_make(const sluice_adam_group_t* groups, int64_t num_groups,
                                        sluice_state_shapes_t shapes, sluice_allocator_t* allocator,
                                        sluice_state_model_t* out_model);
void sluice_state_model_free(sluice_state_model_t* model, sluice_allocator_t* allocator);

/* Counts tensors and elements of words that were read. 0: they are none that _make has written. */
int sluice_state_model_read(sluice_state_model_t* model);

/* MISMATCH with the first difference of an optimizer's tensors from those of a file; path: for messages. Of tensors
 * alone, without shapes: by counts. */
sluice_status_t sluice_state_model_compare(const sluice_state_model_t* of_file, const sluice_state_model_t* wanted,
                                           const char* path);
sluice_status_t sluice_state_model_compare_tensors(const sluice_state_model_t* of_file,
                                                   const sluice_adam_group_t* groups, int64_t num_groups,
                                                   const char* path);

#endif /* SLUICE_BACKEND_OPTIM_FILE_MODEL_H_ */
