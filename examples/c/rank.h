// SPDX-License-Identifier: Apache-2.0
/* The work of one rank of an expert-parallel layer. local4.c, tcp.c and mpi.c differ only in how their ranks start. */
#pragma once

#include "sluice/sluice.h"

enum { RANK_TOKENS = 192, RANK_WIDTH = 16, RANK_HIDDEN = 32, RANK_EXPERTS = 8, RANK_TOP_K = 2, RANK_STEPS = 40 };

/* Trains the experts that this rank owns on its share of the tokens. All ranks together have RANK_TOKENS tokens, which
 * do not depend on the number of ranks, and neither do the losses. comm NULL: one rank. out_losses [RANK_STEPS]: this
 * rank's part of each step's loss, which is the sum over the ranks. Prints an error and returns 1, else returns 0. */
int rank_train(sluice_comm_t* comm, double* out_losses);
