// SPDX-License-Identifier: Apache-2.0
/* Trains the layer of a rank of the soak test, and saves its weights every ten steps. A process has one trainer. */
#pragma once

#include "sluice/sluice.h"

typedef struct trainer_s {
  const char* folder; /* has the weights: weights-RANK-STEP */
  int rank, world_size;
  uint64_t began_ms; /* the beginning of the last call */
} trainer_t;

uint64_t trainer_now_ms(void);

/* Begins with the weights of `first_step`. Prints `made TURN`, and `step TURN STEP LOSS` after each step, with all
 * bits of the loss in hexadecimal. Returns the first status that is not OK, after releasing the layer and context. */
sluice_status_t trainer_run(trainer_t* trainer, sluice_comm_t* comm, int turn, int first_step, int num_steps);
