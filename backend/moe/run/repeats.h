// SPDX-License-Identifier: Apache-2.0
/* Repeated forwards, while n or the plan is open. A forward that activation checkpointing runs again must produce
 * buffers of the same sizes as the first time, since the host replaces one with the other: the same n and the same
 * plan. So a first forward is recorded (is_noted), and a repetition (repeats) looks it up (layer/replay.h). The three
 * functions do nothing for a forward that is neither. Private to moe/run. */
#pragma once

#include "backend/moe/run/forward_call.h"

/* Before the header: the forwards with this rank's routing. */
void sluice_forward_look_back(sluice_forward_t* f);
/* After the header: the forward that this one repeats on all ranks, whose choice it takes; NULL: none. */
const sluice_replay_forward_t* sluice_forward_take_repeated(sluice_forward_t* f, uint32_t like);
/* Records the forward once all ranks continue; all ranks record the same forwards. */
void sluice_forward_note(const sluice_forward_t* f);
