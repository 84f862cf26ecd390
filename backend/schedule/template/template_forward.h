// SPDX-License-Identifier: Apache-2.0
/* The template of a forward: homes of its chunks, then its ops in program order. Private to
 * backend/schedule/template. */
#pragma once

#include "backend/schedule/template/builder.h"

void sluice_place_forward(sluice_builder_t* builder, const sluice_template_spec_t* spec);
void sluice_build_forward(sluice_builder_t* builder, const sluice_template_spec_t* spec);
