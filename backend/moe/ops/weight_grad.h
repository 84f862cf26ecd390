// SPDX-License-Identifier: Apache-2.0
/* The gradients of the parameters. Private to moe.
 *
 * Where several chunks add to a 16-bit gradient, their sum is f32 and rounded once, at the end: a running sum of 16
 * bits loses what is small beside it. The sums lie in T_DW's slot, one block for each local expert that several chunks
 * touch, or, where one op goes through all chunks expert by expert, one block for all. */
#ifndef SLUICE_BACKEND_MOE_OPS_WEIGHT_GRAD_H_
#define SLUICE_BACKEND_MOE_OPS_WEIGHT_GRAD_H_

#include "backend/moe/pass/pass.h"

/* Every local expert, idle ones too: their gradients are zeros, not absent. */
sluice_status_t sluice_weight_grad(sluice_pass_t* pass, const sluice_op_t* op);

#endif /* SLUICE_BACKEND_MOE_OPS_WEIGHT_GRAD_H_ */
