// SPDX-License-Identifier: Apache-2.0
/* Selects the strategies of a layer; other code does not test for variants. */
#include "backend/moe/run/run.h"

#include "backend/moe/context/row_memory.h"
#include "backend/moe/layer/layer_life.h"
#include "backend/moe/ops/travel.h"
#include "backend/moe/pass/lanes.h"
#include "backend/moe/routing/copies.h"
#include "backend/moe/run/mode.h"
#include "backend/moe/step/saved_memory.h"

/* Each route's row is sent: there is nothing to number, to exchange or to keep. */
static const sluice_copies_t no_copies = {0};

/* By row memory, and SLUICE_DEDUPLICATE_* (ADAPTIVE if both levels are possible). */
static const sluice_strategies_t strategies[2][5] = {
    {{&sluice_routes_in_host_memory, &no_copies, &sluice_lanes_of_threads, &sluice_saved_in_host_memory,
      &sluice_travel_of_rows, NULL},
     {&sluice_routes_in_host_memory, &sluice_copies_in_host_memory, &sluice_lanes_of_threads,
      &sluice_saved_in_host_memory, &sluice_travel_of_token_copies, NULL},
     {&sluice_routes_in_host_memory, &sluice_copies_by_node, &sluice_lanes_of_threads, &sluice_saved_in_host_memory,
      &sluice_travel_of_node_copies, NULL},
     {&sluice_routes_in_host_memory, &sluice_copies_in_host_memory, &sluice_lanes_of_threads,
      &sluice_saved_in_host_memory, &sluice_travel_of_token_copies, strategies[0]},
     {&sluice_routes_in_host_memory, &no_copies, &sluice_lanes_of_threads, &sluice_saved_in_host_memory,
      &sluice_travel_of_rows, strategies[0]}},
    {{&sluice_routes_in_device_memory, &no_copies, &sluice_lanes_of_streams, &sluice_saved_in_device_memory,
      &sluice_travel_of_rows, NULL},
     {&sluice_routes_in_device_memory, &sluice_copies_in_device_memory, &sluice_lanes_of_streams,
      &sluice_saved_in_device_memory, &sluice_travel_of_token_copies, NULL},
     {&sluice_routes_in_device_memory, &sluice_copies_by_node_on_device, &sluice_lanes_of_streams,
      &sluice_saved_in_device_memory, &sluice_travel_of_node_copies, NULL},
     [SLUICE_DEDUPLICATE_ANY] = {&sluice_routes_in_device_memory, &no_copies, &sluice_lanes_of_streams,
                                 &sluice_saved_in_device_memory, &sluice_travel_of_rows, strategies[1]}},
};

static int32_t travels_by(const sluice_shape_t* shape) {
  return sluice_shape_travel_is_open(shape) ? shape->config.deduplicate : sluice_shape_deduplication(shape);
}

sluice_status_t sluice_layer_create(sluice_context_t* context, const sluice_moe_config_t* config,
                                    const sluice_chunk_policies_t* policies, sluice_moe_t** out_moe) {
  SLUICE_TRY(sluice_layer_begin(context, config, policies, out_moe));
  sluice_moe_t* moe = *out_moe;
  moe->strategies = &strategies[context->rows->is_device][travels_by(&moe->shape)];
  sluice_layer_choose_mode(moe);
  return SLUICE_OK;
}
