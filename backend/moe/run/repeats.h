// SPDX-License-Identifier: Apache-2.0
/* What a forward has to do with earlier ones, where somebody chooses n or plans. What activation checkpointing runs
 * again must leave what the first time left, or the host cannot put one in the other's place: the same n and the same
 * plan. So a first forward is noted (is_noted), and a repetition (repeats) looks back for it (layer/replay.h). All
 * three do nothing for a forward that is neither. Private to moe/run. */
#ifndef SLUICE_BACKEND_MOE_RUN_REPEATS_H_
#define SLUICE_BACKEND_MOE_RUN_REPEATS_H_

#include "backend/moe/run/forward_call.h"

/* Before the header: what this rank's routing says. */
void sluice_forward_look_back(sluice_forward_t* f);
/* After it: the forward that this one repeats on all ranks, whose choice it takes; NULL: none. */
const sluice_replay_forward_t* sluice_forward_take_repeated(sluice_forward_t* f, uint32_t like);
/* Once all ranks go on. They do this for the same forwards. */
void sluice_forward_note(const sluice_forward_t* f);

#endif /* SLUICE_BACKEND_MOE_RUN_REPEATS_H_ */
