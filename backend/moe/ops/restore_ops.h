// SPDX-License-Identifier: Apache-2.0
/* Ops that save rows in forward and restore them in backward. Private to moe. */
#pragma once

#include "backend/moe/pass/pass.h"

/* COPY_OUT and COPY_IN: copies the op's one read to its one write, expert by expert. */
sluice_status_t sluice_copy(sluice_pass_t* pass, const sluice_op_t* op, int32_t index);
/* RECOMPUTE: T_DI -> T_M with the GEMMs and kernels of the forward, so that the bits are the same. */
sluice_status_t sluice_recompute(sluice_pass_t* pass, const sluice_op_t* op);
/* Calls the host's expert, T_DI -> T_DO: in forward, and again in backward if T_DO was not kept. */
sluice_status_t sluice_host_expert(sluice_pass_t* pass, const sluice_op_t* op);
