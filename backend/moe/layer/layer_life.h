// SPDX-License-Identifier: Apache-2.0
/* Making layers, and their end. */
#ifndef SLUICE_BACKEND_MOE_LAYER_LAYER_LIFE_H_
#define SLUICE_BACKEND_MOE_LAYER_LAYER_LIFE_H_

#include "backend/moe/layer/layer.h"

/* config has been validated; policies: of its lists, NULL: it has none. Retains context. Its strategies are still to be
 * chosen: run/make_layer.h makes whole layers. */
sluice_status_t sluice_layer_begin(sluice_context_t* context, const sluice_moe_config_t* config,
                                   const sluice_chunk_policies_t* policies, sluice_moe_t** out_moe);
/* What a layer itself takes of its context's memory. */
uint64_t sluice_layer_bytes(const sluice_moe_t* moe);
/* Writes the tables of who owns which expert, and what follows from them: the shape's numbers, the fingerprint. The
 * placement has been checked; its lists are not kept. Cannot fail. */
void sluice_layer_place(sluice_moe_t* moe, const sluice_expert_placement_t* placement);
/* Of layers that one plan fits: alike, with as many experts on each rank. */
uint64_t sluice_layer_plan_key(const sluice_moe_t* moe);
/* Of layers whose plans take the same bytes, wherever their experts lie. */
uint64_t sluice_layer_bytes_kind(const sluice_moe_t* moe);
void sluice_layer_retain(sluice_moe_t* moe);
void sluice_layer_release(sluice_moe_t* moe);

#endif /* SLUICE_BACKEND_MOE_LAYER_LAYER_LIFE_H_ */
