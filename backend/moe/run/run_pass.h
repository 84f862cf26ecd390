// SPDX-License-Identifier: Apache-2.0
/* Initialises a pass of a layer with its ops and the layer's strategies. Private to moe/run. */
#pragma once

#include "backend/moe/pass/pass.h"

/* stream: the host's; NULL on a CPU. */
sluice_pass_t sluice_run_pass(sluice_moe_t* moe, int32_t direction, sluice_stream_t stream);
