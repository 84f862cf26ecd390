// SPDX-License-Identifier: Apache-2.0
/* Ops that both directions add. Private to backend/schedule/template. */
#pragma once

#include "backend/schedule/template/builder.h"

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
