// SPDX-License-Identifier: Apache-2.0
/* The shape of a layer as plain data: sizes, ranks, experts, routes, dtype, activation, policies and modes. It is all
 * that plans, bytes, prices and the search over candidates need: no memory, no ranks, no device.
 *
 * A shape is written when its layer is made (sluice_shape_init). Only the numbers of experts change, when a placement
 * with other numbers replaces the present one (sluice_shape_set_experts). */
#pragma once

#include <stdint.h>

#include "backend/model/chunk_policies.h"
#include "backend/model/restore.h"
#include "sluice/moe.h"

typedef struct sluice_shape_s {
  sluice_moe_config_t config; /* expert_rank, expert_slot, restore_input_of, restore_pre_activation_of: NULL */
  sluice_chunk_policies_t policies;
  int32_t rank;
  int32_t world_size;       /* W */
  int32_t num_local;        /* E_local of this rank */
  int32_t most_local;       /* largest E_local of any rank: capacities are the same on all ranks */
  int32_t gate_factor;      /* g: 2 for gated experts, else 1 */
  int16_t on_device_memory; /* rows lie in device memory, which the host cannot touch */
  int16_t ranks_per_node;   /* of the context, if it has several nodes of several ranks and K > 1; else 0 */
} sluice_shape_t;

/* config: has been checked; its lists are not kept. policies: of its lists, or NULL. first_position: [W + 1], rank r
 * has first_position[r + 1] - first_position[r] experts; NULL: the same number on each rank. */
void sluice_shape_init(sluice_shape_t* out_shape, const sluice_moe_config_t* config,
                       const sluice_chunk_policies_t* policies, int32_t rank, int32_t world_size,
                       const int32_t* first_position, int32_t on_device_memory);
/* Sets the number of ranks per node, with consecutive ranks on a node; 0: not known. A token with one route is sent to
 * one node in any case: it keeps one level, which has one hop. */
void sluice_shape_set_nodes(sluice_shape_t* shape, int32_t ranks_per_node);
/* Sets other numbers of experts: num_local and most_local. first_position: as in sluice_shape_init. */
void sluice_shape_set_experts(sluice_shape_t* shape, const int32_t* first_position);

/* The shape on the rank with most experts. */
sluice_shape_t sluice_shape_widest(const sluice_shape_t* shape);

/* Whether a token's row is sent once to each rank. One rank sends nothing. A shape that leaves this open (ANY) is not
 * deduplicated; sluice_shape_take_deduplication sets the chosen value. */
static inline int sluice_shape_is_deduplicated(const sluice_shape_t* shape) {
  const int32_t asked = shape->config.deduplicate;
  return asked != SLUICE_DEDUPLICATE_NONE && asked != SLUICE_DEDUPLICATE_ANY && shape->world_size > 1;
}

/* Whether a token's row is sent once to each node, and within a node once to each rank. */
static inline int sluice_shape_has_two_levels(const sluice_shape_t* shape) {
  return shape->config.deduplicate == SLUICE_DEDUPLICATE_NODES && shape->ranks_per_node > 0;
}
/* Whether each pass sends copies by rank or by node, as chosen for that pass. */
static inline int sluice_shape_levels_are_open(const sluice_shape_t* shape) {
  return shape->config.deduplicate == SLUICE_DEDUPLICATE_ADAPTIVE && shape->ranks_per_node > 0;
}
/* Whether each pass sends rows or copies, as chosen for that pass. If the choice cannot be made for a layer,
 * sluice_layer_begin replaces ANY with NONE. */
static inline int sluice_shape_copies_are_open(const sluice_shape_t* shape) {
  return shape->config.deduplicate == SLUICE_DEDUPLICATE_ANY;
}
static inline int sluice_shape_travel_is_open(const sluice_shape_t* shape) {
  return sluice_shape_levels_are_open(shape) || sluice_shape_copies_are_open(shape);
}
/* Sets the SLUICE_DEDUPLICATE_* that was chosen for a pass, if the shape leaves it open. */
static inline void sluice_shape_take_deduplication(sluice_shape_t* shape, int32_t deduplicate) {
  if (sluice_shape_travel_is_open(shape)) shape->config.deduplicate = deduplicate;
}
/* The SLUICE_DEDUPLICATE_* of passes; if the shape leaves it open, that of passes before the choice. */
static inline int32_t sluice_shape_deduplication(const sluice_shape_t* shape) {
  if (!sluice_shape_is_deduplicated(shape)) return SLUICE_DEDUPLICATE_NONE;
  return sluice_shape_has_two_levels(shape) ? SLUICE_DEDUPLICATE_NODES : SLUICE_DEDUPLICATE_RANKS;
}

/* Whether the layer is deduplicated with tables in device memory. */
static inline int sluice_shape_has_device_token_copies(const sluice_shape_t* shape) {
  return shape->on_device_memory && sluice_shape_is_deduplicated(shape);
}

/* The fixed number of rows that one rank sends to one expert in one chunk; 0: the number of routed rows. */
static inline int64_t sluice_shape_capacity(const sluice_shape_t* shape) {
  return shape->config.exchange_mode == SLUICE_EXCHANGE_CAPACITY ? shape->config.capacity_rows : 0;
}

/* Whether the forward of callback experts runs again in backward. */
static inline int sluice_shape_runs_again(const sluice_shape_t* shape) {
  int again = sluice_restore_is_computed_again(shape->config.restore_pre_activation);
  for (int32_t i = 0; i < shape->policies.count; ++i) again |= sluice_restore_is_computed_again(shape->policies.m[i]);
  return again;
}

/* Whether rows of T_DI, or of T_M, of any chunk are not kept for the backward, without a plan. */
int sluice_shape_restores_input(const sluice_shape_t* shape);
int sluice_shape_restores_pre_activation(const sluice_shape_t* shape);

/* Whether passes without a plan take the weight-gradient mode that holds the fewest bytes (sluice_leanest_wgrad_mode):
 * the config names no mode, and restores rows to save memory. Deferred weight gradients would hold the rows of all
 * chunks again in backward, which is what reuse saves [MPipeMoE eq. 5]. */
static inline int sluice_shape_is_lean(const sluice_shape_t* shape) {
  const sluice_moe_config_t* c = &shape->config;
  return c->wgrad_mode == SLUICE_WGRAD_ADAPTIVE && c->num_chunks != 1 && !c->callback_experts &&
         (c->reuse || sluice_shape_restores_input(shape) || sluice_shape_restores_pre_activation(shape));
}

/* The properties that determine how chunks are cut, for a layer that runs or is priced. */
typedef struct sluice_chunking_s {
  int32_t num_chunks;
  int32_t chunking; /* SLUICE_CHUNKING_* */
  int32_t num_experts, world_size;
  int32_t deduplicate;
  int32_t restore_input, restore_pre_activation; /* of all chunks */
} sluice_chunking_t;

/* Whether chunks are cut out of rows by expert instead of tokens, if neither a plan nor a capacity bounds them and rows
 * lie in host memory: with several experts per rank, and with all rows kept, since a layer that restores rows needs the
 * memory that waiting rows would take. */
static inline int sluice_chunking_is_by_rows(const sluice_chunking_t* c) {
  return c->num_chunks > 1 && c->chunking == SLUICE_CHUNKING_ADAPTIVE && c->world_size > 1 &&
         c->num_experts > c->world_size && !c->deduplicate && sluice_restore_is_kept(c->restore_input) &&
         sluice_restore_is_kept(c->restore_pre_activation);
}

/* The same for a forward of n chunks without a plan. Equal on all ranks, and with or without a backward, so that both
 * have the same bits. */
int sluice_shape_chunks_by_experts(const sluice_shape_t* shape, int32_t num_chunks);

/* Token copies divided by routes if routing is uniform: W (1 - (E - E/W choose K) / (E choose K)) / K. */
double sluice_token_copies_share(int32_t num_experts, int32_t world_size, int32_t top_k);
