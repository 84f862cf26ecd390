// SPDX-License-Identifier: Apache-2.0
/* Runs a forward or a backward of one layer, from arguments that capi has checked: agreement, binding, execution. */
#pragma once

#include "backend/moe/step/step.h"

/* `refusal`: SLUICE_OK, or why this rank's arguments were refused (with the record on this thread); the header is sent
 * even then. The context has been entered. stream: the host's with device memory, NULL on a CPU. */
sluice_status_t sluice_run_forward(sluice_moe_t* moe, const sluice_moe_forward_args_t* args, sluice_stream_t stream,
                                   sluice_status_t refusal, sluice_step_t** out_step);
sluice_status_t sluice_run_backward(sluice_moe_t* moe, sluice_step_t* step, const sluice_moe_backward_args_t* args,
                                    sluice_stream_t stream, sluice_status_t refusal);
