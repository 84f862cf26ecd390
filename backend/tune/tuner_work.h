// SPDX-License-Identifier: Apache-2.0
/* Describes a layer as the work that a machine prices. Private to backend/tune. */
#pragma once

#include "backend/tune/tuner_state.h"

/* The work of a layer, without tokens; skew 1. */
sluice_workload_t sluice_tuner_work_of(const sluice_moe_t* moe);
/* Whether a machine is known that has the rates that this layer needs. */
int sluice_tuner_may_predict(const sluice_tuner_t* tuner, const sluice_moe_t* moe);

/* The SLUICE_DEDUPLICATE_* of passes in a form, and the form of passes with this deduplication. The plain form has that
 * of `work`. */
int32_t sluice_tuner_deduplication_of(const sluice_workload_t* work, int32_t form);
int32_t sluice_tuner_form_of(const sluice_workload_t* work, int32_t deduplicate, int32_t is_grouped);
