// SPDX-License-Identifier: Apache-2.0
/* Reads and checks the groups and tensors of public calls, for backend/optim. */
#pragma once

#include "backend/optim/file/state_file.h"
#include "sluice/optimizer.h"

/* What a call requires of tensors. */
enum {
  SLUICE_TENSORS_WITH_STATES = 0, /* gradients, moments, and optionally a master */
  SLUICE_TENSORS_OF_A_FILE,       /* gradients; no states */
  SLUICE_TENSORS_TO_STORE,        /* any states; gradients are not read */
  SLUICE_TENSORS_TO_LOAD          /* the same; param may be NULL too */
};

/* Allocated as one block. */
typedef struct sluice_optimizer_work_s {
  sluice_adam_group_t* groups;
  sluice_comm_t** comms;
  sluice_adam_tensor_t* tensors;
  int64_t num_groups, num_elements;
  uint64_t bytes;
} sluice_optimizer_work_t;

/* of_step: the communicator of all ranks; NULL: one rank. out_work: release with sluice_optimizer_work_free, after
 * errors too. Errors: INVALID_ARGUMENT naming group, tensor and what is wrong, ABI, NO_MEMORY. */
sluice_status_t sluice_optimizer_work_make(const sluice_optimizer_group_t* const* groups, int64_t num_groups,
                                           sluice_comm_t* of_step, int32_t wanted, sluice_optimizer_work_t* out_work);
/* Returns 1 if every tensor with elements has its parameter. */
int sluice_optimizer_work_has_params(const sluice_optimizer_work_t* work);
void sluice_optimizer_work_free(sluice_optimizer_work_t* work);

/* ---- files ---- */

/* Takes the file for one call. BUSY if another call has it. */
sluice_status_t sluice_optimizer_file_take(sluice_optimizer_file_t* file, sluice_state_file_t** out_states);
void sluice_optimizer_file_release(sluice_optimizer_file_t* file);
/* Refuse tensors that do not match the file's and, for a step, tensors whose step is not the file's next one. */
sluice_status_t sluice_optimizer_file_check(const sluice_state_file_t* states, const sluice_optimizer_work_t* work);
sluice_status_t sluice_optimizer_file_check_step(const sluice_state_file_t* states,
                                                 const sluice_optimizer_work_t* work);
