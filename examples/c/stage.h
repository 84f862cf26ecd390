// SPDX-License-Identifier: Apache-2.0
/* The work of one rank of a pipeline whose stages hold expert-parallel layers. pipeline4.c and pipeline_mpi.c differ
 * only in how their ranks start. */
#pragma once

#include "sluice/sluice.h"

enum { STAGE_LAYERS = 4, STAGE_MICRO_BATCHES = 4, STAGE_TOKENS = 48, STAGE_WIDTH = 16, STAGE_STEPS = 40 };

/* Trains STAGE_LAYERS layers, each x + MoE(x), over `stages` stages (1, 2 or 4) in W / stages replicas. `all` has W
 * ranks; rank r is stage r mod stages of replica r / stages. `column`: the replicas of this rank's stage in order, over
 * which its experts are distributed; NULL: one replica. A micro-batch has STAGE_TOKENS tokens, divided among the
 * replicas, so the losses do not depend on the numbers of stages and replicas. out_losses [STAGE_STEPS]: this rank's
 * part of each loss, which is the sum over the ranks. Prints an error and returns 1, else returns 0. */
int stage_train(sluice_comm_t* all, sluice_comm_t* column, int stages, double* out_losses);
