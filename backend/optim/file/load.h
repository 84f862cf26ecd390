// SPDX-License-Identifier: Apache-2.0
/* Copies between a file of states and tensors in memory. The file has the elements in the order of groups and
 * tensors. */
#pragma once

#include "backend/optim/adam.h"
#include "backend/optim/file/state_file.h"

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
