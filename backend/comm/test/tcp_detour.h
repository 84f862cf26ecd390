// SPDX-License-Identifier: Apache-2.0
/* Another machine that listens at an address of rank 0. Ranks receive rank 0's card with the port of this machine. */
#pragma once

#include "backend/comm/test/tcp_ranks.h"

typedef enum tcp_detour_kind_e {
  DETOUR_SILENT = 0, /* its kernel accepts connections, but it sends nothing */
  DETOUR_GARBAGE,    /* sends data that no rank sends */
  DETOUR_ECHO,       /* sends back what it receives */
  DETOUR_LATE,       /* closes two connections and forwards the third; there is no other address */
  DETOUR_RECORDS,    /* forwards and records; there is no other address */
  DETOUR_NOBODY      /* sends garbage; there is no other address */
} tcp_detour_kind_t;

typedef struct tcp_detour_s {
  tcp_detour_kind_t kind;
  /* Results. */
  int32_t num_accepted;
  size_t num_recorded; /* bytes sent to rank 0 on the last connection, as far as they fit */
  char recorded[256];
} tcp_detour_t;

/* Runs two ranks. Rank 1 tries to connect to the other machine. */
void tcp_detour_run(tcp_detour_t* detour, tcp_rank_t ranks[2]);
