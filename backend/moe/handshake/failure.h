// SPDX-License-Identifier: Apache-2.0
/* Tells the other ranks that this rank refuses a call, or that a pass failed after its header. */
#pragma once

#include "backend/moe/context/context.h"

/* Returns the failure of an earlier pass that the other ranks have not been told about, else `refusal`. */
sluice_status_t sluice_take_refusal(sluice_context_t* context, sluice_status_t refusal, char* text,
                                    uint64_t text_bytes);
/* Called after a pass that failed beyond its header; returns `status` with its record. If its exchanges all ran
 * (in_step), the next header tells the other ranks. A rank that could not take part in the payload (no memory, no
 * thread) aborts its communicator, so that the others do not wait for it. */
sluice_status_t sluice_fail_pass(sluice_context_t* context, sluice_status_t status, int in_step);
