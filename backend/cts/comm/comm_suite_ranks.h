// SPDX-License-Identifier: Apache-2.0
/* The ranks of a case: creation, barriers, short deadlines, and a new group after a failure. */
#ifndef SLUICE_BACKEND_CTS_COMM_COMM_SUITE_RANKS_H_
#define SLUICE_BACKEND_CTS_COMM_COMM_SUITE_RANKS_H_

#include "backend/cts/comm/comm_suite_case.h"

void cts_sleep_ns(uint64_t ns);
/* All ranks meet, outside the communicator under test. A rank that does not arrive fails the others. */
int cts_meet(cts_rank_t* me);
sluice_status_t cts_create_end(cts_world_t* world, void* shared, int32_t rank, int32_t world_size, uint64_t timeout_ns,
                               sluice_comm_t** out_comm);
/* The last rank is the one that misbehaves. */
int cts_is_culprit(const cts_rank_t* me);
/* From here on deadlines are short, on all ranks: the last line before the wait that must time out. Earlier calls have
 * all the time that a busy machine needs. */
int cts_hurry(cts_rank_t* me, uint64_t timeout_ns);
/* Every call returns `status` now; abort, twice, and destroy are quick. */
void cts_check_broken_and_destroy(cts_rank_t* me, sluice_status_t status);
/* A new group of the same ranks, after the old one failed. */
void cts_renew(cts_rank_t* me);

#endif /* SLUICE_BACKEND_CTS_COMM_COMM_SUITE_RANKS_H_ */
