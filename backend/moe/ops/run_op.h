// SPDX-License-Identifier: Apache-2.0
/* Runs one op of a pass, by its kind. */
#ifndef SLUICE_BACKEND_MOE_OPS_RUN_OP_H_
#define SLUICE_BACKEND_MOE_OPS_RUN_OP_H_

#include "backend/moe/pass/pass.h"

sluice_status_t sluice_run_forward_op(sluice_pass_t* pass, const sluice_op_t* op, int32_t index);
sluice_status_t sluice_run_backward_op(sluice_pass_t* pass, const sluice_op_t* op, int32_t index);

#endif /* SLUICE_BACKEND_MOE_OPS_RUN_OP_H_ */
