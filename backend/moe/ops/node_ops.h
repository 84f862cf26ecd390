// SPDX-License-Identifier: Apache-2.0
/* The ops within a node of an exchange in two levels, for both directions. */
#pragma once

#include "backend/moe/pass/pass.h"

/* index: of the op. tokens: the rows that the preceding dispatch sent. */
sluice_status_t sluice_node_dispatch(sluice_pass_t* pass, const sluice_op_t* op, int32_t index,
                                     const sluice_tensor_t* tokens);
/* tensor: the rows to be summed, T_DO or dT_DI. */
sluice_status_t sluice_node_combine(sluice_pass_t* pass, const sluice_op_t* op, int32_t index, int32_t tensor);
