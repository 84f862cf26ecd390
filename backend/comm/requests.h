// SPDX-License-Identifier: Apache-2.0
/* The requests of a communicator: at most two are in flight. A transport has an array of SLUICE_MAX_IN_FLIGHT structs
 * with a member is_used. */
#pragma once

#include <stddef.h>

enum { SLUICE_MAX_IN_FLIGHT = 2 };

/* The first free request; NULL if both are in flight. */
#define SLUICE_FREE_REQUEST(requests) \
  (!(requests)[0].is_used ? &(requests)[0] : !(requests)[1].is_used ? &(requests)[1] : NULL)
#define SLUICE_REQUESTS_ARE_FREE(requests) (!(requests)[0].is_used && !(requests)[1].is_used)
