// SPDX-License-Identifier: Apache-2.0
/* The template of each direction, homes of chunks first, then ops in program order; and what both share. Private to
 * backend/schedule/template. */
#pragma once

#include "backend/schedule/template/builder.h"

void sluice_place_forward(sluice_builder_t* builder, const sluice_template_spec_t* spec);
void sluice_build_forward(sluice_builder_t* builder, const sluice_template_spec_t* spec);
void sluice_place_backward(sluice_builder_t* builder, const sluice_template_spec_t* spec);
void sluice_build_backward(sluice_builder_t* builder, const sluice_template_spec_t* spec);

/* ---- homes of chunks: slots in a ring, and homes of kept and restored tensors ---- */

/* Slots that are passed between lanes are double-buffered; those that one lane fills and empties need only one. T_DO is
 * passed between lanes and has two slots even under a plan, although the papers count one: with one slot, the second
 * GEMM of a chunk would wait for the combine of the previous chunk, a whole exchange, while the papers draw the two as
 * concurrent [MPipeMoE Fig. 4(b), 7]. */
enum { RING_BETWEEN_LANES = SLUICE_GROUPED_CHUNKS, RING_WITHIN_LANE = 1, RING_OF_GROUP = 2 };

/* Returns the number of chunks that are not kept: they share a ring. */
int32_t sluice_count_moving(const uint8_t* restore, int32_t num_chunks);

static inline int sluice_has_part(const sluice_template_spec_t* spec, int32_t part) {
  return spec->only == 0 || (spec->only & part) != 0;
}

/* Homes of T_DI or the pre-activation: kept chunks have a slot each, the others share the ring. */
void sluice_place_restored(sluice_builder_t* builder, int32_t tensor, int32_t kept, const uint8_t* restore);

/* Returns whether two consecutive chunks of a ring would use the slot at the same time if the ring had one slot. No
 * second slot is needed if lane order and the exchanges in between order the chunks; nothing orders copies. */
typedef int (*sluice_overlap_fn_t)(const sluice_template_spec_t* spec, const uint8_t* restore, int32_t earlier,
                                   int32_t later);

int32_t sluice_ring_of(const sluice_template_spec_t* spec, const uint8_t* restore, int32_t moving,
                       sluice_overlap_fn_t overlap);

/* Returns whether T_ACT and dT_ACT share the slots of T_M. With two slots of T_M for the copies and another of T_ACT, a
 * chunk would need three tensors of width H, while the papers count two [MPipeMoE Fig. 6, eq. 5]. */
int sluice_shares_act(const sluice_template_spec_t* spec);

/* Sets the homes of `tensor`, T_ACT or dT_ACT, if they are shared: the slot of T_M that the next chunk uses. */
void sluice_place_shared_act(sluice_builder_t* builder, const sluice_template_spec_t* spec, int32_t tensor);

/* Sets the homes of received rows and of tokens: by chunk, unless one op reads all returned rows. */
void sluice_place_tokens(sluice_builder_t* builder, const sluice_template_spec_t* spec);
/* Call after sluice_builder_init_homes. Sent and received rows have two slots if exchanges are grouped: a returning
 * chunk is in a group with the chunk that is RING_BETWEEN_LANES later. */
void sluice_place_groups(sluice_builder_t* builder, const sluice_template_spec_t* spec);

/* ---- ops that both directions add ---- */

/* kind: COPY_OUT moves `tensor` of the chunk to the buffer `host`, COPY_IN back. */
void sluice_add_copy(sluice_builder_t* builder, int32_t kind, int32_t tensor, int32_t host, int32_t chunk);
void sluice_add_host_expert(sluice_builder_t* builder, int32_t chunk);
/* Adds the write of T_LOW, to which an op with low-rank terms writes the products with the first factor. Call after its
 * other writes. */
void sluice_op_write_low(sluice_builder_t* builder, const sluice_template_spec_t* spec, sluice_op_t* op);

/* The ops that an exchange in two levels adds. Between nodes a chunk's rows are sent once to each node, from a rank to
 * the one with the same local index there; within a node they are forwarded to the ranks with their experts. Sums
 * return the same way.
 *
 *   dispatch: tokens -> T_NODE    node_dispatch: T_NODE and own tokens -> T_RECV
 *   node_combine: T_DO -> T_NODE  combine: T_NODE -> T_RECV
 *
 * Source: DeepSeek-V3 (arXiv 2412.19437) section 3.2.2. */

/* Returns the tensor that receives the rows of a dispatch. */
static inline int32_t sluice_arrives_in(const sluice_template_spec_t* spec) {
  return sluice_has_two_levels(spec) ? SLUICE_T_NODE : SLUICE_T_RECV;
}

/* kind: NODE_DISPATCH or NODE_DISPATCH_GRAD, after a dispatch; adds nothing with one level. */
void sluice_add_node_dispatch(sluice_builder_t* builder, const sluice_template_spec_t* spec, int32_t kind,
                              int32_t chunk);
/* kind: NODE_COMBINE or NODE_COMBINE_GRAD, before a combine with two levels. */
void sluice_add_node_combine(sluice_builder_t* builder, int32_t kind, int32_t chunk);
