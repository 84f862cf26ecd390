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
