// SPDX-License-Identifier: Apache-2.0
/* The life of a communicator: creation, release, and whether it may still be used. comm.h declares what transports
 * call. Private to backend/comm. */
#pragma once

#include "backend/comm/comm.h"

/* Returns whether this process is a forked child of the process that created it. */
int sluice_comm_is_inherited(const sluice_comm_t* comm);
/* Return STATE in such a child, and for a broken communicator the status that broke it. */
sluice_status_t sluice_comm_check_usable(sluice_comm_t* comm);
/* Aborts after a step that failed on this rank before its messages were posted, because peers would wait for them until
 * their deadlines. Returns status. */
sluice_status_t sluice_comm_fail_and_tell(sluice_comm_t* comm, sluice_status_t status);
/* Aborts the communicator's endpoint, if there is one (messages_open.c). */
void sluice_comm_abort_messages(sluice_comm_t* comm);
