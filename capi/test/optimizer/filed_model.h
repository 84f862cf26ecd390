// SPDX-License-Identifier: Apache-2.0
/* A small model of three dtypes, whose master weights and moments are in memory or in a file, and whose parameters and
 * gradients may be on another machine. The second group of tensors is that of the experts, if ranks share it in parts.
 */
#pragma once

#include <stdint.h>

#include "backend/base/test/refused.h"
#include "capi/test/world/world.h"
#include "sluice/optimizer.h"

enum { NUM_TENSORS = 4, ELEMENTS = 10150, BUCKET = 1000 };

extern const int64_t counts[NUM_TENSORS];
extern const int32_t dtypes[NUM_TENSORS];

typedef struct states_s {
  float param[ELEMENTS], master[ELEMENTS], exp_avg[ELEMENTS], exp_avg_sq[ELEMENTS];
} states_t;

typedef struct model_s {
  states_t s;
  float grad[ELEMENTS];
  sluice_optimizer_tensor_t tensors[NUM_TENSORS];
  sluice_optimizer_group_t groups[2];
  const sluice_optimizer_group_t* list[2];
  sluice_optimizer_step_args_t args;
  sluice_optimizer_step_result_t result;
  sluice_optimizer_t* optimizer;
  sluice_optimizer_file_t* file;
  char path[512];
  sluice_comm_t* comm;            /* of the file */
  const world_machine_t* machine; /* whose parameters and gradients steps use; NULL: those in this model */
  int32_t rank;                   /* on the machine */
  char *param_there, *grad_there;
} model_t;

/* A model with its states in memory, without an optimizer. */
void init_model(model_t* m);
/* A model with its states in memory. close_model closes models of all kinds and removes the file. */
model_t* open_model(void);
model_t* open_with_file(void);
model_t* open_with_file_at(const char* path); /* creates the file at the path of another model */
/* Removes master weights and moments from the tensors, since the file now holds them. */
void forget_states(model_t* m);
void close_model(model_t* m);
/* Copies parameters and gradients to the machine, for optimizers of a context on it. */
void move_model(model_t* m, const world_machine_t* machine, int32_t rank);
/* The configuration of the model's file, which need not exist. */
sluice_optimizer_file_config_t config_of(model_t* m);

void write_element(void* data, int32_t dtype, int64_t i, float x);
float read_element(const void* data, int32_t dtype, int64_t i);
void set_gradients(model_t* m, int step, int rank);
/* Takes a step with the present gradients, and waits until the machine has run it. */
sluice_status_t run_step(model_t* m);
void step_model(model_t* m, int number);
sluice_optimizer_file_info_t info_of(model_t* m);
/* Checks that the file's states and the parameters equal the states of `wanted` in memory. */
void expect_states(model_t* m, const model_t* wanted);
/* Changes elements of each tensor, as code outside of the optimizer may do: in m's parameters, and in the parameters
 * and masters of `copy`, whose states are in memory. */
void write_params(model_t* m, model_t* copy, int seed);
/* Closes the file. */
void close_file(model_t* m);
/* Closes the file and opens it at a step; -1: the last step. */
void reopen(model_t* m, int64_t at);
