// SPDX-License-Identifier: Apache-2.0
/* Computes the gradients of the parameters. Private to moe.
 *
 * If several chunks add to a 16-bit gradient, their sum is f32 and rounded once, at the end: a running sum in 16 bits
 * would lose small addends. The sums lie in T_DW's slot, one block for each local expert that several chunks touch, or,
 * if one op computes all chunks expert by expert, one block for all. */
#pragma once

#include "backend/moe/pass/pass.h"

/* Writes the gradients of every local expert; those of experts without rows are zeros. */
sluice_status_t sluice_weight_grad(sluice_pass_t* pass, const sluice_op_t* op);
