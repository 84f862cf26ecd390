// SPDX-License-Identifier: Apache-2.0
/* The work of one rank of a pipeline whose stages hold expert-parallel layers; pipeline4.c and pipeline_mpi.c differ
 * only in how their ranks start. */
#ifndef SLUICE_EXAMPLES_C_STAGE_H_
#define SLUICE_EXAMPLES_C_STAGE_H_

#include "sluice/sluice.h"

enum { STAGE_LAYERS = 4, STAGE_MICRO_BATCHES = 4, STAGE_TOKENS = 48, STAGE_WIDTH = 16, STAGE_STEPS = 40 };

/* Trains STAGE_LAYERS layers, x + MoE(x) each, over `stages` stages (1, 2 or 4) in W / stages replicas: rank r of
 * `all`, W ranks, is stage r mod stages of replica r / stages. `column` joins the replicas of this rank's stage, which
 * share its experts, by their numbers; NULL: one replica. A micro-batch has STAGE_TOKENS tokens, split over the
 * replicas: the same training for any number of stages and replicas, so the losses are the same too. out_losses
 * [STAGE_STEPS]: this rank's part; the loss is their sum over the ranks. Prints and returns 1 on an error, else 0. */
int stage_train(sluice_comm_t* all, sluice_comm_t* column, int stages, double* out_losses);

#endif /* SLUICE_EXAMPLES_C_STAGE_H_ */
