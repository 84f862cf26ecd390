// SPDX-License-Identifier: Apache-2.0
/* The tuner's record of its decisions. Private to backend/tune. */
#pragma once

#include "backend/tune/tuner_state.h"

/* Keeps a decision, and logs it if requested. */
void sluice_tuner_record(sluice_tuner_t* tuner, const sluice_decision_t* decision);
