// SPDX-License-Identifier: Apache-2.0
/* The work of one rank of an expert-parallel layer; local4.c, tcp.c and mpi.c differ only in how their ranks start. */
#ifndef SLUICE_EXAMPLES_C_RANK_H_
#define SLUICE_EXAMPLES_C_RANK_H_

#include "sluice/sluice.h"

enum { RANK_TOKENS = 192, RANK_WIDTH = 16, RANK_HIDDEN = 32, RANK_EXPERTS = 8, RANK_TOP_K = 2, RANK_STEPS = 40 };

/* Trains the experts that this rank owns on its share of the tokens: RANK_TOKENS of all ranks together, the same for
 * any number of ranks, so the losses are the same too. comm may be NULL: one rank. out_losses [RANK_STEPS]: this rank's
 * part of each step's loss; the loss is their sum over the ranks. Prints and returns 1 on an error, else 0. */
int rank_train(sluice_comm_t* comm, double* out_losses);

#endif /* SLUICE_EXAMPLES_C_RANK_H_ */
