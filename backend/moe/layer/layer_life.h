// SPDX-License-Identifier: Apache-2.0
/* Creates and destroys layers. */
#pragma once

#include "backend/moe/layer/layer.h"

/* config has been validated; policies: of its lists, or NULL. Retains context. The strategies are not set yet:
 * run/run.h makes complete layers. */
sluice_status_t sluice_layer_begin(sluice_context_t* context, const sluice_moe_config_t* config,
                                   const sluice_chunk_policies_t* policies, sluice_moe_t** out_moe);
/* Bytes that the layer object itself takes of its context's memory. */
uint64_t sluice_layer_bytes(const sluice_moe_t* moe);
/* Writes the tables of the placement and all that depends on them: numbers of the shape, the fingerprint. The placement
 * has been checked; its lists are not kept. Cannot fail. */
void sluice_layer_place(sluice_moe_t* moe, const sluice_expert_placement_t* placement);
/* Key of layers that can share a plan: equal configs, with equal numbers of experts on each rank. */
uint64_t sluice_layer_plan_key(const sluice_moe_t* moe);
/* Key of layers whose plans take the same bytes, whatever their placement. */
uint64_t sluice_layer_bytes_kind(const sluice_moe_t* moe);
void sluice_layer_retain(sluice_moe_t* moe);
void sluice_layer_release(sluice_moe_t* moe);
