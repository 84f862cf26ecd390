// SPDX-License-Identifier: Apache-2.0
/* Between a file of states and tensors in memory: elements lie in the file in the order of groups and tensors. */
#ifndef SLUICE_BACKEND_OPTIM_FILE_LOAD_H_
#define SLUICE_BACKEND_OPTIM_FILE_LOAD_H_

#include "backend/optim/adam_request.h"
#include "backend/optim/file/state_file.h"

/* Parameters become the file's masters, rounded to nearest even; masters and moments are filled where a tensor has
 * them. Errors: EXTERNAL, after which tensors before the place are filled, or all where the file was damaged. */
sluice_status_t sluice_states_load(const sluice_state_file_t* file, const sluice_adam_group_t* groups,
                                   int64_t num_groups);
/* The parameters alone of elements [0, end). */
sluice_status_t sluice_states_load_params(const sluice_state_file_t* file, const sluice_adam_group_t* groups,
                                          int64_t num_groups, int64_t end);
/* The file's next step, from _begin to _end: masters are tensors' masters, or their parameters; moments theirs, or 0.
 */
sluice_status_t sluice_states_store(sluice_state_file_t* file, int64_t step, const sluice_adam_group_t* groups,
                                    int64_t num_groups);

/* Whether elements [first, first + count) of a parameter are these masters, rounded. */
int sluice_param_is_rounded(const sluice_adam_tensor_t* tensor, int64_t first, int64_t count, const float* masters);
/* Masters become the parameter where they are not. */
void sluice_param_to_masters(const sluice_adam_tensor_t* tensor, int64_t first, int64_t count, float* masters);

#endif /* SLUICE_BACKEND_OPTIM_FILE_LOAD_H_ */
