// SPDX-License-Identifier: Apache-2.0
/* What the ranks of the soak do between their ends: a layer is trained, its weights are kept every ten steps. One
 * trainer in a process. */
#ifndef SLUICE_INTEGRATION_TESTS_SOAK_TRAINER_H_
#define SLUICE_INTEGRATION_TESTS_SOAK_TRAINER_H_

#include "sluice/sluice.h"

typedef struct trainer_s {
  const char* folder; /* of the weights: weights-RANK-STEP */
  int rank, world_size;
  uint64_t began_ms; /* the call that was made last */
} trainer_t;

uint64_t trainer_now_ms(void);

/* Begins with the weights of `first_step`. Says `made TURN`, and `step TURN STEP LOSS` after each, with all bits of
 * the loss in hexadecimal. Returns the first status that is not OK, with everything of its own given back. */
sluice_status_t trainer_run(trainer_t* trainer, sluice_comm_t* comm, int turn, int first_step, int num_steps);

#endif /* SLUICE_INTEGRATION_TESTS_SOAK_TRAINER_H_ */
