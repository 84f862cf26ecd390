// SPDX-License-Identifier: Apache-2.0
/* The layout of ranks: a link between processes of one machine differs from one between machines. */
#pragma once

#include "backend/comm/comm.h"

enum { SLUICE_LAYOUT_BYTES = 64 };

/* "1 host", or "2 hosts (<hash of the assignment of ranks to hosts>)"; the same on all ranks. comm NULL: "1 host".
 * Collective. Errors: those of exchanges. */
sluice_status_t sluice_layout_describe(sluice_comm_t* comm, char out[SLUICE_LAYOUT_BYTES]);

/* The same for a rank that reports `host`: a number >= 0 that identifies the machine. */
sluice_status_t sluice_layout_of(sluice_comm_t* comm, int64_t host, char out[SLUICE_LAYOUT_BYTES]);
