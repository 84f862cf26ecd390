// SPDX-License-Identifier: Apache-2.0
/* Runs one op of a pass, by its kind; and the ops that run_op of both directions, or another file, needs. */
#pragma once

#include "backend/moe/pass/pass.h"

sluice_status_t sluice_run_forward_op(sluice_pass_t* pass, const sluice_op_t* op, int32_t index);
sluice_status_t sluice_run_backward_op(sluice_pass_t* pass, const sluice_op_t* op, int32_t index);

/* ---- ops that save rows in forward and restore them in backward (forward_ops.c) ---- */

/* COPY_OUT and COPY_IN: copies the op's one read to its one write, expert by expert. */
sluice_status_t sluice_copy(sluice_pass_t* pass, const sluice_op_t* op, int32_t index);
/* RECOMPUTE: T_DI -> T_M with the GEMMs and kernels of the forward, so that the bits are the same. */
sluice_status_t sluice_recompute(sluice_pass_t* pass, const sluice_op_t* op);
/* Calls the host's expert, T_DI -> T_DO: in forward, and again in backward if T_DO was not kept. */
sluice_status_t sluice_host_expert(sluice_pass_t* pass, const sluice_op_t* op);

/* WEIGHT_GRAD: writes the gradients of every local expert; those of experts without rows are zeros (weight_grad.c). */
sluice_status_t sluice_weight_grad(sluice_pass_t* pass, const sluice_op_t* op);
