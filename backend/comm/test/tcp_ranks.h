// SPDX-License-Identifier: Apache-2.0
/* Ranks of a tcp communicator, which are threads that connect through the local transport. */
#pragma once

#include "backend/comm/comm.h"

enum { TCP_MAX_RANKS = 4 };

typedef struct tcp_rank_s {
  sluice_local_group_t* group;
  int32_t rank;
  int32_t world_size;
  const char* interfaces;
  uint64_t timeout_ns;
  uint64_t connect_timeout_ns;
  void (*then)(struct tcp_rank_s* me); /* after a successful create */
  sluice_comm_t* parent;
  sluice_comm_t* comm;
  uint64_t created_ns; /* duration of create */
  sluice_status_t status;
  sluice_error_info_t why;
  sluice_status_t again; /* of a reduction over the parent at the end */
} tcp_rank_t;

/* Creates the communicators, calls `then` on each rank, and destroys the communicators. */
void tcp_ranks_run(tcp_rank_t* ranks, int32_t world_size);
/* A small message to and from each other rank over the communicator. */
void tcp_ranks_exchange(tcp_rank_t* me);
/* A barrier of all ranks over the parent. */
void tcp_ranks_meet(const tcp_rank_t* me);
