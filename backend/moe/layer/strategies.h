// SPDX-License-Identifier: Apache-2.0
/* How a layer does what layers do in several ways: a table of functions for each axis, chosen once when the layer is
 * made (run/make_layer.c), so that nobody asks which way it is. The tables are of the rooms above. */
#ifndef SLUICE_BACKEND_MOE_LAYER_STRATEGIES_H_
#define SLUICE_BACKEND_MOE_LAYER_STRATEGIES_H_

struct sluice_copies_s;
struct sluice_pass_lanes_s;
struct sluice_routes_s;
struct sluice_saved_memory_s;
struct sluice_travel_s;

typedef struct sluice_strategies_s {
  const struct sluice_routes_s* routes;      /* where routes are ordered and stay: routing/routes.h */
  const struct sluice_copies_s* copies;      /* what ranks tell each other of copies of tokens: routing/copies.h */
  const struct sluice_pass_lanes_s* lanes;   /* how ops reach their lanes, and whose clock times them: pass/lanes.h */
  const struct sluice_saved_memory_s* saved; /* where saved buffers lie: step/saved_memory.h */
  const struct sluice_travel_s* travel;      /* what travels between ranks: ops/travel.h */
  /* Of its passes by SLUICE_DEDUPLICATE_NONE, _RANKS and _NODES, where a layer leaves that open; else NULL. */
  const struct sluice_strategies_s* by_deduplication;
} sluice_strategies_t;

#endif /* SLUICE_BACKEND_MOE_LAYER_STRATEGIES_H_ */
