// SPDX-License-Identifier: Apache-2.0
/* Another machine at an address of rank 0: ranks get rank 0's card with this one's port in it. */
#ifndef SLUICE_BACKEND_COMM_TEST_TCP_DETOUR_H_
#define SLUICE_BACKEND_COMM_TEST_TCP_DETOUR_H_

#include "backend/comm/test/tcp_ranks.h"

typedef enum tcp_detour_kind_e {
  DETOUR_SILENT = 0, /* accepts connections, as its system does, and says nothing */
  DETOUR_GARBAGE,    /* answers what no rank answers */
  DETOUR_ECHO,       /* answers what it was told */
  DETOUR_LATE,       /* ends the first two connections and hands on the third: rank 0 is nowhere else */
  DETOUR_RECORDS,    /* hands on: rank 0 is nowhere else */
  DETOUR_NOBODY      /* answers garbage, and rank 0 is nowhere else */
} tcp_detour_kind_t;

typedef struct tcp_detour_s {
  tcp_detour_kind_t kind;
  /* Outcome. */
  int32_t num_accepted;
  size_t num_recorded; /* what was said to rank 0 on the last connection, as far as it fits */
  char recorded[256];
} tcp_detour_t;

/* Runs two ranks with it in the way. Rank 1 is the one that is misled. */
void tcp_detour_run(tcp_detour_t* detour, tcp_rank_t ranks[2]);

#endif /* SLUICE_BACKEND_COMM_TEST_TCP_DETOUR_H_ */
