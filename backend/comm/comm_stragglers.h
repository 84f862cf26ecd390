// SPDX-License-Identifier: Apache-2.0
/* Finds stragglers with the notes that ranks publish about their progress. Private to backend/comm. */
#pragma once

#include "backend/comm/comm.h"

/* Publishes a note if the transport has a store. */
void sluice_comm_publish_note(sluice_comm_t* comm, const char* phase);
/* Returns TIMED_OUT and names the straggler: from the notes, else `missing`, whose message is missing (-1: unknown).
 * Publishes the note that sluice_comm_check_given_up reads. */
sluice_status_t sluice_comm_fail_timed_out(sluice_comm_t* comm, int32_t missing, uint64_t waited_ns, const char* phase);
