// SPDX-License-Identifier: Apache-2.0
/* Runs one op of a pass, by its kind. */
#pragma once

#include "backend/moe/pass/pass.h"

sluice_status_t sluice_run_forward_op(sluice_pass_t* pass, const sluice_op_t* op, int32_t index);
sluice_status_t sluice_run_backward_op(sluice_pass_t* pass, const sluice_op_t* op, int32_t index);
