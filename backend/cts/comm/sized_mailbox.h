// SPDX-License-Identifier: Apache-2.0
/* Messages of known sizes between threads, as in MPI: a send completes when its receive has taken it, and reports that
 * slightly later than the receive. */
#pragma once

#include "backend/comm/sized_messages.h"

typedef struct sized_mailbox_s sized_mailbox_t;

/* One for all ranks; NULL without memory. */
sized_mailbox_t* sized_mailbox_create(int32_t world_size);
void sized_mailbox_destroy(sized_mailbox_t* mailbox);

/* One rank of a mailbox. */
typedef struct sized_rank_s {
  sized_mailbox_t* mailbox;
  int32_t rank;
} sized_rank_t;

/* user: the rank's sized_rank_t. */
extern const sluice_sized_messages_t sized_mailbox_messages;
