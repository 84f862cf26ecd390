// SPDX-License-Identifier: Apache-2.0
/* The template of a forward: homes of its chunks, then its ops in program order. Private to
 * backend/schedule/template. */
#ifndef SLUICE_BACKEND_SCHEDULE_TEMPLATE_TEMPLATE_FORWARD_H_
#define SLUICE_BACKEND_SCHEDULE_TEMPLATE_TEMPLATE_FORWARD_H_

#include "backend/schedule/template/builder.h"

void sluice_place_forward(sluice_builder_t* builder, const sluice_template_spec_t* spec);
void sluice_build_forward(sluice_builder_t* builder, const sluice_template_spec_t* spec);

#endif /* SLUICE_BACKEND_SCHEDULE_TEMPLATE_TEMPLATE_FORWARD_H_ */
