// SPDX-License-Identifier: Apache-2.0
/* The variants of a layer: a table of functions for each property, chosen once when the layer is made
 * (run/make_layer.c), so that no other code tests which variant it is. The folders above define the tables. */
#pragma once

struct sluice_copies_s;
struct sluice_pass_lanes_s;
struct sluice_routes_s;
struct sluice_saved_memory_s;
struct sluice_travel_s;

typedef struct sluice_strategies_s {
  const struct sluice_routes_s* routes;      /* memory and order of routes: routing/routes.h */
  const struct sluice_copies_s* copies;      /* what ranks exchange about token copies: routing/copies.h */
  const struct sluice_pass_lanes_s* lanes;   /* how ops are submitted and timed: pass/lanes.h */
  const struct sluice_saved_memory_s* saved; /* memory of saved buffers: step/saved_memory.h */
  const struct sluice_travel_s* travel;      /* what ranks send each other: ops/travel.h */
  /* By SLUICE_DEDUPLICATE_NONE, _RANKS and _NODES of a pass, if the layer leaves that open; else NULL. */
  const struct sluice_strategies_s* by_deduplication;
} sluice_strategies_t;
