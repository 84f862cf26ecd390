// SPDX-License-Identifier: Apache-2.0
/* Makes a layer, runs its forward and its backward (agreement, binding, execution), and replaces its experts. Arguments
 * have been checked; except for creation, the calling thread has entered the context. */
#pragma once

#include "backend/moe/step/step.h"

/* Makes a layer with its strategies and mode. policies: of the config's lists, NULL: it has none. Retains context. */
sluice_status_t sluice_layer_create(sluice_context_t* context, const sluice_moe_config_t* config,
                                    const sluice_chunk_policies_t* policies, sluice_moe_t** out_moe);

/* `refusal`: SLUICE_OK, or why this rank's arguments were refused (with the record on this thread); the header is sent
 * even then. stream: the host's with device memory, NULL on a CPU. */
sluice_status_t sluice_run_forward(sluice_moe_t* moe, const sluice_moe_forward_args_t* args, sluice_stream_t stream,
                                   sluice_status_t refusal, sluice_step_t** out_step);
sluice_status_t sluice_run_backward(sluice_moe_t* moe, sluice_step_t* step, const sluice_moe_backward_args_t* args,
                                    sluice_stream_t stream, sluice_status_t refusal);

/* Replaces the placement of the experts, on all ranks or on none. Collective. refusal: as above; if OK, the placement
 * is checked, else it is not read. */
sluice_status_t sluice_run_replace_experts(sluice_moe_t* moe, const sluice_expert_placement_t* placement,
                                           sluice_status_t refusal);
