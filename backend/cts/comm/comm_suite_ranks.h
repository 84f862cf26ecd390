// SPDX-License-Identifier: Apache-2.0
/* The ranks of a case: creation, barriers, short deadlines, and a new group after a failure. */
#pragma once

#include "backend/cts/comm/comm_suite_case.h"

void cts_sleep_ns(uint64_t ns);
/* A barrier of all ranks that does not use the communicator under test. Returns 0 if a rank does not arrive. */
int cts_meet(cts_rank_t* me);
sluice_status_t cts_create_end(cts_world_t* world, void* shared, int32_t rank, int32_t world_size, uint64_t timeout_ns,
                               sluice_comm_t** out_comm);
/* Whether this is the last rank, which misbehaves. */
int cts_is_culprit(const cts_rank_t* me);
/* Sets a short deadline on all ranks. Call it just before the wait that must time out, so that earlier calls have all
 * the time that a busy machine needs. */
int cts_hurry(cts_rank_t* me, uint64_t timeout_ns);
/* Checks that every call returns `status`, and that two aborts and destroy are quick. */
void cts_check_broken_and_destroy(cts_rank_t* me, sluice_status_t status);
/* Makes and checks a new group of the same ranks after the old one has failed. */
void cts_renew(cts_rank_t* me);
