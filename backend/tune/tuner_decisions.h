// SPDX-License-Identifier: Apache-2.0
/* The tuner's record of its decisions. Private to backend/tune. */
#ifndef SLUICE_BACKEND_TUNE_TUNER_DECISIONS_H_
#define SLUICE_BACKEND_TUNE_TUNER_DECISIONS_H_

#include "backend/tune/tuner_state.h"

/* Keeps a decision, and logs it if requested. */
void sluice_tuner_record(sluice_tuner_t* tuner, const sluice_decision_t* decision);

#endif /* SLUICE_BACKEND_TUNE_TUNER_DECISIONS_H_ */
