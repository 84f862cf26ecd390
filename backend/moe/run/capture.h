// SPDX-License-Identifier: Apache-2.0
/* Opens a call on a stream that may be in capture into a graph. */
#pragma once

#include "backend/moe/pass/pass.h"

/* Opens the call: pass->captured. Errors: INVALID_ARGUMENT, EXTERNAL. */
sluice_status_t sluice_capture_open(sluice_pass_t* pass);
/* The same for a call that waits for counts. STATE in a capture. */
sluice_status_t sluice_capture_refuse(sluice_pass_t* pass);
