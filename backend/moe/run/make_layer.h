// SPDX-License-Identifier: Apache-2.0
/* Creates a layer with its strategies and mode. */
#pragma once

#include "backend/moe/layer/layer.h"

/* config has been validated; policies: of its lists, NULL: it has none. Retains context. */
sluice_status_t sluice_layer_create(sluice_context_t* context, const sluice_moe_config_t* config,
                                    const sluice_chunk_policies_t* policies, sluice_moe_t** out_moe);
