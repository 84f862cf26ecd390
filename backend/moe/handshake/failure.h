// SPDX-License-Identifier: Apache-2.0
/* What the other ranks are told where a rank refuses a call, or a pass has failed beyond its header. */
#ifndef SLUICE_BACKEND_MOE_HANDSHAKE_FAILURE_H_
#define SLUICE_BACKEND_MOE_HANDSHAKE_FAILURE_H_

#include "backend/moe/context/context.h"

/* The failure of an earlier pass that the other ranks have not been told about, else `refusal`. */
sluice_status_t sluice_take_refusal(sluice_context_t* context, sluice_status_t refusal, char* text,
                                    uint64_t text_bytes);
/* After a pass that failed beyond its header; returns `status` with its record. Where its exchanges ran on all the same
 * (in_step), the other ranks learn it from the next header; a rank that could not take part in the payload (no memory,
 * no thread) aborts its communicator instead of leaving them waiting. */
sluice_status_t sluice_fail_pass(sluice_context_t* context, sluice_status_t status, int in_step);

#endif /* SLUICE_BACKEND_MOE_HANDSHAKE_FAILURE_H_ */
