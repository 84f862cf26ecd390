// SPDX-License-Identifier: Apache-2.0
/* Ranks, as threads, repeat the same work while one system call or one allocation fails. For every place of a system
 * call and every call stack of an allocation, the first, second and last hit fail in turn (with SLUICE_FULL set, every
 * hit of an allocation). Each rank returns a status in bounded time, nothing leaks, and the same work succeeds
 * afterwards. A rank that succeeds despite the failure has the same bits. */
#pragma once

#include "sluice/comm.h"

enum { NTH_MOST_RANKS = 4 };

typedef struct nth_rank_s {
  sluice_local_group_t* group;
  sluice_local_group_t* second; /* a second group of all ranks */
  sluice_local_group_t* pair;   /* a group of ranks 2 i and 2 i + 1, if the number of ranks is even */
  sluice_comm_t* later; /* over the second group with NTH_OVER_TCP_AND_LATER, for use after the first comm has ended */
  int32_t rank, world_size;
  sluice_status_t status; /* the first error */
  char message[512];      /* the message of this error */
  uint64_t took_ns, digest;
  int64_t live_blocks; /* live blocks of the context at its end */
  int32_t is_torn;     /* the state is neither the old nor the new state, or required work failed */
} nth_rank_t;

/* The work of a rank over a communicator of all ranks. parent: the communicator that TCP connections were made through;
 * NULL: comm is a local communicator. The work releases what it creates. */
typedef sluice_status_t (*nth_work_t)(nth_rank_t* me, sluice_comm_t* comm, sluice_comm_t* parent);

/* If `status` is an error, keeps its message. Returns `status`. */
sluice_status_t nth_said(nth_rank_t* me, sluice_status_t status);
/* Makes the communicator of the rank's pair, with the deadline of the suite. */
sluice_status_t nth_pair(nth_rank_t* me, sluice_comm_t** out_comm);

typedef enum nth_way_e { NTH_WITHIN, NTH_OVER_TCP, NTH_OVER_TCP_AND_LATER } nth_way_t;

/* The body of a cmocka case. A hang prints the planned failure. */
void nth_call(int32_t num_ranks, nth_way_t way, nth_work_t work);
