// SPDX-License-Identifier: Apache-2.0
/* Ranks of a tcp communicator as threads of the test, which find each other through the local transport. */
#ifndef SLUICE_BACKEND_COMM_TEST_TCP_RANKS_H_
#define SLUICE_BACKEND_COMM_TEST_TCP_RANKS_H_

#include "backend/comm/comm.h"

enum { TCP_MAX_RANKS = 4 };

typedef struct tcp_rank_s {
  sluice_local_group_t* group;
  int32_t rank;
  int32_t world_size;
  const char* interfaces;
  uint64_t timeout_ns;
  uint64_t connect_timeout_ns;
  sluice_comm_t* (*wrap)(struct tcp_rank_s* me, sluice_comm_t* local); /* the parent, of the local one; takes it */
  void (*first)(struct tcp_rank_s* me);                                /* before create */
  void (*then)(struct tcp_rank_s* me);                                 /* with what create gave */
  void (*last)(struct tcp_rank_s* me);                                 /* after both, whatever they gave */
  sluice_comm_t* parent;
  sluice_comm_t* comm;
  uint64_t created_ns; /* what create took */
  sluice_status_t status;
  sluice_error_info_t why;
  sluice_status_t again; /* of the parent, afterwards */
} tcp_rank_t;

/* Makes the communicators, has each rank do its `then`, and destroys them. */
void tcp_ranks_run(tcp_rank_t* ranks, int32_t world_size);
/* All ranks meet, over the parent. */
void tcp_ranks_meet(const tcp_rank_t* me);

#endif /* SLUICE_BACKEND_COMM_TEST_TCP_RANKS_H_ */
